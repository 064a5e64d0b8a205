"""Random faults at random moments, in random stages, of pipelines of random length: no hang, no orphan, the right stage.

    python tests/soak.py --faults 1000 --seed 7        (or: nox -s soak)

Rules of this file:

* Each fault has a launch of its own; what it is, where and when, comes from the seed alone. When it strikes does not.
* A stage is told by pid or by the injection, never by what stageflow says of itself; a process left is looked up in the
  kernel, after the block.
* A wrong type of error, a wrong stage, a hang and an orphan each make the run fail.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
import trio.lowlevel
from tables import markdown, write
from torch import nn

from stageflow import LaunchError, Pipeline, PipelineBroken, StageDied, StageError, StageStalled
from stageflow.testing import Delay, Exit, Fault, Hang, Kill, Raise, inject, no_stages_left, stage_processes

STALL = 0.4
HUNG = 20.0
"""Seconds after which a run counts as hung. No bound of a pipeline launched like these comes near."""

GONE = 0.1
"""Seconds that the stages of a killed controller may live."""


class Work(nn.Module):
    """A stage that takes about a millisecond, and adds one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return x + 1


@attrs.frozen
class Marked(Fault):
    """A fault that notes when it is committed."""

    fault: Fault
    mark: Path

    def commit(self) -> None:
        self.mark.write_text(str(time.monotonic()))
        self.fault.commit()


@attrs.frozen
class Case:
    """One fault, as drawn."""

    kind: str
    pp: int
    stage: int
    seq: int
    delay: float
    """Seconds into the run, for faults from outside."""
    size: int
    """Of a micro-batch, in elements."""


@attrs.frozen
class Outcome:
    """What came of it."""

    name: str
    """The error, or what else there was."""
    right: bool
    """Whether it was the error of that fault, in that stage."""
    seconds: float | None
    """From the fault until its end; None if it came too late to strike."""


# ---- the kinds ----------------------------------------------------------------------------------------------------------

INJECTED: dict[str, Fault] = {
    "raise": Raise(ValueError("soak")),
    "delay": Delay(0.05),
    "exit 3": Exit(3),
    "exit 0": Exit(0),
    "SIGSEGV": Kill(signal.SIGSEGV),
    "sleep for ever": Hang(),
    "hold the GIL": Hang(hold_gil=True),
}
OUTSIDE: dict[str, int] = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}
SHARES = {
    "raise": 12,
    "delay": 4,
    "exit 3": 8,
    "exit 0": 6,
    "SIGSEGV": 8,
    "sleep for ever": 4,
    "hold the GIL": 4,
    "SIGKILL": 24,
    "SIGTERM": 6,
    "SIGSTOP": 6,
    "SIGKILL while it starts": 8,
    "cancelled": 5,
    "error in the body": 4,
    "controller SIGKILL": 1,
}


def draw(seed: int, count: int) -> Iterator[Case]:
    """The cases of a seed."""
    dice = random.Random(seed)
    for _ in range(count):
        pp = dice.randint(1, 4)
        yield Case(
            kind=dice.choices(list(SHARES), list(SHARES.values()))[0],
            pp=pp,
            stage=dice.randrange(pp),
            seq=dice.randrange(20),
            delay=dice.uniform(0, 0.06),
            size=dice.choice([1, 1000, 2**16, 2**20]),
        )


async def run_case(case: Case, directory: Path) -> Outcome:
    """Launch a pipeline, keep it busy, let the fault strike."""
    mark = directory / "fault"
    mark.unlink(missing_ok=True)
    try:
        with trio.fail_after(HUNG), no_stages_left():
            if case.kind in INJECTED:
                return await run_injected(case, mark)
            if case.kind in OUTSIDE:
                return await run_signal(case)
            return await OTHERS[case.kind](case)
    except trio.TooSlowError:
        return Outcome("HANG", right=False, seconds=HUNG)
    except AssertionError as error:
        return Outcome(f"ORPHAN {error}", right=False, seconds=None)


def launch(case: Case) -> Any:
    return Pipeline.launch(
        [Work() for _ in range(case.pp)], case.pp, stall_timeout=STALL, shutdown_timeout=1.0, start_timeout=10.0
    )


