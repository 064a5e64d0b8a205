"""Tensors in values of any structure, and copies without values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = [
    "Answering",
    "answer_of",
    "leaves_of",
    "map_tensors",
    "modules_of",
    "on_meta",
    "same_tensors",
    "structure_of",
    "to_meta",
    "within",
]


def leaves_of(value: Any) -> list[Tensor]:
    """All tensors in it, also those in a dataclass, in order."""
    found: list[Tensor] = []
    leaves: list[Any] = tree_flatten(value)[0]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__attrs_attrs__") or hasattr(leaf, "__dataclass_fields__"):
            found += leaves_of([*vars(leaf).values()])
    return found


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure, with each tensor changed."""

    def each(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(each, value)


def structure_of(value: Any) -> tuple[Any, list[Any]]:
    """How it is built, and its leaves."""
    leaves, structure = tree_flatten(value)
    return structure, leaves


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules in it, with their names."""
    return [*model.named_modules()]


def within(name: str, module: str) -> bool:
    """Whether a name is that of a module, or of something in it; everything is in the model itself, whose name is empty."""
    return not module or name == module or name.startswith(f"{module}.")


def same_tensors(model: nn.Module) -> dict[int, Any]:
    """The memo for a ``deepcopy`` that copies modules, and takes their tensors as they are."""
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


def to_meta(value: Any) -> Any:
    """The same, with tensors on the meta device."""
    return map_tensors(lambda tensor: tensor.detach().to("meta"), value)


class Answering(TorchDispatchMode):
    """Lets a forward on the meta device ask for a value: the answer is yes, or one.

    What models ask there is whether a mask hides nothing, or positions are those of plain sequences, to leave work out.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        answer = answer_of(func, args)
        return func(*args, **(kwargs or {})) if answer is None else answer


def answer_of(func: Any, args: tuple[Any, ...]) -> Any:
    """The value of a single number on the meta device, if that is what is asked for; else None."""
    if func is not torch.ops.aten._local_scalar_dense.default or not args[0].is_meta:
        return None
    return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no values."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, memo)
