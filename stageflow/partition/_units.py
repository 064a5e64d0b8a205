"""Which modules of a model are its blocks: those between which it is cut.

Rules of this file:

* The members of the model's ``ModuleList``s: a model with lists of layers is cut between them. Without, its modules, from
  the outermost inwards, until none is too large for an even cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["listed_blocks", "nested_blocks"]

_SMALLEST_SHARE = 0.05
"""A list with less of the model's bytes isn't what it is made of."""


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.parameters())


def listed_blocks(model: nn.Module, depth: int = 0) -> list[str]:
    """Members of the ``ModuleList``s that aren't inside a member of another; ``depth`` of them deeper."""
    found: list[tuple[str, nn.ModuleList]] = []

    def look(module: nn.Module, prefix: str, level: int) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList) and len(child):
                if level == depth:
                    found.append((path, child))
                else:
                    look(child, f"{path}.", level + 1)
            else:
                look(child, f"{path}.", level)

    look(model, "", 0)
    sizes = [_nbytes(modules) for _, modules in found]
    whole = max(_nbytes(model), 1)
    kept = [(path, modules) for (path, modules), size in zip(found, sizes, strict=True) if size >= _SMALLEST_SHARE * whole]
    return [f"{path}.{name}" for path, modules in kept for name, _ in modules.named_children()]


def nested_blocks(model: nn.Module, num_stages: int) -> list[str]:
    """Modules that cover the model, none inside another, and none with more than a quarter of a stage's even share."""
    limit = _nbytes(model) / (4 * num_stages)

    def cover(module: nn.Module, path: str) -> Iterator[str]:
        for name, child in module.named_children():
            inner = f"{path}{name}"
            is_container = isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            if next(child.children(), None) is not None and (is_container or _nbytes(child) > limit):
                yield from cover(child, f"{inner}.")
            else:
                yield inner

    return list(cover(model, ""))
