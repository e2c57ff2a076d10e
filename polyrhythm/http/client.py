"""The blocking client: a deadline for every whole call, a limit for every answer, one kept connection."""

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from polyrhythm import messages
from polyrhythm.http.credentials import bearer
from polyrhythm.http.errors import AnswerTooLarge, DeadlinePassed, ErrorReply, NoAnswer

PIECE_BYTES = 2**20


class BlockingClient:
    """Talks to one server, called `peer` in errors, from one thread at a time. Raises `CallFailed`."""

    def __init__(self, url: str, credential: str, *, peer: str):
        address = urlsplit(url)
        if address.scheme != "http" or not address.hostname:
            raise ValueError(f"{url!r} is no address of {peer}: it looks like http://HOST:PORT")
        self._peer = peer
        self._connection = _Connection(address.hostname, address.port)
        self._headers = {"Authorization": bearer(credential), "Content-Type": messages.CONTENT_TYPE}

    def __enter__(self) -> "BlockingClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self, method: str, path: str, message: Any = None, *, deadline_s: float, is_idempotent: bool = False
    ) -> bytes:
        """The body of a successful answer. A call that may be repeated is, once, if the connection turns out to be dead."""
        body = None if message is None else messages.encode(message)
        until_s = time.monotonic() + deadline_s
        with self._failing_as_calls_do(method, path, deadline_s):
            try:
                return self._exchange(method, path, body, until_s)
            except (ConnectionError, http.client.BadStatusLine):
                # A kept connection may have been closed while idle, which shows only when it is used.
                self.close()
                if not is_idempotent or time.monotonic() > until_s:
                    raise
                return self._exchange(method, path, body, until_s)

    def stream(self, path: str, *, max_bytes: int, deadline_s: float) -> Iterator[bytes]:
        """The body of a large answer in pieces; the deadline includes what the caller does between them."""
        until_s = time.monotonic() + deadline_s
        try:
            with self._failing_as_calls_do("GET", path, deadline_s):
                yield from _pieces(self._answer("GET", path, None, until_s), max_bytes, until_s)
        finally:
            self.close()  # an answer that was not read to its end blocks the connection

    def close(self) -> None:
        self._connection.close()

    def _exchange(self, method: str, path: str, body: bytes | None, until_s: float) -> bytes:
        return b"".join(_pieces(self._answer(method, path, body, until_s), messages.MAX_BODY_BYTES, until_s))

    def _answer(self, method: str, path: str, body: bytes | None, until_s: float) -> http.client.HTTPResponse:
        """An answer of status 200 whose body is still to be read."""
        self._connection.due(until_s)
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        if response.status != 200:
            reason = b"".join(_pieces(response, messages.MAX_BODY_BYTES, until_s))
            raise ErrorReply(self._peer, response.status, reason)
        return response

    @contextmanager
    def _failing_as_calls_do(self, method: str, path: str, deadline_s: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self.close()
            raise DeadlinePassed(f"{self._peer} did not answer {method} {path} within {deadline_s:.0f} s") from None
        except AnswerTooLarge as error:
            self.close()
            raise AnswerTooLarge(f"{self._peer} answered {method} {path} with {error}") from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise NoAnswer(f"{self._peer} cannot be reached: {str(error) or type(error).__name__}") from None


def _pieces(response: http.client.HTTPResponse, max_bytes: int, until_s: float) -> Iterator[bytes]:
    num_bytes = 0
    while piece := response.read1(PIECE_BYTES):
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise AnswerTooLarge(f"more than {max_bytes} bytes")
        if time.monotonic() > until_s:
            raise TimeoutError
        yield piece
    if response.length:  # read1 says nothing about an answer that was cut off
        raise http.client.IncompleteRead(b"", response.length)
    response.close()  # nor does it free the connection for the next call


class _Connection(http.client.HTTPConnection):
    """A connection whose waits, however many a call has, share the deadline of the call."""

    def due(self, until_s: float) -> None:
        self._until_s = until_s
        if isinstance(self.sock, _Socket):
            self.sock.until_s = until_s

    def connect(self) -> None:
        address, left_s = (self.host, self.port), max(self._until_s - time.monotonic(), 0.001)
        self.sock = _Socket(fileno=socket.create_connection(address, timeout=left_s).detach())
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.due(self._until_s)


class _Socket(socket.socket):
    """A timeout of the standard library starts anew with every byte; this one does not."""

    until_s = 0.0

    def recv_into(self, *args: Any) -> int:
        self._wait_no_longer_than_due()
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        self._wait_no_longer_than_due()
        super().sendall(*args)

    def _wait_no_longer_than_due(self) -> None:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.settimeout(left_s)
