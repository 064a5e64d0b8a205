"""Which way a model is cut: one function for each kind of model, and the refusal of all others.

Rules of this directory:

* The caller's model is never changed, and its tensors are never copied: pieces hold the very same ones.
* A piece holds nothing of another stage, since it is pickled and shipped with everything that it reaches.
* Names are the unsplit model's, so that the state dicts of the stages together are its state dict.
* Every refusal says the rule, what was found, what would be possible, and which argument to change.
* A new kind of model is a file of its own with a function that returns pieces, and a line in ``cut``.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import attrs
from torch import nn

from stageflow._frames import StageInfo
from stageflow.errors import PartitionError
from stageflow.partition._checkpoint import Checkpoint, Filler, aliases_of
from stageflow.partition._cut_replay import Cut, cut_replay, watch, weights_of
from stageflow.partition._dry_run import DryRun
from stageflow.partition._export import cut_exported
from stageflow.partition._needs import Subject, as_call
from stageflow.partition._pieces import StagePiece, Unit, refuse_altered
from stageflow.partition._sizes import Balance, sizes_of
from stageflow.partition._split import Split
from stageflow.partition._tensors import modules_of
from stageflow.partition._transformers import is_transformers_model, subject_of
from stageflow.partition._units import listed_blocks, nested_blocks

__all__ = ["cut", "cut_subject"]


def cut(
    model: nn.Module | Sequence[nn.Module] | Checkpoint | Callable[[StageInfo], nn.Module],
    num_stages: int,
    split: Split | Callable[[StageInfo], nn.Module] = "auto",
    balance: Balance | Literal["parameters", "time", "activations"] | Sequence[float] = "parameters",
    example: Any = None,
    threads: int | None = None,
) -> tuple[StagePiece, ...]:
    """Cut a model into consecutive stages.

    Args:
        model: an ``nn.Sequential``; a list of ``num_stages`` modules; a model of transformers; any module, with an
            ``example``; a callable ``build(stage) -> nn.Module`` that will be run in each stage process.
        num_stages: number of stages, ``pp``.
        split: where. ``"auto"``, so that the heaviest stage is as light as possible; or, in units of the model (children of
            a Sequential, decoder layers of a language model): how many each stage has, ``[8, 8, 8, 6]``; the names where
            stages but the first begin, ``["layers.8", …]`` or ``{"layers.8": SplitPoint.BEGINNING}``; the names in each
            stage; the modules where stages but the first begin. Or what the stages are: ``num_stages`` modules, or
            ``build(stage)``.
        balance: of ``"auto"``.
        example: arguments of the model's forward: a tensor, a tuple of arguments, a dict of keyword arguments, or
            ``(args, kwargs)``. Values don't matter, only shapes and dtypes.
        threads: torch threads of a stage, for measurements. Default: those of this process.

    Returns:
        One piece for each stage, in order.

    Raises:
        PartitionError: the model can't be cut so.
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PartitionError(f"The number of stages is an int of at least 1: found {num_stages!r}. Change pp.")
    weighed = Balance.of(balance)
    if stages := _stages_in(split, num_stages):
        model, split = stages, "auto"
    if isinstance(model, Checkpoint):
        return _cut_checkpoint(model, num_stages, split, weighed, example, threads)
    if isinstance(model, nn.Sequential) and (example is None or _is_chain(model, num_stages)):
        return _cut_sequential(model, num_stages, split, weighed, example, threads)
    if isinstance(model, (list, tuple)):
        return _take_modules(cast("Sequence[object]", model), num_stages, split)
    if callable(model) and not isinstance(model, nn.Module):
        _refuse_split(split, "a callable build(stage)")
        return (StagePiece(target=model, module_names=(), unpack=True),) * num_stages
    if is_transformers_model(model):
        _, cuts = cut_subject(subject_of(model, example), num_stages, split, weighed, threads)
        return tuple(one.piece_of(cast("nn.Module", model)) for one in cuts)
    if num_stages == 1 and example is None:  # there is nothing to cut
        return _take_modules([model], 1, split)
    if isinstance(model, nn.Module) and example is not None:
        subject = Subject(model, *as_call(example))
        seen = _watched(subject, num_stages)
        if isinstance(seen, str):  # too few modules
            return cut_exported(subject, num_stages, split, weighed, seen.partition(" Change pp")[0])
        return tuple(one.piece_of(model) for one in cut_replay(subject, seen, num_stages, split, weighed, threads))
    raise PartitionError(
        "A model is one of these: an nn.Sequential, a list of pp modules, a model of transformers, any module with example "
        "arguments of its forward in example, or a callable build(stage: StageInfo) -> nn.Module, run in the stage, "
        f"which makes each one: found {type(model).__name__}. Change model, or pass example."
    )


