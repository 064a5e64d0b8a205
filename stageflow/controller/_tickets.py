"""One submitted micro-batch: the entry that the pipeline holds, and the ticket that the caller holds.

Rules of this file:

* The pipeline holds entries, the caller holds the ticket, and only the ticket holds the entry's slot: a result that nobody
  has taken keeps its slot, a ticket that is let go gives it back, at once or when the result arrives.
* An entry ends in one way: taken, or dropped. ``dropped`` before the arrival means: drop it then.
* Trio thread only, but for ``Ticket.__del__``, which may run in any thread and only leaves a message for the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, final

import attrs
import trio


@attrs.frozen
class Outcome:
    """A result, or the error in its place."""

    value: Any = None
    error: Callable[[], BaseException] | None = None
    """Makes a fresh error: several tasks, or one task several times, may raise it."""

    def unwrap(self) -> Any:
        """The value, or the error raised."""
        if self.error is not None:
            raise self.error()
        return self.value


@attrs.define(eq=False)
class Entry:
    """A micro-batch in flight, or whose result waits to be taken."""

    seq: int
    release: Callable[[Entry], None]
    """Gives the slot back."""
    owner: trio.lowlevel.Task | None = None
    """The task that will take the result: the one that submitted it, or that entered the map."""
    outcome: Outcome | None = None
    dropped: bool = False
    taken: bool = False
    waiter: str | None = None
    """Name of the task that waits for the result."""
    arrived: trio.Event = attrs.field(factory=trio.Event)

    def arrive(self, outcome: Outcome) -> None:
        """The result is here."""
        if self.outcome is not None:
            return
        if self.dropped:
            self.outcome = Outcome()
            self.release(self)
        else:
            self.outcome = outcome
            self.arrived.set()

    def take(self) -> Outcome:
        """Take the result that has arrived: the slot is free."""
        assert self.outcome is not None
        if not self.taken and not self.dropped:
            self.taken = True
            self.release(self)
        return self.outcome

    def drop(self) -> None:
        """Nobody wants the result any more."""
        if self.taken or self.dropped:
            return
        self.dropped = True
        if self.outcome is not None:
            self.outcome = Outcome()
            self.release(self)


@final
class Ticket:
    """The claim to one result. Made by ``pipe.submit`` and ``pipe.submit_nowait``.

    ``await ticket`` waits for the result and returns it, or raises ``StageError`` if a stage raised for it, or what broke
    the pipeline. It may be awaited again once it is done. If the wait is cancelled, the micro-batch is not recalled: its
    result is dropped when it arrives, and the ticket is void. A ticket that is let go without being awaited gives its slot
    of the window back in the same way.
    """

    __slots__ = ("__weakref__", "_entry", "_token")

    def __init__(self, entry: Entry, token: trio.lowlevel.TrioToken) -> None:
        self._entry = entry
        self._token = token

    @property
    def seq(self) -> int:
        """The number of the micro-batch, in order of submission."""
        return self._entry.seq

    @property
    def done(self) -> bool:
        """Whether the result is here, so that awaiting it will not wait."""
        return self._entry.arrived.is_set()

    def owned_by(self, task: trio.lowlevel.Task) -> None:
        """Note the task that holds this ticket, so that it can be told if it waits for itself."""
        self._entry.owner = task

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        entry = self._entry
        if entry.dropped:
            raise RuntimeError(
                f"the wait for micro-batch {entry.seq} was cancelled, so its result was dropped. Submit it again: "
                "a cancelled wait gives the ticket up"
            )
        if entry.waiter is not None:
            raise trio.BusyResourceError(f"task {entry.waiter!r} already waits for micro-batch {entry.seq}")
        entry.waiter = trio.lowlevel.current_task().name
        try:
            await entry.arrived.wait()
        except trio.Cancelled:
            entry.drop()
            raise
        finally:
            entry.waiter = None
        return entry.take().unwrap()

    def __del__(self) -> None:
        entry = self._entry
        if not entry.taken and not entry.dropped:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(entry.drop)

    def __repr__(self) -> str:
        entry = self._entry
        state = "taken" if entry.taken else "dropped" if entry.dropped else "arrived" if entry.outcome else "in flight"
        return f"<Ticket for micro-batch {entry.seq}: {state}>"
