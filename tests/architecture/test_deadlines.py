"""Nothing waits forever: every wait for the network, a process, a thread or a queue has a deadline, or a reason here.

A wait is bounded if it stands inside `asyncio.timeout`, if it is given a deadline (an argument that is called timeout or
ends with `_s`, as all seconds do here), or if it awaits a coroutine of this package, whose own waits are checked as well.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "polyrhythm"
FILES = sorted(PACKAGE.rglob("*.py"))

PRIMITIVES = {
    "wait", "get", "put", "join", "read", "readexactly", "readany", "drain", "acquire", "write", "write_eof", "prepare",
    "communicate", "wrap_future", "shield", "gather", "to_thread", "create_subprocess_exec", "urlopen",
}  # fmt: skip
"""Names of library calls that wait: a coroutine of ours that has the same name does not excuse them."""

BLOCKING = {
    "subprocess.run", "subprocess.check_output", "subprocess.check_call", "urllib.request.urlopen",
    "http.client.HTTPConnection", "os.read", "os.waitpid",
}  # fmt: skip
BLOCKING_METHODS = {"wait", "communicate"}

SERVED = "the client that asked has a deadline, and its leaving cancels the handler"
LIFE = "the life of the process: it ends by being cancelled or by a signal"
LOCAL = "local and short: no network, no other process"
CUT_OFF = "a timer cuts the connection off, which ends the wait"
TIMEOUT_SCOPES = ("asyncio.timeout(", "_one_failure_ends_all(")  # the second holds the first
WITHOUT_DEADLINE = {
    ("runs/joining.py", "task"): LIFE,
    ("conductor/service.py", "run"): LIFE,
    ("conductor/service.py", "asyncio.wait([run])"): "the task was cancelled; what it awaits is bounded",
    ("engine/server.py", "asyncio.Event().wait()"): LIFE,
    ("observe/loggers/background.py", "self._inbox.get()"): "a daemon thread that lives until it is closed",
    ("kernels/spinning.py", "self._closed.wait()"): "a daemon thread that lives until it is closed",
    (
        "cluster/local_processes.py",
        "os.read(sys.stdin.fileno(), 4096)",
    ): "a daemon thread that waits for its parent's end",
    (
        "cluster/ray/node_process.py",
        "os.read(process.stdout.fileno(), 65536)",
    ): "a daemon thread that reads until its process ends",
    ("cluster/ray/node_process.py", "process.wait()"): "a daemon thread that waits for the end of its process",
    ("cluster/ray/guard.py", "os.read(sys.stdin.fileno(), 4096)"): "a daemon thread that waits for its parent's end",
    ("cluster/ray/guard.py", "process.wait()"): LIFE,
    ("http/listener.py", "loop.create_server("): LOCAL,
    ("http/listener.py", "self._server.start_serving()"): LOCAL,
    ("http/server.py", "runner.setup()"): LOCAL,
    ("http/server.py", "runner.cleanup()"): "the runner has a shutdown timeout",
    ("engine/openai/api.py", "asyncio.to_thread("): LOCAL,
    ("engine/openai/api.py", "response.write(last_word)"): CUT_OFF,
    ("engine/openai/api.py", "response.write_eof()"): CUT_OFF,
    ("chaos/engine.py", "generating"): SERVED,
    ("chaos/engine.py", "response.prepare("): SERVED,
    ("chaos/engine.py", "response.write("): SERVED,
    ("weights/server.py", "asyncio.to_thread("): LOCAL,
    ("training/parallel/elastic/replica.py", "work.wait()"): "the operation has ended: this raises what has gone wrong",
    ("observe/terminal/plain.py", "capture.get()"): "no queue: the text that rich has captured",
    ("engine/server.py", "asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)"): LIFE,
    ("engine/embedded/engine.py", "asyncio.wrap_future(self._failed)"): LIFE,
    ("engine/embedded/engine.py", "asyncio.wrap_future(reply)"): SERVED,
    ("engine/embedded/engine.py", "asyncio.shield(asyncio.wrap_future(done))"): SERVED,
    ("engine/embedded/engine.py", "asyncio.to_thread(self._stops.prepare, request.sampling.stop)"): LOCAL,
    ("engine/embedded/engine.py", "self._inbox.get()"): "the queue is not empty",
    ("engine/vllm/engine.py", "asyncio.to_thread(check_vllm, config)"): "the process that it starts has a deadline",
    ("engine/vllm/engine.py", "stack.enter_async_context(client)"): LOCAL,
    ("engine/vllm/engine.py", "asyncio.shield(self._failed)"): LIFE,
    ("engine/vllm/engine.py", "asyncio.gather(*tasks)"): "each of them asks with a deadline",
    ("engine/vllm/engine.py", "asyncio.shield(loading)"): SERVED,
    (
        "engine/vllm/engine.py",
        "asyncio.to_thread(self._store.local_folder, manifest.version)",
    ): "a download has a deadline",
    ("engine/vllm/engine.py", "asyncio.to_thread(self._store.manifest, version)"): "a download has a deadline",
    ("engine/vllm/guard.py", "os.read(sys.stdin.fileno(), 4096)"): "a daemon thread that waits for its parent's end",
    ("engine/vllm/guard.py", "process.wait()"): LIFE,
    ("rewards/sandbox/process.py", "asyncio.create_subprocess_exec("): "the system starts a process or fails",
    ("rewards/sandbox/hosting.py", "os.waitpid(pid, 0)"): "the process was killed",
    ("rewards/kinds/code.py", "asyncio.gather(*runs)"): "the pool kills a worker that misses its deadline",
    ("rewards/kinds/code.py", "result"): "the pool kills a worker that misses its deadline",
    (
        "rewards/sandbox/pool.py",
        "self._idle.get()",
    ): "a worker is given back at its deadline; each makes one call at a time",
    ("rewards/sandbox/pool.py", "asked.scores"): "answered by the call that has taken it, at its deadline",
    (
        "rewards/sandbox/scoring.py",
        "asyncio.gather(*awaitables, return_exceptions=True)",
    ): "the pool kills a worker that misses its deadline",
    ("http/async_client.py", "async for response.content.iter_any()"): "the only caller holds a timeout",
}


def waits_without_deadline(source: str, own_coroutines: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of every wait in a module that nothing bounds."""
    yield from _Walk(own_coroutines).found(ast.parse(source))


