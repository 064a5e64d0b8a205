"""The process group of an edge: two members, the sender (0) and the receiver (1).

Rules of this file:

* No group here is torch's default group, on either side: the user's own ``init_process_group`` is left alone.
* Rendezvous is by a file in a private directory; every socket is on loopback. A host name that doesn't resolve, or no
  network at all, changes nothing.
* Joining has a bound, and can be given up at once (``Rendezvous.abort``): a peer that died while joining must not hold up
  the report of its death.
* An operation, once joined, has no timeout of its own: a gloo wait that times out closes its connection for good. Stalls
  are judged by the controller, and a blocked operation ends when its peer's process does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FOREVER = timedelta(days=365)
"""For waits that end with the peer: by its data or by its death."""

_POLL_S = 0.001


class TransportError(Exception):
    """An edge is broken: the peer is gone, or what came is not what was announced. Never the user's fault."""


class JoinAborted(TransportError):
    """The other side won't come: the launch is being given up."""


class AbortableStore(dist.Store):
    """A file store whose waits end when ``abort`` is called. gloo itself offers no way out of a rendezvous."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = dist.FileStore(str(path), -1)
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Let every wait on this store raise, now and from now on."""
        self._aborted.set()

    @property
    def aborted(self) -> bool:
        """Whether ``abort`` was called."""
        return self._aborted.is_set()

    # What gloo and NCCL ask of a store, called back from C++.

    def set(self, key: str, value: Any) -> None:
        """See ``torch.distributed.Store.set``."""
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store.get``."""
        self.wait([key])
        return self._file.get(key)

    def add(self, key: str, value: int) -> int:
        """See ``torch.distributed.Store.add``."""
        return self._file.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """See ``torch.distributed.Store.check``."""
        return self._file.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for keys by looking every millisecond, as the file store itself does."""
        while not self._file.check(list(keys)):
            if self._aborted.wait(_POLL_S):
                raise JoinAborted


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


class Rendezvous:
    """The pipeline's private meeting place, from one process's side: where it joins the edges that it is an end of."""

    def __init__(self, directory: Path, timeout: float) -> None:
        """Args: the pipeline's directory; the seconds to wait for the other end of an edge."""
        gloo: Any = dist.ProcessGroupGloo
        self._store = AbortableStore(directory / "store")
        self._timeout = timedelta(seconds=min(timeout, 86400.0))
        # One for all edges of this process: each has a thread that looks around every 10 ms, also when idle.
        self._loopback = gloo.create_device(hostname="127.0.0.1")

    def abort(self) -> None:
        """Let every ``join`` raise, now and from now on. From any thread."""
        self._store.abort()

    @property
    def aborted(self) -> bool:
        """Whether ``abort`` was called."""
        return self._store.aborted

    def join(self, source: int, tp_index: int, member: int, backend: str, device: torch.device) -> EdgeGroup:
        """Join the group of an edge. Blocks until the other end joins too.

        Args:
            source: the place that the edge leaves: 0 for the controller, k for stage k - 1.
            tp_index: the place in the stages that it connects.
            member: 0 for the sending end, 1 for the receiving end.
            backend: ``"gloo"`` or ``"nccl"``.
            device: this end's device; NCCL needs a CUDA device of this rank's own.

        Raises:
            TransportError: the other end did not come, or the rendezvous was aborted.
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
