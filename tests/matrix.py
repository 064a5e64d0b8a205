"""Faults × times × positions: what each cell is, and running one. For the tests, the table in the docs, and the soak.

Rules of this file:

* A stage imports it, so it needs nothing but stageflow, torch and Trio, and nothing happens on import.
* Where user code runs, user code commits the fault: while it is unpickled, in `build(stage)`, in `forward`. At the other
  times a thread of the user's could do it; there the stage's own functions are made to, in that process alone.
* At the moment of the fault the time is noted, for the figures.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from stageflow import LaunchError, Pipeline, PipelineBroken, StageDied, StageError, StageflowError, StageInfo, StageStalled
from stageflow._frames import Door, EndOfStream, Warmup
from stageflow.controller import _process

PP = 3
COUNT = 9
"""Micro-batches of a run."""

# Short enough for a thousand cells, long enough for a machine that others use.
STALL, START, SHUTDOWN = 0.4, 1.0, 0.2

# ---- the faults ---------------------------------------------------------------------------------------------------------


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("can't be pickled")
        self.lock = threading.Lock()


class Explosive(Exception):
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise OSError("the unpickling raised")


def exception() -> None:
    raise ValueError("boom")


def exception_that_cannot_be_pickled() -> None:
    raise Unpicklable


def exception_whose_unpickling_raises() -> None:
    raise Explosive("boom")


def sys_exit_0() -> None:
    sys.exit(0)


def os_exit_3() -> None:
    os._exit(3)


def sigsegv() -> None:
    ctypes.string_at(0)


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sigstop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def c_loop_that_holds_the_gil() -> None:
    sum(range(2**62))


def endless_sleep() -> None:
    while True:
        time.sleep(3600)


def result_that_cannot_be_pickled() -> Any:
    return threading.Lock()


def flood_on_stderr() -> None:
    for _ in range(20_000):
        sys.stderr.write("x" * 99 + "\n")


def child_that_is_forked() -> None:
    if os.fork() == 0:
        time.sleep(20)  # longer than any bound; with copies of all that the stage has open
        os._exit(0)


Fault = Callable[[], Any]

RAISES: tuple[Fault, ...] = (exception, exception_that_cannot_be_pickled, exception_whose_unpickling_raises)
ENDS: dict[Fault, tuple[int, str | None]] = {
    sys_exit_0: (0, None),
    os_exit_3: (3, None),
    sigsegv: (-signal.SIGSEGV, "SIGSEGV"),
    sigkill: (-signal.SIGKILL, "SIGKILL"),
}
HANGS: tuple[Fault, ...] = (sigstop, c_loop_that_holds_the_gil, endless_sleep)
HARMLESS: tuple[Fault, ...] = (flood_on_stderr, child_that_is_forked)
FAULTS: tuple[Fault, ...] = (*RAISES, *ENDS, *HANGS, result_that_cannot_be_pickled, *HARMLESS)

# ---- the times ----------------------------------------------------------------------------------------------------------

START_TIMES = ("rendezvous", "import", "build", "warm-up")
MICRO_BATCHES = {"first micro-batch": 0, "mid-window": COUNT // 2, "last micro-batch": COUNT - 1}
END_TIMES = ("drain", "teardown")
TIMES = (*START_TIMES, *MICRO_BATCHES, *END_TIMES)


LABELS = {
    sys_exit_0: "`sys.exit(0)`",
    os_exit_3: "`os._exit(3)`",
    sigsegv: "SIGSEGV",
    sigkill: "SIGKILL",
    sigstop: "SIGSTOP",
    c_loop_that_holds_the_gil: "C loop that holds the GIL",
}


def label(fault: Fault) -> str:
    """For people."""
    return LABELS.get(fault, fault.__name__.replace("_", " "))


@attrs.frozen
class Cell:
    """A fault, when, and in which stage."""

    fault: Fault
    when: str
    position: int

    @property
    def exists(self) -> bool:
        """Only a micro-batch has a result."""
        return self.fault is not result_that_cannot_be_pickled or self.when in MICRO_BATCHES

    def __str__(self) -> str:
        return f"{self.fault.__name__}-{self.when}-stage{self.position}".replace(" ", "_")


CELLS = [
    cell for fault in FAULTS for when in TIMES for position in range(PP) if (cell := Cell(fault, when, position)).exists
]


@attrs.frozen
class Trigger:
    """Commits the fault of a cell, in its stage, and notes the time."""

    cell: Cell
    mark: Path

    def __call__(self) -> Any:
        if self.mark.exists():  # once
            return None
        self.mark.write_text(str(time.monotonic_ns()))
        return self.cell.fault()

    def at(self, when: str, position: int) -> bool:
        return (self.cell.when, self.cell.position) == (when, position)


class AddOne(nn.Module):
    """Adds one; commits the fault at its micro-batch."""

    def __init__(self, position: int, trigger: Trigger | None) -> None:
        super().__init__()
        self.position, self.trigger = position, trigger

    def forward(self, x: torch.Tensor) -> Any:
        trigger = self.trigger
        if trigger is not None and trigger.at(trigger.cell.when, self.position):
            at = MICRO_BATCHES.get(trigger.cell.when)
            if int(x[0]) - self.position == at and (result := trigger()) is not None:
                return result
        return x + 1


class Build:
    """``build(stage)``. Commits the fault while it is built, or while it is unpickled itself."""

    def __init__(self, trigger: Trigger | None) -> None:
        self.trigger = trigger

    def __call__(self, stage: StageInfo) -> nn.Module:
        if self.trigger is not None and self.trigger.at("build", stage.stage_index):
            self.trigger()
        return AddOne(stage.stage_index, self.trigger)


class Bomb:
    """A list of these takes the place of the model: each stage unpickles its own."""

    def __init__(self, position: int, trigger: Trigger) -> None:
        self.position, self.trigger = position, trigger

    def __reduce__(self) -> Any:
        return unpickle_module, (self.position, self.trigger)


def unpickle_module(position: int, trigger: Trigger) -> nn.Module:
    if trigger.at("import", position):
        trigger()
    return AddOne(position, trigger)


class Holder(nn.Module):
    """A module that holds a bomb where its content should be."""

    def __init__(self, position: int, trigger: Trigger) -> None:
        super().__init__()
        self.bomb = Bomb(position, trigger)

    def forward(self, x: torch.Tensor) -> Any:
        return self.bomb(x)  # unpickled, it is a module


def faulty_main(trigger: Trigger, door: Door) -> None:
    """A stage process whose own functions commit the fault."""
    from stageflow.stage import _main

    position = door.rank
    join, leave, pass_on = _main._join_edges, _main._exit, _main._Loop._pass_on

    def join_edges(*args: Any) -> Any:
        if trigger.at("rendezvous", position):
            trigger()
        return join(*args)

    def pass_frame_on(self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
        for kind, when in ((Warmup, "warm-up"), (EndOfStream, "drain")):
            if isinstance(frame, kind) and trigger.at(when, position):
                trigger()
        pass_on(self, frame, *args, **kwargs)

    def exit_with(code: int) -> None:
        if trigger.at("teardown", position):
            trigger()
        leave(code)

    _main._join_edges, _main._Loop._pass_on, _main._exit = join_edges, pass_frame_on, exit_with
    _main.main(door)


# ---- a run --------------------------------------------------------------------------------------------------------------


@attrs.define
class Run:
    """What came of one cell."""

    results: list[Any] = attrs.field(factory=list)
    """Of the micro-batches: an int, or the StageError in its place."""
    error: StageflowError | None = None
    """What came out of the block."""
    seconds: float = math.nan
    """From the fault until then, or until the awaiter had its StageError."""


async def run_cell(cell: Cell, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Launch a pipeline, send micro-batches through it, let the fault of the cell happen."""
    mark = directory / "fault"
    mark.unlink(missing_ok=True)
    trigger = Trigger(cell, mark)
    run = Run()
    model: Any = Build(trigger)
    if cell.when == "import":
        model = [Holder(position, trigger) for position in range(PP)]
    with monkeypatch.context() as patch:
        if cell.when in ("rendezvous", "warm-up", *END_TIMES):
            patch.setattr(_process, "STAGE_MODULE", __name__)
            patch.setattr(sys.modules[__name__], "main", partial(faulty_main, trigger), raising=False)
        try:
            async with Pipeline.launch(
                model, pp=PP, stall_timeout=STALL, start_timeout=START, shutdown_timeout=SHUTDOWN
            ) as pipe:
                async with pipe.map(torch.full((2,), value) for value in range(COUNT)) as outputs:
                    while len(run.results) < COUNT:
                        try:
                            run.results.append(int((await anext(outputs))[0]))
                        except StageError as error:
                            run.results.append(error)
                            run.seconds = since(mark)
        except (LaunchError, PipelineBroken) as error:
            run.error = error
    if math.isnan(run.seconds) and mark.exists():
        run.seconds = since(mark)
    return run