def _cut_checkpoint(
    checkpoint: Checkpoint, num_stages: int, split: Any, balance: Balance, example: Any, threads: int | None
) -> tuple[StagePiece, ...]:
    """The pieces of a model that is on the disk: each as what loads it."""
    skeleton = checkpoint.skeleton()
    if checkpoint.build is None:
        _, cuts = cut_subject(subject_of(skeleton, example), num_stages, split, balance, threads)
        targets = [checkpoint.target(skeleton, one.needs, deep=one.deep) for one in cuts]
        return tuple(
            StagePiece(target, one.module_names, unpack=True, loads=target.nbytes)
            for target, one in zip(targets, cuts, strict=True)
        )
    pieces = cut(skeleton, num_stages, split, balance, example, threads)
    path, aliases = os.fspath(checkpoint.path), aliases_of(skeleton)
    targets = [Filler(cast("nn.Module", one.target), path, checkpoint.dtype, aliases) for one in pieces]
    return tuple(attrs.evolve(one, target=target, loads=target.nbytes) for one, target in zip(pieces, targets, strict=True))


def cut_subject(
    subject: Subject, num_stages: int, split: object, balance: Balance, threads: int | None = None
) -> tuple[DryRun, list[Cut]]:
    """Cut a model along its blocks; also what was seen of it.

    Raises:
        PartitionError: it can't be cut so.
    """
    seen = _watched(subject, num_stages)
    if isinstance(seen, str):
        raise PartitionError(seen)
    return seen, cut_replay(subject, seen, num_stages, split, balance, threads)


def _watched(subject: Subject, num_stages: int) -> DryRun | str:
    """A forward of the model, seen as calls of its blocks: the members of its lists, else those of the lists in them; for
    one without lists, any modules in it. What to tell the user, if all these are too few.
    """
    _refuse_replaced(subject.model)
    tried: list[str] = []
    listed = listed_blocks(subject.model)
    ways = [("members of its ModuleLists", listed), ("members of the ModuleLists in those", listed_blocks(subject.model, 1))]
    if not listed:
        ways = [("modules in it", nested_blocks(subject.model, num_stages))]
    most = 0
    for way, blocks in ways:
        if not blocks:
            continue
        _refuse_hooks(subject.model, blocks)
        try:
            seen = watch(subject, blocks)
        except Exception as error:
            raise PartitionError(
                f"To see what each stage needs, {type(subject.model).__name__} is run once on example arguments: found that "
                f"it raises {type(error).__name__}: {error}. Pass others in example, or pass build(stage) or a list of pp "
                "modules as model."
            ) from error
        if len(seen.units) >= num_stages:
            return seen
        most = max(most, len(seen.units))
        tried.append(f"{len(seen.units)} calls of {way}")
    found = ", ".join(tried) or "no modules in it"
    return (
        f"Every stage needs at least one of the model's {subject.word}: found at most {most} {subject.word} for "
        f"{num_stages} stages in {type(subject.model).__name__} ({found}). Change pp to {max(most, 1)} or less."
    )


def _refuse_replaced(model: nn.Module) -> None:
    for name, module in modules_of(model):
        if "forward" in vars(module):
            raise PartitionError(
                f"A stage gets copies of the model's modules, not of functions that are bound to them: found a forward that "
                f"was replaced on {name or type(model).__name__!r}, as device_map, offloading and use_kernels do. Load the "
                "model without, or pass build(stage) as model."
            )


def _refuse_hooks(model: nn.Module, blocks: Sequence[str]) -> None:
    """No stage has the whole of what holds the blocks, so a hook there would see only a part, or never be called."""
    for name, module in modules_of(model):
        hooks: list[Any] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]  # pyright: ignore[reportPrivateUsage]
        own = any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)
        if own and any(block.startswith(f"{name}.") or not name for block in blocks):
            raise PartitionError(
                f"No stage has the whole model, so what belongs to the whole alone would be lost: found a forward hook on "
                f"{type(model).__name__}{name and f', on {name!r}'}. Move it into a module that isn't cut, or pass "
                "build(stage) as model, which makes each stage."
            )


