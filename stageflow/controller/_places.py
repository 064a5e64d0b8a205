"""Where ranks run: devices, the backend between them, threads. Decided in the controller, before anything is started.

Rules of this file:

* The controller never touches a CUDA context; it only counts devices.
* NCCL needs a GPU for each rank; several ranks on one GPU, or any rank on the CPU, means gloo (through pinned host memory).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

logger = logging.getLogger("stageflow")


def choose_devices(devices: str | torch.device | Sequence[str | torch.device], ranks: int) -> tuple[str, ...]:
    """The device of each rank.

    Args:
        devices: ``"auto"`` (GPUs in turn, or the CPU where there is none), one device for all, or one for each rank.
        ranks: number of ranks.

    Raises:
        ValueError: not one for each rank, or not a device.
    """
    if isinstance(devices, (str, torch.device)):
        devices = str(devices)
        if devices != "auto":
            chosen = (devices,) * ranks
        elif torch.cuda.is_available() and torch.cuda.device_count():
            chosen = tuple(f"cuda:{rank % torch.cuda.device_count()}" for rank in range(ranks))
        else:
            chosen = ("cpu",) * ranks
    elif isinstance(devices, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        chosen = tuple(str(device) for device in devices)
    else:
        raise ValueError(f"devices is 'auto', one device, or one for each rank: found {devices!r}")  # noqa: TRY004
    if len(chosen) != ranks:
        raise ValueError(
            f"devices names one device for each rank: found {len(chosen)}, needed {ranks}. Give {ranks}, or one string"
        )
    return tuple(_checked(device) for device in chosen)


def _checked(device: str) -> str:
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"devices names torch devices such as 'cpu' or 'cuda:0': found {device!r}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"devices may be 'cpu' or 'cuda:N': found {device!r}")
    if parsed.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = parsed.index or 0
        if index >= found:
            raise ValueError(f"devices asks for cuda:{index}, but this machine has {found} CUDA devices. Change devices")
        return f"cuda:{index}"
    return "cpu"


def choose_backend(backend: str, devices: Sequence[str]) -> str:
    """``"nccl"`` or ``"gloo"``, for the edges between stages.

    Raises:
        ValueError: NCCL was asked for where ranks share a GPU or have none, or the name is neither.
    """
    if backend not in ("auto", "gloo", "nccl"):
        raise ValueError(f"backend is 'auto', 'gloo' or 'nccl': found {backend!r}")
    on_gpu = all(device.startswith("cuda") for device in devices)
    own_gpu = on_gpu and len(set(devices)) == len(devices)
    if backend == "nccl" and not own_gpu:
        raise ValueError(
            f"backend='nccl' needs a GPU of its own for each rank: found devices {list(devices)}. "
            "Change devices, or use backend='auto'"
        )
    if backend == "auto" and on_gpu and not own_gpu:
        logger.info(
            "several ranks share a GPU: payloads go by gloo through pinned host memory (NCCL needs a GPU for each rank)"
        )
    return "nccl" if own_gpu and backend != "gloo" else "gloo"


def choose_threads(threads: int | None, ranks: int) -> int:
    """Threads per rank for torch's operators: cores ÷ ranks, at least one, unless told otherwise.

    Raises:
        ValueError: fewer than one.
    """
    if threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // ranks)
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"threads is the number of torch threads per rank, at least 1: found {threads}")
    return threads
