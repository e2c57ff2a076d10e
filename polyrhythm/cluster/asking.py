"""What `polyrhythm engines` and `polyrhythm ranks` share: the status of a live run, and the wish for one more process."""

import time

from polyrhythm.cluster.admin import Unreachable
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import UserError
from polyrhythm.observe.status import RunStatus

HEARD_DEADLINE_S = 10.0
POLL_S = 0.1


def status_of(run: RunFolder) -> RunStatus:
    """Of a run that goes on; anything else is a UserError."""
    if not (run.path / "run.json").exists():
        raise UserError(f"--run {run.path} is not a run folder: it has no run.json")
    try:
        return run.admin().status()
    except Unreachable:
        raise UserError(f"the run in {run.path} is not running") from None
    except OSError as error:
        raise UserError(f"--run {run.path} is not a run folder that you can read: {error.strerror}") from None


def ask_for_one_more(run: RunFolder, kind: str, what: str, known: set[str]) -> str:
    """Have the run's supervisor start one more process of a kind on its machine; its name."""
    started = {path.stem for path in run.logs.glob(f"{kind}-*.log")}  # those that have not joined yet, too
    request = run.request(kind, taken=known | started)
    until_s = time.monotonic() + HEARD_DEADLINE_S
    while request.exists():
        if time.monotonic() > until_s:
            request.unlink(missing_ok=True)
            raise UserError(f"nobody started {what}: is `polyrhythm train` of {run.path} running on this machine?")
        time.sleep(POLL_S)
    return request.name