def since(mark: Path) -> float:
    return (time.monotonic_ns() - int(mark.read_text())) / 1e9


# ---- what must come of it -----------------------------------------------------------------------------------------------


@attrs.frozen
class Expected:
    """Of a cell: the error that comes out of the block, its facts, which micro-batches have results, and the bound."""

    kind: type[StageflowError] | None
    within: float
    """Seconds from the fault, timeouts included."""
    facts: dict[str, Any] = attrs.field(factory=dict)
    stage_error: bool = False
    """Whether the error is the micro-batch's own, and all others have results."""


def expected(cell: Cell) -> Expected:
    """What the design promises for a cell. A second is added to each bound for machines that others use."""
    fault, when, seq = cell.fault, cell.when, MICRO_BATCHES.get(cell.when)
    soon = 0.5 + 1.0
    stacks = 1.0  # for their collection
    if fault in HARMLESS:
        return Expected(None, math.inf)
    if when in START_TIMES:
        facts: dict[str, Any] = {"phase": when}
        if fault in ENDS:
            code, name = ENDS[fault]
            return Expected(LaunchError, soon, facts | {"exitcode": code, "signal": name})
        if fault in HANGS:
            return Expected(LaunchError, START + stacks + soon, facts)
        return Expected(LaunchError, soon, facts | {"remote_type": remote_type(fault)})
    if when in MICRO_BATCHES:
        facts = {"seq": seq, "phase": "serve"}
        if fault in ENDS:
            code, name = ENDS[fault]
            return Expected(StageDied, soon, facts | {"exitcode": code, "signal": name})
        if fault in HANGS:
            return Expected(StageStalled, 1.5 * STALL + stacks + soon, facts)
        return Expected(StageError, soon, facts | {"remote_type": remote_type(fault)}, stage_error=True)
    phase = "serve" if when == "drain" else "exit"
    if fault in HANGS:  # terminated, with a warning: every result has been taken
        return Expected(None, SHUTDOWN + soon)
    if fault is sys_exit_0 and when == "teardown":
        return Expected(None, soon)  # that is what it was about to do
    if fault in ENDS:
        code, name = ENDS[fault]
        return Expected(StageDied, soon, {"phase": phase, "exitcode": code, "signal": name})
    if when == "teardown":
        return Expected(StageDied, soon, {"phase": phase, "exitcode": 1})
    return Expected(PipelineBroken, soon, {"phase": phase, "remote_type": remote_type(fault)})


def remote_type(fault: Fault) -> str:
    return {
        exception: "ValueError",
        exception_that_cannot_be_pickled: f"{__name__}.Unpicklable",
        exception_whose_unpickling_raises: f"{__name__}.Explosive",
        result_that_cannot_be_pickled: "TypeError",
    }[fault]


async def warm_up() -> None:
    """The fork server is there, and Trio's threads."""
    async with Pipeline.launch(Build(None), pp=PP) as pipe:
        assert torch.equal(await pipe(torch.zeros(2)), torch.full((2,), float(PP)))
