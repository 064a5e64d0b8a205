"""Models that call too few modules: cut between operations of their trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from stageflow import PartitionError, Pipeline
from stageflow.partition import StagePiece, cut


class Functional(nn.Module):
    """All in one forward: a skip over every stage, a dict of results, an input that is returned, a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(6)])
        self.register_buffer("bias", torch.ones(8))

    def forward(self, x: Tensor, *, scale: Tensor, twice: bool = False) -> dict[str, Any]:
        skip = x
        for weight in self.weights:
            x = torch.tanh(x @ weight) * scale + self.bias
        return {"y": 2 * x if twice else x + skip, "skip": skip, "twice": twice, "pair": (x, x.sum())}


def run(pieces: Sequence[StagePiece], *args: Any, **kwargs: Any) -> Any:
    with torch.inference_mode():
        value = pieces[0].target(*args, **kwargs)
        for piece in pieces[1:]:
            value = piece.target(value)  # type: ignore[call-arg, arg-type]
    return value


@pytest.mark.parametrize("pp", [2, 3, 5])
@pytest.mark.parametrize("twice", [False, True])
def test_a_trace_gives_what_the_model_gives(pp: int, twice: bool) -> None:
    model, x = Functional().eval(), torch.randn(4, 8)
    call = {"scale": torch.tensor(0.5), "twice": twice}
    pieces = cut(model, pp, example=((x,), call))
    assert {key for piece in pieces for key in piece.target.state_dict()} == set(model.state_dict())  # type: ignore[union-attr]
    assert all(sum("weights" in name for name in piece.module_names) in (1, 2, 3) for piece in pieces)
    pieces = cloudpickle.loads(cloudpickle.dumps(pieces))
    other = torch.randn(4, 8)
    with torch.inference_mode():
        expected = model(other, **call)
    result = run(pieces, other, **dict(reversed(call.items())))
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_another_call_than_the_example_s_is_refused() -> None:
    x = torch.randn(4, 8)
    pieces = cut(Functional().eval(), 2, example=((x,), {"scale": torch.tensor(0.5), "twice": False}))
    for args, kwargs in [
        ((x[:2],), {"scale": torch.tensor(0.5), "twice": False}),
        ((x.double(),), {"scale": torch.tensor(0.5), "twice": False}),
        ((x,), {"scale": torch.tensor(0.5), "twice": True}),
        ((x,), {"scale": torch.tensor(0.5)}),
    ]:
        with pytest.raises(ValueError, match=r"called as its example was.*change example"):
            run(pieces, *args, **kwargs)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if float((x @ self.weight).sum()) > float(x.sum()) else x.tolist()  # type: ignore[return-value]


def test_an_untraceable_model_is_told_with_what_export_said() -> None:
    with pytest.raises(PartitionError) as caught:
        cut(Untraceable(), 2, example=torch.ones(2, 4))
    text = str(caught.value)
    assert all(part in text for part in ["torch.export", "Three ways out", "list of pp modules", "build(stage)"])
    assert "\n" not in text


@pytest.mark.parametrize(("split", "balance"), [([3, 3], "parameters"), ("auto", "time")])
def test_a_trace_is_cut_by_itself_only(split: Any, balance: Any) -> None:
    example = ((torch.randn(4, 8),), {"scale": torch.tensor(0.5)})
    with pytest.raises(PartitionError, match="between operations"):
        cut(Functional(), 2, split, balance, example)


def test_too_many_stages_for_a_trace() -> None:
    with pytest.raises(PartitionError, match=r"at least one operation: found \d+ for 99 stages"):
        cut(Functional(), 99, example=((torch.randn(4, 8),), {"scale": torch.tensor(0.5)}))


async def test_a_pipeline_of_a_trace() -> None:
    model, x = Functional().eval(), torch.randn(4, 8)
    call = {"scale": torch.tensor(0.5)}
    async with Pipeline.launch(model, pp=2, example=((x,), call), balance="activations") as pipe:
        result = await pipe(x, **call)
    with torch.inference_mode():
        torch.testing.assert_close(result, model(x, **call))
