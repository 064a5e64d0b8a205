"""The public face: what a user holds inside ``async with Pipeline.launch(...) as pipe``.

Rules of this file:

* A pipeline belongs to one Trio run; every method is called in it. Async methods are checkpoints, ``x_nowait`` and
  properties never wait.
* Nothing is sent here: a micro-batch is packed, numbered and put to the writer; its result comes from the reader.
* A wait ends by its result, by the caller's cancellation, or by the pipeline's breaking or closing. There is no other way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, final

import attrs
import torch
import trio

from stageflow._frames import Call, MicroBatch, Report, StageInfo
from stageflow.controller._batches import join_batch, split_batch
from stageflow.controller._map import MapContext
from stageflow.controller._ranks import Rank
from stageflow.controller._tickets import Entry, Outcome, Ticket
from stageflow.controller._traffic import Writer
from stageflow.controller._window import Window
from stageflow.errors import StageError
from stageflow.observe import ProgressBoard, Statistics, stage_statistics
from stageflow.transport import pack

logger = logging.getLogger("stageflow")

SELF_WAIT_S = 5.0
"""How long a task may wait for slots that it holds itself before it is told."""

MADE_BY_LAUNCH = object()


@attrs.define(eq=False)
class _Calling:
    """One ``call`` on its way: what is still missing."""

    missing: set[int]
    values: dict[int, Any] = attrs.field(factory=dict[int, Any])
    errors: dict[int, Exception] = attrs.field(factory=dict[int, Exception])
    done: trio.Event = attrs.field(factory=trio.Event)


@final
class Pipeline:
    """A module cut into stages, each a supervised process; alive inside its ``async with`` block and nowhere else.

    Made by ``Pipeline.launch`` alone.
    """

    def __init__(self, *, made_by: object = None, **parts: Any) -> None:
        if made_by is not MADE_BY_LAUNCH:
            raise TypeError("a Pipeline is made by its launch:  async with Pipeline.launch(model, pp=4) as pipe: ...")
        self._window: Window = parts["window"]
        self._writer: Writer = parts["writer"]
        self._ranks: Sequence[Rank] = parts["ranks"]
        self._board: ProgressBoard = parts["board"]
        self._token = trio.lowlevel.current_trio_token()
        self._entries: dict[int, Entry] = {}
        """Every micro-batch that holds a slot: in flight, or its result not yet taken."""
        self._calls: dict[int, _Calling] = {}
        self._next_seq = 0
        self._next_call = 0
        self._done = self._failed = self._dropped = 0
        self._closed: Callable[[], BaseException] | None = None

    @staticmethod
    def launch(
        model: Any,
        pp: int,
        *,
        split: Literal["auto"] | Sequence[int] = "auto",
        window: int | None = None,
        devices: str | Sequence[str | torch.device] = "auto",
        backend: str = "auto",
        threads: int | None = None,
        seed: int | None = None,
        start_method: str | None = None,
        start_timeout: float = 120.0,
        stall_timeout: float = 300.0,
        shutdown_timeout: float = 5.0,
    ) -> AbstractAsyncContextManager[Pipeline]:
        """Cut a model into stages, start a process for each, and hold them for as long as the block lasts.

            async with Pipeline.launch(model, pp=4) as pipe:
                y = await pipe(x)

        The block is entered when every stage is ready. When it is left, in whatever way, no stage process is left: by the end
        of the stream and ``shutdown_timeout``, else by SIGTERM, else by SIGKILL. No wait here is without a bound.
        Stages run under ``torch.inference_mode()``; modules keep the train or eval mode they come in.

        Args:
            model: an ``nn.Sequential``, a list of ``pp`` modules, a transformers causal LM of the Llama kind, or a callable
                ``build(stage: StageInfo) -> nn.Module`` that is run in the stage process (so the weights never lie here).
                A stage's output is the next one's argument; of a list or ``build``, a plain tuple becomes its arguments.
            pp: number of stages.
            split: ``"auto"``, balanced by bytes of parameters; or the number of layers of each stage, ``[8, 8, 8, 6]``.
            window: the most micro-batches in flight. Default: ``2 * pp``.
            devices: ``"auto"`` (GPUs in turn; the CPU where there is none), one device, or one for each rank.
            backend: between stages. ``"auto"``: NCCL if each rank has a GPU of its own, else gloo.
            threads: torch threads of each stage. Default: cores ÷ ranks, at least 1.
            seed: of the stages' random generators; stage k is seeded with ``seed + k``. Default: ``torch.initial_seed()``.
            start_method: ``"forkserver"`` (default where the platform has it) or ``"spawn"``.
            start_timeout: seconds for all stages to become ready.
            stall_timeout: seconds without progress of any stage, while work is assigned, after which the pipeline is broken
                with ``StageStalled``. ``math.inf`` for never, e.g. under a debugger.
            shutdown_timeout: seconds for the stages to finish what is in flight when the block is left.

        Returns:
            An async context manager; nothing is started before it is entered. It gives the pipeline.

        Raises:
            PartitionError: the model can't be cut so (at once, on the call).
            ValueError: another argument is out of its range (at once, on the call).
            LaunchError: a stage did not become ready (on entering). Everything that had been started is gone.
            StageDied, StageStalled, PipelineBroken: a stage was lost (on leaving, whatever the body does meanwhile).
        """
        from stageflow.controller._launch import Launch, make_plan  # the launch makes pipelines: it is the floor above

        plan = make_plan(
            model,
            pp,
            split=split,
            window=window,
            devices=devices,
            backend=backend,
            threads=threads,
            seed=seed,
            start_method=start_method,
            start_timeout=start_timeout,
            stall_timeout=stall_timeout,
            shutdown_timeout=shutdown_timeout,
        )
        return Launch(plan)

    # ---- one micro-batch --------------------------------------------------------------------------------------------------

    async def __call__(self, *args: Any, stage_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Run one micro-batch through the stages, as the module's own call.

        Waits for a slot of the window, then for the result. Input tensors must not be changed until it is there. If the wait
        is cancelled, the micro-batch is not recalled: its result is dropped when it arrives, and its slot is free then.

        Args:
            *args: the first stage's positional arguments; tensors on any device, anything picklable.
            stage_kwargs: small values that every stage's forward receives as keyword arguments. Default: none.
            **kwargs: the first stage's keyword arguments.

        Returns:
            What the last stage returned. Its tensors are in host memory, with no autograd history.

        Raises:
            StageError: a stage's forward raised for this micro-batch. The pipeline lives on.
            StageDied, StageStalled, PipelineBroken: the pipeline is lost.
            trio.ClosedResourceError: the pipeline's block has ended.
            Exception: what pickling an argument raised, or unpickling the result.
        """
        return await (await self.submit(*args, stage_kwargs=stage_kwargs, **kwargs))

    async def submit(self, *args: Any, stage_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> Ticket:
        """Wait for a slot of the window and send one micro-batch; arguments and errors as for ``pipe(...)``.

        Returns:
            A ticket: ``await`` it for the result. It holds its slot until then, or until it is let go: a task that submits
            more than ``window`` micro-batches before it awaits a ticket waits for itself.
        """
        ticket = await self._feed(args, kwargs, stage_kwargs)
        ticket._entry.owner = trio.lowlevel.current_task()  # pyright: ignore[reportPrivateUsage]
        return ticket

    async def _feed(self, args: tuple[Any, ...], kwargs: dict[str, Any], stage_kwargs: Mapping[str, Any] | None) -> Ticket:
        self._check()
        await self._window.acquire()
        return self._send(args, kwargs, stage_kwargs)

    def submit_nowait(self, *args: Any, stage_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> Ticket:
        """Send one micro-batch if there is a slot, as ``submit`` does.

        Raises:
            trio.WouldBlock: the window is full, or others wait for a slot.
        """
        self._check()
        self._window.acquire_nowait()
        return self._send(args, kwargs, stage_kwargs)

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any], stage_kwargs: Mapping[str, Any] | None) -> Ticket:
        """Pack and put; a slot has been taken for it."""
        try:
            value = pack((args, kwargs))
            extra = pack(dict(stage_kwargs)) if stage_kwargs else None
        except BaseException:
            self._window.release()
            raise
        seq = self._next_seq
        self._next_seq += 1
        entry = self._entries[seq] = Entry(seq, self._released)
        self._writer.put(MicroBatch(seq), value, extra)
        return Ticket(entry, self._token)

    # ---- many -------------------------------------------------------------------------------------------------------------

    def map(self, inputs: Iterable[Any] | AsyncIterable[Any], *, stage_kwargs: Mapping[str, Any] | None = None) -> MapContext:
        """Run a stream of micro-batches, one argument each, with the window full and back-pressure on the source.

            async with pipe.map(batches) as outputs:
                async for y in outputs: ...

        Results come in order. A stage that raised for one raises ``StageError`` in its place; iterate again to go on. An error
        of the source comes after the results of what it gave before. Leaving the block early drops what is in flight.

        Args:
            inputs: a plain iterable is taken from in the Trio thread: one that blocks belongs in an async iterator.
            stage_kwargs: for every micro-batch of the stream; see ``pipe(...)``.

        Returns:
            An async context manager, which gives an async iterator.
        """
        self._check()
        return MapContext(lambda item: self._feed((item,), {}, stage_kwargs), inputs)

    def starmap(self, inputs: Iterable[Any] | AsyncIterable[Any], *, stage_kwargs: Mapping[str, Any] | None = None) -> MapContext:
        """``map`` for micro-batches of several arguments: each item is a tuple, given as positional arguments."""
        self._check()
        return MapContext(lambda item: self._feed(tuple(item), {}, stage_kwargs), inputs)

    async def run_batch(
        self, *args: Any, n_microbatches: int = 8, stage_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Split a batch on dim 0, pipeline the parts, join their results: torch's ``schedule.eval()``.

        Args:
            *args: every tensor in it, also inside containers, is split; dim 0 must be the same for all. The rest goes to each.
            n_microbatches: number of parts, at most the number of rows; their sizes differ by one at most. Default 8.
            stage_kwargs: given to every micro-batch as they are; see ``pipe(...)``.
            **kwargs: as ``args``.

        Returns:
            The results joined on dim 0, in the same containers.

        Raises:
            ValueError: nothing to split, unequal first dimensions, or results that can't be joined.
            StageError: of the first micro-batch that failed; the others are dropped.
        """
        self._check()
        parts = split_batch(args, kwargs, n_microbatches)
        async with MapContext(lambda part: self._feed(part[0], part[1], stage_kwargs), parts) as outputs:
            return join_batch([value async for value in outputs])

    # ---- calls ------------------------------------------------------------------------------------------------------------

    async def call(self, fn: Callable[..., Any], *args: Any, stages: Sequence[int] | int | None = None) -> list[Any]:
        """Run ``fn(stage, *args)`` in the stage processes, at this place of the stream.

        Every rank runs it after the micro-batches submitted before it and before those submitted after. It takes no slot, so
        it works while the window is full. ``fn`` runs under ``torch.inference_mode()``; ``stage`` is a ``Stage``.
        If the wait is cancelled, ``fn`` runs all the same.

        Args:
            fn: any callable that cloudpickle can send; lambdas and functions of ``__main__`` work.
            *args: sent along.
            stages: stage indices to run it on. Default: all.

        Returns:
            What it returned, in the order of ranks, of the ranks that ran it. Tensors in host memory.

        Raises:
            StageError: ``fn`` raised; that of the lowest rank, the others in ``secondary``. The pipeline lives on.
            ValueError: a stage that does not exist.
            StageDied, StageStalled, PipelineBroken, trio.ClosedResourceError: as for ``pipe(...)``.
        """
        self._check()
        wanted = range(self._ranks[0].info.num_stages) if stages is None else [stages] if isinstance(stages, int) else stages
        ranks = tuple(sorted(rank.info.rank for rank in self._ranks if rank.info.stage_index in set(wanted)))
        if missing := set(wanted) - {rank.info.stage_index for rank in self._ranks}:
            raise ValueError(f"stages are 0 … {self._ranks[0].info.num_stages - 1}: found {sorted(missing)}. Change stages")
        value = pack((fn, args))
        if not ranks:
            await trio.lowlevel.checkpoint()
            return []
        call_id = self._next_call
        self._next_call += 1
        calling = self._calls[call_id] = _Calling(set(ranks))
        self._writer.put(Call(call_id, ranks), value)
        await calling.done.wait()
        if calling.missing:
            self._check()
        if calling.errors:
            first, *others = (calling.errors[rank] for rank in sorted(calling.errors))
            if isinstance(first, StageError):
                first.secondary = tuple(error for error in others if isinstance(error, StageError))
            raise first
        return [calling.values[rank] for rank in ranks]

    # ---- looking ------------------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[StageInfo, ...]:
        """The ranks' facts, in order of rank: place, device, pid, module names, parameters, bytes."""
        return tuple(rank.info for rank in self._ranks)

    def statistics(self) -> Statistics:
        """A snapshot: the window, counts, and what each stage does. Waits for nothing, also when a stage hangs."""
        return Statistics(
            window=self._window.size,
            in_flight=self._window.used,
            waiting_to_submit=self._window.waiting,
            submitted=self._next_seq,
            done=self._done,
            failed=self._failed,
            dropped=self._dropped,
            stages=tuple(
                stage_statistics(rank.info.stage_index, rank.info.rank, self._board.read(rank.info.rank)) for rank in self._ranks
            ),
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._window.used} of {self._window.size} in flight"
        return f"<Pipeline of {len(self._ranks)} stages on {', '.join(sorted({i.device for i in self.stages}))}: {state}>"

    def _check(self) -> None:
        try:
            ours = trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            ours = False
        if not ours:
            raise RuntimeError(
                "this pipeline belongs to another Trio run or thread. Call it from the run that launched it, "
                "e.g. by trio.from_thread.run(pipe, x)"
            )
        if self._closed is not None:
            raise self._closed()

    # ---- for the launch and the reader --------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._calls) or any(entry.outcome is None for entry in self._entries.values())

    async def _watch_window(self) -> None:
        """Say so when a task waits for a slot that only itself could give back. A service of the launch."""
        full_since, seen = trio.current_time(), -1
        while True:
            await trio.sleep(SELF_WAIT_S / 5)
            owners = {entry.owner for entry in self._entries.values() if entry.waiter is None and entry.outcome is not None}
            owner = next(iter(owners), None)
            alone = len(owners) == 1 and len(self._entries) == self._window.size and owner in self._window.waiting_tasks()
            if not alone or owner is None or seen != self._next_seq:
                full_since, seen = trio.current_time(), self._next_seq
            elif trio.current_time() - full_since >= SELF_WAIT_S:
                logger.warning(
                    "task %r waits for a slot of the window (%d) and holds all of them itself, by tickets whose results have "
                    "arrived. It has to await a ticket, or let go of one, before it can submit more; or use pipe.map",
                    owner.name,
                    self._window.size,
                )
                full_since = math.inf

    def _released(self, entry: Entry) -> None:
        self._entries.pop(entry.seq, None)
        self._window.release()

    def _arrived(self, seq: int, outcome: Outcome) -> None:
        entry = self._entries.get(seq)
        if entry is None or entry.outcome is not None:  # closed meanwhile
            return
        self._done += outcome.error is None
        self._failed += outcome.error is not None
        self._dropped += entry.dropped
        entry.arrive(outcome)

    def _result(self, seq: int, value: Any) -> None:
        self._arrived(seq, Outcome(value))

    def _unreadable(self, seq: int, error: Exception) -> None:
        error.add_note(f"stageflow: the result of micro-batch {seq} came back, but could not be unpickled in this process")
        self._arrived(seq, Outcome(error=lambda: error))

    def _stage_failed(self, seq: int, report: Report) -> None:
        self._arrived(seq, Outcome(error=_stage_error(report).copy))

    def _call_answered(self, call_id: int, rank: int, value: Any, report: Report | None, problem: Exception | None) -> None:
        calling = self._calls.get(call_id)
        if calling is None:
            return
        if report is not None:
            calling.errors[rank] = _stage_error(report)
        elif problem is not None:
            problem.add_note(f"stageflow: what the call returned on rank {rank} could not be unpickled in this process")
            calling.errors[rank] = problem
        else:
            calling.values[rank] = value
        calling.missing.discard(rank)
        if not calling.missing:
            del self._calls[call_id]
            calling.done.set()

    def _close(self, error: Callable[[], BaseException]) -> None:
        """End every wait, now and from now on, with ``error()``. The first reason stays."""
        if self._closed is not None:
            return
        self._closed = error
        self._window.close(error)
        for entry in list(self._entries.values()):
            entry.arrive(Outcome(error=error))
        for calling in self._calls.values():
            calling.done.set()
        self._calls.clear()



def _stage_error(report: Report) -> StageError:
    what = "its call" if report.seq is None else f"micro-batch {report.seq}"
    return StageError(
        f"stage {report.stage_index} raised {report.remote_type} for {what}: {report.text}",
        stage_index=report.stage_index,
        tp_index=report.tp_index,
        rank=report.rank,
        seq=report.seq,
        phase=report.phase,
        remote_type=report.remote_type,
        remote_traceback=report.traceback,
    )