async def keep_busy(pipe: Pipeline, case: Case, count: int) -> list[Any]:
    """The results of micro-batches, or the StageErrors in their place; each checked."""
    results: list[Any] = []
    async with pipe.map(torch.full((case.size,), float(seq)) for seq in range(count)) as outputs:
        while len(results) < count:
            try:
                y = await anext(outputs)
            except StageError as error:
                results.append(error)
            else:
                assert float(y[0]) == float(y[-1]) == len(results) + case.pp, "a wrong result"
                results.append(None)
    return results


async def run_injected(case: Case, mark: Path) -> Outcome:
    error: Any = None
    try:
        async with launch(case) as pipe:
            await inject(pipe, Marked(INJECTED[case.kind], mark), stage=case.stage, seq=case.seq)
            results = await keep_busy(pipe, case, 25)
            error = results.pop(case.seq)
            assert not any(results), "an error of another micro-batch"
    except PipelineBroken as broken:
        error = broken
    seconds = time.monotonic() - float(mark.read_text())
    kinds = {"raise": StageError, "delay": type(None), "sleep for ever": StageStalled, "hold the GIL": StageStalled}
    name = "all right" if error is None else type(error).__name__
    return Outcome(name, is_right(error, kinds.get(case.kind, StageDied), case, seq=case.seq), seconds)


def is_right(error: Any, kind: type, case: Case, **facts: Any) -> bool:
    if type(error) is not kind:
        return False
    if error is None:
        return True
    return error.stage_index == case.stage and all(getattr(error, name) == value for name, value in facts.items())


async def run_signal(case: Case) -> Outcome:
    struck: float | None = None

    async def strike() -> None:
        nonlocal struck
        await trio.sleep(case.delay)
        struck = time.monotonic()
        os.kill(pipe.stages[case.stage].pid or 0, OUTSIDE[case.kind])

    error: Any = None
    try:
        async with launch(case) as pipe, trio.open_nursery() as nursery:
            nursery.start_soon(strike)
            await keep_busy(pipe, case, 10_000)
    except* PipelineBroken as group:
        [error] = leaves(group)
    assert struck is not None
    seconds = time.monotonic() - struck
    if case.kind == "SIGSTOP":
        return Outcome(type(error).__name__, is_right(error, StageStalled, case), seconds)
    return Outcome(type(error).__name__, is_right(error, StageDied, case, signal=case.kind), seconds)


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in leaves(one)]
    return [error]


async def killed_while_starting(case: Case) -> Outcome:
    struck: float | None = None

    async def strike() -> None:
        nonlocal struck
        while not (pid := next((pid for pid, name in stage_processes().items() if f" {case.stage}/" in name), None)):
            await trio.lowlevel.checkpoint()
        await trio.sleep(case.delay)
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    error: Any = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(strike)
        try:
            async with launch(case):
                await trio.sleep_forever()
        except (LaunchError, StageDied) as raised:
            error = raised
    assert struck is not None
    return Outcome(type(error).__name__, is_right(error, type(error), case, signal="SIGKILL"), time.monotonic() - struck)


async def cancelled(case: Case) -> Outcome:
    with trio.move_on_after(case.delay) as scope:
        async with launch(case) as pipe:
            await keep_busy(pipe, case, 10_000)
    return Outcome("Cancelled", scope.cancelled_caught, trio.current_time() - scope.deadline)


async def error_in_the_body(case: Case) -> Outcome:
    mine = RuntimeError("mine")
    try:
        async with launch(case) as pipe, trio.open_nursery() as nursery:
            nursery.start_soon(keep_busy, pipe, case, 10_000)
            await trio.sleep(case.delay)
            began = time.monotonic()
            raise mine
    except* RuntimeError as group:
        right = leaves(group) == [mine]
    return Outcome("RuntimeError", right, time.monotonic() - began)


