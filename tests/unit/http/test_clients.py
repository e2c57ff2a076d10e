"""Both clients against servers that answer badly, slowly, too much or not at all: they say who, and in time."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from polyrhythm import messages
from polyrhythm.http.async_client import AsyncClient, open_session
from polyrhythm.http.client import BlockingClient
from polyrhythm.http.credentials import Credentials
from polyrhythm.http.errors import AnswerTooLarge, CallFailed, DeadlinePassed, ErrorReply, NoAnswer

Script = Callable[[socket.socket], None]
Call = Callable[..., bytes]
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def read_request(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received and (piece := connection.recv(65536)):
        received += piece
    return received


def says(*answers: bytes) -> Script:
    """One answer after the other on one connection, which is then closed."""

    def script(connection: socket.socket) -> None:
        for answer in answers:
            if not read_request(connection):
                return
            connection.sendall(answer)

    return script


def drips(head: bytes, num_bytes: int = 200) -> Script:
    def script(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(head)
        for _ in range(num_bytes):
            connection.sendall(b"x")
            time.sleep(0.05)

    return script


@contextmanager
def server(*scripts: Script) -> Iterator[tuple[str, list[int]]]:
    """Plays one script per connection; the list grows by one with each."""
    accepted: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def play() -> None:
        for script in scripts:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(1)
            with connection:
                connection.settimeout(20)
                with suppress(OSError):
                    script(connection)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", accepted
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


def call_blocking(url: str, *, times: int = 1, deadline_s: float = 5.0, is_idempotent: bool = False) -> bytes:
    with BlockingClient(url, "secret", peer="the oracle") as client:
        for _ in range(times):
            answer = client.call("POST", "/ask", {"q": 1}, deadline_s=deadline_s, is_idempotent=is_idempotent)
    return answer


def call_async(url: str, *, times: int = 1, deadline_s: float = 5.0, is_idempotent: bool = False) -> bytes:
    async def ask() -> bytes:
        async with open_session() as session:
            client = AsyncClient(session, url, peer="the oracle")
            for _ in range(times):
                answer = await client.call(
                    "POST", "/ask", {"q": 1}, credential="secret", deadline_s=deadline_s, is_idempotent=is_idempotent
                )
            return answer

    return asyncio.run(ask())


@pytest.fixture(params=[call_blocking, call_async], ids=["blocking", "async"])
def call(request) -> Call:
    return request.param


def test_an_answer_of_status_200_is_returned_and_the_credential_was_shown(call: Call):
    requests: list[bytes] = []

    def script(connection: socket.socket) -> None:
        requests.append(read_request(connection))
        connection.sendall(GOOD)

    with server(script) as (url, _):
        assert call(url) == b"ok"
    assert b"Authorization: Bearer secret\r\n" in requests[0]
    assert f"Content-Type: {messages.CONTENT_TYPE}\r\n".encode() in requests[0]


def test_another_status_is_an_error_with_the_servers_words(call: Call):
    answer = b"HTTP/1.1 409 Conflict\r\nContent-Length: 8\r\n\r\nnot now\n"
    with (
        server(says(answer)) as (url, _),
        pytest.raises(ErrorReply, match=r"^the oracle answered 409: not now$") as caught,
    ):
        call(url)
    assert (caught.value.status, caught.value.said) == (409, "not now")


def test_a_redirect_is_not_followed(call: Call):
    answer = b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    with server(says(answer, GOOD)) as (url, _), pytest.raises(ErrorReply, match="answered 302"):
        call(url)


def test_nobody_there_is_said(call: Call):
    with pytest.raises(NoAnswer, match=r"^the oracle cannot be reached"):
        call("http://127.0.0.1:9")


@pytest.mark.parametrize(
    "script",
    [
        drips(b"HTTP/1.1 200 O"),
        drips(b"HTTP/1.1 200 OK\r\nX-Slow: "),
        drips(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n"),
    ],
    ids=["status line", "header", "body"],
)
def test_a_server_that_drips_does_not_move_the_deadline(call: Call, script: Script):
    started_s = time.monotonic()
    with server(script) as (url, _), pytest.raises(DeadlinePassed, match="the oracle did not answer POST /ask within"):
        call(url, deadline_s=0.3)
    assert time.monotonic() - started_s < 8, "the drip alone takes ten seconds"


@pytest.mark.parametrize("length", [b"Content-Length: 2000\r\n\r\n", b"\r\n"], ids=["announced", "until closed"])
def test_an_answer_that_is_too_large_is_not_taken(call: Call, length: bytes, monkeypatch):
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 1000)
    answer = b"HTTP/1.1 200 OK\r\n" + length + b"x" * 2000
    with server(says(answer)) as (url, _), pytest.raises(AnswerTooLarge, match="POST /ask with more than 1000 bytes"):
        call(url)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", b"gibberish\r\n\r\n", b"\x00" * 99]
)
def test_an_answer_that_is_cut_off_or_no_http_is_none(call: Call, answer: bytes):
    with server(says(answer)) as (url, _), pytest.raises(NoAnswer, match="the oracle cannot be reached"):
        call(url)


def test_a_connection_is_kept(call: Call):
    with server(says(GOOD, GOOD, GOOD)) as (url, accepted):
        assert call(url, times=3) == b"ok"
    assert len(accepted) == 1


def test_a_kept_connection_that_is_dead_is_replaced_if_the_call_may_be_repeated(call: Call):
    def closes_after_the_second_request(connection: socket.socket) -> None:
        says(GOOD)(connection)
        read_request(connection)

    with server(closes_after_the_second_request, says(GOOD)) as (url, accepted):
        assert call(url, times=2, is_idempotent=True) == b"ok"
    assert len(accepted) == 2
    with server(closes_after_the_second_request, says(GOOD)) as (url, accepted):
        with pytest.raises(NoAnswer):
            call(url, times=2)
    assert len(accepted) == 1


def test_a_call_is_repeated_once_and_not_for_ever(call: Call):
    silent = says(b"")
    with server(silent, silent, silent) as (url, accepted), pytest.raises(CallFailed):
        call(url, is_idempotent=True)
    assert len(accepted) == 2


def test_a_blocking_client_answers_well_after_each_failure():
    drip = drips(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n", num_bytes=20)
    with server(drip, says(GOOD)) as (url, _), BlockingClient(url, "secret", peer="x") as client:
        with pytest.raises(DeadlinePassed):
            client.call("GET", "/", deadline_s=0.1)
        assert client.call("GET", "/", deadline_s=10) == b"ok"


def test_credentials_are_not_shown_and_never_empty():
    assert "secret" not in repr(Credentials({"admin": "secret"}))
    with pytest.raises(ValueError, match="would admit anybody"):
        Credentials({"admin": ""})


def test_a_credential_has_the_scopes_it_was_given_and_no_others():
    credentials = Credentials({"generate": "one", "admin": "two"})
    assert credentials.scopes_of("Bearer one") == {"generate"}
    for header in ("", "one", "Bearer", "Bearer ", "Bearer onex", "bearer one", "Bearer öne", "Bearer one two"):
        assert credentials.scopes_of(header) == set()
