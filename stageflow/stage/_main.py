"""All that a stage process does, from top to bottom.

    guard → hello → rendezvous → import → build → warm-up → ready → loop → drain → bye → exit

Rules of this file:

* Three threads. The main thread computes and sends. The receiver blocks on the edge that comes in, and only queues: it
  never throttles, the window bounds what it can hold. The keeper holds sent tensors until the peer has them.
* Everything the rank does, it does in the order of its header pipe.
* The user's code fails alone: whatever it raises for a micro-batch or a call becomes a report, in that one's turn. A failure
  of the transport, or of the start, is fatal: it is reported, and the controller ends the process.
* ``SystemExit`` is not caught: a stage that wants to end, ends, and its controller calls that a death.
* There is no way back from a failure here; who waits for whom, and for how long, is decided in the controller.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import attrs
import torch
from torch import nn

from stageflow._frames import (
    Build,
    Bye,
    Call,
    CallPart,
    Door,
    EndOfStream,
    Failed,
    Fatal,
    Hello,
    MicroBatch,
    Phase,
    Ready,
    RingFrame,
    UpFrame,
    Warmup,
    decode,
    encode,
)
from stageflow._lifecycle import Event
from stageflow.observe import Activity, ProgressBoard, ProgressWriter
from stageflow.stage._guard import arm
from stageflow.stage._report import Reporter
from stageflow.stage._stage import Stage
from stageflow.transport import (
    Arrival,
    EdgeReceiver,
    EdgeSender,
    Packed,
    Rendezvous,
    Sent,
    StreamGroup,
    TransportError,
    close_in_forked_children,
    pack,
    put_together,
    read_tensors,
    to_bytes,
    unpack,
)

_PART = 32 * 1024
"""Bytes of a call's result per frame on the up pipe: half a pipe's buffer."""


_ENDINGS = (SystemExit, KeyboardInterrupt)
"""Of what user code raises, this ends the process; anything else fails one micro-batch or call."""


def main(door: Door) -> None:
    """The life of a stage process."""
    arm(
        name=f"stageflow {door.rank}/{door.ranks}",
        death=door.death,
        stdout=door.stdout,
        stderr=door.stderr,
        stacks=door.directory / f"stacks.{door.rank}",
    )
    close_in_forked_children(door.header_in, door.header_out, door.down, door.up, door.memory)
    up = _Up(door.up)
    try:
        up.send(Hello(os.getpid()))
        build: Build = decode(door.down.recv_bytes())
        reporter = Reporter(build.info)
        try:
            receiver, sender = _join_edges(door, build)
            stage = _build(door, build, up, reporter)
            up.send(Phase(Event.WARM_UP))
            reporter.phase = "serve"
            progress = ProgressBoard(door.directory / "progress", door.ranks).writer(door.rank)
            _Loop(stage, build.unpack, receiver, sender, up, progress, reporter).run()
        except Exception as error:
            up.send(Fatal(reporter.report(error, transport=isinstance(error, TransportError))))
            _wait_for_the_end(door.down)
        up.send(Bye())
        _exit(0)
    except SystemExit as ending:  # as the interpreter itself would end
        if ending.code is not None and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
        _exit(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
    except OSError:  # the up pipe or the down pipe is closed: the controller is gone, or going
        _exit(1)
    except BaseException:
        traceback.print_exc()
        _exit(1)


def _wait_for_the_end(down: Connection) -> None:
    """After a fatal report: stay until the controller has read it and ends this process, or is gone itself."""
    with contextlib.suppress(EOFError, OSError):
        down.recv_bytes()
    _exit(1)


def _exit(code: int) -> None:
    # Not by returning: threads blocked in gloo can't be joined, and an interpreter that takes itself apart under them may
    # crash. multiprocessing ends its forked children in the same way.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code may have closed or replaced it
            stream.flush()
    os._exit(code)


class _Up:
    """The pipe to the controller, for what is out of order. Several threads may report."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, *frames: UpFrame) -> None:
        with self._lock:
            for frame in frames:
                self._connection.send_bytes(encode(frame))


# ---- the start ----------------------------------------------------------------------------------------------------------


def _join_edges(door: Door, build: Build) -> tuple[EdgeReceiver, EdgeSender]:
    info = build.info
    device = torch.device(info.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = Rendezvous(door.directory, door.join_timeout)
    # Every rank joins the edge it receives from first: the first has nothing to join there, and each one frees the next.
    if door.payload_in is not None:
        incoming = StreamGroup(door.payload_in)
    else:
        incoming = place.join(info.stage_index - 1, info.tp_index, 1, build.backend, device)
    if door.payload_out is not None:
        outgoing = StreamGroup(door.payload_out)
    else:
        outgoing = place.join(info.stage_index, info.tp_index, 0, build.backend, device)
    return EdgeReceiver(door.header_in, incoming, pin=device.type == "cuda"), EdgeSender(door.header_out, outgoing)


def _build(door: Door, build: Build, up: _Up, reporter: Reporter) -> Stage:
    info = build.info
    torch.set_num_threads(build.threads)
    torch.manual_seed(build.seed)
    up.send(Phase(Event.IMPORT))
    reporter.phase = "import"
    target = put_together(build.skeleton, read_tensors(door.memory, build.specs))
    door.memory.close()
    up.send(Phase(Event.BUILD))
    reporter.phase = "build"
    module: Any = target if isinstance(target, nn.Module) else target(info)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"build(stage) must return a torch.nn.Module for stage {info.stage_index}, not {type(module).__name__}"
        )
    module.to(info.device)
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
    info = attrs.evolve(
        info,
        pid=os.getpid(),
        module_names=info.module_names or tuple(name for name, _ in module.named_children()),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        bytes=sum(tensor.nbytes for tensor in tensors),
    )
    return Stage(module, info)


