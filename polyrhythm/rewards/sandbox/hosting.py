"""Functions that only this process has: lambdas, closures, cells of a notebook. Their workers are forked from it.

The process that has them forks one host, which does nothing but listen on a socket and fork a worker for each connection.
So nothing is pickled or imported, and a worker sees the functions as they were when they were given to the run.
"""

import contextlib
import gc
import inspect
import os
import re
import selectors
import signal
import site
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from polyrhythm.errors import UserError
from polyrhythm.rewards.sandbox.frames import WorkerSetup, read_frame
from polyrhythm.rewards.sandbox.process import PID, worker_environment
from polyrhythm.rewards.sandbox.worker import end_with_parent, limit_resources, serve

SOCKET_NAME = "script.sock"

Reward = Callable[..., Any] | str


@contextlib.contextmanager
def host_functions(functions: Sequence[Reward]) -> Iterator[list[str]]:
    """Names for `reward.functions`, one for each function, that are good until the end of the `with`.

    A function that a worker can import is named as `module:function` or `file.py:function`, which is good for ever; names are
    left as they are. All others are held here, and named by the socket of their host.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="polyrhythm-"))
        )  # nobody else may look into it
        names = [function if isinstance(function, str) else importable_name(function) for function in functions]
        held: dict[str, Callable[..., Any]] = {}
        for place, function in enumerate(functions):
            if names[place] is None and not isinstance(function, str):
                names[place] = name = f"{folder / SOCKET_NAME}:{_free_name(function, held)}"
                held[name] = function
        if held:
            stack.enter_context(_host_of(held, folder / SOCKET_NAME))
        yield [name for name in names if name is not None]


def importable_name(function: Callable[..., Any]) -> str | None:
    """`module:function` or `file.py:function`, if a worker gets this same function by it; None if not."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    module = sys.modules.get(module_name or "")
    if module is None or module_name == "__main__" or not name.isidentifier() or vars(module).get(name) is not function:
        return None
    file = Path(getattr(module, "__file__", None) or "").resolve()
    if file.suffix != ".py":
        return None
    parts = module.__name__.count(".") + (file.name == "__init__.py")
    if file.parents[parts] in _where_workers_look():
        return f"{module.__name__}:{name}"
    return f"{file}:{name}" if parts == 0 else None


def _where_workers_look() -> set[Path]:
    """The folders from which a worker imports: not that of a script which is run from elsewhere."""
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {Path(path).resolve() for path in (*inherited, *site.getsitepackages(), site.getusersitepackages(), ".")}


def _free_name(function: Callable[..., Any], held: Mapping[str, Any]) -> str:
    """What the function is called, in letters; numbered if another is called so."""
    inner = inspect.unwrap(getattr(function, "func", function))  # of a functools.partial
    said = getattr(inner, "__name__", type(inner).__name__)
    word = re.sub(r"\W+", "_", said).strip("_") or "reward"
    taken = {name.rpartition(":")[2] for name in held}
    return next(n for n in (word, *(f"{word}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)


@contextlib.contextmanager
def _host_of(held: Mapping[str, Callable[..., Any]], path: Path) -> Iterator[None]:
    """A host that listens on `path` while the body runs, and ends with this process whatever ends that."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(path))
        except OSError as error:
            raise UserError(
                f"the socket of the rewards, {path}, cannot be made: {error}: set TMPDIR to a shorter path"
            ) from error
        listener.listen()
        parent_lives, hold = os.pipe()
        pid = _fork()
        if pid == 0:
            os.close(hold)
            _as_a_process(lambda: _host(listener, parent_lives, held))
        os.close(parent_lives)
    try:
        yield
    finally:
        os.close(hold)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)  # it has nothing to finish, and its workers end with it
            os.waitpid(pid, 0)


def _host(listener: socket.socket, parent_lives: int, held: Mapping[str, Callable[..., Any]]) -> None:
    """Consumes connections, produces a worker for each; waits for the next until its parent is gone."""
    os.setsid()  # Ctrl-C reaches the parent alone
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a worker that has ended leaves nothing behind
    gc.freeze()  # or collecting in a worker would copy all that it shares with the others
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(parent_lives, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in selector.select()):
            connection, _ = listener.accept()
            with connection:
                if _fork() == 0:
                    listener.close()
                    _as_a_process(lambda taken=connection: _work(taken, held))


def _work(connection: socket.socket, held: Mapping[str, Callable[..., Any]]) -> None:
    """One worker, from the first frame of its connection to the end of it."""
    os.setsid()  # a group of its own, which is killed with all that a reward has started
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, (log,), _, _ = socket.recv_fds(connection, 1, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # A notebook's own would talk to threads that are not here.
    sys.stdout = sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    connection.sendall(PID.pack(os.getpid()))
    with connection.makefile("rb") as requests, connection.makefile("wb") as results:
        setup = read_frame(requests, WorkerSetup)
        if setup is not None:
            _become_a_worker(setup)
            serve(setup, requests, results, held)


def _become_a_worker(setup: WorkerSetup) -> None:
    environment = worker_environment(setup.environment)
    os.environ.clear()
    os.environ.update(environment | {"TOKENIZERS_PARALLELISM": "false"})
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # the others of its threads were not forked: it would wait for them
    # What it has from its parent is not its own.
    limit_resources(setup.memory_mb and setup.memory_mb + _address_space_mb())


def _address_space_mb() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") // 2**20 if statm.exists() else 0


def _fork() -> int:
    with warnings.catch_warnings():
        # Of threads in the parent. The child calls nothing that one of them may have locked but the user's functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _as_a_process(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process, which must never return into what its parent was doing, nor end as it would."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)
