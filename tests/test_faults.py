"""What goes wrong in a stage, at every position: who gets which error, how soon, and that nothing is left."""

from __future__ import annotations

import contextlib
import math
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import trio
from torch import nn
from trio.testing import wait_all_tasks_blocked

from stageflow import LaunchError, Pipeline, PipelineBroken, StageDied, StageError, StageInfo, StageStalled

# Stages shall not import this file, and pytest with it: what they need of it goes along.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PP = 3
POSITIONS = range(PP)
SOON = 3.0
"""Seconds that stand for "at once" on a machine that others use, too."""

Fault = Callable[[], Any]


class AddOne(nn.Module):
    """Adds one. Commits its fault, if it has one, at the micro-batches that were ``at`` when they came into the pipeline."""

    def __init__(self, position: int = 0, fault: Fault | None = None, *at: int) -> None:
        super().__init__()
        self.position, self.fault, self.at = position, fault, at or (0,)

    def forward(self, x: torch.Tensor) -> Any:
        if self.fault is not None and int(x.flatten()[0]) - self.position in self.at:
            return self.fault()
        return x + 1


def stages(position: int | None = None, fault: Fault | None = None, *at: int, pp: int = PP) -> list[AddOne]:
    return [AddOne(stage, fault if stage == position else None, *at) for stage in range(pp)]


def batch(value: int) -> torch.Tensor:
    return torch.full((2,), value)


async def works(pipe: Pipeline) -> None:
    assert torch.equal(await pipe(batch(100)), batch(100 + len(pipe.stages)))


async def next_launch_works() -> None:
    async with Pipeline.launch(stages(), pp=PP) as pipe:
        await works(pipe)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


