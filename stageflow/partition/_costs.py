"""What the units of a model cost: measured on an example, or estimated from one forward on the meta device.

Rules of this file:

* A unit's cost is that of its block and of the glue before it; the last has the glue after it as well.
* Measured is what is there and lies on the CPU, with as many threads as a stage will have. Anything else is estimated: the
  longer of the time for its floating-point operations and the time to read its weights and write its activations once (the
  roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009).
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from stageflow.partition._dry_run import DryRun, Work
from stageflow.partition._needs import Subject
from stageflow.partition._pieces import Unit
from stageflow.partition._tensors import same_tensors

__all__ = ["Rates", "calibrated", "estimated_seconds", "measured_seconds", "seconds_of_children", "works_of"]

_RUNS = 5
_BUDGET_S = 20.0


@attrs.frozen
class Rates:
    """What a device can do."""

    flops: float
    """Floating-point operations each second."""
    bandwidth: float
    """Bytes read or written each second."""


def works_of(seen: DryRun) -> list[Work]:
    """Of each unit with its glue."""
    found: list[Work] = []
    for index, unit in enumerate(seen.units):
        work = Work()
        for one in (unit.work, seen.work_between[index], *seen.work_between[index + 1 :] * (unit is seen.units[-1])):
            work.add(one)
        found.append(work)
    return found


def estimated_seconds(seen: DryRun, units: Sequence[Unit], rates: Rates) -> list[float]:
    """Of each unit, for one micro-batch."""
    found: list[float] = []
    for unit, work in zip(units, works_of(seen), strict=True):
        weights = {id(tensor): tensor.nbytes for _, module in unit.parts for tensor in module.parameters()}
        moved = sum(weights.values()) + work.activations
        found.append(max(work.flops / rates.flops, moved / rates.bandwidth))
    return found


def measured_seconds(subject: Subject, blocks: Sequence[str], threads: int | None) -> list[float]:
    """Of each unit, for one micro-batch like the example: the median of several forwards after a first one.

    Raises:
        Exception: what the model's forward raised.
    """
    copied = copy.deepcopy(subject.model, same_tensors(subject.model))  # its own hooks and caches are then nobody's
    ends: list[float] = []
    inside: list[nn.Module] = []

    def enter(module: nn.Module, _args: Any) -> None:
        inside.append(module)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        inside.pop()
        if not inside:  # not that of a block in a block
            ends.append(time.perf_counter())

    for block in {id(one): one for one in map(copied.get_submodule, blocks)}.values():
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    runs: list[list[float]] = []
    deadline = time.perf_counter() + _BUDGET_S
    with _threads(threads), torch.inference_mode():
        while len(runs) < _RUNS + 1 and (len(runs) < 2 or time.perf_counter() < deadline):
            ends.clear()
            start = time.perf_counter()
            copied(*subject.args, **subject.kwargs, **subject.fixed)
            ends[-1] = time.perf_counter()
            runs.append([end - begin for begin, end in zip([start, *ends], ends, strict=False)])
    return [statistics.median(times) for times in zip(*runs[1:], strict=True)]


def seconds_of_children(model: nn.Sequential, x: Tensor, threads: int | None) -> list[float]:
    """Of each child of a Sequential, for one micro-batch like ``x``."""
    return measured_seconds(Subject(model, (x,), {}), [name for name, _ in model.named_children()], threads)


def calibrated(dtype: torch.dtype, threads: int | None) -> Rates:
    """What this machine's CPU does with so many threads, found in a fraction of a second."""
    with _threads(threads), torch.inference_mode():
        side = 768
        a = torch.ones(side, side, dtype=dtype)
        multiply = _seconds(lambda: a @ a)
        big = torch.ones(1 << 24)
        read = _seconds(big.sum)
        return Rates(flops=2 * side**3 / multiply, bandwidth=big.nbytes / read)


def _seconds(run: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@contextlib.contextmanager
def _threads(threads: int | None) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
