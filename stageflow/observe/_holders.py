"""Who holds which micro-batch, as text: for the error of a pipeline that hangs.

Rules of this file:

* Every rank handles all micro-batches in order, so two counts say it all: a rank holds what the place before it has passed
  on and it has not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from stageflow._frames import StageInfo
from stageflow.observe._progress import RankProgress


def draw_holders(ranks: Sequence[tuple[StageInfo, RankProgress]], *, submitted: int, arrived: int) -> str:
    """A line for each place of the ring: what it does, since when, which micro-batches lie there.

    Args:
        ranks: by rank.
        submitted: micro-batches that were sent, numbered from 0.
        arrived: how many of them are back.
    """
    now = time.monotonic_ns()
    rows: list[tuple[str, str, str]] = []
    for rank, (info, progress) in enumerate(ranks):
        before = submitted if info.is_first else ranks[rank - info.tp][1].handled
        seq = "" if progress.seq is None else f" micro-batch {progress.seq}"
        doing = f"{progress.activity.name.lower()}{seq} for {(now - progress.since_ns) / 1e9:.1f} s"
        rows.append((info.label, doing, _range(progress.handled, before)))
    rows.append(("controller", f"has got {_range(0, arrived)}", _range(arrived, ranks[-1][1].handled)))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{place:{widths[0]}}  {doing:{widths[1]}}  holds {held}" for place, doing, held in rows)


def _range(start: int, stop: int) -> str:
    if stop <= start:
        return "none"
    return str(start) if stop == start + 1 else f"{start} … {stop - 1}"