async def gone(*pids: int) -> None:
    """Wait for the end of processes, whoever's children they are."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                await trio.lowlevel.wait_readable(descriptor)
            finally:
                os.close(descriptor)


# ---- isolated errors ----------------------------------------------------------------------------------------------------


class Unpicklable(Exception):
    def __init__(self, first: str, _second: object) -> None:
        super().__init__(first)
        self.lock = threading.Lock()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_plain() -> None:
    raise ValueError("boom")


def raise_unpicklable() -> None:
    raise Unpicklable("locked", object())


def raise_unprintable() -> None:
    raise Unprintable


def raise_huge() -> None:
    raise ValueError("größer" * (2**20 // 8))


def raise_recursion() -> Any:
    return raise_recursion()


def unpicklable_result() -> Any:
    return threading.Lock()


ISOLATED = {
    raise_plain: ("ValueError", 'raise ValueError("boom")'),
    raise_unpicklable: ("Unpicklable", 'raise Unpicklable("locked", object())'),
    raise_unprintable: ("Unprintable", "raise Unprintable"),
    raise_huge: ("ValueError", 'raise ValueError("größer" * (2**20 // 8))'),
    raise_recursion: ("RecursionError", "return raise_recursion()"),
    unpicklable_result: ("TypeError", ""),
}
COUNT = 9
FIRST_MID_LAST = (0, COUNT // 2, COUNT - 1)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("fault", ISOLATED, ids=lambda fault: fault.__name__)
async def test_only_the_micro_batches_that_failed_get_the_error(fault: Fault, position: int) -> None:
    kind, line = ISOLATED[fault]
    results: list[Any] = []
    with trio.fail_after(30):
        async with Pipeline.launch(stages(position, fault, *FIRST_MID_LAST), pp=PP) as pipe:
            async with pipe.map(batch(value) for value in range(COUNT)) as outputs:
                while len(results) < COUNT:
                    try:
                        results.append(int((await anext(outputs))[0]))
                    except StageError as error:
                        results.append(error)
                with pytest.raises(StopAsyncIteration):
                    await anext(outputs)
            await works(pipe)
    for at, error in enumerate(results):
        if at not in FIRST_MID_LAST:
            assert error == at + PP
            continue
        assert type(error) is StageError
        assert (error.stage_index, error.tp_index, error.rank, error.seq) == (position, 0, position, at)
        assert error.remote_type.rpartition(".")[2] == kind
        assert line in error.remote_traceback
        assert len(str(error)) < 64 * 1024
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is StageError
        assert (str(again), again._facts()) == (str(error), error._facts())


@pytest.mark.parametrize("position", POSITIONS)
async def test_only_the_task_whose_micro_batch_failed_gets_the_error(position: int) -> None:
    got: dict[int, Any] = {}

    async def one(pipe: Pipeline, value: int) -> None:
        try:
            got[value] = int((await pipe(batch(value)))[0])
        except StageError as error:
            got[value] = error.remote_type

    with trio.fail_after(30):
        async with Pipeline.launch(stages(position, raise_plain, 7), pp=PP) as pipe:
            async with trio.open_nursery() as nursery:
                for value in range(20):
                    nursery.start_soon(one, pipe, value)
    assert got == {value: "ValueError" if value == 7 else value + PP for value in range(20)}


async def test_a_stage_error_that_the_body_lets_through_is_what_comes_out() -> None:
    with trio.fail_after(30):
        with pytest.raises(StageError, match="boom") as caught:
            async with Pipeline.launch(stages(1, raise_plain), pp=PP) as pipe:
                await pipe(batch(0))
        assert caught.value.stage_index == 1
        await next_launch_works()


# ---- deaths -------------------------------------------------------------------------------------------------------------


def wait_for_the_test(fifo: str) -> None:
    """Until the test opens the other end: then it knows that we are here, and we that it has done what it wanted."""
    os.close(os.open(fifo, os.O_RDONLY))


async def meet_the_stage(fifo: Path) -> None:
    """The other side of ``wait_for_the_test``."""

    def meet() -> None:
        os.close(os.open(fifo, os.O_WRONLY))

    await trio.to_thread.run_sync(meet)


def exit_3() -> None:
    print("last words", file=sys.stderr)
    os._exit(3)


def sys_exit_0() -> None:
    sys.exit(0)


def sys_exit_text() -> None:
    sys.exit("a reason")


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stay() -> None:
    """For a death that comes from outside."""
    while True:
        signal.pause()


def flood_and_exit() -> None:
    for _ in range(20_000):
        sys.stderr.write("y" * 99 + "\n")
    sys.stderr.write("the last line\n")
    os._exit(5)


DEATHS: dict[Fault, tuple[int, str | None, str]] = {
    exit_3: (3, None, "last words"),
    sys_exit_0: (0, None, ""),
    sys_exit_text: (1, None, "a reason"),
    segfault: (-signal.SIGSEGV, "SIGSEGV", "in segfault"),
    sigkill: (-signal.SIGKILL, "SIGKILL", ""),
    stay: (-signal.SIGTERM, "SIGTERM", ""),
    flood_and_exit: (5, None, "the last line"),
}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("fault", DEATHS, ids=lambda fault: "sigterm_from_outside" if fault is stay else fault.__name__)
async def test_every_waiter_and_the_block_get_the_death_of_the_true_stage(
    fault: Fault, position: int, tmp_path: Path
) -> None:
    exitcode, name, words = DEATHS[fault]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path = str(fifo)
    got: dict[str, BaseException] = {}

    async def note(who: str, wait: Callable[[], Any]) -> None:
        try:
            await wait()
        except Exception as error:
            got[who] = error

    def die() -> None:
        wait_for_the_test(path)
        fault()

    with trio.fail_after(30):
        with pytest.raises(StageDied) as caught:
            async with Pipeline.launch(stages(position, die), pp=PP) as pipe:
                tickets = [await pipe.submit(batch(0)), await pipe.submit(batch(1))]

                async def take(ticket: Any) -> Any:
                    return await ticket

                async def stream() -> None:
                    async with pipe.map(batch(value) for value in range(2, 100)) as outputs:
                        async for _ in outputs:
                            pass

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(note, "ticket 0", lambda: take(tickets[0]))
                    if position == 0:  # else it may be answered before
                        nursery.start_soon(note, "ticket 1", lambda: take(tickets[1]))
                    for number in range(3):
                        nursery.start_soon(note, f"task {number}", lambda: pipe(batch(200)))
                    nursery.start_soon(note, "map", stream)
                    nursery.start_soon(note, "call", lambda: pipe.call(lambda stage: stage.rank))
                    await wait_all_tasks_blocked()
                    await meet_the_stage(fifo)
                    if fault is stay:
                        os.kill(pipe.stages[position].pid or 0, signal.SIGTERM)
                    start = time.monotonic()
                    pids = [stage.pid or 0 for stage in pipe.stages]
        assert time.monotonic() - start < SOON
        await gone(*pids)
        await next_launch_works()
    waiters = {"ticket 0", "map", "call", *(f"task {number}" for number in range(3))}
    assert got.keys() >= waiters
    for error in (caught.value, *got.values()):
        assert type(error) is StageDied
        assert (error.stage_index, error.rank, error.seq, error.phase) == (position, position, 0, "serve")
        assert (error.exitcode, error.signal) == (exitcode, name)
        assert words in "\n".join(error.stderr_tail)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.exitcode) == (StageDied, str(error), exitcode)


@pytest.mark.parametrize("position", POSITIONS)
async def test_a_ticket_kept_beyond_the_block_tells_of_the_death(position: int) -> None:
    with trio.fail_after(30):
        with pytest.raises(StageDied):
            async with Pipeline.launch(stages(position, sigkill), pp=PP) as pipe:
                ticket = await pipe.submit(batch(0))
                await trio.sleep_forever()
        with pytest.raises(StageDied) as caught:
            await ticket
        assert caught.value.stage_index == position


@pytest.mark.parametrize("position", POSITIONS)
async def test_death_in_a_call(position: int) -> None:
    with trio.fail_after(30):
        with pytest.raises(StageDied) as caught:
            async with Pipeline.launch(stages(), pp=PP) as pipe:
                await pipe.call(lambda _stage: os._exit(4), stages=position)
        assert (caught.value.stage_index, caught.value.exitcode, caught.value.seq) == (position, 4, None)


@pytest.mark.parametrize("position", POSITIONS)
async def test_death_of_an_idle_stage_ends_a_sleeping_body(position: int) -> None:
    with trio.fail_after(30), within(SOON):
        with pytest.raises(StageDied) as caught:
            async with Pipeline.launch(stages(), pp=PP) as pipe:
                os.kill(pipe.stages[position].pid or 0, signal.SIGKILL)
                await trio.sleep_forever()
        assert (caught.value.stage_index, caught.value.seq) == (position, None)


async def test_stages_are_killed_while_a_shielded_body_goes_on() -> None:
    with trio.fail_after(30):
        with pytest.raises(StageDied) as caught:
            async with Pipeline.launch(stages(), pp=PP) as pipe:
                with trio.CancelScope(shield=True):
                    os.kill(pipe.stages[1].pid or 0, signal.SIGKILL)
                    with trio.fail_after(SOON):
                        await gone(*(stage.pid or 0 for stage in pipe.stages))
        assert caught.value.stage_index == 1


async def test_a_body_that_swallows_the_death_does_not_hide_it() -> None:
    with trio.fail_after(30):
        with pytest.raises(StageDied) as caught:
            async with Pipeline.launch(stages(2, sigkill), pp=PP) as pipe:
                with contextlib.suppress(StageDied):
                    await pipe(batch(0))
        assert caught.value.stage_index == 2


async def test_an_error_that_the_body_makes_of_the_death_is_its_cause() -> None:
    with trio.fail_after(30):
        with pytest.raises(StageDied) as caught:
            async with Pipeline.launch(stages(2, sigkill), pp=PP) as pipe:
                try:
                    await pipe(batch(0))
                except StageDied:
                    raise KeyError("mine") from None
        assert isinstance(caught.value.__cause__, KeyError)


async def test_the_death_comes_out_alone_when_many_tasks_of_the_body_got_it() -> None:
    with trio.fail_after(30):
        with pytest.raises(StageDied) as caught:
            async with Pipeline.launch(stages(1, sigkill), pp=PP) as pipe:
                async with trio.open_nursery() as nursery:
                    for value in range(5):
                        nursery.start_soon(pipe, batch(value))
        assert caught.value.stage_index == 1


async def test_a_stage_that_ends_at_the_last_micro_batch_is_noticed_at_the_end_of_the_block() -> None:
    with trio.fail_after(30), within(SOON):
        with pytest.raises(StageDied) as caught:
            async with Pipeline.launch(stages(1, exit_3), pp=PP) as pipe:
                await pipe.submit(batch(0))
        assert (caught.value.stage_index, caught.value.exitcode) == (1, 3)


# ---- stalls -------------------------------------------------------------------------------------------------------------


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_endlessly() -> None:
    time.sleep(10_000)


def hold_the_gil() -> None:
    sum(range(10**11))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("fault", [stop_itself, sleep_endlessly, hold_the_gil], ids=lambda fault: fault.__name__)
async def test_a_stage_that_hangs_is_named_with_its_micro_batch_and_stacks(fault: Fault, position: int) -> None:
    with trio.fail_after(30):
        with pytest.raises(StageStalled) as caught:
            async with Pipeline.launch(stages(position, fault, 2), pp=PP, stall_timeout=0.5) as pipe:
                for value in range(2):
                    await pipe(batch(value))
                start = time.monotonic()
                async with pipe.map(batch(value) for value in range(2, 100)) as outputs:
                    async for _ in outputs:
                        pass
        assert 0.4 < time.monotonic() - start < 0.5 + 0.5 + SOON
        error = caught.value
        assert type(error) is StageStalled
        assert (error.stage_index, error.rank, error.seq) == (position, position, 2)
        assert error.stacks is not None
        assert error.stacks.keys() == set(POSITIONS)
        assert all(error.stacks[rank] for rank in POSITIONS if rank != position)
        if fault is not stop_itself:  # a stopped process says nothing any more
            assert fault.__name__ in error.stacks[position]
            assert fault.__name__ in str(error)
        assert pickle.loads(pickle.dumps(error)).stacks == error.stacks
        await next_launch_works()


async def test_a_stage_that_hangs_in_a_call_is_named() -> None:
    with trio.fail_after(30):
        with pytest.raises(StageStalled) as caught:
            async with Pipeline.launch(stages(), pp=PP, stall_timeout=0.5) as pipe:
                await pipe.call(lambda _stage: time.sleep(10_000), stages=1)
        assert (caught.value.stage_index, caught.value.seq) == (1, None)


async def test_an_idle_pipeline_does_not_stall() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(stages(), pp=PP, stall_timeout=0.3) as pipe:
            await works(pipe)
            await trio.sleep(1.0)
            await works(pipe)


async def test_a_body_that_blocks_the_loop_makes_no_stall() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(stages(), pp=PP, stall_timeout=0.5) as pipe:
            tickets = [await pipe.submit(batch(value)) for value in range(4)]
            time.sleep(1.5)  # noqa: ASYNC251 - the fault that this is about
            assert [int((await ticket)[0]) for ticket in tickets] == [value + PP for value in range(4)]
            await works(pipe)


async def test_a_consumer_that_takes_its_time_makes_no_stall() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(stages(), pp=PP, stall_timeout=0.3) as pipe:
            async with pipe.map(batch(value) for value in range(20)) as outputs:
                results = []
                async for y in outputs:
                    results.append(int(y[0]))
                    if len(results) == 2:
                        await trio.sleep(1.0)  # the window is full of results that nobody takes
        assert results == [value + PP for value in range(20)]


async def test_slow_stages_that_get_on_make_no_stall() -> None:
    def slowly() -> torch.Tensor:
        time.sleep(0.3)
        return batch(1)

    with trio.fail_after(30):
        async with Pipeline.launch([AddOne(0, slowly)], pp=1, stall_timeout=0.6) as pipe:
            async with pipe.map(batch(0) for _ in range(4)) as outputs:
                assert [int(y[0]) async for y in outputs] == [1] * 4


async def test_no_stall_is_declared_without_a_stall_timeout() -> None:
    def slowly() -> torch.Tensor:
        time.sleep(1.0)
        return batch(1)

    with trio.fail_after(30):
        async with Pipeline.launch([AddOne(0, slowly)], pp=1, stall_timeout=math.inf) as pipe:
            assert torch.equal(await pipe(batch(0)), batch(1))


# ---- the launch ---------------------------------------------------------------------------------------------------------


class Explosive:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise OSError("no such checkpoint")


def no_module() -> Any:
    return "not a module"


BUILDS: dict[Fault, dict[str, Any]] = {
    raise_plain: {"remote_type": "ValueError", "exitcode": None},
    raise_unpicklable: {"exitcode": None},
    no_module: {"remote_type": "TypeError", "exitcode": None},
    exit_3: {"exitcode": 3, "signal": None, "stderr_tail": ("last words",)},
    sys_exit_0: {"exitcode": 0, "signal": None},
    sigkill: {"exitcode": -9, "signal": "SIGKILL"},
}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("fault", BUILDS, ids=lambda fault: fault.__name__)
async def test_a_build_that_fails_is_the_launch_error_of_its_stage(fault: Fault, position: int) -> None:
    def build(stage: StageInfo) -> Any:
        return fault() if stage.stage_index == position else AddOne()

    await next_launch_works()  # the fork server is there
    with trio.fail_after(30):
        with within(SOON), pytest.raises(LaunchError) as caught:
            async with Pipeline.launch(build, pp=PP):
                pytest.fail("it was launched")
        error = caught.value
        assert type(error) is LaunchError
        assert (error.stage_index, error.rank, error.phase) == (position, position, "build")
        for name, value in BUILDS[fault].items():
            assert getattr(error, name) == value, name
        if fault is raise_plain:
            assert 'raise ValueError("boom")' in str(error)
        pickle.loads(pickle.dumps(error))
        await next_launch_works()


@pytest.mark.parametrize("position", POSITIONS)
async def test_a_model_that_cannot_be_unpickled_fails_in_phase_import(position: int) -> None:
    model = stages()
    model[position].checkpoint = Explosive()  # type: ignore[assignment]
    with trio.fail_after(30):
        with within(2 * SOON), pytest.raises(LaunchError) as caught:
            async with Pipeline.launch(model, pp=PP):
                pytest.fail("it was launched")
        error = caught.value
        assert (error.stage_index, error.phase, error.remote_type) == (position, "import", "OSError")
        assert 'raise OSError("no such checkpoint")' in (error.remote_traceback or "")
        await next_launch_works()


@pytest.mark.parametrize("position", POSITIONS)
async def test_a_model_that_cannot_be_pickled_fails_at_the_hand_over_and_names_the_attribute(position: int) -> None:
    model = stages()
    model[position].guard = threading.Lock()  # type: ignore[assignment]
    with trio.fail_after(30):
        with within(2 * SOON), pytest.raises(LaunchError, match=r"'guard'") as caught:
            async with Pipeline.launch(model, pp=PP):
                pytest.fail("it was launched")
        error = caught.value
        assert (error.stage_index, error.rank, error.phase) == (position, position, "hand-over")
        pickle.loads(pickle.dumps(error))
        await next_launch_works()


@pytest.mark.parametrize("position", POSITIONS)
async def test_start_timeout_names_the_stage_that_is_late(position: int) -> None:
    def build(stage: StageInfo) -> Any:
        return sleep_endlessly() if stage.stage_index == position else AddOne()

    await next_launch_works()
    with trio.fail_after(30):
        with within(1.0 + SOON), pytest.raises(LaunchError, match="start_timeout") as caught:
            async with Pipeline.launch(build, pp=PP, start_timeout=1.0):
                pytest.fail("it was launched")
        assert (caught.value.stage_index, caught.value.phase) == (position, "build")
        await next_launch_works()


async def test_a_launch_that_is_cancelled_ends_at_once() -> None:
    with trio.fail_after(30):
        with within(1.0 + SOON), trio.move_on_after(0.5) as scope:
            async with Pipeline.launch(lambda _stage: sleep_endlessly(), pp=PP):
                pytest.fail("it was launched")
        assert scope.cancelled_caught
        await next_launch_works()


@pytest.mark.parametrize("milliseconds", range(0, 60, 10))
@pytest.mark.parametrize("position", POSITIONS)
async def test_a_stage_that_is_killed_at_any_moment_of_the_launch(position: int, milliseconds: int) -> None:
    await next_launch_works()
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]

    def children() -> list[int]:
        return sorted(map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split()))

    async def kill() -> None:
        while len(found := children()) < PP:
            await trio.lowlevel.checkpoint()
        await trio.sleep(milliseconds / 1000)
        os.kill(found[position], signal.SIGKILL)

    with trio.fail_after(30):
        await gone(*children())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with within(SOON), pytest.raises((LaunchError, StageDied)) as caught:
                async with Pipeline.launch(stages(), pp=PP):
                    await trio.sleep_forever()
        assert (caught.value.stage_index, caught.value.signal) == (position, "SIGKILL")


# ---- what comes out of the block ----------------------------------------------------------------------------------------


async def test_the_bodys_own_error_is_that_very_object() -> None:
    mine = ValueError("mine")
    with trio.fail_after(30):
        with pytest.raises(ValueError, match="mine") as caught:
            async with Pipeline.launch(stages(), pp=PP) as pipe:
                await pipe.submit(batch(0))
                raise mine
        assert caught.value is mine
        assert mine.__cause__ is None


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, GeneratorExit, RuntimeError, SystemExit])
async def test_odd_errors_of_the_body_come_out_as_they_are(kind: type[BaseException]) -> None:
    mine = kind("mine")
    got: BaseException | None = None
    with trio.fail_after(30):
        try:
            async with Pipeline.launch([AddOne()], pp=1):
                raise mine
        except kind as error:
            got = error
    assert got is mine


async def test_move_on_after_around_the_block_is_bounded_and_quiet() -> None:
    with trio.fail_after(30), within(0.5 + SOON):
        with trio.move_on_after(0.5) as scope:
            async with Pipeline.launch(stages(1, sleep_endlessly), pp=PP, shutdown_timeout=0.2) as pipe:
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(pipe, batch(0))
        assert scope.cancelled_caught


async def test_fail_after_around_the_block_raises_too_slow_alone() -> None:
    with trio.fail_after(30), within(0.5 + SOON), pytest.raises(trio.TooSlowError):
        with trio.fail_after(0.5):
            async with Pipeline.launch(stages(2, hold_the_gil), pp=PP, shutdown_timeout=0.2) as pipe:
                await pipe(batch(0))


async def test_a_sibling_that_fails_is_all_that_comes_out() -> None:
    ready = trio.Event()

    async def fail() -> None:
        await ready.wait()
        raise ValueError("sibling")

    with trio.fail_after(30), pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="sibling")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            async with Pipeline.launch(stages(), pp=PP):
                ready.set()
                await trio.sleep_forever()


async def test_an_error_raised_while_being_cancelled_is_not_lost() -> None:
    mine = ValueError("in cleaning up")
    with trio.fail_after(30):
        with pytest.raises(ValueError, match="in cleaning up") as caught, trio.CancelScope() as scope:
            async with Pipeline.launch(stages(), pp=PP):
                scope.cancel()
                try:
                    await trio.sleep_forever()
                finally:
                    raise mine
        assert caught.value is mine


async def test_a_death_that_the_body_meets_while_being_cancelled_is_not_lost() -> None:
    with trio.fail_after(30):
        with pytest.raises(StageDied) as caught, trio.CancelScope() as scope:
            async with Pipeline.launch(stages(1, sigkill), pp=PP) as pipe:
                scope.cancel()
                with trio.CancelScope(shield=True):
                    await pipe(batch(0))
        assert caught.value.stage_index == 1


async def test_a_cancellation_passes_through_though_a_stage_dies_meanwhile() -> None:
    with trio.fail_after(30), within(SOON + 1):
        with trio.CancelScope() as scope:
            async with Pipeline.launch(stages(), pp=PP) as pipe:
                scope.cancel()
                with trio.CancelScope(shield=True):
                    os.kill(pipe.stages[1].pid or 0, signal.SIGKILL)
                    await gone(*(stage.pid or 0 for stage in pipe.stages))
                await trio.sleep_forever()
        assert scope.cancelled_caught
        await next_launch_works()


async def test_a_dead_pipeline_does_not_touch_another() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(stages(), pp=PP) as other:
            with pytest.raises(PipelineBroken):
                async with Pipeline.launch(stages(1, sigkill), pp=PP) as pipe:
                    await pipe(batch(0))
            await works(other)


# ---- children of a stage ------------------------------------------------------------------------------------------------


def fork_sleeper(_stage: Any) -> int:
    """A child that lives on, with copies of all that the stage had open."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


