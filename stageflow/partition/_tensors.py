"""Tensors in values of any structure, and copies without values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["leaves_of", "map_tensors", "modules_of", "on_meta", "structure_of", "to_meta"]


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


def to_meta(value: Any) -> Any:
    """The same, with tensors on the meta device."""
    return map_tensors(lambda tensor: tensor.detach().to("meta"), value)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no values."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, memo)
