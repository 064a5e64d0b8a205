"""Cutting a model by replay: each stage gets an excerpt of it, with the modules that it runs.

Rules of this file:

* What a stage needs is read off one forward on the meta device (`_dry_run.py`); what it then does is in `_replay.py`.
* The pieces are tried in sequence on the meta device before anything is started: a model that can't be cut so
  is refused here.
* A module that several stages need is in each of them; a tensor that modules share is shared in each stage that has both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from stageflow.errors import PartitionError
from stageflow.partition._costs import calibrated, estimated_seconds, measured_seconds, works_of
from stageflow.partition._dry_run import DryRun, dry_run
from stageflow.partition._excerpt import excerpt
from stageflow.partition._needs import Needs, Subject, needs_of
from stageflow.partition._pieces import StagePiece, Unit
from stageflow.partition._sizes import Balance, sizes_of
from stageflow.partition._tensors import Answering, leaves_of, map_tensors, on_meta, same_tensors, to_meta, within

__all__ = ["Cut", "cut_replay", "units_of", "watch", "weights_of"]


def weights_of(
    by: str, subject: Subject, units: Sequence[Unit], threads: int | None, look: Callable[[], DryRun]
) -> list[float]:
    """What each unit weighs by ``"time"`` or ``"activations"``; ``look`` gives the dry run, for what isn't measured."""
    if by == "activations":
        return [float(work.activations) for work in works_of(look())]
    if all(tensor.device.type == "cpu" for tensor in (*subject.model.parameters(), *subject.model.buffers())):
        return measured_seconds(subject, [unit.name for unit in units], threads)
    dtype = next((one.dtype for one in subject.model.parameters() if one.is_floating_point()), torch.float32)
    return estimated_seconds(look(), units, calibrated(dtype, threads))


@attrs.frozen
class Cut:
    """One stage, as decided."""

    needs: Needs
    deep: bool
    module_names: tuple[str, ...]

    def piece_of(self, model: nn.Module) -> StagePiece:
        """The stage, with the model's tensors."""
        return StagePiece(target=excerpt(model, self.needs, deep=self.deep), module_names=self.module_names, unpack=True)


def watch(subject: Subject, blocks: Sequence[str]) -> DryRun:
    """A forward of the model on the meta device; with its real tensors, where that isn't possible.

    Raises:
        Exception: neither is possible: what the forward on the meta device raised.
    """
    reason: Exception | None = None
    for half in (False, True):
        try:
            bare, args, more = _bare(subject, half=half)
            seen = dry_run(bare, blocks, args, {**more, **subject.fixed})
            return attrs.evolve(seen, half=half)
        except Exception as error:
            reason = reason or error
    assert reason is not None
    if any(tensor.is_meta for tensor in subject.model.parameters()):
        raise reason
    copied = copy.deepcopy(subject.model, same_tensors(subject.model))
    return dry_run(copied, blocks, subject.args, {**subject.kwargs, **subject.fixed})


def _bare(subject: Subject, *, half: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its example arguments on the meta device."""

    def halved(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if half and tensor.is_floating_point() else tensor

    bare = on_meta(subject.model)
    return (
        bare.bfloat16() if half else bare,
        map_tensors(halved, to_meta(subject.args)),
        map_tensors(halved, to_meta(subject.kwargs)),
    )


def units_of(model: nn.Module, seen: DryRun) -> list[Unit]:
    """The units with the glue before them, and after the last."""
    parts: list[list[tuple[str, nn.Module]]] = [[] for _ in seen.units]
    named: set[str] = set()
    calls = [(position, False, name) for position, name in seen.glue]
    calls += [(index, True, unit.name) for index, unit in enumerate(seen.units)]
    for position, is_unit, name in sorted(calls, key=lambda call: call[:2]):  # stable: the glue stays in its order
        if is_unit or name not in named:
            parts[min(position, len(parts) - 1)].append((name, model.get_submodule(name)))
            named.add(name)
    return [Unit(unit.name, tuple(part)) for unit, part in zip(seen.units, parts, strict=True)]


def cut_replay(
    subject: Subject, seen: DryRun, num_stages: int, split: object, balance: Balance, threads: int | None = None
) -> list[Cut]:
    """Cut a model between its units.

    Raises:
        PartitionError: into so many stages it can't be cut, or not in this way.
    """
    units = units_of(subject.model, seen)

    def weigh(by: str) -> list[float]:
        return weights_of(by, subject, units, threads, lambda: seen)

    edges = list(pairwise(accumulate(sizes_of(units, num_stages, split, subject.word, balance, weigh), initial=0)))
    stages = needs_of(subject, seen, edges)
    _refuse_state(seen, stages)
    deep = False
    try:
        _try_out(subject, seen, stages, deep=False)
    except PartitionError as error:
        if not isinstance(error.__cause__, AttributeError):
            raise
        deep = True
        _try_out(subject, seen, stages, deep=True)
    cuts: list[Cut] = []
    for needs, (start, end) in zip(stages, edges, strict=True):
        names = [name for unit in units[start:end] for name, _ in unit.parts if name in needs.present]
        names += [name for name in sorted(needs.present) if name not in names and name in needs.glue]
        cuts.append(Cut(needs, deep, tuple(dict.fromkeys(names))))
    return cuts


def _refuse_state(seen: DryRun, stages: Sequence[Needs]) -> None:
    """Refuse a module in two stages that changes its buffers: each process has its own, and neither would be right."""
    for name in sorted(seen.written):
        holders = [index for index, needs in enumerate(stages) if any(within(name, one) for one in needs.present)]
        if len(holders) > 1:
            raise PartitionError(
                "A module that changes its buffers is in one stage, since each process holds a copy of its own: found "
                f"{name!r} in stages {' and '.join(map(str, holders))}. Call model.eval() if it is one that does so in "
                "train mode only, like BatchNorm; or change split so that one stage holds all that uses it.",
                stage_index=holders[1],
            )


def _try_out(subject: Subject, seen: DryRun, stages: Sequence[Needs], *, deep: bool) -> None:
    """Run the pieces one after the other without computing anything."""
    if any(not tensor.is_meta for tensor in leaves_of(seen.result)):
        return  # it can't be run on the meta device
    bare, args, kwargs = _bare(subject, half=seen.half)
    value: Any = None
    for index, needs in enumerate(stages):
        try:
            with torch.no_grad(), Answering():
                stage = excerpt(bare, needs, deep=deep)
                value = stage(*args, **kwargs) if not index else stage(*value)
        except Exception as error:
            raise PartitionError(
                f"Each stage runs the model's own forward with the modules of other stages absent: found that stage {index} "
                f"of a {type(subject.model).__name__} can't, {type(error).__name__}: {error}. Change split, or pass "
                "build(stage) or a list of pp modules as model.",
                stage_index=index,
            ) from error
    if [one.shape for one in leaves_of(value)] != [one.shape for one in leaves_of(seen.result)]:
        raise PartitionError(
            f"The stages together return what the model returns: found {_shapes(value)} where a "
            f"{type(subject.model).__name__} itself returns {_shapes(seen.result)}. Pass build(stage) or a list of pp "
            "modules as model."
        )


def _shapes(value: Any) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in leaves_of(value))
