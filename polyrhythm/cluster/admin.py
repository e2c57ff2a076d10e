"""What the supervisor and the command line ask of a run's conductor: blocking HTTP, a deadline on every call."""

from typing import Any

import msgspec

from polyrhythm import __version__, messages
from polyrhythm.errors import RunError, UserError
from polyrhythm.http.client import BlockingClient
from polyrhythm.http.errors import ErrorReply, NoAnswer
from polyrhythm.observe.status import RunStatus

DEADLINE_S = 10.0


class Unreachable(RunError):
    """Nobody answers where the conductor should be."""


class RunAdmin:
    """The administration of a live run, through its conductor at `url`."""

    def __init__(self, url: str, credential: str, deadline_s: float = DEADLINE_S):
        self._url = url
        self._deadline_s = deadline_s
        try:
            self._client = BlockingClient(url, credential, peer=f"the conductor at {url}")
        except ValueError:
            raise UserError(f"{url!r} is no address of a conductor: it looks like http://HOST:PORT") from None

    def status(self) -> RunStatus:
        return msgspec.json.decode(self._call("GET", "/status"), type=RunStatus)

    def info(self) -> messages.RunInfo:
        try:
            return messages.decode(self._call("GET", "/run"), messages.RunInfo)
        except msgspec.DecodeError:
            raise UserError(
                f"{self._url} is not the conductor of a run, or of another version of polyrhythm than {__version__}, which is here"
            ) from None

    def drain(self, name: str) -> None:
        self._call("POST", "/engines/drain", messages.EngineName(name))

    def remove(self, name: str) -> None:
        self._call("POST", "/engines/remove", messages.EngineName(name))

    def drain_rank(self, name: str) -> None:
        self._call("POST", "/ranks/drain", messages.RankName(name))

    def remove_rank(self, name: str) -> None:
        self._call("POST", "/ranks/remove", messages.RankName(name))

    def rank_ended(self, name: str) -> None:
        """The process of this elastic rank has ended."""
        self._call("POST", "/ranks/ended", messages.RankName(name))

    def _call(self, method: str, path: str, message: Any = None) -> bytes:
        with self._client:  # whoever asks now and then keeps no connection
            try:
                return self._client.call(method, path, message, deadline_s=self._deadline_s)
            except NoAnswer as error:
                raise Unreachable(str(error)) from None
            except ErrorReply as error:
                if error.status == 401:
                    who = f"the conductor at {self._url}"
                    raise UserError(f"{who} does not know this token: is it the one of this run?") from None
                raise RunError(str(error)) from None
