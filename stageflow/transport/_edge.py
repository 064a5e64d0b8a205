"""The two ends of an edge: frames by a header pipe, payloads by a process group or a socket, in step.

Rules of this file:

* A frame announces every payload before it is sent; the receiver posts a receive only for what was announced, with the
  exact number of bytes. (gloo aborts the process on a message larger than the buffer, and leaves the tail of a smaller one.)
* The wires of a frame follow it in one order: of each value its description, if that was too large for the frame, then its
  wires. Nobody else uses the group, so no tags are needed.
* Host payloads of at most ``INLINE_LIMIT`` bytes ride inside the frame: a pipe is several times as quick as gloo for them.
* ``send`` returns as soon as everything is posted. What it returns must be waited for, somewhere off the compute path, and
  holds the tensors until the peer has them. ``receive`` blocks, in a thread that does nothing else.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from stageflow._frames import (
    DESCRIPTION_LIMIT,
    FRAME_LIMIT,
    INLINE_LIMIT,
    Announcement,
    Call,
    MicroBatch,
    RingFrame,
    Warmup,
    decode,
    encode,
)
from stageflow.transport._groups import TransportError
from stageflow.transport._packing import Packed, as_tensor, host_bytes, wire_sizes


class Group(Protocol):
    """What an edge needs of the way that payloads go: a process group of two, or a pair of sockets."""

    wire_device: torch.device | None
    """Where wires must lie; None for host memory."""

    def send(self, wire: Tensor) -> Any: ...
    def receive(self, wire: Tensor) -> Any: ...
    def wait(self, work: Any) -> None: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


@attrs.frozen
class Sent:
    """Payloads on their way: alive until ``wait`` returns."""

    group: Group
    works: list[tuple[Any, Tensor]]
    """Each with the wire that it reads."""

    def wait(self) -> None:
        """Block until the peer has everything.

        Raises:
            TransportError: the peer is gone.
        """
        try:
            for work, _wire in self.works:
                self.group.wait(work)
        except (OSError, RuntimeError) as error:
            raise TransportError(str(error)) from error


@attrs.frozen
class Arrival:
    """A frame and the values it announced, in the frame's order."""

    frame: RingFrame
    values: list[Packed]


class EdgeSender:
    """The sending end. One thread at a time."""

    def __init__(self, header: Connection, group: Group) -> None:
        self._header = header
        self._group = group
        self.wire_device = group.wire_device

    def send(self, frame: RingFrame, values: Sequence[Packed | None] = ()) -> Sent | None:
        """Send a frame, which is made to announce the values here, and begin to send what doesn't fit into it.

        Args:
            frame: the frame, with nothing announced yet.
            values: its packed values, in the order of its fields; None for one that it does without.

        Returns:
            What to wait for, or None if everything rode inside the frame.

        Raises:
            TransportError: the peer is gone.
        """
        frame, wires = _announce(frame, values)
        data = encode(frame)
        if len(data) > FRAME_LIMIT:
            raise TransportError(f"internal: a frame of {len(data)} bytes ({type(frame).__name__}), at most {FRAME_LIMIT}")
        try:
            self._header.send_bytes(data)
            if not wires:
                return None
            if self.wire_device is not None:
                wires = [wire.to(self.wire_device) for wire in wires]
            return Sent(self._group, [(self._group.send(wire), wire) for wire in wires])
        except (OSError, RuntimeError) as error:
            raise TransportError(str(error)) from error

    def interrupt(self) -> None:
        """Let what is blocked in a payload fail, if the way that payloads go allows it. From any thread."""
        self._group.interrupt()

    def close(self) -> None:
        """Close the header pipe and the group. Nothing may be on its way."""
        self._header.close()
        self._group.close()


