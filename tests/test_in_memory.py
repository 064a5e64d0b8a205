"""`launch_in_memory` is the real pipeline but for processes: one set of behaviours, held by both."""

from __future__ import annotations

import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import trio
from torch import nn

from stageflow import LaunchError, PartitionError, Pipeline, PipelineBroken, StageDied, StageError, StageInfo, StageStalled
from stageflow.testing import Delay, Exit, Hang, Kill, Raise, inject, launch_in_memory, stage_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Launch = Callable[..., Any]
both = pytest.mark.parametrize("launch", [Pipeline.launch, launch_in_memory], ids=["real", "in memory"])
X = torch.arange(12.0).reshape(3, 4)
Pair = namedtuple("Pair", "left right")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).eval()


class Apply(nn.Module):
    """A stage that does what it is given."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def one(fn: Callable[..., Any]) -> list[nn.Module]:
    return [Apply(fn)]


# ---- values -------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("pp", [1, 2, 4])
async def test_the_unsplit_models_answer(launch: Launch, pp: int) -> None:
    whole = model()
    async with launch(whole, pp) as pipe:
        for rows in (3, 1, 0, 3):
            with torch.inference_mode():
                assert torch.equal(await pipe(X[:rows]), whole(X[:rows]))
        batches = [X * factor for factor in range(10)]
        async with pipe.map(batches) as outputs:
            results = [y async for y in outputs]
        assert all(torch.equal(y, whole(x)) for x, y in zip(batches, results, strict=True))
        assert torch.equal(await pipe.run_batch(X, n_microbatches=2), whole(X))
        assert {key for stage in pipe.stages for key in stage.module_names} == {"0", "1", "2", "3"}
        assert sum(stage.parameters for stage in pipe.stages) == sum(each.numel() for each in whole.parameters())


@both
async def test_structures_and_keyword_arguments(launch: Launch) -> None:
    def first(x: torch.Tensor, *, factor: int = 1, more: Any = None) -> Any:
        return {"x": x * factor, "more": more, "pair": Pair(x, [1, None, "two"])}

    def second(value: dict[str, Any]) -> Any:
        return value["pair"], value["x"], value["more"]

    async with launch([Apply(first), Apply(second)], 2) as pipe:
        pair, x, more = await pipe(X, factor=3, more={"deep": (X[0], b"bytes")})
    assert type(pair).__name__ == "Pair"
    assert torch.equal(pair.left, X)
    assert pair.right == [1, None, "two"]
    assert torch.equal(x, X * 3)
    assert torch.equal(more["deep"][0], X[0])


@both
async def test_a_tuple_becomes_arguments_and_stage_kwargs_reach_all(launch: Launch) -> None:
    def split(x: torch.Tensor, *, add: int) -> Any:
        return x + add, x - add

    def join(a: torch.Tensor, b: torch.Tensor, *, add: int) -> Any:
        return a * b + add

    async with launch([Apply(split), Apply(join)], 2) as pipe:
        assert torch.equal(await pipe(X, stage_kwargs={"add": 2}), (X + 2) * (X - 2) + 2)
        async with pipe.starmap([(X,), (X + 1,)], stage_kwargs={"add": 1}) as outputs:
            assert [float(y.sum()) async for y in outputs] == [float(((x + 1) * (x - 1) + 1).sum()) for x in (X, X + 1)]


@both
async def test_what_a_stage_changes_shows_nowhere_else(launch: Launch) -> None:
    def change(x: torch.Tensor, *, shared: torch.Tensor) -> torch.Tensor:
        x += 1
        shared += 1
        return x + shared

    mine, shared, whole = X.clone(), torch.zeros(1), nn.BatchNorm1d(4).train()
    async with launch([Apply(change), Apply(change)], 2) as pipe:
        assert torch.equal(await pipe(mine, stage_kwargs={"shared": shared}), X + 4)
    assert torch.equal(mine, X)
    assert shared.item() == 0
    async with launch([whole], 1) as pipe:
        await pipe(mine)
        [batches] = await pipe.call(lambda stage: int(stage.module.num_batches_tracked))
    assert (batches, int(whole.num_batches_tracked)) == (1, 0)


@both
async def test_results_carry_no_history_and_build_runs_in_the_stage(launch: Launch) -> None:
    def build(stage: StageInfo) -> nn.Module:
        return nn.Linear(4, 4) if stage.is_first else nn.Identity()

    async with launch(build, 2) as pipe:
        assert not (await pipe(X.requires_grad_())).requires_grad
        assert [stage.parameters for stage in pipe.stages] == [20, 0]
    X.requires_grad_(False)


# ---- calls and the window -----------------------------------------------------------------------------------------------


class Counts(nn.Module):
    count = 0

    def forward(self, x: Any) -> Any:
        self.count += 1
        return x


@both
async def test_calls_come_in_order_and_by_rank(launch: Launch) -> None:
    async with launch([Counts(), Counts()], 2) as pipe:
        tickets = [await pipe.submit(value) for value in range(3)]
        assert await pipe.call(lambda stage: (stage.rank, stage.module.count, stage.seq)) == [(0, 3, None), (1, 3, None)]
        assert [await ticket for ticket in tickets] == [0, 1, 2]
        assert await pipe.call(lambda stage, y: stage.stage_index + y, 10, stages=1) == [11]
        with pytest.raises(StageError, match="no such thing") as caught:
            await pipe.call(lambda stage: {}["no such thing"], stages=[1])
        assert (caught.value.stage_index, caught.value.phase, caught.value.seq) == (1, "call", None)
        with pytest.raises(ValueError, match="stages are 0 … 1"):
            await pipe.call(print, stages=2)


@both
async def test_the_window_is_full_and_then_it_is_not(launch: Launch) -> None:
    async with launch([nn.Identity(), nn.Identity()], 2, window=3) as pipe:
        tickets = [pipe.submit_nowait(value) for value in range(3)]
        with pytest.raises(trio.WouldBlock):
            pipe.submit_nowait(3)
        assert [ticket.seq for ticket in tickets] == [0, 1, 2]
        assert await tickets[1] == 1
        assert await pipe(3) == 3
        del tickets  # two results that nobody wants
        await trio.testing.wait_all_tasks_blocked(0.05)
        with trio.fail_after(5):
            assert [await pipe(value) for value in range(5)] == list(range(5))
        statistics = pipe.statistics()
        assert (statistics.window, statistics.in_flight, statistics.submitted, statistics.done) == (3, 0, 9, 9)
        assert [stage.done for stage in statistics.stages] == [9, 9]


@both
async def test_a_cancelled_wait_gives_its_slot_back(launch: Launch) -> None:
    async with launch([nn.Identity()], 1, window=1) as pipe:
        with trio.CancelScope() as scope:
            scope.cancel()
            await pipe(1)
        assert scope.cancelled_caught
        assert await pipe(2) == 2


@both
async def test_a_thousand_callers(launch: Launch) -> None:
    got = {}

    async def ask(value: int) -> None:
        got[value] = await pipe(value)

    async with launch([nn.Identity(), nn.Identity()], 2) as pipe, trio.open_nursery() as nursery:
        for value in range(1000):
            nursery.start_soon(ask, value)
    assert got == {value: value for value in range(1000)}


@both
async def test_after_the_block(launch: Launch) -> None:
    async with launch([nn.Identity()], 1) as pipe:
        ticket = await pipe.submit(1)
    with pytest.raises(trio.ClosedResourceError):
        await pipe(1)
    with pytest.raises(trio.ClosedResourceError):
        pipe.map([1])
    assert repr(pipe) == "<Pipeline of 1 stages on cpu: closed>"
    del ticket


# ---- what goes wrong ----------------------------------------------------------------------------------------------------


@both
async def test_one_micro_batch_fails_alone(launch: Launch) -> None:
    def root(x: int) -> float:
        if x < 0:
            raise ValueError("no root")
        return x**0.5

    async with launch([nn.Identity(), Apply(root), nn.Identity()], 3) as pipe:
        got = []
        async with pipe.map([1, -4, 9]) as outputs:
            for _ in range(3):
                try:
                    got.append(await anext(outputs))
                except StageError as error:
                    line = next(line.strip() for line in str(error).splitlines() if "raise" in line and "stage" not in line)
                    got.append((error.stage_index, error.seq, error.remote_type, error.phase, line))
        assert got == [1, (1, 1, "ValueError", "serve", 'raise ValueError("no root")'), 3]
        statistics = pipe.statistics()
        assert (statistics.done, statistics.failed) == (2, 1)


@both
async def test_what_cannot_be_sent(launch: Launch) -> None:
    async with launch(one(lambda x: (each for each in x)), 1) as pipe:
        with pytest.raises(TypeError, match="generator"):
            await pipe(each for each in ())
        with pytest.raises(StageError, match="generator") as caught:
            await pipe([1])
        assert caught.value.remote_type == "TypeError"


@both
async def test_a_launch_that_cannot_be(launch: Launch) -> None:
    def build(stage: StageInfo) -> Any:
        if stage.stage_index == 1:
            raise FileNotFoundError("weights")
        return nn.Identity()

    with pytest.raises(PartitionError):
        launch(nn.Sequential(nn.Identity()), 2)
    with pytest.raises(ValueError, match="window"):
        launch([nn.Identity()], 1, window=0)
    with pytest.raises(LaunchError, match="weights") as caught:
        async with launch(build, 3):
            pytest.fail("it was launched")
    error = caught.value
    assert (error.stage_index, error.phase, error.remote_type) == (1, "build", "FileNotFoundError")
    assert 'raise FileNotFoundError("weights")' in str(error)
    with pytest.raises(LaunchError, match=r"must return a torch\.nn\.Module"):
        async with launch(lambda _stage: 3, 1):
            pytest.fail("it was launched")


@both
async def test_what_comes_out_of_the_block(launch: Launch) -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with launch([nn.Identity()], 1):
            raise mine
    assert caught.value is mine
    with trio.move_on_after(0.1) as scope:
        async with launch([nn.Identity()], 1):
            await trio.sleep_forever()
    assert scope.cancelled_caught


@both
@pytest.mark.parametrize(
    ("fault", "exitcode", "name"),
    [(Exit(4), 4, None), (Kill(), -9, "SIGKILL"), (Kill(signal.SIGTERM), -15, "SIGTERM")],
    ids=str,
)
async def test_a_death(launch: Launch, fault: Any, exitcode: int, name: str | None) -> None:
    with pytest.raises(StageDied) as caught:
        async with launch([nn.Identity() for _ in range(3)], 3) as pipe:
            await inject(pipe, fault, stage=1, seq=2)
            for value in range(5):
                assert await pipe(value) == value < 2
    error = caught.value
    assert (error.stage_index, error.rank, error.seq, error.phase) == (1, 1, 2, "serve")
    assert (error.exitcode, error.signal) == (exitcode, name)
    assert repr(pipe) == "<Pipeline of 3 stages on cpu: broken, StageDied>"


@both
@pytest.mark.parametrize(("code", "exitcode"), [(0, 0), (None, 0), (7, 7), ("words", 1)])
async def test_sys_exit_is_a_death(launch: Launch, code: Any, exitcode: int) -> None:
    with pytest.raises(StageDied) as caught:
        async with launch(one(lambda _x: sys.exit(code)), 1) as pipe:
            await pipe(1)
    assert (caught.value.stage_index, caught.value.exitcode) == (0, exitcode)


@both
async def test_a_loss_reaches_a_body_that_waits_for_something_else(launch: Launch) -> None:
    with pytest.raises(StageDied):
        async with launch([nn.Identity()], 1) as pipe:
            await inject(pipe, Exit(), stage=0, seq=0)
            await pipe.submit(1)
            await trio.sleep_forever()


# ---- faults on purpose --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("stage", range(3))
async def test_injected_errors_come_where_they_are_asked_for(launch: Launch, stage: int) -> None:
    async with launch([nn.Identity() for _ in range(3)], 3) as pipe:
        early = await pipe.submit(0)
        await inject(pipe, Raise(ValueError("three")), stage=stage, seq=3)
        await inject(pipe, Raise(KeyError("some")), stage=stage, seq=[1, 5])
        await inject(pipe, Delay(0.001), stage=stage)
        assert await early == 0
        got = {}
        for seq in range(1, 7):
            try:
                got[seq] = await pipe(seq)
            except StageError as error:
                got[seq] = (error.stage_index, error.seq, error.remote_type)
        some, three = [(stage, seq, "KeyError") for seq in (1, 5)], (stage, 3, "ValueError")
        assert got == {1: some[0], 2: 2, 3: three, 4: 4, 5: some[1], 6: 6}
        await inject(pipe, Raise(), stage=stage)
        with pytest.raises(StageError, match="injected by stageflow"):
            await pipe(7)


@both
async def test_misuse_of_inject_says_so(launch: Launch) -> None:
    async with launch([nn.Identity()], 1) as pipe:
        with pytest.raises(TypeError, match="fault is a Raise, Exit, Kill, Hang or Delay"):
            await inject(pipe, ValueError("no"), stage=0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="stages are 0 … 0"):
            await inject(pipe, Raise(), stage=1)


@pytest.mark.parametrize("fault", [Hang(), Hang(hold_gil=True), Kill(signal.SIGSTOP)], ids=str)
async def test_a_hang_is_a_stall(fault: Any) -> None:
    with pytest.raises(StageStalled) as caught:
        async with Pipeline.launch([nn.Identity(), nn.Identity()], 2, stall_timeout=0.4) as pipe:
            await inject(pipe, fault, stage=1, seq=1)
            await pipe(0)
            await pipe(1)
    assert (caught.value.stage_index, caught.value.seq) == (1, 1)


# ---- in memory alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Hang(), Hang(hold_gil=True), Kill(signal.SIGSTOP)], ids=str)
async def test_a_stall_takes_no_time_on_a_clock_that_jumps(fault: Any, autojump_clock: Any) -> None:
    began, real = trio.current_time(), time.monotonic()
    with pytest.raises(StageStalled, match="stall_timeout=300 s") as caught:
        async with launch_in_memory([nn.Identity(), nn.Identity()], 2) as pipe:
            await inject(pipe, fault, stage=1, seq=0)
            await pipe(0)
    assert (caught.value.stage_index, caught.value.seq) == (1, 0)
    assert trio.current_time() - began == pytest.approx(300)
    assert time.monotonic() - real < 10


async def test_a_delay_passes_on_trios_clock(autojump_clock: Any) -> None:
    async with launch_in_memory([nn.Identity()], 1) as pipe:
        await inject(pipe, Delay(60), stage=0, seq=1)
        began = trio.current_time()
        assert [await pipe(value) for value in range(3)] == [0, 1, 2]
        assert trio.current_time() - began == pytest.approx(60)


async def test_nothing_is_started() -> None:
    async with launch_in_memory([nn.Identity()], 1, devices="cuda:7", backend="nccl", threads=3) as pipe:
        assert await pipe(1) == 1
        assert stage_processes() == {}
        assert pipe.stages[0].pid is None


async def test_it_takes_the_place_of_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "launch", launch_in_memory)
    async with Pipeline.launch(model(), pp=2, window=5, start_timeout=1.0) as pipe:
        assert stage_processes() == {}
        assert (await pipe(X)).shape == (3, 2)
    with pytest.raises(TypeError, match="windw"):
        Pipeline.launch(model(), pp=2, windw=5)


def test_a_ctrl_c_in_a_forward_comes_out_alone() -> None:
    async def main() -> None:
        async with launch_in_memory(one(interrupt), 1) as pipe:
            await pipe(1)

    def interrupt(_x: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)


async def test_a_broken_one_is_broken_for_all_waiters() -> None:
    got = []

    async def ask(value: int) -> None:
        with pytest.raises(PipelineBroken):
            await pipe(value)
        got.append(value)

    with pytest.raises(StageDied):
        async with launch_in_memory([nn.Identity()], 1, window=2) as pipe, trio.open_nursery() as nursery:
            await inject(pipe, Exit(), stage=0, seq=0)
            for value in range(5):
                nursery.start_soon(ask, value)
    assert sorted(got) == list(range(5))
