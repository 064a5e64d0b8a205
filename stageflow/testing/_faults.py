"""Faults on purpose: at a stage, for a micro-batch.

Rules of this file:

* A fault is committed in the stage, in the place of its forward, by a hook on its module: where the user's own code would.
* It is real: an exit exits, a kill kills. In an in-memory pipeline, which has no processes, the same errors come of it.
"""

from __future__ import annotations

import os
import signal as signals
import time
from collections.abc import Sequence
from typing import Any, cast

import attrs

from stageflow.controller import Pipeline
from stageflow.stage import Stage


@attrs.frozen
class Fault:
    """Base of the faults: what happens instead of, or before, a stage's forward."""

    def commit(self) -> None:
        """Do it, in the stage process."""
        raise NotImplementedError


@attrs.frozen
class Raise(Fault):
    """The forward raises. The micro-batch's awaiter gets a ``StageError``, the pipeline lives on."""

    error: BaseException = attrs.field(factory=lambda: RuntimeError("injected by stageflow.testing"))
    """What is raised; it has to be picklable."""

    def commit(self) -> None:
        raise self.error


@attrs.frozen
class Exit(Fault):
    """The process ends by itself, at once, as by ``os._exit``. Everybody gets a ``StageDied``."""

    code: int = 3
    """Its exit code."""

    def commit(self) -> None:
        os._exit(self.code)


@attrs.frozen
class Kill(Fault):
    """A signal hits the process, as from the out-of-memory killer. Everybody gets a ``StageDied``."""

    signal: int = signals.SIGKILL
    """The signal; SIGSTOP makes a ``StageStalled`` of it, with no stack of that stage."""

    def commit(self) -> None:
        os.kill(os.getpid(), self.signal)


@attrs.frozen
class Hang(Fault):
    """The forward never returns. Everybody gets a ``StageStalled``, after ``stall_timeout``: launch with a short one."""

    hold_gil: bool = False
    """Whether it hangs in C code that holds the GIL, so that no other thread of the stage runs."""

    def commit(self) -> None:
        while True:
            if self.hold_gil:
                sum(range(2**62))
            else:
                time.sleep(3600)


@attrs.frozen
class Delay(Fault):
    """The forward takes longer."""

    seconds: float
    """By how much."""

    def commit(self) -> None:
        time.sleep(self.seconds)


async def inject(pipe: Pipeline, fault: Fault, *, stage: int, seq: int | Sequence[int] | None = None) -> None:
    """Let a fault happen in a stage of a running pipeline.

        await inject(pipe, Raise(ValueError("no")), stage=1, seq=[2, 5])

    Micro-batches that were submitted before this call aren't affected. Several faults may be injected; those for the same
    micro-batch happen in the order of the calls.

    Args:
        pipe: of ``Pipeline.launch`` or ``launch_in_memory``.
        fault: what happens: ``Raise``, ``Exit``, ``Kill``, ``Hang`` or ``Delay``.
        stage: the stage it happens in, on all its ranks.
        seq: the micro-batches, numbered in order of submission from 0 (``pipe.statistics().submitted`` is the next one's
            number). Default: every one from now on.

    Raises:
        TypeError: not a fault.
        ValueError: a stage that does not exist.
        StageDied, StageStalled, PipelineBroken, trio.ClosedResourceError: the pipeline is lost, or its block has ended.
    """
    if not isinstance(fault, Fault):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"fault is a Raise, Exit, Kill, Hang or Delay: found {fault!r}")
    wanted = None if seq is None else frozenset([seq] if isinstance(seq, int) else seq)
    await pipe.call(_install, fault, wanted, stages=stage)


class _Faults:
    """The faults of one stage, in its process."""

    def __init__(self) -> None:
        self._faults: list[tuple[Fault, frozenset[int] | None]] = []

    def add(self, fault: Fault, wanted: frozenset[int] | None) -> None:
        self._faults.append((fault, wanted))

    def due(self, seq: int | None) -> list[Fault]:
        return [fault for fault, wanted in self._faults if wanted is None or seq in wanted]


def faults_of(stage: Stage) -> _Faults | None:
    """What has been injected into a stage, in its process."""
    return cast("_Faults | None", vars(stage).get("_faults"))


def _install(stage: Stage, fault: Fault, wanted: frozenset[int] | None) -> None:
    faults = faults_of(stage)
    if faults is None:
        faults = vars(stage)["_faults"] = _Faults()

        def commit(_module: Any, _args: Any) -> None:
            for one in faults.due(stage.seq):
                if isinstance(one, Raise) or not vars(stage).get("in_memory"):
                    one.commit()

        stage.module.register_forward_pre_hook(commit)
    faults.add(fault, wanted)
