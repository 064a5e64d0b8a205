"""`stageflow bench pipeline`: how close a pipeline of sleeping stages comes to the ideal.

Stages that sleep need no core, so what is missing to the ideal is the pipeline's own: hand-overs, bubbles, the window.

* The ideal is made from what the stages measured themselves in the same run, since a sleep takes longer than it is told:
  for equal stages (n + stages - 1) × their mean time, for unequal ones the sum of their times + (n - 1) × the largest.
* Payloads take turns, run by run, so that a change of the machine's load meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from itertools import repeat

import attrs
import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline, __version__
from stageflow.cli._ends import OK, Refused
from stageflow.cli._values import as_bytes, milliseconds, positive, sizes, table

__all__ = ["HELP", "add_arguments", "seconds_of_stream"]

HELP = "compare a pipeline of sleeping stages with the ideal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stageflow bench pipeline`."""
    add = parser.add_argument
    add("--stages", type=positive, metavar="N", help="number of stages (default: as many as --stage-ms names, or 4)")
    add("--stage-ms", type=milliseconds, default=[5.0], metavar="MS", help="of all stages, or of each: 2,5,3,4 (default: 5)")
    add(
        "--payload",
        type=sizes,
        default=[8 << 10],
        metavar="SIZE",
        help="of a micro-batch; several: 8KiB,1MiB (default: 8KiB)",
    )
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
    """Measure, and say what came out."""
    stage_ms: list[float] = arguments.stage_ms
    stages: int = arguments.stages or (len(stage_ms) if len(stage_ms) > 1 else 4)
    if len(stage_ms) == 1:
        stage_ms = stage_ms * stages
    if len(stage_ms) != stages:
        raise Refused(f"--stage-ms names one time for all stages or one for each: found {len(stage_ms)} for {stages} stages")
    payloads: list[int] = arguments.payload
    window, runs = trio.run(_measure, stage_ms, payloads * arguments.repeat, arguments.n, arguments.window)
    by_payload = {payload: [run for run in runs if run.payload == payload] for payload in payloads}
    if arguments.json:
        print(json.dumps(_figures(stage_ms, arguments.n, window, by_payload), indent=2))
    else:
        _describe(stage_ms, arguments.n, window, by_payload)
    return OK


# ---- measuring ----------------------------------------------------------------------------------------------------------


async def _measure(stage_ms: Sequence[float], payloads: Sequence[int], n: int, window: int | None) -> tuple[int, list[Run]]:
    """A run for each payload, in this order; and the window that they had."""
    stages = [Sleeper(milliseconds / 1000) for milliseconds in stage_ms]
    async with Pipeline.launch(stages, pp=len(stages), devices="cpu", threads=1, window=window) as pipe:
        window = pipe.statistics().window
        for payload in dict.fromkeys(payloads):
            await seconds_of_stream(
                pipe, _tensor(payload), 2 * window
            )  # what is only there from the second time on: threads, memory
        return window, [await _run(pipe, payload, n, equal=len(set(stage_ms)) == 1) for payload in payloads]


async def _run(pipe: Pipeline, payload: int, n: int, *, equal: bool) -> Run:
    before = pipe.statistics().stages
    seconds = await seconds_of_stream(pipe, _tensor(payload), n)
    after = pipe.statistics().stages
    times = [(b.busy - a.busy) / (b.done - a.done) for a, b in zip(before, after, strict=True)]
    ideal = (n + len(times) - 1) * statistics.mean(times) if equal else sum(times) + (n - 1) * max(times)
    return Run(payload=payload, seconds=seconds, ideal=ideal, stage_seconds=tuple(times))


def _tensor(payload: int) -> Tensor:
    return torch.zeros(payload, dtype=torch.uint8)


async def seconds_of_stream(pipe: Pipeline, tensor: Tensor, n: int) -> float:
    """For n micro-batches, all of this tensor."""
    start = time.perf_counter()
    async with pipe.map(repeat(tensor, n)) as outputs:
        async for _ in outputs:
            pass
    return time.perf_counter() - start


# ---- saying -------------------------------------------------------------------------------------------------------------


def _describe(stage_ms: Sequence[float], n: int, window: int, by_payload: dict[int, list[Run]]) -> None:
    names = " + ".join(f"{ms:g}" for ms in stage_ms) if len(set(stage_ms)) > 1 else f"{stage_ms[0]:g}"
    print(f"{len(stage_ms)} stages that sleep {names} ms, {n} micro-batches, window {window}\n")
    head = ["payload", "run", "seconds", "ideal", "ideal / seconds", "ms in each stage"]
    rows = [
        [
            as_bytes(payload),
            str(index),
            f"{run.seconds:.3f}",
            f"{run.ideal:.3f}",
            f"{run.ratio:.3f}",
            ", ".join(f"{seconds * 1000:.2f}" for seconds in run.stage_seconds),
        ]
        for payload, runs in by_payload.items()
        for index, run in enumerate(runs, 1)
    ]
    print(table(head, rows) + "\n")
    for payload, runs in by_payload.items():
        print(f"{as_bytes(payload)}: {_median_ratio(runs):.3f} of the ideal (median of {len(runs)})")


def _figures(stage_ms: Sequence[float], n: int, window: int, by_payload: dict[int, list[Run]]) -> dict[str, object]:
    return {
        "benchmark": "pipeline",
        "stageflow": __version__,
        "torch": torch.__version__,
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "stages": len(stage_ms),
        "stage_ms": stage_ms,
        "n": n,
        "window": window,
        "payloads": [
            {
                "bytes": payload,
                "median_ratio": _median_ratio(runs),
                "runs": [
                    {"seconds": run.seconds, "ideal": run.ideal, "ratio": run.ratio, "stage_seconds": run.stage_seconds}
                    for run in runs
                ],
            }
            for payload, runs in by_payload.items()
        ],
    }


def _median_ratio(runs: Sequence[Run]) -> float:
    return statistics.median(run.ratio for run in runs)
