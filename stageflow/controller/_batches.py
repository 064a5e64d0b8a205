"""A batch into micro-batches and back: what ``run_batch`` does around the pipeline.

Rules of this file:

* Tensors are split and joined on dim 0; sizes differ by one at most, so an uneven batch costs no stage a full step.
* Everything else in the arguments is given to each micro-batch as it is, and must come back equal from each.
* Containers are looked into: tuples, named tuples, lists, mappings, dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor


def split_batch(args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each micro-batch; at most ``n``, and no more than there are rows.

    Raises:
        ValueError: ``n`` below one, no tensor to split, or tensors whose first dimensions differ.
    """
    if n < 1:
        raise ValueError(f"n_microbatches is at least 1: found {n}")
    whole = (args, kwargs)
    tensors: list[Tensor] = []
    _map(whole, tensors.append)
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if not sizes:
        raise ValueError(
            "run_batch splits tensors on dim 0: found no tensor with a dimension in args and kwargs. Use pipe(...)"
        )
    if len(sizes) > 1:
        raise ValueError(
            "run_batch splits every tensor on dim 0, so these must be equal: found shapes "
            f"{[tuple(tensor.shape) for tensor in tensors]}. Expand them to the batch, or pass what is not per row by "
            "stage_kwargs"
        )
    [rows] = sizes
    parts = max(1, min(n, rows))
    split = [torch.tensor_split(tensor, parts) if tensor.dim() else (tensor,) * parts for tensor in tensors]

    def part(at: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pieces = (one[at] for one in split)  # met again in the same order
        return _map(whole, lambda _tensor: next(pieces))

    return [part(at) for at in range(parts)]


def _map(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    return _rebuild(value, [_map(child, fn) for child in _children(value)])


def join_batch(values: Sequence[Any]) -> Any:
    """The results of the micro-batches as one, shaped like each of them.

    Raises:
        ValueError: results that can't be joined: of unlike shape, 0-d tensors, or unequal other values.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Tensor):
        if first.dim() == 0:
            raise ValueError(
                "run_batch joins results on dim 0, and a result is a 0-d tensor. Use pipe.map and join them yourself"
            )
        return torch.cat(list(values))
    families = [_children(value) for value in values]
    if any(type(value) is not type(first) for value in values) or len({len(children) for children in families}) > 1:
        raise ValueError(f"run_batch joins results of one shape: found {sorted({type(value).__name__ for value in values})}")
    if not families[0] and any(value is not first and value != first for value in values):
        raise ValueError(f"run_batch can't join unequal values that are not tensors: found {list(values)[:4]}. Use pipe.map")
    return _rebuild(first, [join_batch(children) for children in zip(*families, strict=True)])


def _children(value: Any) -> list[Any]:
    """What a container holds; nothing for anything else."""
    if isinstance(value, (tuple, list)):
        return list(cast("Sequence[Any]", value))
    if isinstance(value, Mapping):
        return list(cast("Mapping[Any, Any]", value).values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def _rebuild(value: Any, children: list[Any]) -> Any:
    """The container again, holding ``children``."""
    if isinstance(value, (tuple, list)):
        kind: Any = type(cast("Sequence[Any]", value))
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        if not isinstance(value, Mapping):
            return dataclasses.replace(value, **dict(zip(names, children, strict=True)))
    if isinstance(value, Mapping):
        mapping: Any = cast("Mapping[Any, Any]", value)
        items = dict(zip(mapping, children, strict=True))
        if dataclasses.is_dataclass(mapping):  # a transformers ModelOutput, made by keywords
            return type(mapping)(**items)
        fresh = copy.copy(mapping)  # of its own kind: a defaultdict stays one
        fresh.update(items)
        return fresh
    return value
