"""Finding a stage that hangs: no rank gets on with anything, and there is work.

Rules of this file:

* Judged by what ranks write into shared memory, never by when results arrive here, and only over time in which Trio's loop
  ran: a body that blocks the loop makes no stall, however long, and neither does a slow consumer.
* While somebody sits at a debugger in a stage, no time passes.
* Before the pipeline is broken, every rank has been asked for its stacks: by a signal, so it answers while it holds the GIL.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

import trio

from stageflow._frames import STACKS_SIGNAL
from stageflow._lifecycle import State
from stageflow.controller._interrupts import protected
from stageflow.controller._ledger import Ledger
from stageflow.controller._output import Output
from stageflow.controller._ranks import Rank
from stageflow.controller._supervisor import Supervisor
from stageflow.errors import LaunchError, StageStalled
from stageflow.observe import Activity, ProgressBoard, RankProgress, draw_holders

STACKS_S = 1.0
"""For all ranks to write their stacks."""

NO_ANSWER = "(no answer)"

_LOOK_S = 0.02
"""Between two looks at whether they have."""


class StallWatch:
    """Watches the progress of one pipeline."""

    def __init__(self, supervisor: Supervisor, ledger: Ledger, board: ProgressBoard, stall_timeout: float) -> None:
        self._supervisor = supervisor
        self._ranks = supervisor.ranks
        self._ledger = ledger
        self._board = board
        self._timeout = stall_timeout

    @protected
    async def run(self) -> None:
        """Break the pipeline when no rank has got on with anything for ``stall_timeout`` while work is assigned."""
        if self._timeout == math.inf:
            return
        period = min(5.0, self._timeout / 4)  # an idle pipeline shall hardly wake up
        marks: object = None
        looked = quiet_since = trio.current_time()
        while True:
            await trio.sleep(period)
            now = trio.current_time()
            seen = [self._board.read(rank.info.rank) for rank in self._ranks]
            new_marks = [progress.mark for progress in seen]
            loop_was_blocked = now - looked > 2 * period + 0.1
            if new_marks != marks or not self._ledger.has_work() or self._supervisor.debugging() or loop_was_blocked:
                quiet_since = now
            marks, looked = new_marks, now
            if now - quiet_since >= self._timeout:
                await self._declare(seen)
                return

    async def _declare(self, seen: Sequence[RankProgress]) -> None:
        at = stalled_rank(seen, self._ranks[0].info.tp, self._ledger.submitted)
        rank, progress = self._ranks[at], seen[at]
        since = (time.monotonic_ns() - progress.since_ns) / 1e9
        seq = f" micro-batch {progress.seq}" if progress.seq is not None else ""
        what = f"{progress.activity.name.lower()}{seq}"
        if all(one.activity is Activity.WAITING and one.handled == seen[0].handled for one in seen):
            what = "waiting like all others: the controller has not taken a result, whose unpickling may hang there"
        error = StageStalled(
            f"{rank.label} (rank {at}) made no progress for {since:.1f} s, {what} (stall_timeout={self._timeout:g} s)",
            stage_index=rank.info.stage_index,
            tp_index=rank.info.tp_index,
            rank=rank.info.rank,
            phase=rank.state.value,
            seq=progress.seq,
            holders=draw_holders(
                [(one.info, each) for one, each in zip(self._ranks, seen, strict=True)],
                submitted=self._ledger.submitted,
                arrived=self._ledger.done + self._ledger.failed,
            ),
        )
        self._supervisor.stall_found(error)
        stacks = await collect_stacks(self._ranks, min(STACKS_S, self._timeout))
        error.stacks = {at: stacks.pop(at), **stacks}
        self._supervisor.stall_reported()


async def collect_stacks(ranks: Sequence[Rank], seconds: float) -> dict[int, str]:
    """The stacks of all threads of all ranks, as text by rank; or why one doesn't answer."""
    for rank in ranks:
        if rank.state is not State.STARTING:  # its guard is not armed: the signal would end it
            rank.kill(STACKS_SIGNAL)
    with trio.move_on_after(seconds):
        before: object = None
        while not all((answers := _answers(ranks)).values()) or answers != before:  # all there, and none still growing
            before = answers
            await trio.sleep(_LOOK_S)
    return {rank: text or NO_ANSWER for rank, text in _answers(ranks).items()}


def _answers(ranks: Sequence[Rank]) -> dict[int, str]:
    return {rank.info.rank: _written(rank) or rank.stopped for rank in ranks}


def _written(rank: Rank) -> str:
    if rank.state is State.STARTING:
        return NO_ANSWER
    return os.pread(rank.stacks, os.fstat(rank.stacks).st_size, 0).decode(errors="replace")


async def late_start(ranks: Sequence[Rank], board: ProgressBoard, output: Output, start_timeout: float) -> LaunchError:
    """The error for a start that took too long: it names the rank that the others wait for."""
    stacks = await collect_stacks(ranks, min(STACKS_S, start_timeout))
    order = list(State)

    def lateness(rank: Rank) -> tuple[int, bool, bool]:
        # In the earliest phase; there, not one that waits for its neighbour; among those, one that says nothing any more.
        at = rank.info.rank
        answers = stacks[at] not in (NO_ANSWER, rank.stopped)
        return order.index(rank.state), answers and board.read(at).activity is Activity.WAITING, answers

    late = min(ranks, key=lateness)
    at = late.info.rank
    return LaunchError(
        f"{late.label} is still in phase {late.state.value!r} after start_timeout={start_timeout:g} s. "
        "Give it longer by start_timeout, if it needs to load much",
        stage_index=late.info.stage_index,
        tp_index=late.info.tp_index,
        rank=at,
        phase=late.state.value,
        stderr_tail=output.stderr_tail(at),
        stacks={at: stacks.pop(at), **stacks},
    )


def stalled_rank(seen: Sequence[RankProgress], tp: int, submitted: int) -> int:
    """The rank that the others wait for: at work for longest; else the first that is behind the stage before it."""
    at_work = [rank for rank, progress in enumerate(seen) if progress.activity is not Activity.WAITING]
    if at_work:
        return min(at_work, key=lambda rank: seen[rank].since_ns)
    before = [submitted] * tp + [progress.handled for progress in seen]  # by rank: what the stage before it has passed on
    return next((rank for rank, progress in enumerate(seen) if progress.handled < before[rank]), 0)
