"""The nesting of a launch, from its first check to the last process reaped.

Rules of this file, from outside in:

* A plain nursery, the reaper: it waits for the processes and breaks the pipeline when one is lost. Only bounded work.
* A service nursery: reader, writer, watches. Its tasks live until the body has ended, whatever cancels the block.
* The user's body, in a cancel scope of its own, which a break cancels.

What comes out: an error of the body alone is that very exception; a broken pipeline is one ``PipelineBroken`` (or, before
the body, ``LaunchError``), raised from what the body raised; ``Cancelled``, ``KeyboardInterrupt`` and ``SystemExit`` are
untouched.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, final

import torch
import tricycle
import trio

from stageflow._frames import StageInfo
from stageflow._lifecycle import State
from stageflow.controller._interrupts import is_cancelled, is_interrupt, protected, to_the_end
from stageflow.controller._ledger import Ledger
from stageflow.controller._loading import show_loading
from stageflow.controller._logs import levels
from stageflow.controller._pipeline import Pipeline, make_pipeline
from stageflow.controller._places import choose_backend, choose_devices, choose_threads
from stageflow.controller._process import choose_start_method, fork_server_within
from stageflow.controller._ranks import Plan, Rank, Started, hand_over, late_hand_over, start_ranks, take_piece_apart
from stageflow.controller._stalls import StallWatch, late_start
from stageflow.controller._supervisor import Supervisor
from stageflow.controller._traffic import Listener, Reader, Writer
from stageflow.errors import LaunchError, StageflowError
from stageflow.observe import ProgressBoard
from stageflow.partition import cut
from stageflow.transport import EdgeReceiver, EdgeSender, StreamGroup

THREADS_S = 1.0
"""For reader and writer to end when they are told: only a header pipe that somebody else holds open can keep them."""


def make_plan(
    model: Any,
    pp: int,
    *,
    split: Any,
    balance: Any,
    example: Any,
    window: int | None,
    devices: str | torch.device | Sequence[str | torch.device],
    backend: str,
    threads: int | None,
    seed: int | None,
    start_method: str | None,
    start_timeout: float,
    stall_timeout: float,
    shutdown_timeout: float,
) -> Plan:
    """Check every argument of the launch and decide what it leaves open. Nothing is started here."""
    if isinstance(pp, bool) or not isinstance(pp, int) or pp < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"pp is the number of stages, an int of at least 1: found {pp!r}")
    if window is None:
        window = default_window(pp)
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"window is the most micro-batches in flight, an int of at least 1: found {window!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"seed is an int of at most 64 bits, or None for torch.initial_seed(): found {seed!r}")
    for name, seconds in (("start", start_timeout), ("stall", stall_timeout), ("shutdown", shutdown_timeout)):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name}_timeout is in seconds, above 0, math.inf for never: found {seconds!r}")
    pieces = cut(model, pp, split, balance, example, choose_threads(threads, pp))
    places = choose_devices(devices, pp)
    infos = tuple(
        StageInfo(stage_index=stage, num_stages=pp, device=places[stage], module_names=pieces[stage].module_names)
        for stage in range(pp)
    )
    return Plan(
        infos=infos,
        pieces=list(pieces),
        loads=tuple(piece.loads for piece in pieces),
        backend=choose_backend(backend, places),
        threads=choose_threads(threads, pp),
        seed=torch.initial_seed() if seed is None else seed,
        start_method=choose_start_method(start_method),
        window=window,
        start_timeout=start_timeout,
        stall_timeout=stall_timeout,
        shutdown_timeout=shutdown_timeout,
        environ=dict(os.environ),
        log_levels=levels(),
    )


def default_window(pp: int) -> int:
    """Micro-batches in flight: one computing and one waiting in each stage, so that no stage waits for a hand-over."""
    return 2 * pp


@final
class Launch(AbstractAsyncContextManager[Pipeline]):
    """What ``Pipeline.launch(...)`` returns: enter it with ``async with``. Nothing has been started before that."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._context: AbstractAsyncContextManager[Pipeline] | None = None

    async def __aenter__(self) -> Pipeline:
        if self._context is not None:
            raise RuntimeError("a launch is entered once: call Pipeline.launch(...) again for another pipeline")
        self._context = _run(self._plan)
        return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._context is not None
        return await self._context.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        state = "not entered" if self._context is None else "entered"
        return f"<launch of a pipeline of {len(self._plan.infos)} stages: {state}>"

    def _misuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("a pipeline lives in a block:  async with Pipeline.launch(model, pp=4) as pipe: ...")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no {name!r} before its block: async with Pipeline.launch(model, pp=4) as pipe: pipe.{name}")

    __await__ = __call__ = __enter__ = _misuse

    def __exit__(self, *_: Any) -> None:  # only so that a plain `with` gets to __enter__ and its sentence
        ...


