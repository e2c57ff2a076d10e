"""Who listens where: the sockets of all processes of a run, for tests of what is open to the network."""

import ipaddress
import socket
import subprocess
import time
from dataclasses import dataclass

import psutil

LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Listener:
    process: str
    """What the process is: a command of polyrhythm, or the name of its program."""
    address: str

    @property
    def is_outside_loopback(self) -> bool:
        return not ipaddress.ip_address(self.address.partition("%")[0]).is_loopback


def listeners_of(process: psutil.Process) -> set[Listener]:
    """Where a process and all that it has started listen: TCP, and UDP ports that anybody may send to."""
    found = set()
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for member in family:
        try:
            for connection in member.net_connections(kind="inet"):
                is_open = connection.type == socket.SOCK_DGRAM and not connection.raddr
                if connection.status == psutil.CONN_LISTEN or is_open:
                    found.add(Listener(_what(member), connection.laddr.ip))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def watch_listeners(*processes: subprocess.Popen, deadline_s: float = 300.0) -> set[Listener]:
    """Everywhere that they and their children have been seen to listen, until the first of them has ended."""
    seen, until_s = set(), time.monotonic() + deadline_s
    while processes[0].poll() is None and time.monotonic() < until_s:
        for process in processes:
            if process.poll() is None:
                seen |= listeners_of(psutil.Process(process.pid))
        time.sleep(LOOK_EVERY_S)
    return seen


def _what(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[words.index("polyrhythm") + 1] if "polyrhythm" in words[:-1] else process.name()