class _Walk(ast.NodeVisitor):
    def __init__(self, own_coroutines: set[str]):
        self.own = own_coroutines
        self.num_timeouts = 0
        self.waits: list[tuple[int, str]] = []

    def found(self, tree: ast.AST) -> list[tuple[int, str]]:
        self.visit(tree)
        return self.waits

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        outside, self.num_timeouts = self.num_timeouts, 0
        self.generic_visit(node)
        self.num_timeouts = outside

    visit_FunctionDef = visit_Lambda = visit_AsyncFunctionDef  # type: ignore[assignment]

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        has_timeout = any(ast.unparse(item.context_expr).startswith(TIMEOUT_SCOPES) for item in node.items)
        for item in node.items:
            self._check_entry(item.context_expr)
            self.visit_children_of_call(item.context_expr)
        self.num_timeouts += has_timeout
        for statement in node.body:
            self.visit(statement)
        self.num_timeouts -= has_timeout

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        if not self.num_timeouts:
            self.waits.append((node.lineno, f"async for {ast.unparse(node.iter)}"))
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        waited = node.value
        if not (self.num_timeouts or self._is_bounded(waited)):
            self.waits.append((node.lineno, ast.unparse(waited)))
        self.visit_children_of_call(waited)

    def visit_Call(self, node: ast.Call) -> None:
        name, method = ast.unparse(node.func), _last_name(node.func)
        is_queue_get = method == "get" and not node.args and not node.keywords
        if (name in BLOCKING or method in BLOCKING_METHODS or is_queue_get) and not _has_deadline(node):
            self.waits.append((node.lineno, ast.unparse(node)))
        self.generic_visit(node)

    def visit_children_of_call(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def _check_entry(self, entered: ast.expr) -> None:
        """`async with x`: a timeout, a task group, a resource of ours, or a request that has a timeout."""
        name = _last_name(entered.func) if isinstance(entered, ast.Call) else ast.unparse(entered)
        is_request = name in ("get", "post", "request", "put", "delete", "ws_connect")
        if is_request and not (self.num_timeouts or _has_deadline(entered)):
            self.waits.append((entered.lineno, ast.unparse(entered)))

    def _is_bounded(self, waited: ast.expr) -> bool:
        if not isinstance(waited, ast.Call):
            return False
        name = _last_name(waited.func)
        if ast.unparse(waited.func) == "asyncio.sleep" or _has_deadline(waited):
            return True
        return name in self.own and name not in PRIMITIVES


def _last_name(function: ast.expr) -> str:
    return ast.unparse(function).rsplit(".", 1)[-1]


def _has_deadline(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call):
        return False
    if any(keyword.arg and ("timeout" in keyword.arg or keyword.arg.endswith("_s")) for keyword in call.keywords):
        return True
    names = (inner for argument in call.args for inner in ast.walk(argument))
    return any(_is_seconds(name) for name in names)


def _is_seconds(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lower().endswith("_s")


@functools.cache
def coroutines_of_the_package() -> set[str]:
    return {
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AsyncFunctionDef)
    } | {"handler"}


def is_excused(wait: str, text: str) -> bool:
    """A reason holds for one expression, or for all calls of a function if it ends with a parenthesis."""
    return wait.startswith(text) if text.endswith("(") else wait == text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_wait_has_a_deadline_or_a_reason(path):
    name = str(path.relative_to(PACKAGE))
    waits = list(waits_without_deadline(path.read_text(), coroutines_of_the_package()))
    excused = [text for file, text in WITHOUT_DEADLINE if file == name]
    unexplained = [wait for wait in waits if not any(is_excused(wait[1], text) for text in excused)]
    assert not unexplained, f"{name} waits without a deadline: {unexplained}"


def test_every_reason_is_still_needed():
    own = coroutines_of_the_package()
    for file, text in WITHOUT_DEADLINE:
        waits = waits_without_deadline((PACKAGE / file).read_text(), own)
        assert any(is_excused(wait, text) for _, wait in waits), f"{file}: {text} is not there any more"


@pytest.mark.parametrize(
    "wait",
    [
        "await queue.get()", "await event.wait()", "await process.wait()", "await stream.read()", "await future",
        "process.wait()", "process.communicate()", "subprocess.run(command)", "urllib.request.urlopen(url)",
        "async with session.post(url): pass", "inbox.get()", "await asyncio.wait([task])",
    ],
)  # fmt: skip
def test_a_wait_without_a_deadline_is_found(wait):
    assert list(waits_without_deadline(f"async def f():\n    {wait}", {"get", "wait", "read", "post"}))


@pytest.mark.parametrize(
    "wait",
    [
        "await change.wait(TICK_S)", "await client.load(version, self.load_deadline_s)", "process.wait(deadline_s)",
        "subprocess.run(command, timeout=3)", "await ours()", "table.get(key)", "await asyncio.sleep(pause)",
        "async with session.post(url, timeout=timeout): pass", "async with asyncio.timeout(3):\n        await queue.get()",
    ],
)  # fmt: skip
def test_a_wait_with_a_deadline_is_not(wait):
    assert not list(waits_without_deadline(f"async def f():\n    {wait}", {"ours"}))
