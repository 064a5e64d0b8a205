"""Cutting a model by replay: each stage gets an excerpt of it, with the modules that it runs.

Rules of this file:

* What a stage needs is read off one forward on the meta device (`_dry_run.py`); what it then does is in `_replay.py`.
* The pieces are tried in sequence on the meta device before anything is started: a model that can't be cut so
  is refused here.
* A module that several stages need is in each of them; a tensor that modules share is shared in each stage that has both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import attrs
import torch
from torch import nn

from stageflow.errors import PartitionError
from stageflow.partition._dry_run import DryRun, Source, dry_run
from stageflow.partition._pieces import StagePiece, Unit
from stageflow.partition._replay import PLACEHOLDERS, Absent, Block, Progress, ReplayStage
from stageflow.partition._sizes import Balance, sizes_of
from stageflow.partition._tensors import leaves_of, modules_of, on_meta, structure_of, to_meta

__all__ = ["Subject", "cut_replay", "watch"]


@attrs.frozen
class Subject:
    """A model to be cut, and what is known of it."""

    model: nn.Module
    args: tuple[Any, ...]
    """Of an example call."""
    kwargs: dict[str, Any]
    refused: Mapping[str, str] = attrs.field(factory=dict[str, str])
    fixed: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    word: str = "blocks"
    """What its units are called."""


def watch(subject: Subject, blocks: Sequence[str], *, count_flops: bool = False) -> DryRun:
    """A forward of the model on the meta device; with its real tensors, where that isn't possible.

    Raises:
        Exception: neither is possible: what the forward on the meta device raised.
    """
    kwargs = {**subject.kwargs, **subject.fixed}
    try:
        return dry_run(on_meta(subject.model), blocks, to_meta(subject.args), to_meta(kwargs), count_flops=count_flops)
    except Exception:
        if any(tensor.is_meta for tensor in subject.model.parameters()):
            raise
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*subject.model.parameters(), *subject.model.buffers())}
        return dry_run(copy.deepcopy(subject.model, memo), blocks, subject.args, kwargs, count_flops=count_flops)


def units_of(model: nn.Module, seen: DryRun) -> list[Unit]:
    """The units with the glue before them, and after the last."""
    parts: list[list[tuple[str, nn.Module]]] = [[] for _ in seen.units]
    named: set[str] = set()
    for position, call in seen.glue:
        if position < len(parts) and call.name not in named:
            parts[position].append((call.name, model.get_submodule(call.name)))
            named.add(call.name)
    for index, unit in enumerate(seen.units):
        parts[index].append((unit.name, model.get_submodule(unit.name)))
    for position, call in seen.glue:
        if position == len(parts) and call.name not in named:
            parts[-1].append((call.name, model.get_submodule(call.name)))
            named.add(call.name)
    return [Unit(unit.name, tuple(part)) for unit, part in zip(seen.units, parts, strict=True)]


def cut_replay(subject: Subject, seen: DryRun, num_stages: int, split: object, balance: Balance) -> tuple[StagePiece, ...]:
    """Cut a model between its units.

    Raises:
        PartitionError: into so many stages it can't be cut, or not in this way.
    """
    units = units_of(subject.model, seen)
    edges = list(pairwise(accumulate(sizes_of(units, num_stages, split, subject.word, balance), initial=0)))
    stages = [_Needs(subject, seen, start, end) for start, end in edges]
    deep = False
    try:
        _try_out(subject, seen, stages, deep=False)
    except PartitionError as error:
        if not isinstance(error.__cause__, AttributeError):
            raise
        deep = True
        _try_out(subject, seen, stages, deep=True)
    pieces: list[StagePiece] = []
    for needs, (start, end) in zip(stages, edges, strict=True):
        names = [name for unit in units[start:end] for name, _ in unit.parts if name in needs.present]
        names += [name for name in needs.present if name not in names and name in needs.reported]
        target = needs.stage(subject.model, deep=deep)
        pieces.append(StagePiece(target=target, module_names=tuple(dict.fromkeys(names)), unpack=True))
    return tuple(pieces)


class _Needs:
    """What one stage is made of."""

    def __init__(self, subject: Subject, seen: DryRun, start: int, end: int) -> None:
        self._subject, self._seen = subject, seen
        self.start, self.end, self.is_last = start, end, end == len(seen.units)
        needed = self._sources(start, end)
        self.received = self._units_before(start)
        self.carried = frozenset[int]() if self.is_last else self._units_before(end)
        glue = {call.name: position for position, call in reversed(seen.glue)}
        self.reported = frozenset(glue)
        modules = {cast("str", at) for kind, at in needed if kind == "module"}
        self.called_before_end = {name for name, position in glue.items() if position < end}
        present = {unit.name for unit in seen.units[start:end]}
        for name, position in glue.items():
            here = start <= position < end or (self.is_last and position == end)
            if any(one == name or one.startswith(f"{name}.") for one in modules) or (here and not self._is_source(name)):
                present.add(name)
        for name, position in seen.used_directly.items():
            if position < end or self.is_last:
                present.add(self._glue_of(name, glue))
        self.uncalled = self._uncalled(glue)
        present |= {name for name, first in self.uncalled.items() if (start == 0 if first else self.is_last)}
        self.present: dict[str, None] = dict.fromkeys(sorted(present))
        self.glue = list(glue)

    def _sources(self, start: int, end: int) -> frozenset[Source]:
        found = frozenset[Source]().union(*(unit.sources for unit in self._seen.units[start:end]))
        return found | self._seen.end if end == len(self._seen.units) else found

    def _units_before(self, edge: int) -> frozenset[int]:
        later = self._sources(edge, len(self._seen.units))
        return frozenset(cast("int", at) for kind, at in later if kind == "unit" and cast("int", at) < edge)

    def _is_source(self, name: str) -> bool:
        return any(
            kind == "module" and (at == name or str(at).startswith(f"{name}."))
            for kind, at in self._sources(0, len(self._seen.units))
        )

    @staticmethod
    def _glue_of(name: str, glue: Iterable[str]) -> str:
        return next((whole for whole in glue if name == whole or name.startswith(f"{whole}.")), name)

    def _uncalled(self, glue: Mapping[str, int]) -> dict[str, bool]:
        """Modules with parameters that no forward calls; each with whether it comes before the first block."""
        blocks = {unit.name for unit in self._seen.units}
        found: dict[str, bool] = {}
        first = True
        for name, module in modules_of(self._subject.model):
            inside = any(name == one or name.startswith(f"{one}.") for one in (*blocks, *glue, *found))
            outside = name == "" or any(one.startswith(f"{name}.") for one in (*blocks, *glue))
            first = first and name not in blocks
            has_any = next(module.parameters(), next(module.buffers(), None)) is not None
            if not inside and not outside and has_any and name not in self._seen.called:
                found[name] = first
        return found

    def unneeded_inputs(self) -> frozenset[str]:
        """Arguments of the example of which later stages need at most the shape."""
        later = {at for kind, at in self._sources(self.end, len(self._seen.units)) if kind == "input"}
        found: set[str] = set()
        index = 0
        named = [(str(place), arg) for place, arg in enumerate(self._subject.args)]
        for name, arg in [*named, *{**self._subject.kwargs, **self._subject.fixed}.items()]:
            count = len(leaves_of([arg]))
            if count and not later.intersection(range(index, index + count)):
                found.add(name)
            index += count
        return frozenset(found)

    # ---- the excerpt ----------------------------------------------------------------------------------------------------

    def stage(self, model: nn.Module, *, deep: bool) -> ReplayStage:
        """The stage, with the very tensors of the model; ``deep`` if what is absent still has its children, also absent."""
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        progress = Progress(
            start=self.start,
            end=self.end,
            is_last=self.is_last,
            carried=self.carried,
            stand_in=self._stand_ins(),
            fresh=self._seen.in_place,
        )
        kept = {id(module) for name in self.present for module in model.get_submodule(name).modules()}
        absent = {id(one): Absent(on_meta(one)) for one in self._called_for_shape(model)}
        blocks = dict.fromkeys(unit.name for unit in self._seen.units)
        shells = [name for name in (*blocks, *self.glue, *self.uncalled) if name not in self.present]
        for name in shells:
            module = model.get_submodule(name)
            if id(module) not in memo and id(module) not in kept:
                memo[id(module)] = _shell(module, memo, deep=deep or name not in blocks)
        excerpt = copy.deepcopy(model, memo)
        for name in (*blocks, *self.glue):
            module, original = excerpt.get_submodule(name), model.get_submodule(name)
            if name in blocks:
                module.forward = Block(progress, module, absent.get(id(original)))
            elif name in shells and id(original) in absent:
                module.forward = absent[id(original)]
        _drop_recorders(excerpt)
        return ReplayStage(
            excerpt,
            progress,
            refused=self._subject.refused,
            fixed=self._subject.fixed,
            shapes_only=frozenset() if self.is_last else self.unneeded_inputs(),
        )

    def _stand_ins(self) -> dict[int, int]:
        found: dict[int, int] = {}
        units = self._seen.units
        for index in range(self.start):
            mine = units[index]
            for other in sorted(self.received):
                theirs = units[other]
                alike = structure_of(mine.form)[0] == structure_of(theirs.form)[0] and mine.shapes == theirs.shapes
                if other > index and alike and mine.name.rpartition(".")[0] == theirs.name.rpartition(".")[0]:
                    found[index] = other
                    break
        return found

    def _called_for_shape(self, model: nn.Module) -> list[nn.Module]:
        """Absent modules that are called before the stage is done, and whose output nothing stands in for."""
        stand_ins = self._stand_ins()
        names = [self._seen.units[index].name for index in range(self.start) if index not in {*self.received, *stand_ins}]
        names += [name for name in self.glue if name in self.called_before_end and name not in self.present]
        return [model.get_submodule(name) for name in dict.fromkeys(names)]


def _shell(module: nn.Module, memo: dict[int, Any], *, deep: bool) -> nn.Module:
    """A module of the same class with nothing in it: for models that ask an absent module what it is, and has."""
    shell = type(module).__new__(type(module))
    nn.Module.__init__(shell)
    shell.training = module.training
    for name, value in vars(module).items():
        if name not in vars(shell) and _is_plain(value):
            setattr(shell, name, value)
        elif name == "config":
            shell.config = copy.deepcopy(value, memo)
    if deep:
        for name, child in module._modules.items():  # pyright: ignore[reportPrivateUsage]
            shell.add_module(name, None if child is None else _shell(child, memo, deep=True))
        tensors = {**module._parameters, **module._buffers}  # pyright: ignore[reportPrivateUsage]
        placeholders = [(name, one.shape, one.dtype) for name, one in tensors.items() if one is not None]
        vars(shell)[PLACEHOLDERS] = placeholders
        for name in [name for name, one in tensors.items() if one is None]:
            vars(shell)[name] = None
    return shell


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, cast("Sequence[object]", value)))
    return value is None or isinstance(value, (str, int, float, torch.dtype))


def _drop_recorders(model: nn.Module) -> None:
    """Take off the hooks that transformers leaves behind when hidden states or attentions were once asked for.

    They do nothing in between, but can't be pickled.
    """
    for module in model.modules():
        hooks = cast("dict[int, Any]", module._forward_hooks)  # pyright: ignore[reportPrivateUsage]
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("transformers.")]:
            del hooks[key]


def _try_out(subject: Subject, seen: DryRun, stages: Sequence[_Needs], *, deep: bool) -> None:
    """Run the pieces one after the other without computing anything."""
    if any(not tensor.is_meta for tensor in leaves_of(seen.result)):
        return  # it can't be run on the meta device
    bare = on_meta(subject.model)
    args, kwargs = to_meta(subject.args), to_meta(subject.kwargs)
    value: Any = None
    for index, needs in enumerate(stages):
        try:
            with torch.no_grad():
                stage = needs.stage(bare, deep=deep)
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
