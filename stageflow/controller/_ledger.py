"""What is in flight and who waits for it: micro-batches and calls, from the moment they are sent until they are answered.

Rules of this file:

* Nothing is sent here: a micro-batch is packed, numbered and put to the writer; answers come from the reader, in the loop.
* A wait ends by its answer, by the caller's cancellation, or by ``close``. There is no other way, and none without a bound:
  a stage that never answers is a stall, and a stall closes the ledger.
* Trio thread of the launch only; ``check`` says so to whoever comes from elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import trio

from stageflow._frames import Call, EndOfStream, MicroBatch, Report, RingFrame, Warmup
from stageflow.controller._interrupts import protected
from stageflow.controller._tickets import Entry, Outcome, Ticket
from stageflow.controller._window import Window
from stageflow.errors import PipelineBroken, StageError
from stageflow.transport import SMALL, Packed, pack

logger = logging.getLogger("stageflow")

SELF_WAIT_S = 5.0
"""How long a task may wait for slots that it holds itself before it is told."""


@attrs.define(eq=False)
class _Calling:
    """One call on its way."""

    missing: set[int]
    """Ranks that have not answered."""
    values: dict[int, Any] = attrs.field(factory=dict[int, Any])
    errors: dict[int, BaseException] = attrs.field(factory=dict[int, BaseException])
    done: trio.Event = attrs.field(factory=trio.Event)


class Outbox(Protocol):
    """Where the ledger puts what is to be sent: the writer."""

    def put(self, frame: RingFrame, *values: Packed | None) -> None:
        """Send a frame, in its turn, with the values that it announces."""
        ...


class Ledger:
    """The micro-batches and calls of one pipeline."""

    def __init__(self, window: int, writer: Outbox) -> None:
        self.window = Window(window)
        self.submitted = self.done = self.failed = self.dropped = 0
        """Counts of micro-batches since the launch; see ``Statistics``."""
        self._writer = writer
        self._token = trio.lowlevel.current_trio_token()
        self._entries: dict[int, Entry] = {}
        """Every micro-batch that holds a slot: in flight, or its result not yet taken."""
        self._calls: dict[int, _Calling] = {}
        self._calls_limit = trio.CapacityLimiter(max(window, 8))
        self._next_call = 0
        self._closed: Callable[[], BaseException] | None = None

    @property
    def closed(self) -> bool:
        """Whether the pipeline is broken or its block has ended."""
        return self._closed is not None

    @property
    def state(self) -> str:
        """For people: open, closed, or broken and by what."""
        if self._closed is None:
            return "open"
        reason = self._closed()
        return f"broken, {type(reason).__name__}" if isinstance(reason, PipelineBroken) else "closed"

    def check(self) -> None:
        """Raise what ``close`` was given, or RuntimeError for a caller from another Trio run or thread."""
        if self._closed is not None:
            raise self._closed()
        try:
            ours = trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            ours = False
        if not ours:
            raise RuntimeError(
                "this pipeline belongs to another Trio run or thread. Call it from the run that launched it, "
                "e.g. by trio.from_thread.run(pipe, x)"
            )

    # ---- sending --------------------------------------------------------------------------------------------------------

    async def submit(self, args: tuple[Any, ...], kwargs: dict[str, Any], stage_kwargs: Mapping[str, Any] | None) -> Ticket:
        """Wait for a slot and send a micro-batch."""
        self.check()
        await self.window.acquire()
        try:
            self.check()  # it may have been closed in the moment that this task took to come back
        except BaseException:
            self.window.release()
            raise
        return self._send(args, kwargs, stage_kwargs)

    def submit_nowait(self, args: tuple[Any, ...], kwargs: dict[str, Any], stage_kwargs: Mapping[str, Any] | None) -> Ticket:
        """Send a micro-batch, or raise ``trio.WouldBlock``."""
        self.check()
        self.window.acquire_nowait()
        return self._send(args, kwargs, stage_kwargs)

    @protected
    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any], stage_kwargs: Mapping[str, Any] | None) -> Ticket:
        """Pack and put; a slot has been taken for it."""
        try:
            value = pack((args, kwargs))
            extra = pack(dict(stage_kwargs)) if stage_kwargs else None
        except BaseException:
            self.window.release()
            raise
        entry = Entry(self.submitted, self._released)
        self.submitted += 1
        self._entries[entry.seq] = entry
        self._writer.put(MicroBatch(entry.seq), value, extra)
        return Ticket(entry, self._token)

    def send_warmup(self) -> None:
        """Once round the ring, with a payload too large to ride in a frame."""
        self._writer.put(Warmup(), Packed.of_bytes(SMALL + 1))

    def send_end_of_stream(self) -> None:
        """The last frame."""
        self._writer.put(EndOfStream())

    async def call(self, fn: Callable[..., Any], args: tuple[Any, ...], ranks: tuple[int, ...]) -> list[Any]:
        """Send a call and wait for the answers of ``ranks``, in their order."""
        self.check()
        # No slot of the window, but a bound of its own: a stage can't refuse what is sent to it.
        async with self._calls_limit:
            return await self._call(fn, args, ranks)

    async def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], ranks: tuple[int, ...]) -> list[Any]:
        self.check()
        value = pack((fn, args))
        call_id = self._next_call
        self._next_call += 1
        calling = self._calls[call_id] = _Calling(set(ranks))
        self._writer.put(Call(call_id, ranks), value)
        if not ranks:
            self._calls.pop(call_id).done.set()
        await calling.done.wait()
        if calling.missing:
            self.check()
        if calling.errors:
            first, *others = (calling.errors[rank] for rank in sorted(calling.errors))
            if isinstance(first, StageError):
                first.secondary = tuple(error for error in others if isinstance(error, StageError))
            raise first
        return [calling.values[rank] for rank in ranks]

    # ---- answers, from the reader ---------------------------------------------------------------------------------------

    def result(self, seq: int, value: Any) -> None:
        """A result is here."""
        self._arrived(seq, Outcome(value))

    def unreadable(self, seq: int, error: BaseException) -> None:
        """A result is here that can't be put together in this process."""
        _note(error, f"the result of micro-batch {seq} came back, but could not be unpickled in this process")
        self._arrived(seq, Outcome(error=lambda: error))

    def stage_failed(self, seq: int, report: Report) -> None:
        """A stage raised for this micro-batch."""
        self._arrived(seq, Outcome(error=_stage_error(report).copy))

    def call_answered(
        self, call_id: int, rank: int, value: Any, report: Report | None, problem: BaseException | None
    ) -> None:
        """A rank has run a call: it returned, or raised, or what it returned can't be put together here."""
        calling = self._calls.get(call_id)
        if calling is None:
            return
        if report is not None:
            calling.errors[rank] = _stage_error(report)
        elif problem is not None:
            _note(problem, f"what the call returned on rank {rank} could not be unpickled in this process")
            calling.errors[rank] = problem
        else:
            calling.values[rank] = value
        calling.missing.discard(rank)
        if not calling.missing:
            del self._calls[call_id]
            calling.done.set()

    def _arrived(self, seq: int, outcome: Outcome) -> None:
        entry = self._entries.get(seq)
        if entry is None or entry.outcome is not None:  # closed meanwhile
            return
        self.done += outcome.error is None
        self.failed += outcome.error is not None
        self.dropped += entry.dropped
        entry.arrive(outcome)

    def _released(self, entry: Entry) -> None:
        self._entries.pop(entry.seq, None)
        self.window.release()

    # ---- for the supervisor ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether the stages owe an answer."""
        return bool(self._calls) or any(entry.outcome is None for entry in self._entries.values())

    @protected
    async def watch_window(self) -> None:
        """Say so when a task waits for a slot that only itself could give back. For the service nursery."""
        full_since, seen = trio.current_time(), -1
        while True:
            await trio.sleep(SELF_WAIT_S / 2)
            entries = self._entries.values()
            owners = {entry.owner for entry in entries}
            all_here = all(entry.outcome is not None and entry.waiter is None for entry in entries)
            stuck = bool(owners) and all_here and owners <= set(self.window.waiting_tasks())
            if not stuck or seen != self.submitted:
                full_since, seen = trio.current_time(), self.submitted
            elif trio.current_time() - full_since >= SELF_WAIT_S:
                logger.warning(
                    "task %s waits for a slot of the window (%d), and all slots are held by results that only tasks which "
                    "wait like this could take. A result has to be taken, or its ticket let go, before more can be "
                    "submitted: await a ticket first, or use another pipeline inside the block of a map",
                    ", ".join(sorted(repr(owner.name) for owner in owners if owner is not None)),
                    self.window.size,
                )
                full_since = math.inf

    def close(self, error: Callable[[], BaseException]) -> None:
        """End every wait, now and from now on, with ``error()``. The first reason stays; results that are here do too."""
        if self._closed is not None:
            return
        self._closed = error
        self.window.close(error)
        for entry in list(self._entries.values()):
            entry.arrive(Outcome(error=error))
        for calling in self._calls.values():
            calling.done.set()
        self._calls.clear()


def _note(error: BaseException, text: str) -> None:
    with contextlib.suppress(Exception):  # a frozen exception takes no notes
        error.add_note(f"stageflow: {text}")


def _stage_error(report: Report) -> StageError:
    what = "a call" if report.seq is None else f"micro-batch {report.seq}"
    return StageError(
        f"stage {report.stage_index} raised {report.remote_type} for {what}: {report.text}",
        stage_index=report.stage_index,
        tp_index=report.tp_index,
        rank=report.rank,
        seq=report.seq,
        phase=report.phase,
        remote_type=report.remote_type,
        remote_traceback=report.traceback,
    )
