"""`stageflow bench pipeline`: how close a pipeline of sleeping stages comes to the ideal.

Stages that sleep need no core, so what is missing to the ideal is the pipeline's own doing: hand-overs, bubbles, the window.

* The ideal is made from what the stages themselves measured in the same run, since a sleep takes longer than it is told:
  for equal stages (n + stages - 1) × their mean time, for unequal ones the sum of the times + (n - 1) × the largest.
* Payloads take turns, run by run, so that a change of the machine's load meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import attrs
import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline, StageInfo, __version__
from stageflow.cli._ends import OK, Refused
from stageflow.cli._values import as_bytes, milliseconds, positive, sizes, table

__all__ = ["HELP", "add_arguments"]

HELP = "compare a pipeline of sleeping stages with the ideal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stageflow bench pipeline`."""
    add = parser.add_argument
    add("--stages", type=positive, metavar="N", help="number of stages (default: as many as --stage-ms names, or 4)")
    add("--stage-ms", type=milliseconds, default=[5.0], metavar="MS", help="of all stages, or of each: 2,5,3,4 (default: 5)")
    add("--payload", type=sizes, default=[8 << 10], metavar="SIZE", help="of a micro-batch; several: 8KiB,1MiB (default: 8KiB)")
    add("--n", type=positive, default=200, metavar="N", help="micro-batches in a run (default: 200)")
    add("--window", type=positive, metavar="N", help="the most micro-batches in flight (default: 2 for each stage)")
    add("--repeat", type=positive, default=5, metavar="N", help="runs for each payload (default: 5)")
    add("--json", action="store_true", help="print the raw figures as JSON")
    parser.set_defaults(run=run)


@attrs.frozen
class Run:
    """One stream of n micro-batches, from the first submission to the last result."""

    payload: int
    """Bytes of a micro-batch."""
    seconds: float
    ideal: float
    """Seconds that it could not be faster than."""
    stage_seconds: tuple[float, ...]
    """What a micro-batch took in each stage, on average."""

    @property
    def ratio(self) -> float:
        """``ideal / seconds``: 1 is perfect."""
        return self.ideal / self.seconds


class Sleeper(nn.Module):
    """A stage that takes its time and hands on what it got."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        time.sleep(self.seconds)
        return x


def run(arguments: argparse.Namespace) -> int:
    """Measure and say."""
    given: list[float] = arguments.stage_ms
    stages: int = arguments.stages or max(len(given), 4 if len(given) == 1 else 1)
    if len(given) not in (1, stages):
        raise Refused(f"--stage-ms names one time for all stages or one for each: found {len(given)} for {stages} stages")
    stage_ms = given if len(given) == stages else given * stages
    show = _no_show if arguments.json else _show
    window, runs = trio.run(_measure, stage_ms, arguments.payload, arguments.n, arguments.window, arguments.repeat, show)
    if arguments.json:
        print(json.dumps(_raw(stage_ms, arguments.n, window, runs), indent=2))
    else:
        _conclude(arguments.payload, runs)
    return OK


async def _measure(
    stage_ms: Sequence[float],
    payloads: Sequence[int],
    n: int,
    window: int | None,
    repeats: int,
    show: Callable[[Sequence[float], int, int, Run | None], None],
) -> tuple[int, list[Run]]:
    runs: list[Run] = []
    
    def build(stage: StageInfo) -> nn.Module: ...

    async with Pipeline.launch([Sleeper(ms / 1000) for ms in stage_ms], pp=len(stage_ms), window=window) as pipe:
        ...
    return 0, runs
