"""The payload way of the controller's two edges: a pair of connected sockets, made before the process starts.

Why not a process group here, as between stages: the controller must never be held up by a stage that dies. A rendezvous and
a blocked gloo operation can't be called off; a socket's can, at any moment, by ``interrupt``. There is nothing to join, the
end of a process is the end of the stream at once, and the user's program gets no threads of gloo's.

Rules of this file:

* A transfer is only noted by ``send`` and ``receive`` and carried out by ``wait``; so waits come in the order of the frames,
  from one thread, which for sending is not the one that computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from multiprocessing.connection import Connection

import attrs
import torch
from torch import Tensor

from stageflow.transport._forks import close_in_forked_children


@attrs.frozen
class _Transfer:
    wire: Tensor
    sends: bool


class StreamGroup:
    """One end of a pair of sockets, in the place of a process group of two."""

    wire_device: torch.device | None = None
    """Payloads lie in host memory."""

    def __init__(self, connection: Connection) -> None:
        """Takes the connection over: one end of ``multiprocessing.Pipe()``, which is such a pair."""
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        close_in_forked_children(self._socket)

    def send(self, wire: Tensor) -> _Transfer:
        """Note a wire to be sent; it must stay alive and unchanged until it has been waited for."""
        return _Transfer(wire, sends=True)

    def receive(self, wire: Tensor) -> _Transfer:
        """Note a wire to be received into."""
        return _Transfer(wire, sends=False)

    def wait(self, work: _Transfer) -> None:
        """Carry a transfer out. Blocks this thread, not the GIL.

        Raises:
            OSError: the peer is gone, or ``interrupt`` was called.
        """
        # torch offers no buffer of its own without numpy.
        memory = memoryview((ctypes.c_char * work.wire.numel()).from_address(work.wire.data_ptr())).cast("B")
        if work.sends:
            self._socket.sendall(memory)
            return
        while memory:
            received = self._socket.recv_into(memory)
            if not received:
                raise ConnectionResetError("connection closed by peer")
            memory = memory[received:]

    def interrupt(self) -> None:
        """Let every transfer at both ends fail, now and from now on. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