async def controller_killed(case: Case) -> Outcome:
    script = f"""
    import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
    import soak, trio

    async def main():
        case = soak.Case("", {case.pp}, 0, 0, 0.0, {case.size})
        async with soak.launch(case) as pipe:
            print(*(stage.pid for stage in pipe.stages), flush=True)
            await soak.keep_busy(pipe, case, 10**6)

    trio.run(main)
    """
    process = await trio.to_thread.run_sync(
        lambda: subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    )
    try:
        assert process.stdout is not None
        pids = [int(pid) for pid in (await trio.to_thread.run_sync(process.stdout.readline)).split()]
        handles = [os.pidfd_open(pid) for pid in pids]
        await trio.sleep(case.delay)
        began = time.monotonic()
        process.kill()
        for handle in handles:
            await trio.lowlevel.wait_readable(handle)
            os.close(handle)
        seconds = time.monotonic() - began
    finally:
        process.kill()
        await trio.to_thread.run_sync(process.wait)
        process.stdout.close()
    return Outcome("stages gone", len(pids) == case.pp and seconds < GONE + 0.4, seconds)


OTHERS: dict[str, Callable[[Case], Any]] = {
    "SIGKILL while it starts": killed_while_starting,
    "cancelled": cancelled,
    "error in the body": error_in_the_body,
    "controller SIGKILL": controller_killed,
}

# ---- the run ------------------------------------------------------------------------------------------------------------


@attrs.define
class Tally:
    """All outcomes of one kind."""

    count: int = 0
    names: Counter[str] = attrs.field(factory=Counter)
    slowest: float = 0.0
    wrong: int = 0
    hangs: int = 0
    orphans: int = 0


async def soak(
    count: int, seed: int, directory: Path, each: Callable[[Case, Outcome], None] = lambda _case, _outcome: None
) -> dict[str, Tally]:
    """Run that many cases; returns a tally for each kind."""
    tallies = {kind: Tally() for kind in SHARES}
    for case in draw(seed, count):
        outcome = await run_case(case, directory)
        tally = tallies[case.kind]
        tally.count += 1
        tally.names[outcome.name.splitlines()[0]] += 1
        tally.slowest = max(tally.slowest, outcome.seconds or 0.0)
        tally.hangs += outcome.name == "HANG"
        tally.orphans += outcome.name.startswith("ORPHAN")
        tally.wrong += not outcome.right
        each(case, outcome)
    return tallies


def rows(tallies: dict[str, Tally]) -> list[list[str]]:
    """The table, with its head."""
    found = [["fault", "count", "outcome", "slowest s", "wrong", "hangs", "orphans"]]
    for kind, tally in tallies.items():
        names = ", ".join(f"{name} {count}" for name, count in tally.names.most_common())
        counts = (tally.wrong, tally.hangs, tally.orphans)
        found.append([kind, str(tally.count), names, f"{tally.slowest:.2f}", *map(str, counts)])
    all_of = tallies.values()
    count, *sums = (sum(getattr(tally, name) for tally in all_of) for name in ("count", "wrong", "hangs", "orphans"))
    return [*found, ["all", str(count), "", f"{max(tally.slowest for tally in all_of):.2f}", *map(str, sums)]]


def table(tallies: dict[str, Tally]) -> str:
    """For people."""
    found = rows(tallies)
    widths = [max(len(row[column]) for row in found) for column in range(len(found[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in found]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def options() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn (default: another each time)")
    parser.add_argument("--write", action="store_true", help="write the table into the docs, if nothing was wrong")
    return parser


def main() -> None:
    """The command."""
    arguments = options().parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    torch.set_num_threads(1)
    started = time.monotonic()
    done = 0

    def show(case: Case, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if not outcome.right:
            print(f"WRONG {case}: {outcome}", flush=True)
        if done % 100 == 0:
            print(f"{done} of {arguments.faults}, {time.monotonic() - started:.0f} s", flush=True)

    # What stages print as they are hit is not what is looked at here.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for good
    print(f"{arguments.faults} faults, seed {seed}, stall_timeout {STALL:g} s", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        tallies = trio.run(soak, arguments.faults, seed, Path(directory), show)
    print(table(tallies))
    print(f"{len(os.listdir('/proc/self/fd'))} descriptors, {time.monotonic() - started:.0f} s")
    if any(tally.wrong for tally in tallies.values()):
        sys.exit(1)
    if arguments.write:
        write("soak", markdown(rows(tallies)))


if __name__ == "__main__":
    main()
