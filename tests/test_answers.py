"""The pipeline's answer is the unsplit module's, whatever goes in and comes out (behaviours A1 to A5, A8 to A11)."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trio
from torch import Tensor, nn

from stageflow import Pipeline, StageError


def mlp(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(layers))).eval()


class Apply(nn.Module):
    """A stage that is one function of its arguments."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, dtype, shape and every bit."""
    if isinstance(a, Tensor):
        raw = (torch.complex64, torch.complex128)
        bits = (
            (a, b)
            if a.dtype in raw
            else (a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
        )
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    return bool(a == b)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
async def test_any_number_of_stages_gives_the_unsplit_answer(pp: int) -> None:
    """A1, A2, A7: bit for bit, while the batch size changes."""
    model = mlp(7)
    inputs = [torch.randn(rows, 32) for rows in (8, 4, 5, 1, 16, 1024)]
    with trio.fail_after(60):
        async with Pipeline.launch(model, pp=pp, threads=1) as pipe, pipe.map(inputs) as outputs:
            results = [y async for y in outputs]
            names = [name for stage in pipe.stages for name in stage.module_names]
    with torch.inference_mode():
        assert all(torch.equal(y, model(x)) for x, y in zip(inputs, results, strict=True))
    assert names == [str(i) for i in range(7)]  # every layer in exactly one stage


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    tensor: Tensor
    rest: Any


def odd_values() -> dict[str, Any]:
    torch.manual_seed(1)
    x, big = torch.randn(4, 6), torch.randn(300, 400)
    shared = torch.randn(64, 512)
    return {
        "0-d": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bool": x > 0,
        "int8": torch.arange(100, dtype=torch.int8),
        "bf16": x.bfloat16(),
        "large bf16": big.bfloat16(),
        "fp8": big.to(torch.float8_e4m3fn),
        "complex": torch.randn(5, dtype=torch.complex64),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "transposed": big.t(),
        "sliced": big[:, ::3],
        "expanded": x[:1].expand(900, 6),
        "views of one storage": [shared[:32], shared[32:], shared[::2]],
        "large before small": [big, x, big + 1, torch.tensor(1)],
        "several megabytes": torch.randn(1024, 1024),
        "nested": {"a": [x, (None, 1, "s", {"b": big})], 3: True},
        "named tuple": Pair(x, big),
        "dataclass": Record(big, [x, None]),
        "the same twice": (x, [x]),
        "a thousand tensors": [torch.tensor(i) for i in range(1000)],
        "a megabyte of text": "ü" * 500_000,
        "parameter": nn.Parameter(big),
        "sparse": (x * (x > 0)).to_sparse().coalesce().indices(),
        "none": None,
        "dtype": torch.float16,
    }


async def test_what_may_cross_an_edge() -> None:
    """A3, A4: to the first stage, between stages and back."""
    values = odd_values()
    with trio.fail_after(60):
        async with Pipeline.launch([nn.Identity(), Apply(lambda x: x), nn.Identity()], pp=3) as pipe:
            for name, value in values.items():
                if isinstance(value, tuple) and type(value) is tuple:
                    value = [value]  # a plain tuple would become arguments
                assert same(await pipe(value), value), name


async def test_memory_layout_is_kept_where_it_is_a_permutation() -> None:
    image = torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last)
    with trio.fail_after(60):
        async with Pipeline.launch([nn.Identity(), nn.Identity()], pp=2) as pipe:
            assert (await pipe(image)).stride() == image.stride()
            assert (await pipe(torch.randn(90, 80).t())).stride() == (1, 80)


async def test_a_model_output_of_transformers_comes_back() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = torch.randn(3, 3)
    with trio.fail_after(110):
        async with Pipeline.launch([nn.Identity(), nn.Identity()], pp=2) as pipe:
            y = await pipe(outputs.BaseModelOutput(last_hidden_state=x))
    assert type(y) is outputs.BaseModelOutput
    assert torch.equal(y.last_hidden_state, x)


def test_a_class_of_main_comes_back_as_the_same_class(run_script) -> None:
    result = run_script("""
        import dataclasses, torch, trio
        from torch import nn
        from stageflow import Pipeline

        @dataclasses.dataclass
        class Record:
            x: torch.Tensor

        class Wrap(nn.Module):
            def forward(self, x):
                return Record(x + 1)

        async def main():
            async with Pipeline.launch([Wrap(), nn.Identity()], pp=2) as pipe:
                y = await pipe(torch.zeros(2))
                print(type(y) is Record, y.x.tolist())

        trio.run(main)
    """)
    assert (result.returncode, result.stdout) == (0, "True [1.0, 1.0]\n"), result.stderr


class OnlyThere:
    """Can be pickled, and can't be put together in the process that holds ``pid``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return _refuse_in, (self.pid,)


def _refuse_in(pid: int) -> OnlyThere:
    import os

    if os.getpid() == pid:
        raise LookupError("not in this process")
    return OnlyThere(pid)


async def test_what_cannot_be_pickled_fails_alone() -> None:
    """A4: a result that can't be read here fails its awaiter; one that can't be sent is the stage's error."""
    import os

    class Odd(nn.Module):
        def forward(self, kind: str, pid: int) -> Any:
            return {"ok": 1, "unreadable": OnlyThere(pid), "unsendable": (i for i in range(3))}[kind]

    pid = os.getpid()
    with trio.fail_after(60):
        async with Pipeline.launch([Odd(), nn.Identity()], pp=2, window=2) as pipe:
            for _ in range(3):  # more often than there are slots
                with pytest.raises(LookupError, match="not in this process") as caught:
                    await pipe("unreadable", pid)
                assert "could not be unpickled" in caught.value.__notes__[0]
                with pytest.raises(StageError, match="cannot pickle") as failed:
                    await pipe("unsendable", pid)
                assert failed.value.stage_index == 0
                with pytest.raises(TypeError, match="cannot pickle"):
                    await pipe((i for i in range(3)), pid)
            assert await pipe("ok", pid) == 1
            assert pipe.statistics().in_flight == 0


