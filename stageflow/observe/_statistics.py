"""Frozen snapshots for people: what ``pipe.statistics()`` returns. Seconds, shares and counts."""

from __future__ import annotations

import attrs

from stageflow.observe._progress import Activity, RankProgress


@attrs.frozen
class StageStatistics:
    """One rank of the pipeline, from its first micro-batch to its newest.

    The shares divide by ``span``: a pipeline that idles between bursts of work shows the idling as waiting.
    """

    stage_index: int
    """The stage."""
    rank: int
    """The process."""
    activity: str
    """What it does now: starting, waiting, computing, sending, calling, ending, debugging."""
    seq: int | None
    """The micro-batch it is at, or None."""
    done: int
    """Micro-batches it has passed on."""
    failed: int
    """Micro-batches whose forward raised here."""
    busy: float
    """Seconds spent in forwards."""
    waiting: float
    """Seconds spent waiting for input."""
    sending: float
    """Seconds spent handing results on."""
    span: float
    """Seconds from the start of its first micro-batch to the end of its newest."""

    @property
    def busy_share(self) -> float:
        """``busy / span``, 0 … 1; 0 before the first micro-batch."""
        return min(1.0, self.busy / self.span) if self.span > 0 else 0.0

    @property
    def bubble(self) -> float:
        """The share of ``span`` not spent in forwards, ``1 - busy_share``."""
        return 1.0 - self.busy_share if self.span > 0 else 0.0


@attrs.frozen
class Statistics:
    """A snapshot of a pipeline, taken without waiting for anything."""

    window: int
    """The most micro-batches that may be in flight."""
    in_flight: int
    """Slots of the window in use: submitted, and the result not yet taken."""
    waiting_to_submit: int
    """Tasks waiting for a slot."""
    submitted: int
    """Micro-batches submitted since the launch."""
    done: int
    """Results that arrived."""
    failed: int
    """Micro-batches that came back as a ``StageError``."""
    dropped: int
    """Results that arrived when nobody wanted them any more."""
    stages: tuple[StageStatistics, ...]
    """By rank."""


def stage_statistics(stage_index: int, rank: int, progress: RankProgress) -> StageStatistics:
    """The same facts in people's units."""
    span = max(0, progress.last_ns - progress.first_ns) if progress.first_ns else 0
    return StageStatistics(
        stage_index=stage_index,
        rank=rank,
        activity=progress.activity.name.lower(),
        seq=progress.seq,
        done=progress.done,
        failed=progress.failed,
        busy=progress.spent_ns[Activity.COMPUTING] / 1e9,
        waiting=progress.spent_ns[Activity.WAITING] / 1e9,
        sending=progress.spent_ns[Activity.SENDING] / 1e9,
        span=span / 1e9,
    )
