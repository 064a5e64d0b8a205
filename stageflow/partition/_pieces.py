"""What every way of cutting shares: the piece of a stage, and how many units go into each.

A unit is what is never cut: a child of a Sequential, a decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import attrs
from torch import nn

from stageflow._frames import StageInfo
from stageflow.errors import PartitionError
from stageflow.partition._balance import balance

__all__ = ["Split", "StagePiece", "refuse_altered", "sizes_of"]

Split = Literal["auto"] | Sequence[int]
"""``"auto"``, or the number of units of each stage."""


@attrs.frozen
class StagePiece:
    """What one stage is to be: a module, or how to build it there."""

    target: nn.Module | Callable[[StageInfo], nn.Module]
    """The module itself, or the function that builds it inside the stage process."""
    module_names: tuple[str, ...]
    """Fully-qualified names of the unsplit model's modules that live here, in order. Empty where only the stage knows."""
    unpack: bool
    """Whether a plain tuple that the stage before returned becomes this stage's positional arguments."""


def sizes_of(units: Sequence[Iterable[nn.Module]], num_stages: int, split: Split, word: str) -> list[int]:
    """Number of units of each stage.

    Args:
        units: the modules of each unit, in order.
        num_stages: number of stages.
        split: as the caller gave it.
        word: what a unit is, for messages: ``"layers"``.

    Raises:
        PartitionError: there are too few units, or ``split`` doesn't fit them.
    """
    if num_stages > len(units):
        raise PartitionError(
            f"Every stage needs at least one of the model's {word}: found {len(units)} {word} for {num_stages} stages. "
            f"Change pp to {len(units)} or less."
        )
    if split == "auto":
        costs, shared = _weights(units)
        return balance(costs, num_stages, shared)
    counts = _as_counts(split)
    if counts is None:
        raise PartitionError(
            f'split is "auto" or the number of {word} of each stage, ints of at least 1 like [8, 8, 8, 6]: found {split!r}. '
            "Change split."
        )
    if len(counts) != num_stages:
        raise PartitionError(
            f"split has one number for each stage: found {len(counts)} numbers, {counts}, for {num_stages} stages. "
            "Change split or pp."
        )
    if sum(counts) != len(units):
        raise PartitionError(
            f"The numbers in split add up to the number of {word}: found {counts}, which makes {sum(counts)}, for "
            f"{len(units)} {word}. Change split."
        )
    return counts


def refuse_altered(whole: nn.Module) -> None:
    """Refuse a module that is more than the sum of its children: taken apart, it would silently do less.

    Raises:
        PartitionError: it has a forward, a hook or tensors of its own.
    """
    found = None
    if "forward" in vars(whole):
        found = "a forward that was replaced on this one object"
    elif whole._forward_hooks or whole._forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
        found = "a forward hook on it"
    elif own := [name for name, _ in (*whole.named_parameters(recurse=False), *whole.named_buffers(recurse=False))]:
        found = f"a tensor of its own, {own[0]!r}"
    if found:
        raise PartitionError(
            f"{type(whole).__name__} is cut by taking it apart into its children, and what belongs to the whole alone would "
            f"be lost: found {found}. Move it into a child, or pass build(stage) as model, which makes each stage."
        )


def _as_counts(split: object) -> list[int] | None:
    if isinstance(split, str) or not isinstance(split, Sequence):
        return None
    counts: list[int] = []
    for count in split:  # pyright: ignore[reportUnknownVariableType]
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            return None
        counts.append(count)
    return counts


def _weights(units: Sequence[Iterable[nn.Module]]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Bytes of each unit, and the bytes that it has in common with an earlier one."""
    costs: list[int] = []
    shared: list[tuple[int, int, int]] = []
    last_use: dict[int, int] = {}
    for index, modules in enumerate(units):
        tensors = {id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
        costs.append(sum(tensor.nbytes for tensor in tensors.values()))
        shared += [(last_use[key], index, tensor.nbytes) for key, tensor in tensors.items() if key in last_use]
        last_use.update(dict.fromkeys(tensors, index))
    return costs, shared
