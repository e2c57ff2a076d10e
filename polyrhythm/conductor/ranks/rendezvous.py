"""Where the ranks of an epoch find each other: keys and values, as the stores of torch.distributed have them."""

import time
from collections.abc import Callable

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.refusals import Conflict
from polyrhythm.http.errors import Refusal

MAX_KEYS = 100_000
MAX_KEY_CHARS = 1_000
MAX_VALUE_BYTES = 2**20
MAX_BYTES = 64 * 2**20
TICK_S = 1.0


class Rendezvous:
    """The keys of one epoch. Those of the epochs before it are gone, and who still waits for one is refused."""

    def __init__(self, check: Callable[[], None] = lambda: None):
        """`check` raises why nobody should wait any more, for example because the run has failed."""
        self.epoch = 0
        self._check = check
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._changed = Change()

    def begin(self, epoch: int) -> None:
        """Forget what was before; epochs are counted upwards."""
        assert epoch > self.epoch
        self.epoch = epoch
        self._values, self._num_bytes = {}, 0
        self._changed.set()

    def set(self, epoch: int, key: str, value: bytes) -> None:
        self._check_epoch(epoch)
        num_bytes = self._num_bytes + len(value) - len(self._values.get(key, b""))
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_BYTES:
            raise Refusal(f"a key has at most {MAX_KEY_CHARS} characters, a value at most {MAX_VALUE_BYTES} bytes")
        if num_bytes > MAX_BYTES or (len(self._values) >= MAX_KEYS and key not in self._values):
            raise Refusal(
                f"the ranks of an epoch have at most {MAX_KEYS} keys and {MAX_BYTES} bytes to find each other"
            )
        self._values[key], self._num_bytes = value, num_bytes
        self._changed.set()

    def add(self, epoch: int, key: str, amount: int) -> int:
        """Add to a number, which is 0 before; the sum."""
        self._check_epoch(epoch)
        before = self._values.get(key, b"0")
        try:
            total = int(before) + amount
        except ValueError:
            raise Conflict(f"the value of {key!r} is no number to add to") from None
        self.set(epoch, key, str(total).encode())
        return total

    def compare_set(self, epoch: int, key: str, expected: bytes, value: bytes) -> bytes:
        """Set a value if it still is the expected one, or if nothing is expected and there is none; what is there then."""
        self._check_epoch(epoch)
        if self._values.get(key, b"") == expected:
            self.set(epoch, key, value)
        return self._values.get(key, expected)

    def delete(self, epoch: int, key: str) -> bool:
        self._check_epoch(epoch)
        value = self._values.pop(key, None)
        self._num_bytes -= len(value or b"")
        return value is not None

    def num_keys(self, epoch: int) -> int:
        self._check_epoch(epoch)
        return len(self._values)

    def has(self, epoch: int, keys: list[str]) -> bool:
        self._check_epoch(epoch)
        return all(key in self._values for key in keys)

    async def get(self, epoch: int, keys: list[str], wait_s: float) -> list[bytes] | None:
        """The values as soon as all are there; None when `wait_s` have passed."""
        until_s = time.monotonic() + wait_s
        while not self.has(epoch, keys):
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return None
            await self._changed.wait(min(remaining_s, TICK_S))
        return [self._values[key] for key in keys]

    def _check_epoch(self, epoch: int) -> None:
        self._check()
        if epoch != self.epoch:
            raise Conflict(f"epoch {epoch} of the ranks is not the one that is going on, {self.epoch}")