def _stages_in(split: Any, num_stages: int) -> Any:
    """The stages themselves, if that is what ``split`` is: all of them as modules, or how each is built."""
    if callable(split) and not isinstance(split, nn.Module):
        return split
    if isinstance(split, (list, tuple)):
        modules = [one for one in cast("Sequence[object]", split) if isinstance(one, nn.Module)]
        return modules if len(modules) == num_stages == len(cast("Sequence[object]", split)) else None
    return None


def _is_chain(model: nn.Sequential, num_stages: int) -> bool:
    """Whether it is no more than its children one after the other, and they are enough."""
    return type(model).forward is nn.Sequential.forward and len(model) >= num_stages


def _cut_sequential(
    model: nn.Sequential, num_stages: int, split: object, balance: Balance, example: Any, threads: int | None
) -> tuple[StagePiece, ...]:
    if type(model).forward is not nn.Sequential.forward:
        raise PartitionError(
            "An nn.Sequential is cut between its children, which are called one after the other: found "
            f"{type(model).__name__}, whose forward may do something else. Pass a plain nn.Sequential, a list of pp modules "
            "or build(stage) as model."
        )
    refuse_altered(model)
    # Not named_children(), which leaves out the second place of a module that is used twice, like one ReLU everywhere.
    children = list(model._modules.items())  # pyright: ignore[reportPrivateUsage]
    if not children:
        raise PartitionError(
            f"An nn.Sequential is cut between its children: found none in {type(model).__name__}. Change model."
        )
    pieces: list[StagePiece] = []
    units = [Unit(name, ((name, child),)) for name, child in children]

    def weigh(by: str) -> list[float]:
        subject = Subject(model, *as_call(example))
        return weights_of(by, subject, units, threads, lambda: watch(subject, [name for name, _ in children]))

    sizes = sizes_of(units, num_stages, split, "children", balance, None if example is None else weigh)
    for start, end in pairwise(accumulate(sizes, initial=0)):
        part = OrderedDict(children[start:end])
        target = nn.Sequential(part)
        target.training = model.training  # its own flag only: the children keep the mode they came in
        pieces.append(StagePiece(target=target, module_names=tuple(part), unpack=False))
    _refuse_split_state(cast("nn.Module", piece.target) for piece in pieces)
    return tuple(pieces)


def _take_modules(modules: Sequence[object], num_stages: int, split: object) -> tuple[StagePiece, ...]:
    _refuse_split(split, "a list of modules")
    targets = [module for module in modules if isinstance(module, nn.Module)]
    if len(targets) < len(modules):
        index, stranger = next((i, module) for i, module in enumerate(modules) if not isinstance(module, nn.Module))
        raise PartitionError(
            f"A list of modules has one torch.nn.Module for each stage: found {type(stranger).__name__} at index {index}. "
            "Change model."
        )
    if len(targets) != num_stages:
        raise PartitionError(
            f"A list of modules has one for each stage: found {len(targets)} modules for {num_stages} stages. "
            "Change pp, or the list given as model."
        )
    _refuse_split_state(targets)
    return tuple(StagePiece(target=module, module_names=(type(module).__name__,), unpack=True) for module in targets)


def _refuse_split(split: object, kind: str) -> None:
    if not isinstance(split, str) or split != "auto":
        raise PartitionError(
            f'What each stage holds is already said by {kind}: found split={split!r} as well. Leave split at "auto".'
        )


def _refuse_split_state(stages: Iterable[nn.Module]) -> None:
    """Refuse a buffer that lives in two stages and changes.

    A tensor used in two stages is there twice, once in each process. That is right for as long as nobody changes it: a
    parameter in forward passes never is (tied weights), nor a buffer in eval mode. In train mode a module may write its
    buffers, like BatchNorm its running statistics, and the other stage's copy would silently fall behind.
    """
    owners: dict[int, int] = {}
    stages = list(stages)
    modules = [module for stage in stages for module in stage.modules()]
    written = {id(buffer) for module in modules if module.training for buffer in module.buffers(recurse=False)}
    for index, stage in enumerate(stages):
        for name, buffer in stage.named_buffers():
            if id(buffer) in written and (first := owners.setdefault(id(buffer), index)) != index:
                raise PartitionError(
                    "A buffer that lives in two stages must not change, since each process holds a copy of its own: found "
                    f"{name!r} in stages {first} and {index}, of a module in train mode. Call model.eval(), give each stage "
                    "a module of its own, or change split so that one stage holds both.",
                    stage_index=index,
                )