@pytest.mark.parametrize(("method", "position"), [("forkserver", 0), ("forkserver", 1), ("spawn", 1)])
async def test_a_forked_child_of_a_killed_stage_does_not_hold_the_block_up(method: str, position: int) -> None:
    child = 0
    try:
        with trio.fail_after(60):
            with pytest.raises(StageDied) as caught:
                async with Pipeline.launch(stages(pp=2), pp=2, start_method=method) as pipe:
                    [child] = await pipe.call(fork_sleeper, stages=position)
                    pid = pipe.stages[position].pid or 0
                    os.kill(pid, signal.SIGSTOP)
                    ticket = await pipe.submit(torch.zeros(16 * 2**20))  # can't arrive any more
                    start = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
                    await ticket
            assert time.monotonic() - start < SOON
            assert (caught.value.stage_index, caught.value.signal) == (position, "SIGKILL")
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("position", POSITIONS)
async def test_a_forked_child_does_not_hold_up_a_clean_end(position: int) -> None:
    child = 0
    try:
        with trio.fail_after(30):
            async with Pipeline.launch(stages(), pp=PP) as pipe:
                [child] = await pipe.call(fork_sleeper, stages=position)
                await works(pipe)
                start = time.monotonic()
            assert time.monotonic() - start < SOON
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
