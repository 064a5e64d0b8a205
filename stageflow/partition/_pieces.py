"""What every way of cutting shares: the piece of a stage, the unit, and what may be taken apart.

A unit is what is never cut: a child of a Sequential, a decoder layer, with what belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import nn

from stageflow._frames import StageInfo
from stageflow.errors import PartitionError

__all__ = ["StagePiece", "Unit", "refuse_altered"]


@attrs.frozen
class StagePiece:
    """What one stage is to be: a module, or how to build it there."""

    target: nn.Module | Callable[[StageInfo], nn.Module]
    """The module itself, or the function that builds it inside the stage process."""
    module_names: tuple[str, ...]
    """Fully-qualified names of the unsplit model's modules that live here, in order. Empty where only the stage knows."""
    unpack: bool
    """Whether a plain tuple that the stage before returned becomes this stage's positional arguments."""
    loads: int = 0
    """Bytes that the stage reads from files by itself. Its target then counts them in ``loaded_bytes()``."""


@attrs.frozen
class Unit:
    """What is never cut."""

    name: str
    """Fully-qualified name of the module that it is about."""
    parts: tuple[tuple[str, nn.Module], ...]
    """All modules that go with it, in the order in which they are called, with their names."""


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