# ---- the loop -----------------------------------------------------------------------------------------------------------


class _Keeper:
    """Holds what was sent until the peer has it: gloo drops a message whose work is let go too early."""

    def __init__(self, inbox: queue.SimpleQueue[Arrival | Exception]) -> None:
        self._inbox = inbox
        self._sent: queue.SimpleQueue[Sent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stageflow keeper", daemon=True)
        self._thread.start()

    def keep(self, sent: Sent | None) -> None:
        if sent is not None:
            self._sent.put(sent)

    def drain(self) -> None:
        self._sent.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (sent := self._sent.get()) is not None:
                sent.wait()
                del sent  # not until the next one comes
        except TransportError as error:
            self._inbox.put(error)


class _Loop:
    """Takes what arrives, in order, until the end of the stream."""

    def __init__(
        self,
        stage: Stage,
        unpack_tuples: bool,
        receiver: EdgeReceiver,
        sender: EdgeSender,
        up: _Up,
        progress: ProgressWriter,
        reporter: Reporter,
    ) -> None:
        self._stage = stage
        self._unpack_tuples = unpack_tuples
        self._receiver = receiver
        self._sender = sender
        self._up = up
        self._progress = progress
        self._reporter = reporter
        self._inbox: queue.SimpleQueue[Arrival | Exception] = queue.SimpleQueue()
        self._keeper = _Keeper(self._inbox)

    def run(self) -> None:
        threading.Thread(target=self._receive, name="stageflow receiver", daemon=True).start()
        while True:
            self._progress.enter(Activity.WAITING)
            arrival = self._inbox.get()
            if isinstance(arrival, Exception):
                raise arrival
            match arrival.frame:
                case MicroBatch(seq=seq):
                    self._pass_on(*self._forward(seq, *arrival.values), seq)
                case Call() as call:
                    self._pass_on(call, () if self._stage.is_last else arrival.values)
                    if self._stage.rank in call.ranks:
                        self._call(call.call_id, *arrival.values)
                case Failed(seq=seq) as frame:
                    self._progress.passed()
                    self._pass_on(frame, seq=seq)
                case EndOfStream() as frame:
                    self._pass_on(frame)
                    break
                case Warmup() as frame:
                    self._pass_on(frame, arrival.values)
                    self._up.send(Ready(self._stage.info))
            del arrival  # nothing is kept alive while the next one is waited for
        self._progress.enter(Activity.ENDING)
        self._keeper.drain()

    def _receive(self) -> None:
        device = self._stage.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            while True:
                arrival = self._receiver.receive()
                self._inbox.put(arrival)
                if isinstance(arrival.frame, EndOfStream):
                    return
                del arrival
        except Exception as error:
            self._inbox.put(error if isinstance(error, TransportError) else TransportError(repr(error)))

    def _pass_on(self, frame: RingFrame, values: Sequence[Packed | None] = (), seq: int | None = None) -> None:
        self._progress.enter(Activity.SENDING, seq)
        self._keeper.keep(self._sender.send(frame, values))

    def _forward(
        self, seq: int, value: Packed, stage_kwargs: Packed | None = None
    ) -> tuple[MicroBatch | Failed, list[Packed | None]]:
        """What comes out of this stage for one micro-batch: the frame to pass on, and its values."""
        stage = self._stage
        self._progress.enter(Activity.COMPUTING, seq)
        try:
            args, kwargs = self._arguments(unpack(value, stage.device))
            value.wires.clear()  # so that what is passed through is not held twice, and input is freed as it is used up
            extra: dict[str, Any] = {} if stage_kwargs is None else self._unpack_shared(stage_kwargs)
            with torch.inference_mode():
                output = stage.module(*args, **kwargs, **extra)
                del args, kwargs, extra
                packed = pack(output, self._sender.wire_device)
                del output
            packed.own()
        except _ENDINGS:
            raise
        except BaseException as error:
            self._progress.finished(failed=True)
            return Failed(seq, self._reporter.report(error, seq=seq)), []
        self._progress.finished(failed=False)
        return MicroBatch(seq), [packed] if stage.is_last else [packed, stage_kwargs]

    def _arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first stage gets the caller's arguments; a later one what the stage before returned."""
        if self._stage.is_first:
            return value
        if self._unpack_tuples and type(value) is tuple:  # not a named one, which is a value of its own
            return cast("tuple[Any, ...]", value), {}
        return (value,), {}

    def _unpack_shared(self, value: Packed) -> Any:
        """A value that goes to later stages as well: what user code does to its tensors here must not show there."""
        return unpack(value if self._stage.is_last else value.private(), self._stage.device)

    def _call(self, call_id: int, value: Packed) -> None:
        self._progress.enter(Activity.CALLING)
        failed = False
        try:
            fn, args = self._unpack_shared(value)
            with torch.inference_mode():
                result = to_bytes(pack(fn(self._stage, *args)))
        except _ENDINGS:
            raise
        except BaseException as error:
            failed, result = True, encode(Fatal(self._reporter.report(error, phase="call")))
        parts = [result[at : at + _PART] for at in range(0, len(result), _PART)]
        self._up.send(*(CallPart(call_id, len(result), failed, part) for part in parts))
