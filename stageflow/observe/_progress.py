"""What each rank says of itself, through shared memory: what it does, for which micro-batch, since when, and sums of time.

Rules of this file:

* One slot per rank, written by that rank's main thread alone, read by the controller at any moment and without waiting,
  also when the rank hangs, holds the GIL, or is dead.
* A field is one aligned 64-bit integer, so a reader sees an old value or a new one, never half of each. Fields of one slot
  may be a step apart; sums are for people and for the stall watch, which looks at change only.
* Times are CLOCK_MONOTONIC nanoseconds, the same clock in every process of the machine.
"""

from __future__ import annotations

import mmap
import time
from enum import IntEnum
from pathlib import Path

import attrs

_FIELDS = 16  # 128 bytes: two cache lines, so that neighbours don't share one
_SLOT = _FIELDS * 8


class Activity(IntEnum):
    """What a rank is doing."""

    STARTING = 0
    WAITING = 1
    """For the next frame."""
    COMPUTING = 2
    SENDING = 3
    CALLING = 4
    """Running a function of ``pipe.call``."""
    ENDING = 5
    DEBUGGING = 6
    """Somebody sits at its debugger, or it waits for the terminal to be free for that."""


# The fields of a slot.
_ACTIVITY, _SEQ, _SINCE, _DONE, _FAILED, _PASSED, _FIRST, _LAST, _SUM = range(9)
# _SEQ is plus one, so that 0 is none. _FIRST is the start of the first micro-batch, _LAST the end of the newest.
_LOADED = 15
# _SUM + activity is the sum of nanoseconds spent in it.


@attrs.frozen
class RankProgress:
    """One slot, read at one moment. Times in nanoseconds."""

    activity: Activity
    seq: int | None
    since_ns: int
    done: int
    failed: int
    passed: int
    """Failures of stages before it that it handed on."""
    first_ns: int
    last_ns: int
    loaded: int
    """Bytes of weights that it has read from files, while it is built."""
    spent_ns: dict[Activity, int]
    """Completed stretches of each activity since the first micro-batch, without the current one."""

    @property
    def handled(self) -> int:
        """Micro-batches that it is done with, however they ended."""
        return self.done + self.failed + self.passed

    @property
    def mark(self) -> tuple[int, int, int]:
        """Changes whenever the rank gets on with anything."""
        return (self.activity, self.seq or 0, self.since_ns)


class ProgressBoard:
    """The shared memory of all ranks' slots, a file in the pipeline's private directory."""

    def __init__(self, path: Path | None, ranks: int, *, create: bool = False) -> None:
        """Args: the file, None for memory of this process alone; the number of ranks; whether to make the file."""
        if path is None:
            self._map = mmap.mmap(-1, ranks * _SLOT)
        else:
            with path.open("w+b" if create else "r+b") as file:
                if create:
                    file.truncate(ranks * _SLOT)
                self._map = mmap.mmap(file.fileno(), ranks * _SLOT)
        self._fields = memoryview(self._map).cast("q")
        self._written: list[memoryview[int]] = []
        self._last: list[RankProgress] | None = None

    def read(self, rank: int) -> RankProgress:
        """What ``rank`` says of itself now; after ``close``, what it said last."""
        if self._last is not None:
            return self._last[rank]
        f = self._fields[rank * _FIELDS : (rank + 1) * _FIELDS].tolist()
        return RankProgress(
            activity=Activity(f[_ACTIVITY]),
            seq=f[_SEQ] - 1 if f[_SEQ] else None,
            since_ns=f[_SINCE],
            done=f[_DONE],
            failed=f[_FAILED],
            passed=f[_PASSED],
            first_ns=f[_FIRST],
            last_ns=f[_LAST],
            loaded=f[_LOADED],
            spent_ns={activity: f[_SUM + activity] for activity in Activity},
        )

    def writer(self, rank: int) -> ProgressWriter:
        """The writing side of one slot: for that rank alone."""
        fields = self._fields[rank * _FIELDS : (rank + 1) * _FIELDS]
        self._written.append(fields)
        return ProgressWriter(fields)

    def close(self) -> None:
        """Unmap. Nothing may write in this process any more."""
        self._last = [self.read(rank) for rank in range(len(self._fields) // _FIELDS)]
        for fields in (*self._written, self._fields):
            fields.release()
        self._map.close()


class ProgressWriter:
    """Writes one rank's slot. Under a microsecond a call."""

    def __init__(self, fields: memoryview[int]) -> None:
        self._fields = fields

    def enter(self, activity: Activity, seq: int | None = None) -> None:
        """The rank turns to another activity."""
        f, now = self._fields, time.monotonic_ns()
        if f[_FIRST]:
            f[_SUM + f[_ACTIVITY]] += now - f[_SINCE]
        elif activity is Activity.COMPUTING:
            f[_FIRST] = now
        f[_ACTIVITY] = activity
        f[_SEQ] = 0 if seq is None else seq + 1
        f[_SINCE] = now

    @property
    def current(self) -> tuple[Activity, int | None]:
        """What the rank is doing, and for which micro-batch."""
        return Activity(self._fields[_ACTIVITY]), self._fields[_SEQ] - 1 if self._fields[_SEQ] else None

    def finished(self, *, failed: bool) -> None:
        """A micro-batch is through, well or not."""
        self._fields[_FAILED if failed else _DONE] += 1
        self._fields[_LAST] = time.monotonic_ns()

    def loaded(self, nbytes: int) -> None:
        """So many bytes of weights are there. The one field that another thread may write: no other writes it."""
        self._fields[_LOADED] = nbytes

    def passed(self) -> None:
        """A micro-batch that failed before is handed on."""
        self._fields[_PASSED] += 1