@asynccontextmanager
@protected
async def _run(plan: Plan) -> AsyncGenerator[Pipeline]:
    directory = Path(tempfile.mkdtemp(prefix="stageflow-"))  # only this user may enter it
    try:
        async with _supervised(plan, directory) as pipe:
            yield pipe
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
@protected
async def _supervised(plan: Plan, directory: Path) -> AsyncGenerator[Pipeline]:
    board = ProgressBoard(directory / "progress", len(plan.infos), create=True)
    try:
        started = await _start(plan, directory)
    except BaseException:
        board.close()
        raise
    supervisor = Supervisor(plan, started.ranks, started.output, board)
    services: _Services | None = None
    error: BaseException | None = None
    try:
        services = _Services(plan, started, supervisor, board)
        async with trio.open_nursery() as reaper:
            for rank in started.ranks:
                reaper.start_soon(supervisor.watch, rank)
                reaper.start_soon(supervisor.listen, rank)
            reaper.start_soon(supervisor.settle)
            async with tricycle.open_service_nursery() as service_nursery:
                try:
                    services.start(service_nursery)
                    error = await _become_ready(services)
                    if error is None and supervisor.failure is None:
                        supervisor.launched = True
                        # Every rank has open what it needs of it; so nothing is left of it if this program is killed.
                        shutil.rmtree(directory, ignore_errors=True)
                        try:
                            with trio.CancelScope() as body:
                                supervisor.on_break(lambda _failure: body.cancel())
                                yield services.pipe
                        except trio.Cancelled:
                            raise
                        except BaseException as raised:
                            error = raised
                finally:
                    services.ledger.close(lambda: trio.ClosedResourceError("this pipeline's block has ended"))
                    interrupted = await supervisor.shut_down(services.ledger.send_end_of_stream)
                    interrupted |= await to_the_end(services.stop)
                    if interrupted and not isinstance(error, KeyboardInterrupt):
                        error = KeyboardInterrupt()
                    service_nursery.cancel_scope.cancel()
                    supervisor.stop_watching()
    except BaseException as raised:
        error = out_of_nurseries(raised, error)
    finally:
        _close_all(started, services, board)
    raise_outcome(supervisor.failure, error)


def out_of_nurseries(raised: BaseException, error: BaseException | None) -> BaseException:
    """What the body's error is, when this has come out of the nurseries around it.

    Raises:
        BaseException: what came out itself, if it is the caller's cancellation, or an error of our own.
    """
    if is_interrupt(raised):  # a Ctrl-C that was pending
        return error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
    if error is None or not is_cancelled(raised):
        raise raised
    return error


def raise_outcome(failure: StageflowError | None, error: BaseException | None) -> None:
    """Raise what comes out of a block: given what broke the pipeline, and what the body raised."""
    if failure is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
        if error is not None:
            raise error
    elif error is not None and type(error) is type(failure) and str(error) == str(failure):
        raise error  # a waiter's own copy of it, which shows the user's line that waited
    else:
        raise failure from error


async def _start(plan: Plan, directory: Path) -> Started:
    began = trio.current_time()
    try:
        with fork_server_within(plan.start_timeout):
            return await trio.to_thread.run_sync(start_ranks, plan, directory, limiter=trio.CapacityLimiter(1))
    except (OSError, EOFError, AssertionError) as error:  # the last is multiprocessing's, in a daemonic process
        why = repr(error)
        if trio.current_time() - began >= plan.start_timeout:
            why = f"the fork server had not started it after start_timeout={plan.start_timeout:g} s"
        raise LaunchError(f"a stage process could not be started: {why}", phase=State.STARTING.value) from error


