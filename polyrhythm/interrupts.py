"""Where Ctrl-C and SIGTERM may end this process: at once, or not before what it is doing is done.

A trainer must not be interrupted between the first change of its weights and the end of the step: it would hold neither
the policy before the step nor the one after it. So it defers, and says where it may be interrupted after all:

with interrupts.deferred():
    with interrupts.allowed():
        ...                     # waiting, forward and backward: KeyboardInterrupt as usual
    ...                         # update, publish, commit, checkpoint: it comes with the next `allowed`
"""

from collections.abc import Iterator
from contextlib import contextmanager


class _Interrupts:
    """Of a process there is one, as there is one set of signal handlers."""

    def __init__(self) -> None:
        self._is_deferred = False
        self._has_come = False

    def handle(self, *_: object) -> None:
        """The signal handler. Who was interrupted once is on its way out and is not disturbed again."""
        if not self._has_come:
            self._has_come = True
            if not self._is_deferred:
                raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[None]:
        with self._deferring(True):
            yield

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """KeyboardInterrupt now, if a signal has come before."""
        with self._deferring(False):
            if self._has_come:
                raise KeyboardInterrupt
            yield

    @contextmanager
    def _deferring(self, is_deferred: bool) -> Iterator[None]:
        before, self._is_deferred = self._is_deferred, is_deferred
        try:
            yield
        finally:
            self._is_deferred = before


interrupts = _Interrupts()