class EdgeReceiver:
    """The receiving end. One thread at a time."""

    def __init__(self, header: Connection, group: Group, *, pin: bool = False) -> None:
        self._header = header
        self._group = group
        self._pin = pin

    def fileno(self) -> int:
        """The header pipe, readable when ``receive`` has something to read."""
        return self._header.fileno()

    def receive(self) -> Arrival:
        """Wait for the next frame and for the payloads it announces.

        Raises:
            TransportError: the peer is gone, or sent what can't be read.
        """
        try:
            frame: RingFrame = decode(self._header.recv_bytes())
        except (EOFError, OSError) as error:
            raise TransportError("connection closed by peer") from error
        except Exception as error:
            raise TransportError(f"a frame that can't be read: {error!r}") from error
        try:
            return Arrival(frame, [self._collect(announcement) for announcement in _announced(frame)])
        except TransportError:
            raise
        except (
            Exception
        ) as error:  # gloo and NCCL raise RuntimeError; a payload too large for memory, MemoryError or another
            raise TransportError(f"{type(error).__name__}: {error}") from error

    def _collect(self, announcement: Announcement) -> Packed:
        description, inline = announcement
        if isinstance(description, int):
            [text], pending = self._receive_wires([description])
            for work in pending:
                self._group.wait(work)
            description = host_bytes(text.cpu())
        sizes = wire_sizes(description)
        if inline is None:
            return Packed(description, *self._receive_wires(sizes))
        if len(inline) != sum(sizes):
            raise TransportError(f"{len(inline)} bytes in a frame where its specs say {sum(sizes)}")
        data = io.BytesIO(inline)
        return Packed(description, [data.read(size) for size in sizes])

    def _receive_wires(self, sizes: Sequence[int]) -> tuple[list[Any], list[Any]]:
        device = self._group.wire_device
        wires = [
            torch.empty(n, dtype=torch.uint8, device=device or "cpu", pin_memory=self._pin and device is None) for n in sizes
        ]
        works = [self._group.receive(wire) for wire in wires]
        if device is not None:
            return wires, works  # not waited for here: the compute thread makes its stream wait for them
        for work in works:
            self._group.wait(work)
        return wires, []

    def interrupt(self) -> None:
        """Let what is blocked in a payload fail, if the way that payloads go allows it. From any thread."""
        self._group.interrupt()

    def close(self) -> None:
        """Close the header pipe and the group. Nothing may be on its way."""
        self._header.close()
        self._group.close()


def _announce(frame: RingFrame, values: Sequence[Packed | None]) -> tuple[RingFrame, list[Tensor]]:
    """The frame with its values announced, and the wires that must follow it."""
    text, room = DESCRIPTION_LIMIT, INLINE_LIMIT  # budgets of the frame, not of each value
    announcements: list[Announcement | None] = []
    wires: list[Tensor] = []
    for packed in values:
        if packed is None:
            announcements.append(None)
            continue
        description: bytes | int = packed.description
        if len(packed.description) <= text:
            text -= len(packed.description)
        else:
            description = len(packed.description)
            wires.append(as_tensor(packed.description))
        inline: bytes | None = None
        nbytes = sum(map(len, packed.wires))
        if nbytes <= room and all(isinstance(wire, bytes) or wire.device.type == "cpu" for wire in packed.wires):
            room -= nbytes
            inline = b"".join(map(host_bytes, packed.wires))
        else:
            wires.extend(map(as_tensor, packed.wires))
        announcements.append((description, inline))
    match frame:
        case MicroBatch(seq=seq):
            return MicroBatch(seq, *announcements), wires
        case Call(call_id=call_id, ranks=ranks):
            return Call(call_id, ranks, *announcements), wires
        case Warmup():
            return Warmup(*announcements), wires
        case _:
            return frame, wires


def _announced(frame: RingFrame) -> list[Announcement]:
    """The announcements of a frame, in the order of its fields."""
    match frame:
        case MicroBatch(value=value, stage_kwargs=stage_kwargs):
            found = [value, stage_kwargs]
        case Call(value=value) | Warmup(value=value):
            found = [value]
        case _:
            found = []
    return [announcement for announcement in found if announcement is not None]
