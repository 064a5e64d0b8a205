"""The window: the slots that micro-batches in flight hold.

Rules of this file:

* First come, first served: a slot that is given back goes to the task that has waited longest, directly.
* A slot is taken before a micro-batch is sent, and given back when its result has been taken, or dropped: so no more than
  ``size`` results can lie in memory, however slow the consumer.
* ``close`` ends every wait, now and later, with the error that it is given.
"""

from __future__ import annotations

from collections.abc import Callable

import trio


class Window:
    """A fixed number of slots, and the queue for them. Trio thread only."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._lot = trio.lowlevel.ParkingLot()
        self._error: Callable[[], BaseException] | None = None

    @property
    def waiting(self) -> int:
        """Number of tasks in the queue."""
        return len(self._lot)

    def waiting_tasks(self) -> list[trio.lowlevel.Task]:
        """The waiting tasks, longest wait first."""
        return list(self._lot._parked)  # pyright: ignore[reportPrivateUsage]

    def acquire_nowait(self) -> None:
        """Take a slot.

        Raises:
            trio.WouldBlock: none is free, or others wait.
        """
        self._check()
        if self.used >= self.size or self._lot:
            raise trio.WouldBlock
        self.used += 1

    async def acquire(self) -> None:
        """Wait for a slot and take it. A checkpoint; when cancelled, none is taken."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self.acquire_nowait()
        except trio.WouldBlock:
            await self._lot.park()  # whoever wakes us has kept the slot counted as used, for us
            self._check()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def release(self) -> None:
        """Give a slot back."""
        if self._lot:
            self._lot.unpark(count=1)
        else:
            self.used -= 1

    def close(self, error: Callable[[], BaseException]) -> None:
        """Let every waiting and every later ``acquire`` raise ``error()``."""
        self._error = error
        self._lot.unpark_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error()
