"""One test for each way in which a reader with fresh eyes broke an earlier version."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline, StageDied, StageError
from stageflow.transport import Packed, from_bytes, pack, to_bytes, unpack


def two() -> list[nn.Module]:
    return [nn.Identity(), nn.Identity()]


class AddInPlace(nn.Module):
    def forward(self, x: Tensor, *, mask: Tensor) -> list[Any]:
        seen = [*(x if isinstance(x, list) else []), mask[0].item(), mask[-1].item()]
        mask.add_(1)
        return seen


async def test_a_submit_that_races_with_the_end_is_answered() -> None:
    """From outside the block, in the very moment in which it closes."""
    answers: list[str] = []
    with trio.fail_after(60):
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                async with Pipeline.launch(two(), pp=2) as pipe:

                    async def late(pipe: Pipeline = pipe) -> None:
                        try:
                            while True:
                                await pipe(torch.zeros(1))
                        except trio.ClosedResourceError:
                            answers.append("closed")

                    nursery.start_soon(late)
                    await pipe(torch.zeros(1))
    assert answers == ["closed"] * 10


async def test_a_source_that_loses_its_own_peer_is_not_ours() -> None:
    """``trio.BrokenResourceError`` of the source is an error like any other."""

    def source() -> Iterator[Tensor]:
        yield torch.zeros(1)
        raise trio.BrokenResourceError("peer closed")

    with trio.fail_after(60):
        async with Pipeline.launch(two(), pp=2) as pipe:
            with pytest.raises(trio.BrokenResourceError, match="peer closed"):
                async with pipe.map(source()) as outputs:
                    async for _ in outputs:
                        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_in_the_source_comes_out_bare(error: type[BaseException]) -> None:
    def source() -> Iterator[Tensor]:
        yield torch.zeros(1)
        raise error

    with trio.fail_after(60):
        with pytest.raises(error):
            async with Pipeline.launch(two(), pp=2) as pipe, pipe.map(source()) as outputs:
                async for _ in outputs:
                    pass


@pytest.mark.parametrize("size", [4, 100_000])
async def test_what_a_stage_does_to_shared_arguments_stays_there(size: int) -> None:
    """``stage_kwargs`` and a call's arguments reach each stage as they were sent, however large."""

    def add(_stage: Any, tensor: Tensor) -> tuple[float, float]:
        seen = tensor[0].item(), tensor[-1].item()
        tensor.add_(1)
        return seen

    with trio.fail_after(60):
        async with Pipeline.launch([AddInPlace() for _ in range(4)], pp=4) as pipe:
            for _ in range(3):
                assert await pipe(torch.zeros(1), stage_kwargs={"mask": torch.zeros(size)}) == [0.0] * 8
                assert await pipe.call(add, torch.zeros(size)) == [(0.0, 0.0)] * 4


class Frozen(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"frozen: {name}")

    def add_note(self, _note: str) -> None:
        raise AttributeError("frozen")


class Bare(BaseException):
    pass


class RaisesHere:
    """Raises when it is unpickled in the process ``pid``."""

    def __init__(self, pid: int, error: type[BaseException]) -> None:
        self.pid = pid
        self.error = error

    def __reduce__(self) -> Any:
        return _raise_in, (self.pid, self.error)


def _raise_in(pid: int, error: type[BaseException]) -> RaisesHere:
    import os

    if os.getpid() == pid:
        raise error
    return RaisesHere(pid, error)


@pytest.mark.parametrize("error", [Frozen, Bare, SystemExit])
async def test_odd_exceptions_on_unpickling_a_result_hit_their_awaiter_alone(error: type[BaseException]) -> None:
    import os

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return RaisesHere(int(x), error) if x else 0

    with trio.fail_after(60):
        async with Pipeline.launch([Odd()], pp=1) as pipe:
            try:
                await pipe(torch.tensor(os.getpid()))
            except error:
                pass
            else:
                pytest.fail("nothing raised")
            assert await pipe(torch.tensor(0)) == 0


async def test_run_batch_looks_at_every_tensor_of_a_container() -> None:
    with trio.fail_after(60):
        async with Pipeline.launch(two(), pp=2) as pipe:
            with pytest.raises(ValueError, match="must be equal"):
                await pipe.run_batch([torch.ones(8, 1), torch.ones(4, 1)])
            table = collections.defaultdict(list, a=torch.arange(6))
            joined = await pipe.run_batch(table, n_microbatches=4)
            assert type(joined) is collections.defaultdict
            assert joined["a"].tolist() == [0, 1, 2, 3, 4, 5]
            assert joined["b"] == []


async def test_statistics_can_be_read_after_the_block() -> None:
    with trio.fail_after(60):
        async with Pipeline.launch(two(), pp=2) as pipe:
            await pipe(torch.zeros(1))
    assert [stage.done for stage in pipe.statistics().stages] == [1, 1]
    assert "closed" in repr(pipe)


async def test_a_cancelled_error_of_asyncio_fails_one_micro_batch() -> None:
    class Cancels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            import asyncio

            if x:
                raise asyncio.CancelledError
            return x

    with trio.fail_after(60):
        async with Pipeline.launch([Cancels()], pp=1) as pipe:
            with pytest.raises(StageError, match="CancelledError"):
                await pipe(torch.tensor(1))
            assert await pipe(torch.tensor(0)) == 0


async def test_a_stage_may_leave_its_stdout_in_any_state() -> None:
    def spoil(_stage: Any) -> None:
        import sys

        sys.stdout = None

    with trio.fail_after(60):
        async with Pipeline.launch(two(), pp=2) as pipe:
            await pipe.call(spoil)


async def test_last_words_without_a_newline_are_kept() -> None:
    def die(_stage: Any) -> None:
        import os

        os.write(2, b"first\nlast words")
        os._exit(4)

    with trio.fail_after(60), pytest.raises(StageDied) as caught:
        async with Pipeline.launch(two(), pp=2) as pipe:
            await pipe.call(die, stages=1)
    assert caught.value.stderr_tail == ("first", "last words")
    assert caught.value.exitcode == 4


def test_large_and_small_tensors_in_any_order() -> None:
    """Each keeps its own bytes, also when sizes happen to match."""
    big, small = torch.arange(8192.0), torch.arange(3.0)
    for value in ([big, small], [small, big], [big, big + 1, small, torch.empty(0)], [torch.empty(0), big]):
        packed = pack(value)
        for arrived in (Packed(packed.description, list(packed.wires)), from_bytes(bytearray(to_bytes(packed)))):
            assert all(torch.equal(a, b) for a, b in zip(unpack(arrived), value, strict=True))


def test_a_wire_is_copied_exactly_when_somebody_else_holds_its_memory() -> None:
    numpy = pytest.importorskip("numpy")
    held = torch.randn(100, 100)
    packed = pack((held, torch.randn(100, 100)))
    ours = packed.wires[1].data_ptr()
    packed.own()
    assert packed.wires[0].data_ptr() != held.data_ptr()
    assert packed.wires[1].data_ptr() == ours  # nobody else has it: not copied
    halves = torch.randn(200, 100).chunk(2)
    packed = pack(halves)
    start = halves[0].data_ptr()
    del halves
    packed.own()
    assert packed.wires[0].data_ptr() == start  # two wires of one storage, both ours
    foreign = numpy.zeros((100, 100), dtype=numpy.float32)
    packed = pack(torch.from_numpy(foreign))
    packed.own()
    assert packed.wires[0].data_ptr() != foreign.ctypes.data
