"""A pipeline in this process: the same public face, no processes, no threads, no devices. For fast unit tests.

Rules of this file:

* What is real is used: the ledger with window and tickets, the code that runs a stage, the packing of values. Only edges and
  processes are left out: one task carries micro-batches from stage to stage, one after the other.
* Each stage works on its own copy of its piece of the model, and values are packed on every edge; so what couldn't cross a
  process border, or would be shared by mistake, shows here too.
* No clock but Trio's: with ``trio.testing.MockClock`` a stall of five minutes takes no time.
"""

from __future__ import annotations

import signal as signals
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import attrs
import tricycle
import trio
from torch import nn

from stageflow._frames import Call, EndOfStream, Failed, MicroBatch, RingFrame, StageInfo, Warmup, decode
from stageflow._lifecycle import State
from stageflow.controller import Ledger, Pipeline, Plan, make_pipeline, make_plan, out_of_nurseries, raise_outcome
from stageflow.errors import LaunchError, PipelineBroken, StageDied, StageflowError, StageStalled
from stageflow.observe import ProgressBoard
from stageflow.partition import Balance, Split
from stageflow.stage import Reporter, Runner, Stage, build_stage
from stageflow.testing._faults import Delay, Exit, Fault, Hang, Kill, faults_of
from stageflow.transport import Packed, from_bytes, put_together, take_apart, to_bytes, unpack


def launch_in_memory(
    model: Any,
    pp: int,
    *,
    split: Split | Callable[[StageInfo], nn.Module] = "auto",
    balance: Balance | Literal["parameters", "time", "activations"] | Sequence[float] = "parameters",
    example: Any = None,
    window: int | None = None,
    devices: Any = None,
    backend: Any = None,
    threads: Any = None,
    seed: int | None = None,
    start_method: Any = None,
    start_timeout: float = 120.0,
    stall_timeout: float = 300.0,
    shutdown_timeout: float = 5.0,
) -> AbstractAsyncContextManager[Pipeline]:
    """``Pipeline.launch`` without processes: the stages run in this one, on the CPU, in the Trio loop.

        async with launch_in_memory(model, pp=4) as pipe:
            y = await pipe(x)

    Or for code that launches by itself: ``monkeypatch.setattr(Pipeline, "launch", launch_in_memory)``.

    Same results, errors, order, window, calls and statistics. Different: nothing runs at the same time, a forward blocks the
    Trio loop, and code that ends or blocks its process (``os._exit``, a crash, an endless loop) does so to this one. Faults
    of ``inject`` are safe: an ``Exit`` or ``Kill`` comes out as ``StageDied``, a ``Hang`` as ``StageStalled`` after
    ``stall_timeout`` on Trio's clock. Random numbers come from this process's generators.

    Args:
        model: as for ``Pipeline.launch``, and so are all others. Arguments that say where and by what means stages run
            (``devices``, ``backend``, ``threads``, ``start_method``) are taken and mean nothing.

    Returns:
        An async context manager, which gives a ``Pipeline``.

    Raises:
        PartitionError, ValueError, LaunchError, StageDied, StageStalled: as ``Pipeline.launch`` does.
    """
    del devices, backend, threads, start_method
    plan = make_plan(
        model,
        pp,
        split=split,
        balance=balance,
        example=example,
        window=window,
        devices="cpu",
        backend="auto",
        threads=None,
        seed=seed,
        start_method=None,
        start_timeout=start_timeout,
        stall_timeout=stall_timeout,
        shutdown_timeout=shutdown_timeout,
    )
    return _run(plan)


@attrs.frozen
class _Place:
    """What the pipeline's face needs to know of a stage."""

    info: StageInfo


@asynccontextmanager
async def _run(plan: Plan) -> AsyncGenerator[Pipeline]:
    board = ProgressBoard(None, len(plan.infos))
    try:
        ring = _Ring(plan, board)
        error: BaseException | None = None
        try:
            async with tricycle.open_service_nursery() as nursery:
                nursery.start_soon(ring.run)
                nursery.start_soon(ring.ledger.watch_window)
                try:
                    with trio.CancelScope() as ring.body:
                        yield make_pipeline(ring.ledger, [_Place(runner.stage.info) for runner in ring.runners], board)
                except trio.Cancelled:
                    raise
                except BaseException as raised:
                    error = raised
                finally:
                    ring.ledger.close(lambda: trio.ClosedResourceError("this pipeline's block has ended"))
                    nursery.cancel_scope.cancel()
        except BaseException as raised:
            error = out_of_nurseries(raised, error)
    finally:
        board.close()
    raise_outcome(ring.failure, error)


