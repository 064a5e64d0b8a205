"""Tensors handed from one process to another by shared memory: one flat file descriptor, whatever their number.

Rules of this file:

* The descriptor is an anonymous file (memfd), made before the process starts and filled later: one copy out of the
  controller's tensors, none into the stage's, which lie in the shared pages themselves.
* It has no name, so nothing is left behind whoever is killed; it needs no room in /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from stageflow.transport._packing import CODE_OF_DTYPE, DTYPES, TensorSpec, aligned, as_laid, flat, nbytes_of


def open_memory() -> Connection:
    """An anonymous file that can be given to a process as it starts.

    Dressed as a Connection, since that is what multiprocessing knows how to hand to a child; nothing is sent over it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("stageflow")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    return Connection(descriptor)


def write_tensors(memory: Connection, tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """Copy tensors, from any device, into shared memory; returns what ``read_tensors`` needs."""
    laid = [as_laid(tensor.detach()) for tensor in tensors]
    specs = tuple((CODE_OF_DTYPE[tensor.dtype], tuple(tensor.shape), permutation) for tensor, permutation in laid)
    total = sum(aligned(nbytes_of(spec)) for spec in specs)
    if not total:
        return specs
    os.ftruncate(memory.fileno(), total)
    with mmap.mmap(memory.fileno(), total) as mapped:
        start = 0
        for (tensor, _), spec in zip(laid, specs, strict=True):
            if size := nbytes_of(spec):
                # The view is let go before the map closes: a map with a living view can't.
                _view(mapped, start, size).copy_(flat(tensor))
            start += aligned(size)
    return specs


def read_tensors(memory: Connection, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The tensors that ``write_tensors`` wrote, lying in the shared pages. The map lives as long as one of them does."""
    total = sum(aligned(nbytes_of(spec)) for spec in specs)
    mapped = mmap.mmap(memory.fileno(), total) if total else None
    tensors: list[Tensor] = []
    start = 0
    for spec in specs:
        dtype, shape, permutation = DTYPES[spec[0]], spec[1], spec[2]
        size = nbytes_of(spec)
        tensor = torch.empty(shape, dtype=dtype) if not size else _view(mapped, start, size).view(dtype).view(shape)
        tensors.append(tensor if permutation is None else tensor.permute(permutation))
        start += aligned(size)
    return tensors


def _view(mapped: Any, start: int, size: int) -> Tensor:
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=start)
