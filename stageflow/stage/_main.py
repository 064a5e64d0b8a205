"""All that a stage process does, from top to bottom.

    guard → hello → rendezvous → import → build → warm-up → ready → loop → drain → bye → exit

Rules of this file:

* Three threads. The main thread computes and sends. The receiver blocks on the edge that comes in, and only queues: it
  never throttles, the window bounds what it can hold. The keeper holds sent tensors until the peer has them.
* Everything the rank does, it does in the order of its header pipe.
* The user's code fails alone (``_run.py``). A failure of the transport, or of the start, is fatal: it is reported, and the
  controller ends the process. ``SystemExit`` is not caught: a stage that wants to end, ends, and that is called a death.
* There is no way back from a failure here; who waits for whom, and for how long, is decided in the controller.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection

import attrs
import torch

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
from stageflow._lifecycle import Event, State, advance
from stageflow.observe import Activity, ProgressBoard, ProgressWriter
from stageflow.stage._debugger import debug_on_terminal
from stageflow.stage._guard import arm
from stageflow.stage._logs import forward_logs, set_levels
from stageflow.stage._report import Reporter
from stageflow.stage._run import Runner, build_stage
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
    put_together,
    read_tensors,
)

_PART = 32 * 1024
"""Bytes of a call's result per frame on the up pipe: half a pipe's buffer."""

_Enter = Callable[..., None]
"""Called with the event that moves this life on, and the frame that says so, if that isn't a plain ``Phase``."""


def main(door: Door) -> None:
    """The life of a stage process."""
    arm(
        title=door.title,
        death=door.death,
        stdout=door.stdout,
        stderr=door.stderr,
        stacks=door.directory / f"stacks.{door.rank}",
    )
    forward_logs(door.log)
    pipes = (door.header_in, door.header_out, door.down, door.up, door.memory)
    close_in_forked_children(*pipes)
    for pipe in pipes:
        # Should this process become another program, its controller hears that it is gone. The death pipe stays armed.
        os.set_inheritable(pipe.fileno(), False)
    up = _Up(door.up)
    try:
        progress = ProgressBoard(door.directory / "progress", door.ranks).writer(door.rank)
        up.send(Hello(os.getpid()))
        build: Build = decode(door.down.recv_bytes())
        _move_in(build)
        debug_on_terminal(build.info.label, door.directory / "terminal", progress)
        reporter = Reporter(build.info)

        def enter(event: Event, frame: UpFrame | None = None) -> None:
            reporter.phase = advance(State(reporter.phase), event).value
            up.send(frame or Phase(event))

        try:
            receiver, sender = _join_edges(door, build, progress)
            stage = _build(door, build, enter, progress)
            runner = Runner(
                stage,
                unpack_tuples=build.unpack,
                progress=progress,
                reporter=reporter,
                wire_device=sender.wire_device,
            )
            enter(Event.WARM_UP)
            _Loop(runner, receiver, sender, up, progress, enter).run()
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


def _move_in(build: Build) -> None:
    """What the fork server has of the program's first launch, and the program may have changed since."""
    os.environ.clear()
    os.environ.update(build.environ)
    set_levels(build.log_levels)


def _join_edges(door: Door, build: Build, progress: ProgressWriter) -> tuple[EdgeReceiver, EdgeSender]:
    info = build.info
    device = torch.device(info.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = Rendezvous(door.directory, door.join_timeout)
    progress.enter(Activity.WAITING)  # for neighbours: should the start take too long, they are to blame and not this one
    # Every rank joins the edge it receives from first: the first has nothing to join there, and each one frees the next.
    if door.payload_in is not None:
        incoming = StreamGroup(door.payload_in)
    else:
        incoming = place.join(info.stage_index - 1, info.tp_index, 1, build.backend, device)
    if door.payload_out is not None:
        outgoing = StreamGroup(door.payload_out)
    else:
        outgoing = place.join(info.stage_index, info.tp_index, 0, build.backend, device)
    progress.enter(Activity.STARTING)
    return EdgeReceiver(door.header_in, incoming, pin=device.type == "cuda"), EdgeSender(door.header_out, outgoing)


def _build(door: Door, build: Build, enter: _Enter, progress: ProgressWriter) -> Stage:
    torch.set_num_threads(build.threads)
    torch.manual_seed(build.seed)
    enter(Event.IMPORT)
    target = put_together(build.skeleton, read_tensors(door.memory, build.specs))
    door.memory.close()
    enter(Event.BUILD)
    with _telling(getattr(target, "loaded_bytes", None), progress):
        return build_stage(target, attrs.evolve(build.info, pid=os.getpid()))


@contextlib.contextmanager
def _telling(loaded: Callable[[], int] | None, progress: ProgressWriter) -> Generator[None]:
    """Meanwhile say, a few times a second, how many bytes have been loaded."""
    if loaded is None:
        yield
        return
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(0.1):
            with contextlib.suppress(RuntimeError):  # the model was changed while it was looked through: next time, then
                progress.loaded(loaded())

    thread = threading.Thread(target=tell, name="stageflow loading", daemon=True)
    thread.start()
    try:
        yield
        progress.loaded(loaded())
    finally:
        ended.set()
        thread.join()


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
        runner: Runner,
        receiver: EdgeReceiver,
        sender: EdgeSender,
        up: _Up,
        progress: ProgressWriter,
        enter: _Enter,
    ) -> None:
        self._runner = runner
        self._stage = runner.stage
        self._receiver = receiver
        self._sender = sender
        self._up = up
        self._progress = progress
        self._enter = enter
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
                    self._pass_on(*self._runner.forward(seq, *arrival.values), seq)
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
                    self._enter(Event.READY, Ready(self._stage.info))
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

    def _call(self, call_id: int, value: Packed) -> None:
        failed, result = self._runner.call(value)
        parts = [result[at : at + _PART] for at in range(0, len(result), _PART)]
        self._up.send(*(CallPart(call_id, len(result), failed, part) for part in parts))