class _Services:
    """What serves a pipeline from start to end: the reader, the writer, the watches."""

    def __init__(self, plan: Plan, started: Started, supervisor: Supervisor, board: ProgressBoard) -> None:
        self.plan = plan
        self.started = started
        self.supervisor = supervisor
        self.board = board
        sender = EdgeSender(started.header_out, StreamGroup(started.payload_out))
        receiver = EdgeReceiver(started.header_in, StreamGroup(started.payload_in))
        self.writer = Writer(sender, supervisor.transport_failed)
        self.ledger = Ledger(plan.window, self.writer)
        self.pipe = make_pipeline(self.ledger, started.ranks, board)
        listener = Listener(
            result=self.ledger.result,
            unreadable=self.ledger.unreadable,
            failed=self.ledger.stage_failed,
            warm=supervisor.warm.set,
            call=self.ledger.call_answered,
            said=supervisor.said,
            silent=supervisor.heard_all,
            transport=supervisor.transport_failed,
        )
        self.reader = Reader(receiver, [rank.up for rank in started.ranks], listener)
        self._ended: dict[Reader | Writer, trio.Event] = {self.reader: trio.Event(), self.writer: trio.Event()}
        supervisor.on_break(lambda failure: self.ledger.close(failure.copy))

    def start(self, nursery: trio.Nursery) -> None:
        for thread in (self.reader, self.writer):
            nursery.start_soon(self._run, thread)
        nursery.start_soon(StallWatch(self.supervisor, self.ledger, self.board, self.plan.stall_timeout).run)
        nursery.start_soon(self.ledger.watch_window)

    @protected
    async def _run(self, thread: Reader | Writer) -> None:
        # A limiter of its own for each, so that nobody's other threads can starve it. Left behind only if `stop` has waited
        # for it in vain.
        try:
            await trio.to_thread.run_sync(thread.run, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
        finally:
            self._ended[thread].set()

    async def stop(self) -> None:
        """End the threads."""
        self.writer.stop()
        self.reader.stop()
        with trio.move_on_after(THREADS_S):
            for ended in self._ended.values():
                await ended.wait()


async def _become_ready(services: _Services) -> BaseException | None:
    """Hand the model over, send the warm-up round the ring, wait for all ranks.

    Returns:
        What went wrong here rather than in a stage: an error of pickling the model, a time-out, a Ctrl-C. What went wrong
        in a stage is the supervisor's failure.
    """
    plan, supervisor = services.plan, services.supervisor
    problem: BaseException | None = None
    ready = False

    def give_up(error: BaseException) -> None:
        nonlocal problem
        problem = problem or error
        trying.cancel()

    @protected
    async def give(rank: Rank) -> None:
        try:
            # User code, which nothing can end: left behind if it never ends by itself. It holds nothing of ours.
            skeleton, tensors = await trio.to_thread.run_sync(
                take_piece_apart, rank, plan, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
            )
            not_pickled.discard(rank)
            await trio.to_thread.run_sync(hand_over, rank, plan, skeleton, tensors, limiter=trio.CapacityLimiter(1))
        except OSError:
            pass  # the rank is gone; its supervisor says why
        except Exception as error:
            give_up(error)

    @protected
    async def unblock() -> None:
        # The threads above are held up by ranks that don't read: only their end can end them.
        try:
            await trio.sleep_forever()
        finally:
            if not ready:
                supervisor.kill_all()

    @protected
    async def watch_the_clock() -> None:
        await supervisor.patience(plan.start_timeout, trio.Event())
        if not_pickled:
            give_up(late_hand_over(min(not_pickled, key=lambda rank: rank.info.rank), plan))
            return
        give_up(await late_start(supervisor.ranks, services.board, services.started.output, plan.start_timeout))

    not_pickled = set(supervisor.ranks)
    trying = trio.CancelScope()
    supervisor.on_break(lambda _failure: trying.cancel())
    services.ledger.send_warmup()
    try:
        with trying:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(unblock)
                nursery.start_soon(watch_the_clock)
                nursery.start_soon(show_loading, services.started.ranks, plan.loads, services.board)
                for rank in services.started.ranks:
                    nursery.start_soon(give, rank)
                await supervisor.all_ready.wait()
                await supervisor.warm.wait()
                ready = True
                nursery.cancel_scope.cancel()
    except BaseException as error:
        if not is_interrupt(error):
            raise
        problem = KeyboardInterrupt()
    plan.pieces.clear()
    return problem


def _close_all(started: Started, services: _Services | None, board: ProgressBoard) -> None:
    """Close everything that the controller holds. Every process has ended; one that has not is killed once more."""
    for rank in started.ranks:
        rank.kill()
    started.output.stop()
    if services is not None:
        services.reader.close()
        services.writer.close()
    for rank in started.ranks:
        rank.close()
    for connection in (started.header_in, started.header_out, started.payload_in, started.payload_out):
        connection.close()
    board.close()
