"""The public face: what a user holds inside ``async with Pipeline.launch(...) as pipe``.

Rules of this file:

* A pipeline belongs to one Trio run; every method is called in it. Async methods are checkpoints, ``x_nowait`` and
  properties never wait.
* The face only: what is in flight is the ledger's, who is alive the supervisor's.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, final

import torch
import trio
from torch import nn

from stageflow._frames import StageInfo
from stageflow.controller._batches import join_batch, split_batch
from stageflow.controller._ledger import Ledger
from stageflow.controller._map import MapContext
from stageflow.controller._tickets import Ticket
from stageflow.observe import ProgressBoard, Statistics, stage_statistics
from stageflow.partition import Balance, Split

_MADE_BY_LAUNCH = object()


class Place(Protocol):
    """A rank, as far as the face of a pipeline shows it."""

    @property
    def info(self) -> StageInfo:
        """Its facts."""
        ...


def make_pipeline(ledger: Ledger, places: Sequence[Place], board: ProgressBoard) -> Pipeline:
    """The face of a pipeline that has been launched; ``places`` are its ranks, in order."""
    return Pipeline(made_by=_MADE_BY_LAUNCH, ledger=ledger, places=places, board=board)


@final
class Pipeline:
    """A module cut into stages, each a supervised process; alive inside its ``async with`` block and nowhere else.

    Made by ``Pipeline.launch`` alone.
    """

    def __init__(self, *, made_by: object = None, **parts: Any) -> None:
        if made_by is not _MADE_BY_LAUNCH:
            raise TypeError("a Pipeline is made by its launch:  async with Pipeline.launch(model, pp=4) as pipe: ...")
        self._ledger: Ledger = parts["ledger"]
        self._ranks: Sequence[Place] = parts["places"]
        self._board: ProgressBoard = parts["board"]

    @staticmethod
    def launch(
        model: Any,
        pp: int,
        *,
        split: Split | Callable[[StageInfo], nn.Module] = "auto",
        balance: Balance | Literal["parameters", "time", "activations"] | Sequence[float] = "parameters",
        example: Any = None,
        window: int | None = None,
        devices: str | torch.device | Sequence[str | torch.device] = "auto",
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

        The block is entered when every stage is ready. When it is left, in whatever way, no stage process is left: by the
        end of the stream and ``shutdown_timeout``, else by SIGTERM, else by SIGKILL. No wait here is without a bound.
        Stages run under ``torch.inference_mode()``; modules keep the train or eval mode they come in.

        Args:
            model: an ``nn.Sequential``, a list of ``pp`` modules, a model of transformers, any module together with an
                ``example``, or a callable ``build(stage: StageInfo) -> nn.Module`` that is run in the stage process (so the
                weights never lie here).
                A stage's output is the next one's argument; of a list or ``build``, a plain tuple becomes its arguments.
            pp: number of stages.
            split: where to cut. ``"auto"``, as ``balance`` says; the number of layers of each stage, ``[8, 8, 8, 6]``; the
                names where stages but the first begin, ``["layers.8", "layers.16"]``, or torch's
                ``{"layers.8": SplitPoint.BEGINNING}``; the names in each stage, ``[["0", "1"], ["2"]]``; the modules of the
                model where stages but the first begin. Or the stages themselves: ``pp`` modules, or ``build(stage)``.
            balance: what ``split="auto"`` makes even: ``"parameters"``, the bytes of each stage; ``"time"``, measured on
                the example; ``"activations"``, the bytes of tensors made on the way; one number for each layer; or a
                ``Balance``, for devices of unequal speed or memory as well.
            example: arguments of the model's forward, to see on the meta device what each of its modules needs: a tensor, a
                tuple of arguments, a dict of keyword arguments, or ``(args, kwargs)``. Only shapes and dtypes matter.
                Default: for transformers' models, what their config tells.
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
            balance=balance,
            example=example,
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

    # ---- one micro-batch ------------------------------------------------------------------------------------------------

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
            A ticket. Awaiting it gives the result. It holds its slot until then, or until it is let go, so a task that
            submits more than ``window`` micro-batches before it awaits a ticket waits for itself.
        """
        ticket = await self._ledger.submit(args, kwargs, stage_kwargs)
        ticket.owned_by(trio.lowlevel.current_task())
        return ticket

    def submit_nowait(self, *args: Any, stage_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> Ticket:
        """Send one micro-batch if there is a slot, as ``submit`` does.

        Raises:
            trio.WouldBlock: the window is full, or others wait for a slot.
        """
        ticket = self._ledger.submit_nowait(args, kwargs, stage_kwargs)
        ticket.owned_by(trio.lowlevel.current_task())
        return ticket

    # ---- many -----------------------------------------------------------------------------------------------------------

    def map(
        self, inputs: Iterable[Any] | AsyncIterable[Any], *, stage_kwargs: Mapping[str, Any] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        """Run a stream of micro-batches, one argument each, with the window full and back-pressure on the source.

            async with pipe.map(batches) as outputs:
                async for y in outputs: ...

        Results come in order. A stage that raised for one raises ``StageError`` in its place; iterate again to go on. An
        error of the source comes after the results of what it gave before. Leaving the block early drops what is in flight.

        Args:
            inputs: a plain iterable is taken from in the Trio thread: one that blocks belongs in an async iterator.
            stage_kwargs: for every micro-batch of the stream; see ``pipe(...)``.

        Returns:
            An async context manager, which gives an async iterator.
        """
        self._ledger.check()
        return MapContext(lambda item: self._ledger.submit((item,), {}, stage_kwargs), inputs)

    def starmap(
        self, inputs: Iterable[Any] | AsyncIterable[Any], *, stage_kwargs: Mapping[str, Any] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        """``map`` for micro-batches of several arguments: each item is a tuple, given as positional arguments."""
        self._ledger.check()
        return MapContext(lambda item: self._ledger.submit(tuple(item), {}, stage_kwargs), inputs)

    async def run_batch(
        self, *args: Any, n_microbatches: int = 8, stage_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Split a batch on dim 0, pipeline the parts, join their results: torch's ``schedule.eval()``.

        Args:
            *args: every tensor, also inside containers, is split; dim 0 must be the same for all. The rest goes to each.
            n_microbatches: number of parts, at most the number of rows; their sizes differ by one at most. Default 8.
            stage_kwargs: given to every micro-batch as they are; see ``pipe(...)``.
            **kwargs: as ``args``.

        Returns:
            The results joined on dim 0, in the same containers.

        Raises:
            ValueError: nothing to split, unequal first dimensions, or results that can't be joined.
            StageError: of the first micro-batch that failed; the others are dropped.
        """
        self._ledger.check()
        parts = split_batch(args, kwargs, n_microbatches)
        async with MapContext(lambda part: self._ledger.submit(part[0], part[1], stage_kwargs), parts) as outputs:
            return join_batch([value async for value in outputs])

    # ---- calls ----------------------------------------------------------------------------------------------------------

    async def call(self, fn: Callable[..., Any], *args: Any, stages: Sequence[int] | int | None = None) -> list[Any]:
        """Run ``fn(stage, *args)`` in the stage processes, at this place of the stream.

        Every rank runs it after the micro-batches submitted before it and before those submitted after. It takes no slot, so
        it works while the window is full; of calls at most ``window`` are on their way, or eight if that is more. ``fn``
        runs under ``torch.inference_mode()``; ``stage`` is a ``Stage``. If the wait is cancelled, ``fn`` runs all the same.

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
        self._ledger.check()
        wanted = range(self._ranks[0].info.num_stages) if stages is None else [stages] if isinstance(stages, int) else stages
        ranks = tuple(sorted(rank.info.rank for rank in self._ranks if rank.info.stage_index in set(wanted)))
        if missing := set(wanted) - {rank.info.stage_index for rank in self._ranks}:
            raise ValueError(f"stages are 0 … {self._ranks[0].info.num_stages - 1}: found {sorted(missing)}. Change stages")
        return await self._ledger.call(fn, args, ranks)

    # ---- looking --------------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[StageInfo, ...]:
        """The ranks' facts, in order of rank: place, device, pid, module names, parameters, bytes."""
        return tuple(rank.info for rank in self._ranks)

    def statistics(self) -> Statistics:
        """A snapshot: the window, counts, and what each stage does. Waits for nothing, also when a stage hangs."""
        ledger = self._ledger
        return Statistics(
            window=ledger.window.size,
            in_flight=ledger.window.used,
            waiting_to_submit=ledger.window.waiting,
            submitted=ledger.submitted,
            done=ledger.done,
            failed=ledger.failed,
            dropped=ledger.dropped,
            stages=tuple(
                stage_statistics(rank.info.stage_index, rank.info.rank, self._board.read(rank.info.rank))
                for rank in self._ranks
            ),
        )

    def __repr__(self) -> str:
        window = self._ledger.window
        state = f"{window.used} of {window.size} in flight" if self._ledger.state == "open" else self._ledger.state
        return f"<Pipeline of {len(self._ranks)} stages on {', '.join(sorted({i.device for i in self.stages}))}: {state}>"
