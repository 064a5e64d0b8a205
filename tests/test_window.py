"""The window: how many are in flight, who waits for whom, and what becomes of what nobody wants (behaviours B1 to B7)."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from torch import Tensor, nn

import stageflow.controller._ledger as ledger
from stageflow import Pipeline, StageError


class Gate(nn.Module):
    """Waits, for micro-batches with a number of at least ``first``, until the file is there; notes that it began."""

    def __init__(self, file: Path, first: int = 0) -> None:
        super().__init__()
        self.file = file
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        import time

        while x.item() >= self.first and not self.file.exists():
            time.sleep(0.001)
        return x


class FailOn(nn.Module):
    def __init__(self, *values: int) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        if x.item() in self.values:
            raise ValueError(f"not {x.item()}")
        return x


def two() -> list[nn.Module]:
    return [nn.Identity(), nn.Identity()]


def number(value: int) -> Tensor:
    return torch.tensor(value)


async def settled(pipe: Pipeline) -> None:
    """Until no slot is in use."""
    while pipe.statistics().in_flight:
        await trio.sleep(0.001)


async def test_the_window_is_full_and_never_more(tmp_path: Path) -> None:
    """B1, B2: a fast producer draws exactly ``window`` inputs ahead; results come in order."""
    drawn = 0

    def source() -> Iterator[Tensor]:
        nonlocal drawn
        for i in range(40):
            drawn += 1
            yield number(i)

    opened = tmp_path / "open"
    with trio.fail_after(60):
        async with Pipeline.launch([Gate(opened), nn.Identity()], pp=2, window=5) as pipe, pipe.map(source()) as outputs:
            while pipe.statistics().in_flight < 5 or not pipe.statistics().waiting_to_submit:
                await trio.sleep(0.001)
            assert drawn == 6  # five in flight, and one in the feeder's hand
            opened.touch()
            taken = 0
            async for y in outputs:
                assert y.item() == taken
                taken += 1
                assert pipe.statistics().in_flight <= 5
                await trio.lowlevel.checkpoint()
                assert drawn - taken <= 6  # a slow consumer holds the source back
    assert taken == 40


def resident(pid: int | str) -> int:
    return int(
        next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")).split()[1]
    )


async def test_memory_is_flat_over_a_long_stream() -> None:
    """B2: two gigabytes through two stages."""
    with trio.fail_after(110):
        async with Pipeline.launch(two(), pp=2) as pipe:

            async def stream(n: int) -> list[int]:
                async with pipe.map(torch.zeros(1 << 18) for _ in range(n)) as outputs:
                    async for _ in outputs:
                        pass
                return [resident(pid) for pid in ("self", *(stage.pid for stage in pipe.stages))]

            before = await stream(200)
            after = await stream(1800)
    assert all(b < a + 40_000 for a, b in zip(before, after, strict=True)), (before, after)


async def test_submit_nowait_says_when_the_window_is_full(tmp_path: Path) -> None:
    """B3, B4a: a call takes no slot; a ticket let go gives its slot back when its result arrives, or at once."""
    opened = tmp_path / "open"
    with trio.fail_after(60):
        async with Pipeline.launch([Gate(opened), nn.Identity()], pp=2, window=2) as pipe:
            kept, dropped = pipe.submit_nowait(number(1)), pipe.submit_nowait(number(2))
            with pytest.raises(trio.WouldBlock):
                pipe.submit_nowait(number(3))
            del dropped
            assert pipe.statistics().in_flight == 2
            opened.touch()
            assert await pipe.call(lambda stage: stage.rank) == [0, 1]
            assert (await kept).item() == 1
            assert (await kept).item() == 1  # again, without a slot
            await settled(pipe)
            assert pipe.statistics().dropped == 1
            arrived = pipe.submit_nowait(number(4))
            while not arrived.done:
                await trio.sleep(0.001)
            assert pipe.statistics().in_flight == 1
            del arrived
            await settled(pipe)


async def test_a_task_that_waits_for_itself_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B3; and a slow consumer of a map is not."""
    monkeypatch.setattr(ledger, "SELF_WAIT_S", 0.2)
    with trio.fail_after(60), caplog.at_level(logging.WARNING, "stageflow"):
        async with Pipeline.launch(two(), pp=2, window=2) as pipe:
            async with pipe.map(number(i) for i in range(5)) as outputs:
                await trio.sleep(1)
                assert [y.item() async for y in outputs] == [0, 1, 2, 3, 4]
            assert caplog.text == ""
            tickets = []

            async def greedy() -> None:
                for i in range(3):
                    tickets.append(await pipe.submit(number(i)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(greedy)
                while "waits for a slot" not in caplog.text:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
    assert "greedy" in caplog.text


@pytest.mark.parametrize("how", ["break", "raise", "cancel"])
async def test_leaving_a_map_early_leaves_nothing(how: str) -> None:
    """B4, B7: also of an infinite source; the next call gets its own result."""

    def forever() -> Iterator[Tensor]:
        i = 0
        while True:
            yield number(i)
            i += 1

    with trio.fail_after(60):
        async with Pipeline.launch(two(), pp=2, window=3) as pipe:
            tasks = len(trio.lowlevel.current_task().parent_nursery.child_tasks)
            with trio.CancelScope() as scope:
                try:
                    async with pipe.map(forever()) as outputs:
                        async for y in outputs:
                            if y.item() == 5:
                                if how == "cancel":
                                    scope.cancel()
                                    await trio.sleep_forever()
                                if how == "raise":
                                    raise LookupError("mine")
                                break
                except LookupError:
                    pass
            assert scope.cancelled_caught == (how == "cancel")
            assert (await pipe(number(-1))).item() == -1
            await settled(pipe)
            assert len(trio.lowlevel.current_task().parent_nursery.child_tasks) == tasks


async def test_a_thousand_tasks_each_get_their_own() -> None:
    """B5."""
    results = {}
    with trio.fail_after(60):
        async with Pipeline.launch(two(), pp=2, window=4) as pipe:

            async def one(i: int) -> None:
                results[i] = (await pipe(number(i))).item()

            async with trio.open_nursery() as nursery:
                for i in range(1000):
                    nursery.start_soon(one, i)
            assert pipe.statistics().done == 1000
    assert results == {i: i for i in range(1000)}


async def test_cancelled_waits_take_nothing_from_the_others() -> None:
    """B6."""
    results = {}
    rng = random.Random(0)
    with trio.fail_after(60):
        async with Pipeline.launch(two(), pp=2, window=4) as pipe:

            async def one(i: int) -> None:
                with trio.move_on_after(rng.random() * 0.02 if i % 2 else 60):
                    results[i] = (await pipe(number(i))).item()

            async with trio.open_nursery() as nursery:
                for i in range(64):
                    nursery.start_soon(one, i)
            await settled(pipe)
            stats = pipe.statistics()
            assert stats.submitted == stats.done
            assert (await pipe(number(99))).item() == 99
    assert all(results[i] == i for i in results)
    assert set(range(0, 64, 2)) <= set(results)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("after", [0, 3])
async def test_an_error_of_the_source_comes_in_its_place(kind: str, after: int) -> None:
    """B7."""

    def source() -> Iterator[Tensor]:
        for i in range(after):
            yield number(i)
        raise LookupError("dry")

    async def slow_source() -> AsyncIterator[Tensor]:
        for x in source():
            await trio.sleep(0.01)
            yield x

    seen = []
    with trio.fail_after(60):
        async with Pipeline.launch(two(), pp=2) as pipe:
            with pytest.raises(LookupError, match="dry"):
                async with pipe.map(source() if kind == "sync" else slow_source()) as outputs:
                    async for y in outputs:
                        seen.append(y.item())
            with pytest.raises(LookupError, match="dry"):  # also if nobody looks
                async with pipe.map(source()):
                    await trio.sleep(0.05)
            await settled(pipe)
    assert seen == list(range(after))


async def test_a_failed_micro_batch_keeps_its_place() -> None:
    seen: list[Any] = []
    with trio.fail_after(60):
        async with (
            Pipeline.launch([nn.Identity(), FailOn(2, 5)], pp=2) as pipe,
            pipe.starmap((number(i),) for i in range(7)) as outputs,
        ):
            while True:
                try:
                    async for y in outputs:
                        seen.append(y.item())
                    break
                except StageError as error:
                    seen.append(("failed", error.seq, error.stage_index))
            stats = pipe.statistics()
    assert seen == [0, 1, ("failed", 2, 1), 3, 4, ("failed", 5, 1), 6]
    assert (stats.done, stats.failed, stats.stages[1].failed) == (5, 2, 2)


async def test_misuse_gets_a_sentence() -> None:
    launch = Pipeline.launch(two(), pp=2)
    with pytest.raises(TypeError, match="async with"):
        await launch  # type: ignore[misc]
    with pytest.raises(TypeError, match="async with"), launch:  # type: ignore[attr-defined]
        pass
    with pytest.raises(TypeError, match="async with"):
        Pipeline()
    with trio.fail_after(60):
        async with launch as pipe:
            with pytest.raises(TypeError, match="needs a block"):
                async for _ in pipe.map([]):  # type: ignore[attr-defined]
                    pass
            ticket = await pipe.submit(number(1))
            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await ticket
                with pytest.raises(RuntimeError, match="cancelled"):
                    await ticket
                nursery.cancel_scope.cancel()
            with pytest.raises(ValueError, match="stages are 0"):
                await pipe.call(print, stages=[2])
            problems: list[BaseException] = []

            def elsewhere() -> None:
                try:
                    trio.run(pipe, number(1))
                except BaseException as error:
                    problems.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            await trio.to_thread.run_sync(thread.join)
            assert "another Trio run" in str(problems[0])
        for use in (pipe, pipe.submit):
            with pytest.raises(trio.ClosedResourceError):
                await use(number(1))
        with pytest.raises(trio.ClosedResourceError):
            await pipe.call(print)
        with pytest.raises(RuntimeError, match="entered once"):
            async with launch:
                pass


async def test_two_tasks_may_not_wait_for_one_ticket(tmp_path: Path) -> None:
    opened = tmp_path / "open"
    with trio.fail_after(60):
        async with Pipeline.launch([Gate(opened), nn.Identity()], pp=2) as pipe:
            ticket = pipe.submit_nowait(number(1))

            async def wait() -> None:
                await ticket

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(trio.BusyResourceError):
                    await ticket
                opened.touch()


async def test_calls_run_in_the_order_of_the_stream() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(int(x.item()))
            return x

    with trio.fail_after(60):
        async with Pipeline.launch([Seen(), Seen()], pp=2) as pipe:
            tickets = [pipe.submit_nowait(number(i)) for i in range(2)]
            async with trio.open_nursery() as nursery:

                async def look() -> None:
                    assert await pipe.call(lambda stage: stage.module.seen) == [[0, 1], [0, 1]]
                    assert await pipe.call(lambda stage, a: stage.rank + a, 10, stages=1) == [11]

                nursery.start_soon(look)
                await trio.testing.wait_all_tasks_blocked()
                tickets += [pipe.submit_nowait(number(i)) for i in range(2, 4)]
                for ticket in tickets:
                    await ticket
            with pytest.raises(StageError, match="ZeroDivisionError") as caught:
                await pipe.call(lambda stage: 1 // stage.rank)
            assert (caught.value.stage_index, caught.value.phase, caught.value.seq) == (0, "call", None)
            big = await pipe.call(lambda stage: torch.full((1 << 22,), float(stage.rank)))
            assert [(t.numel(), t[0].item(), t[-1].item()) for t in big] == [(1 << 22, 0.0, 0.0), (1 << 22, 1.0, 1.0)]
