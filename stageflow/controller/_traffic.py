"""The two threads that touch the ring for the controller: one reads, one writes. The Trio loop does neither.

Rules of this file:

* The reader blocks in the kernel on the result edge, the up pipes and a wake pipe; it never spins and never throttles, so
  the ring can't close into a circle of waits. What it reads it hands to the loop by ``run_sync_soon``, which can't be full.
* The writer takes what the loop has packed, in order, and waits until each payload has left: a stage that does not read
  holds up this thread, not the loop.
* Neither thread can be cancelled; each ends when it is told (``stop``), which also interrupts a payload on its way.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import attrs
import trio

from stageflow._frames import Call, CallPart, EndOfStream, Failed, MicroBatch, Report, RingFrame, Warmup, decode
from stageflow.transport import EdgeReceiver, EdgeSender, Packed, TransportError, from_bytes, unpack


class Courier:
    """Carries calls from a thread to the Trio loop, in order. After the loop has ended, nowhere."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def __call__(self, fn: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(fn, *args)


@attrs.frozen
class Listener:
    """Whom the reader tells. Every function runs in the Trio loop."""

    result: Callable[[int, Any], None]
    """(seq, the value): a micro-batch is back."""
    unreadable: Callable[[int, BaseException], None]
    """(seq, what unpickling raised): its result can't be put together here."""
    failed: Callable[[int, Report], None]
    """(seq, report): it raised in a stage."""
    warm: Callable[[], None]
    """The warm-up is back."""
    call: Callable[[int, int, Any, Report | None, BaseException | None], None]
    """(call_id, rank, value, report, what unpickling raised): a rank has run a call."""
    said: Callable[[int, Any], None]
    """(rank, frame): any other frame on an up pipe."""
    silent: Callable[[int], None]
    """(rank): its up pipe has come to its end."""
    transport: Callable[[int | None, Exception], None]
    """(rank, or None for the ring, the error): a pipe or a payload broke."""


class Reader:
    """The long-lived thread that reads. ``run`` is its whole life."""

    def __init__(self, receiver: EdgeReceiver, ups: Sequence[Connection], listener: Listener) -> None:
        self._receiver = receiver
        self._ups = ups
        self._tell = Courier()
        self._to = listener
        self._wake_read, self._wake_write = os.pipe()
        self._parts: dict[tuple[int, int], bytearray] = {}

    def stop(self) -> None:
        """End the thread, whatever it is blocked in."""
        os.write(self._wake_write, b"q")
        self._receiver.interrupt()

    def close(self) -> None:
        """Close the edge and the wake pipe, after the thread has ended."""
        self._receiver.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def run(self) -> None:
        """Read until told to stop."""
        poll = select.poll()
        handlers: dict[int, Callable[[], bool]] = {}

        def watch(descriptor: int, handler: Callable[[], bool]) -> None:
            handlers[descriptor] = handler
            poll.register(descriptor, select.POLLIN)

        for rank, up in enumerate(self._ups):
            watch(up.fileno(), partial(self._read_up, rank, up))
        watch(self._receiver.fileno(), self._read_ring)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    return
                if not handlers[descriptor]():
                    poll.unregister(descriptor)

    def _read_up(self, rank: int, up: Connection) -> bool:
        try:
            frame = decode(up.recv_bytes())
        except (EOFError, OSError):
            self._tell(self._to.silent, rank)  # the process has ended, or is about to: its sentinel says so
            return False
        except Exception as error:
            self._tell(self._to.transport, rank, error)
            return False
        if isinstance(frame, CallPart):
            self._collect(rank, frame)
        else:
            self._tell(self._to.said, rank, frame)
        return True

    def _collect(self, rank: int, part: CallPart) -> None:
        whole = self._parts.setdefault((part.call_id, rank), bytearray())
        whole += part.piece
        if len(whole) < part.total:
            return
        del self._parts[part.call_id, rank]
        value: Any = None
        report: Report | None = None
        problem: BaseException | None = None
        try:
            if part.failed:
                report = decode(bytes(whole)).report
            else:
                value = unpack(from_bytes(whole))
        except BaseException as error:  # the user's unpickling, whatever it raises, must not end the reader
            problem = error
        self._tell(self._to.call, part.call_id, rank, value, report, problem)

    def _read_ring(self) -> bool:
        try:
            arrival = self._receiver.receive()
        except TransportError as error:
            self._tell(self._to.transport, None, error)
            return False
        match arrival.frame:
            case MicroBatch(seq=seq):
                try:
                    value = unpack(arrival.values[0])
                except BaseException as error:  # the user's class, not the pipeline, is at fault
                    self._tell(self._to.unreadable, seq, error)
                else:
                    self._tell(self._to.result, seq, value)
            case Failed(seq=seq, report=report):
                self._tell(self._to.failed, seq, report)
            case Warmup():
                self._tell(self._to.warm)
            case Call():  # every rank has seen it; the answers come by the up pipes
                pass
            case EndOfStream():
                return False
        return True


class Writer:
    """The thread that writes. ``run`` is its whole life."""

    def __init__(self, sender: EdgeSender, transport: Callable[[int | None, Exception], None]) -> None:
        self._sender = sender
        self._tell = Courier()
        self._transport = transport
        self._outbox: queue.SimpleQueue[tuple[RingFrame, list[Packed | None]] | None] = queue.SimpleQueue()

    def put(self, frame: RingFrame, *values: Packed | None) -> None:
        """Send a frame, in its turn, with the values that it announces."""
        self._outbox.put((frame, list(values)))

    def stop(self) -> None:
        """End the thread, whatever it is blocked in."""
        self._outbox.put(None)
        self._sender.interrupt()

    def close(self) -> None:
        """Close the edge, after the thread has ended."""
        self._sender.close()

    def run(self) -> None:
        """Write until told to stop."""
        while (item := self._outbox.get()) is not None:
            try:
                sent = self._sender.send(*item)
                del item
                if sent is not None:
                    sent.wait()
                del sent  # the tensors are not kept alive until the next one comes
            except TransportError as error:
                self._tell(self._transport, None, error)
                break
        else:
            return
        while self._outbox.get() is not None:  # broken: swallow the rest, so that nothing is kept alive
            pass
