"""A cut, described before anything is launched: what `stageflow plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import attrs
import torch

from stageflow.partition._checkpoint import Checkpoint
from stageflow.partition._costs import Rates, calibrated, estimated_seconds, works_of
from stageflow.partition._cut import cut_subject
from stageflow.partition._cut_replay import Cut, units_of
from stageflow.partition._dry_run import DryRun
from stageflow.partition._needs import Subject
from stageflow.partition._sizes import Balance
from stageflow.partition._transformers import subject_of

__all__ = ["PlannedStage", "plan"]


@attrs.frozen
class PlannedStage:
    """One stage of a plan."""

    stage_index: int
    module_names: tuple[str, ...]
    parameters: int
    """Number of them, tensors that several modules of the stage share counted once."""
    bytes: int
    """Of its parameters and buffers."""
    flops: int
    """Floating-point operations of one micro-batch."""
    seconds: float
    """Estimated, of one micro-batch."""
    edge_bytes: int
    """Of the activations that it sends to the next stage for each micro-batch; without the caller's arguments."""


def plan(
    path: str,
    num_stages: int,
    *,
    split: object = "auto",
    balance: Balance,
    batch: int,
    length: int,
    threads: int | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
) -> list[PlannedStage]:
    """Cut a model of transformers on the meta device, and say what each stage would be.

    Args:
        path: as of a ``Checkpoint``, or a config file alone.
        num_stages: number of stages.
        split: as of a launch.
        balance: likewise.
        batch: rows of a micro-batch.
        length: tokens of a row.
        threads: torch threads of a stage. Default: those of this process.
        dtype: of the weights.

    Raises:
        PartitionError: it can't be cut so, or isn't known.
    """
    model = Checkpoint(path, dtype=dtype).skeleton()
    subject = subject_of(model, batch=batch, length=length)
    seen, cuts = cut_subject(subject, num_stages, split, balance, threads)
    rate = calibrated(next(one.dtype for one in model.parameters() if one.is_floating_point()), threads)
    speeds = balance.speeds or [1.0] * num_stages
    rates = [Rates(rate.flops * speed, rate.bandwidth * speed) for speed in speeds]
    return _describe(subject, seen, cuts, rates)


def _describe(subject: Subject, seen: DryRun, cuts: Sequence[Cut], rates: Sequence[Rates]) -> list[PlannedStage]:
    units, works = units_of(subject.model, seen), works_of(seen)
    stages: list[PlannedStage] = []
    edges = pairwise(accumulate((one.needs.end - one.needs.start for one in cuts), initial=0))
    for index, ((start, end), cut, rate) in enumerate(zip(edges, cuts, rates, strict=True)):
        modules = [subject.model.get_submodule(name) for name in cut.needs.present]
        parameters = {id(one): one for module in modules for one in module.parameters()}
        tensors = {**parameters, **{id(one): one for module in modules for one in module.buffers()}}
        stages.append(
            PlannedStage(
                stage_index=index,
                module_names=cut.module_names,
                parameters=sum(one.numel() for one in parameters.values()),
                bytes=sum(one.nbytes for one in tensors.values()),
                flops=sum(work.flops for work in works[start:end]),
                seconds=sum(estimated_seconds(seen, units, rate)[start:end]),
                edge_bytes=sum(seen.units[unit].nbytes for unit in cut.needs.carried),
            )
        )
    return stages
