"""A wake-up call for everybody who waits for a change."""

import asyncio


class Change:
    """`while not <what is waited for>: await change.wait(timeout_s)`; `set` wakes all who wait at that moment."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Whether the signal came before the timeout."""
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
