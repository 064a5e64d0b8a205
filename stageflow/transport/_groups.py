"""The process group of an edge between stages: two members, the sender (0) and the receiver (1).

Rules of this file:

* No group here is torch's default group: a user's own ``init_process_group`` in a stage is left alone.
* Rendezvous is by a file in a private directory; every socket is on loopback. A host name that doesn't resolve, or no
  network at all, changes nothing.
* Joining has a bound. A stage whose neighbour died meanwhile stays in it until its controller ends it, which is soon.
* An operation, once joined, has no timeout of its own: a gloo wait that times out closes its connection for good. Stalls
  are judged by the controller, and a blocked operation ends when its peer's process does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FOREVER = timedelta(days=365)
"""For waits that end with the peer: by its data or by its death."""


class TransportError(Exception):
    """An edge is broken: the peer is gone, or what came is not what was announced. Never the user's fault."""


_PR_SET_TIMERSLACK = 29
_SLACK_NS = 200_000_000


@contextlib.contextmanager
def _unhurried_threads() -> Generator[None]:
    """Threads that are started inside may oversleep by 0.2 s when nothing but a timer would wake them.

    For gloo's: it looks at its sockets as soon as anything comes, and every 10 ms besides. Those looks were nearly all that
    an idle pipeline of four cost, 1.4 % of a core; it is under 0.1 % with them spread by the kernel (Linux; prctl(2)).
    """
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS))
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0))  # this thread's own default again


class EdgeGroup:
    """A process group of two, seen from one of its ends."""

    def __init__(self, group: Any, member: int, backend: str, device: torch.device) -> None:
        self._group: Any = group
        self._peer = 1 - member
        self._waiting: torch.cuda.Stream | None = None
        self.wire_device: torch.device | None = device if backend == "nccl" else None
        """Where payloads must lie: the GPU for NCCL, host memory (None) for gloo."""

    def send(self, wire: Tensor) -> Any:
        """Begin to send; returns the work. The wire must stay alive and unchanged until the work is done."""
        return self._group.send([wire], self._peer, 0)

    def receive(self, wire: Tensor) -> Any:
        """Begin to receive into ``wire``; returns the work."""
        return self._group.recv([wire], self._peer, 0)

    def wait(self, work: Any) -> None:
        """Block this thread, not the GIL and not the compute stream, until a work is done.

        Raises:
            RuntimeError: the peer is gone.
        """
        if self.wire_device is None:
            work.wait(FOREVER)
            return
        # A NCCL work's own wait only makes the current stream wait, so that is one that nobody computes on.
        if self._waiting is None:
            self._waiting = torch.cuda.Stream(self.wire_device)
        with torch.cuda.stream(self._waiting):
            work.wait()
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        arrived.synchronize()

    def close(self) -> None:
        """Let go of the group: its sockets and threads end here, not when the garbage collector comes by."""
        self._group = None

    def interrupt(self) -> None:
        """Nothing can interrupt a process group's operation but the end of its peer; no controller holds one."""


class Rendezvous:
    """The pipeline's private meeting place, where a stage joins the edges between stages that it is an end of."""

    def __init__(self, directory: Path, timeout: float) -> None:
        """Args: the pipeline's directory; the seconds to wait for the other end of an edge."""
        self._timeout = timedelta(seconds=min(timeout, 86400.0))
        self._store = dist.FileStore(str(directory / "store"), -1)
        self._store.set_timeout(self._timeout)

    @functools.cached_property
    def _loopback(self) -> Any:
        """gloo's way out: one for all edges of this process, since each has a thread that looks around every 10 ms."""
        gloo: Any = dist.ProcessGroupGloo
        with _unhurried_threads():
            return gloo.create_device(hostname="127.0.0.1")

    def join(self, source: int, tp_index: int, member: int, backend: str, device: torch.device) -> EdgeGroup:
        """Join the group of an edge. Blocks until the other end joins too.

        Args:
            source: the stage that the edge leaves.
            tp_index: the place in the stages that it connects.
            member: 0 for the sending end, 1 for the receiving end.
            backend: ``"gloo"`` or ``"nccl"``.
            device: this end's device; NCCL needs a CUDA device of this rank's own.

        Raises:
            TransportError: the other end did not come.
        """
        name = f"edge{source}.{tp_index}"
        store = dist.PrefixStore(name, self._store)
        try:
            group = self._nccl(store, member) if backend == "nccl" else self._gloo(store, member)
        except RuntimeError as error:
            raise TransportError(f"{name} could not be joined: {error}") from error
        return EdgeGroup(group, member, backend, device)

    def _gloo(self, store: dist.Store, member: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [self._loopback]
        options._timeout = self._timeout
        options._threads = 1
        return gloo(store, member, 2, options)

    def _nccl(self, store: dist.Store, member: int) -> Any:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER  # pyright: ignore[reportPrivateUsage]
        return dist.ProcessGroupNCCL(store, member, 2, options)