class _Ring:
    """All stages, and the one task that takes the place of edges, reader and writer."""

    def __init__(self, plan: Plan, board: ProgressBoard) -> None:
        self.failure: StageflowError | None = None
        self.body: trio.CancelScope | None = None
        self._stall_timeout = plan.stall_timeout
        self._send, self._receive = trio.open_memory_channel[tuple[RingFrame, tuple[Packed | None, ...]]](float("inf"))
        self.ledger = Ledger(plan.window, self)
        self.runners = [self._build(plan, info, board) for info in plan.infos]
        plan.pieces.clear()

    def put(self, frame: RingFrame, *values: Packed | None) -> None:
        """Send a frame into the first stage, for the ledger."""
        self._send.send_nowait((frame, values))

    def _build(self, plan: Plan, info: StageInfo, board: ProgressBoard) -> Runner:
        reporter = Reporter(info)
        piece = plan.pieces[info.stage_index]
        reporter.phase = State.IMPORTING.value
        try:
            skeleton, tensors = take_apart(piece.target)
            target = put_together(skeleton, [tensor.detach().clone() for tensor in tensors])
            reporter.phase = State.BUILDING.value
            stage = build_stage(target, info)
        except Exception as error:
            report = reporter.report(error)
            raise LaunchError(
                f"{info.label} raised {report.remote_type} in phase {report.phase!r}: {report.text}",
                stage_index=info.stage_index,
                tp_index=info.tp_index,
                rank=info.rank,
                phase=report.phase,
                remote_type=report.remote_type,
                remote_traceback=report.traceback,
            ) from error
        reporter.phase = State.SERVING.value
        vars(stage)["in_memory"] = True
        return Runner(stage, unpack_tuples=piece.unpack, progress=board.writer(info.rank), reporter=reporter)

    async def run(self) -> None:
        """Carry frames through the stages, in order, until the block ends or a stage is lost."""
        stage: Stage | None = None
        try:
            async for frame, values in self._receive:
                await trio.lowlevel.checkpoint()
                match frame:
                    case MicroBatch(seq=seq):
                        at: MicroBatch | Failed = frame
                        passed = list(values)
                        for runner in self.runners:
                            stage = runner.stage
                            if (lost := await self._faults(stage, seq)) is not None:
                                self._break(lost)
                                return
                            at, passed = runner.forward(seq, *(each and _carried(each) for each in passed))  # pyright: ignore[reportArgumentType]
                            if isinstance(at, Failed):
                                self.ledger.stage_failed(seq, at.report)
                                break
                        else:
                            self._give_back(seq, passed[0])
                    case Call() as call:
                        for runner in self.runners:
                            stage = runner.stage
                            if stage.rank in call.ranks and values[0] is not None:
                                self._answer(call, stage.rank, *runner.call(_carried(values[0])))
                    case Failed() | EndOfStream() | Warmup():
                        pass
        except (SystemExit, KeyboardInterrupt) as ending:
            if stage is None or isinstance(ending, KeyboardInterrupt):
                raise
            code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            self._break(_death(stage, f"exited with code {code}", exitcode=code))

    async def _faults(self, stage: Stage, seq: int) -> StageflowError | None:
        """Commit what was injected, as far as it concerns processes; returns what breaks the pipeline, if anything."""
        faults = faults_of(stage)
        due: list[Fault] = faults.due(seq) if faults is not None else []
        for fault in due:
            match fault:
                case Delay(seconds=seconds):
                    await trio.sleep(seconds)
                case Exit(code=code):
                    return _death(stage, f"exited with code {code}", exitcode=code, seq=seq)
                case Kill(signal=signal) if signal != signals.SIGSTOP:
                    name = signals.Signals(signal).name
                    return _death(stage, f"was killed by {name}", exitcode=-signal, signal=name, seq=seq)
                case Kill() | Hang():
                    await trio.sleep(self._stall_timeout)
                    return StageStalled(
                        f"{stage.info.label} (rank {stage.rank}) made no progress for {self._stall_timeout:.1f} s, "
                        f"computing micro-batch {seq} (stall_timeout={self._stall_timeout:g} s)",
                        **_facts(stage),
                        seq=seq,
                        stacks={stage.rank: "".join(traceback.format_stack())},
                    )
                case _:  # Raise: the hook on the module does it
                    pass
        return None

    def _give_back(self, seq: int, value: Packed | None) -> None:
        try:
            assert value is not None
            result = unpack(_carried(value))
        except BaseException as error:
            self.ledger.unreadable(seq, error)
        else:
            self.ledger.result(seq, result)

    def _answer(self, call: Call, rank: int, failed: bool, data: bytes) -> None:
        if failed:
            self.ledger.call_answered(call.call_id, rank, None, decode(data).report, None)
            return
        try:
            value = unpack(from_bytes(bytearray(data)))
        except BaseException as problem:
            self.ledger.call_answered(call.call_id, rank, None, None, problem)
        else:
            self.ledger.call_answered(call.call_id, rank, value, None, None)

    def _break(self, failure: StageflowError) -> None:
        self.failure = failure
        self.ledger.close(failure.copy)
        if self.body is not None:
            self.body.cancel()


def _carried(value: Packed) -> Packed:
    """The same value at the other end of an edge: memory of its own."""
    return from_bytes(bytearray(to_bytes(value)))


def _facts(stage: Stage) -> dict[str, Any]:
    info = stage.info
    return {
        "stage_index": info.stage_index,
        "tp_index": info.tp_index,
        "rank": info.rank,
        "phase": State.SERVING.value,
    }


def _death(stage: Stage, how: str, **facts: Any) -> PipelineBroken:
    seq = facts.get("seq")
    where = "" if seq is None else f" at micro-batch {seq}"
    text = f"{stage.info.label} (rank {stage.rank}, in memory) {how} in phase {State.SERVING.value!r}{where}"
    return StageDied(text, **_facts(stage), **facts)
