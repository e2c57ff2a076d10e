"""A rank's sign of life. It also hears that the run has failed while the rank waits for a rank that will never answer."""

import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from polyrhythm import messages
from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.training.parallel.meeting import MEMBER, ConductorLine, Unreached

BEATS_PER_LEASE = 4
RETRY_S = 0.5
LAST_WORDS_S = 60.0
"""So long a rank has to save what it can, once it waits for nobody any more."""

log = logging.getLogger(__name__)


def break_off_waits(conductor_url: str | None) -> None:
    """Fail what this process waits for: a collective operation and, if no URL is given, an answer of the conductor too.

    Call it from another thread. gloo cannot be asked to (its abort ends the process in torch 2.13), but it notices that its
    connections are gone: all those of a rank that do not lead to the conductor.
    """
    if dist.is_initialized() and dist.get_backend() != "gloo":
        dist.distributed_c10d._abort_process_group()  # not tried on any accelerator
    kept_port = urlsplit(conductor_url).port if conductor_url else None
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port != kept_port:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as theirs:
                theirs.shutdown(socket.SHUT_RDWR)


class Presence:
    """A daemon thread that tells the conductor about this rank.

    When the run has failed, or the conductor is out of reach for the whole lease, collective operations are broken off: they
    have no deadline that is shorter than a step may be. The rank then ends by itself; if it does not, this thread ends it.
    """

    def __init__(self, line: ConductorLine, name: str, lease_s: float):
        self._line = line
        self._name = name
        self._lease_s = lease_s
        self._left = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="presence", daemon=True).start()

    def leave(self) -> None:
        """This rank has nothing more to do."""
        self._left.set()
        try:
            self._beat(is_leaving=True)
        except RunError as error:  # the run may be over by now, and nobody there
            log.info("%s leaves unheard: %s", self._name, error)

    def _run(self) -> None:
        heard_s = time.monotonic()
        while not self._left.is_set():
            try:
                self._beat()
                heard_s = time.monotonic()
            except Unreached as error:
                if time.monotonic() - heard_s > self._lease_s:
                    return self._end(str(error), conductor_url=None)
                self._left.wait(RETRY_S)
            except RunError as error:
                return self._end(str(error), self._line.url)

    def _beat(self, is_leaving: bool = False) -> None:
        pause_s = self._lease_s / BEATS_PER_LEASE
        beat = messages.RankBeat(self._name, MEMBER, 0.0 if is_leaving else pause_s, is_leaving)
        self._line.call("/ranks/heartbeat", beat, beat.wait_s, grace_s=pause_s)

    def _end(self, cause: str, conductor_url: str | None) -> None:
        log.warning("%s is not in the run any more: %s", self._name, cause)
        break_off_waits(conductor_url)
        if not self._left.wait(LAST_WORDS_S):
            print(f"polyrhythm: {self._name} is not in the run any more: {cause}", file=sys.stderr, flush=True)
            os._exit(AnotherFailed.exit_code)
