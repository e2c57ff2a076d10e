"""What the supervisor and the command line ask of a run's conductor: blocking HTTP, a deadline on every call."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import msgspec

from polyrhythm import messages
from polyrhythm.errors import RunError, UserError

DEADLINE_S = 10.0
MAX_SAID_CHARS = 300


class Unreachable(RunError):
    """Nobody answers where the conductor should be."""


class RunAdmin:
    """The administration of a live run, through its conductor at `url`."""

    def __init__(self, url: str, token: str, deadline_s: float = DEADLINE_S):
        address = urlsplit(url)
        if address.scheme != "http" or not address.hostname:
            raise UserError(f"{url!r} is no address of a conductor: it looks like http://HOST:PORT")
        self._url = url
        self._host, self._port = address.hostname, address.port
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": messages.CONTENT_TYPE}
        self._deadline_s = deadline_s

    def status(self) -> dict[str, Any]:
        return json.loads(self._call("GET", "/status"))

    def info(self) -> messages.RunInfo:
        try:
            return messages.decode(self._call("GET", "/run"), messages.RunInfo)
        except msgspec.DecodeError:
            raise UserError(f"{self._url} is not the conductor of a run") from None

    def drain(self, name: str) -> None:
        self._call("POST", "/engines/drain", messages.EngineName(name))

    def remove(self, name: str) -> None:
        self._call("POST", "/engines/remove", messages.EngineName(name))

    def _call(self, method: str, path: str, message: Any = None) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._deadline_s)
        try:
            connection.request(method, path, None if message is None else messages.encode(message), self._headers)
            response = connection.getresponse()
            content = response.read(messages.MAX_BODY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            said = str(error) or type(error).__name__
            raise Unreachable(f"the conductor at {self._url} cannot be reached: {said}") from None
        finally:
            connection.close()
        if response.status == 401:
            raise UserError(f"the conductor at {self._url} does not know this token: is it the one of this run?")
        if response.status != 200:
            said = content.decode(errors="replace").strip()[:MAX_SAID_CHARS]
            raise RunError(f"the conductor at {self._url} answered {response.status}: {said}")
        return content