async def test_arguments_by_keyword_and_for_every_stage() -> None:
    """A5."""

    class First(nn.Module):
        def forward(
            self, x: Tensor, scale: float = 2.0, *, shift: float, bias: Tensor, tag: str = ""
        ) -> tuple[Tensor, Tensor]:
            return x * scale + shift + bias, x

    class Second(nn.Module):
        def forward(self, y: Tensor, x: Tensor, *, bias: Tensor, tag: str) -> list[Any]:
            return [y + x + bias, tag]

    small, large = torch.ones(4), torch.ones(300, 100)
    with trio.fail_after(60):
        async with Pipeline.launch([First(), Second()], pp=2) as pipe:
            y, tag = await pipe(torch.ones(4), shift=1.0, stage_kwargs={"bias": small, "tag": "a"})
            assert (y.tolist(), tag) == ([6.0] * 4, "a")
            y, tag = await pipe(torch.ones(1), 3.0, shift=0.0, stage_kwargs={"bias": large, "tag": "b" * 50_000})
            assert torch.equal(y, torch.full((300, 100), 6.0))
            assert len(tag) == 50_000
            with pytest.raises(StageError, match="shift"):
                await pipe(torch.ones(1), stage_kwargs={"bias": small, "tag": ""})


async def test_a_sequential_passes_a_tuple_on_as_one_value() -> None:
    model = nn.Sequential(Apply(lambda x: (x, x + 1)), Apply(lambda pair: pair[0] + pair[1]))
    with trio.fail_after(60):
        async with Pipeline.launch(model, pp=2) as pipe:
            assert (await pipe(torch.tensor(1.0))).item() == 3.0


async def test_state_dicts_of_the_stages_are_the_whole() -> None:
    """A8."""
    model = mlp(5)
    with trio.fail_after(60):
        async with Pipeline.launch(model, pp=3) as pipe:
            parts = await pipe.call(lambda stage: stage.module.state_dict())
    keys = [key for part in parts for key in part]
    assert keys == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[key]) for part in parts for key, value in part.items())


@pytest.mark.parametrize(("rows", "n"), [(16, 4), (10, 4), (3, 8), (1, 8), (7, 1)])
async def test_a_batch_is_split_and_joined(rows: int, n: int) -> None:
    """A9."""
    with trio.fail_after(60):
        async with Pipeline.launch(
            [Apply(lambda x, k: {"y": x * k, "n": "same", "p": Pair(x, [x + 1])}), nn.Identity()], pp=2
        ) as pipe:
            x = torch.randn(rows, 5)
            y = await pipe.run_batch(x, k=3.0, n_microbatches=n)
            assert same(y, {"y": x * 3.0, "n": "same", "p": Pair(x, [x + 1])})
            assert pipe.statistics().submitted == min(rows, n)


async def test_a_batch_that_cannot_be_split_or_joined_says_why() -> None:
    with trio.fail_after(60):
        async with Pipeline.launch([Apply(lambda *xs: xs[0].sum()), nn.Identity()], pp=2) as pipe:
            for args, n, text in [
                (("no tensor",), 2, "found no tensor"),
                ((torch.ones(4), torch.ones(5)), 2, r"shapes \[\(4,\), \(5,\)\]"),
                ((torch.ones(4),), 0, "n_microbatches"),
                ((torch.ones(4),), 2, "0-d tensor"),
            ]:
                with pytest.raises(ValueError, match=text):
                    await pipe.run_batch(*args, n_microbatches=n)
            assert pipe.statistics().in_flight == 0


async def test_one_seed_one_result() -> None:
    """A10."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).train()
    seen = []
    with trio.fail_after(60):
        for seed in (7, 7, 8):
            async with Pipeline.launch(model, pp=2, seed=seed) as pipe:
                seen.append(await pipe(torch.ones(1000)))
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


async def test_pipelines_side_by_side_and_the_users_own_group(tmp_path) -> None:
    """A11."""
    x = torch.randn(4, 32)
    with trio.fail_after(60):
        async with Pipeline.launch(mlp(2), pp=2) as outer:
            assert not dist.is_initialized()
            dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
            try:
                async with Pipeline.launch(mlp(4), pp=2) as inner:
                    a, b = await outer(x), await inner(x)
                    dist.all_reduce(torch.ones(1))
            finally:
                dist.destroy_process_group()
            c = await outer(x)
        async with Pipeline.launch(mlp(4), pp=2) as later:
            d = await later(x)
    assert torch.equal(a, c)
    assert torch.equal(b, d)


async def test_a_stage_may_overwrite_what_it_returned() -> None:
    """A module that returns its own buffer, large enough to travel by itself, gives each micro-batch its own result."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(512, 1024)

        def forward(self, x: Tensor) -> Tensor:
            return self.count.add_(x)

    with trio.fail_after(60):
        async with Pipeline.launch([Counter(), nn.Identity()], pp=2) as pipe, pipe.map([torch.ones(1)] * 30) as outputs:
            results = [(y.min().item(), y.max().item()) async for y in outputs]
    assert results == [(i, i) for i in range(1, 31)]
