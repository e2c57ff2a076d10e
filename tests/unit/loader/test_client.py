"""What the trainer makes of a conductor that does not answer as it should."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from polyrhythm.errors import AnotherFailed, LetGo, RunError
from polyrhythm.loader.client import ConductorClient


@contextmanager
def conductor_that_answers(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"cause\n")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join(10)


@pytest.mark.parametrize(("status", "error"), [(503, AnotherFailed), (410, LetGo), (409, RunError), (400, RunError)])
def test_a_refusal_is_told_from_a_goodbye_and_from_a_run_that_has_failed(status: int, error: type[RunError]):
    with conductor_that_answers(status) as url, pytest.raises(RunError, match=f"answered {status}: cause$") as caught:
        ConductorClient(url, "token").wait_for_engines(0, 5)
    assert type(caught.value) is error


def test_a_conductor_that_is_not_there_has_failed():
    with pytest.raises(AnotherFailed, match="the conductor cannot be reached"):
        ConductorClient("http://127.0.0.1:9", "token").wait_for_engines(0, 5)


def test_a_conductor_that_says_nothing_has_failed():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(AnotherFailed, match="did not answer"):
        ConductorClient(f"http://127.0.0.1:{silent.getsockname()[1]}", "token").wait_for_engines(0, 0.2)
