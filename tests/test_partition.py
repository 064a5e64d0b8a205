"""Cutting: chains of numbers, Sequentials, lists of modules, build functions, and what is refused."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import cloudpickle
import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

from stageflow import Balance, PartitionError, StageInfo
from stageflow.partition import StagePiece, cut
from stageflow.partition._balance import balance


def run(pieces: Sequence[StagePiece], *args: Any, **kwargs: Any) -> Any:
    """What a pipeline of these pieces returns: they are called one after the other, as stages are."""
    with torch.inference_mode():
        value = pieces[0].target(*args, **kwargs)
        for piece in pieces[1:]:
            value = piece.target(*value) if piece.unpack and type(value) is tuple else piece.target(value)
    return value


def layers(*widths: int) -> list[nn.Module]:
    """Linear layers of these many bytes each (in fours)."""
    return [nn.Linear(width // 4, 1, bias=False) for width in widths]


def names(pieces: Sequence[StagePiece]) -> list[tuple[str, ...]]:
    return [piece.module_names for piece in pieces]


# ---- chains of numbers --------------------------------------------------------------------------------------------------


def every_cut(units: int, groups: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, units), groups - 1):
        yield [end - start for start, end in pairwise([0, *cuts, units])]


def judged(sizes: list[int], costs: Sequence[float], shared: Sequence[tuple[int, int, float]] = ()) -> tuple[Any, ...]:
    """What makes a cut good, as the docs of `balance` say it: the least of these is the best."""
    weights: list[float] = []
    for start, end in pairwise(accumulate(sizes, initial=0)):
        twice = sum(cost for earlier, later, cost in shared if start <= earlier and later < end)
        weights.append(sum(costs[start:end]) - twice)
    return max(weights), sum(weight**2 for weight in weights), sum(size**2 for size in sizes), [-size for size in sizes]


def test_balance_finds_the_best_of_all_cuts() -> None:
    chance = random.Random(1)
    for _ in range(400):
        units = chance.randint(1, 9)
        groups = chance.randint(1, units)
        costs = [chance.choice([0, 0, 1, 2, 3, 7, chance.randint(0, 50)]) for _ in range(units)]
        best = min(every_cut(units, groups), key=lambda sizes, costs=costs: judged(sizes, costs))
        assert judged(balance(costs, groups), costs)[:3] == judged(best, costs)[:3], (costs, groups)


def test_balance_counts_what_a_group_shares_once() -> None:
    chance = random.Random(2)
    for _ in range(400):
        units = chance.randint(2, 8)
        groups = chance.randint(1, units)
        costs = [chance.randint(0, 20) for _ in range(units)]
        shared: list[tuple[int, int, float]] = []
        for _ in range(chance.randint(1, 3)):  # a tensor in some of the units: each of its places and the next
            size = chance.randint(1, 30)
            places = sorted(chance.sample(range(units), chance.randint(2, min(3, units))))
            for place in places:
                costs[place] += size
            shared += [(earlier, later, size) for earlier, later in pairwise(places)]
        best = min(every_cut(units, groups), key=lambda sizes, costs=costs, shared=shared: judged(sizes, costs, shared))
        assert judged(balance(costs, groups, shared), costs, shared)[:3] == judged(best, costs, shared)[:3], (costs, shared)


@pytest.mark.parametrize(
    ("costs", "groups", "sizes"),
    [
        ([5], 1, [1]),
        ([0, 0, 0, 0, 0, 0], 3, [2, 2, 2]),  # nothing costs anything: spread by number
        ([0, 0, 0, 0, 0], 2, [3, 2]),
        ([1, 1, 1, 1, 1], 2, [3, 2]),
        ([4, 0, 4, 0], 2, [2, 2]),
        ([100, 1, 1, 1, 1], 3, [1, 2, 2]),  # the heaviest can't be helped; the others are still even
        ([1, 1, 1, 1, 100], 3, [2, 2, 1]),
        ([0.5, 0.25, 0.25, 1.0], 2, [3, 1]),
        ([1] * 30, 4, [8, 8, 7, 7]),
    ],
)
def test_balance_is_even(costs: list[float], groups: int, sizes: list[int]) -> None:
    assert balance(costs, groups) == sizes


@pytest.mark.parametrize("groups", [0, -1, 4])
def test_balance_makes_no_empty_group(groups: int) -> None:
    with pytest.raises(ValueError, match="3 units"):
        balance([1, 1, 1], groups)


# ---- Sequentials --------------------------------------------------------------------------------------------------------


def sample_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(4, 8),
            act=nn.ReLU(),
            inner=nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            norm=nn.BatchNorm1d(8),
            last=nn.Linear(8, 3),
        )
    ).eval()


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5])
def test_stages_of_a_sequential_are_the_whole(pp: int) -> None:
    model, x = sample_model(), torch.randn(6, 4)
    pieces = cut(model, pp)
    assert torch.equal(run(pieces, x), model(x))
    assert [name for piece in pieces for name in piece.module_names] == ["first", "act", "inner", "norm", "last"]
    states = [piece.target.state_dict() for piece in pieces]
    assert [key for state in states for key in state] == list(model.state_dict())
    for state in states:
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    assert all(
        piece.target.get_submodule(name) is model.get_submodule(name) for piece in pieces for name in piece.module_names
    )
    assert all(type(piece.target) is nn.Sequential and not piece.target.training for piece in pieces)


def test_a_sequential_passes_a_tuple_on_as_one_argument() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + 1

    class Add(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1]

    model, x = nn.Sequential(Pair(), Add()), torch.ones(2)
    pieces = cut(model, 2)
    assert [piece.unpack for piece in pieces] == [False, False]
    assert torch.equal(run(pieces, x), model(x))


def test_children_keep_the_mode_that_they_came_in() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout(), nn.Dropout()).train()
    model[1].eval()
    pieces = cut(model, 3)
    assert [piece.target[0].training for piece in pieces] == [True, False, True]
    assert [child.training for child in model] == [True, False, True]
    assert all(piece.target.training for piece in pieces)


def test_cutting_leaves_the_model_alone() -> None:
    model = sample_model()
    before = {name: id(module) for name, module in model.named_modules()}
    cut(model, 3)
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_a_module_used_twice_is_two_units() -> None:
    act = nn.ReLU()
    model, x = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act), torch.randn(2, 4)
    pieces = cut(model, 2)
    assert names(pieces) == [("0", "1"), ("2", "3")]
    assert torch.equal(run(pieces, x), model(x))


def test_auto_balances_bytes() -> None:
    assert names(cut(nn.Sequential(*layers(400, 100, 100, 100, 100)), 2)) == [("0",), ("1", "2", "3", "4")]
    # Bytes, not elements: of 600, 400, 400, 400 bytes the first has half of the elements.
    half = nn.Sequential(*layers(1200, 400, 400, 400))
    half[0].bfloat16()
    assert names(cut(half, 2)) == [("0", "1"), ("2", "3")]
    # Buffers too: without them either place would do, and the stages would have two children each.
    norms = nn.Sequential(*layers(400, 400), nn.BatchNorm1d(100), nn.BatchNorm1d(100))
    assert names(cut(norms, 2)) == [("0", "1", "2"), ("3",)]


def test_auto_counts_a_shared_parameter_once_in_a_stage() -> None:
    first, big, twin = layers(400, 400, 400)
    twin.weight = big.weight
    assert names(cut(nn.Sequential(first, big, twin), 2)) == [("0",), ("1", "2")]  # counted twice it would be ("0", "1")


@pytest.mark.parametrize("split", [[1, 3, 1], (2, 1, 2), [3, 1, 1]])
def test_split_says_how_many_children_each_stage_has(split: Sequence[int]) -> None:
    model, x = sample_model(), torch.randn(6, 4)
    pieces = cut(model, 3, split)
    assert [len(piece.module_names) for piece in pieces] == list(split)
    assert torch.equal(run(pieces, x), model(x))


def test_tied_parameters_may_be_cut_apart() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    model[2].weight = model[0].weight
    pieces = cut(model, 2, [2, 1])
    assert torch.equal(run(pieces, x), model(x))
    assert "0.weight" in pieces[0].target.state_dict()
    assert "2.weight" in pieces[1].target.state_dict()


def test_a_buffer_may_be_cut_apart_only_where_it_does_not_change() -> None:
    norm = nn.BatchNorm1d(4)
    model, x = nn.Sequential(norm, nn.Linear(4, 4), nn.Sequential(norm)), torch.randn(5, 4)
    with pytest.raises(PartitionError, match=r"'0.0.running_mean'|'2.0.running_mean'") as caught:
        cut(model, 2)
    assert caught.value.stage_index == 1
    assert "model.eval()" in str(caught.value)
    with pytest.raises(PartitionError, match="train mode"):
        cut([norm, norm], 2)
    assert torch.equal(run(cut(model.eval(), 2), x), model(x))
    assert len(cut(nn.Sequential(norm, norm, nn.Linear(4, 4)).train(), 2, [2, 1])) == 2  # one stage has both


# ---- the forms of split -------------------------------------------------------------------------------------------------


FORMS: list[Any] = [
    ["inner", "last"],
    ("inner", "last"),
    {"inner": SplitPoint.BEGINNING, "last": SplitPoint.BEGINNING},
    {"norm": SplitPoint.END, "act": SplitPoint.END},
    {"last": SplitPoint.BEGINNING, "act": SplitPoint.END},
    [["first", "act"], ["inner", "norm"], ["last"]],
    [["act", "first"], ["norm", "inner"], ["last"]],
    [2, 2, 1],
]


@pytest.mark.parametrize("split", FORMS, ids=str)
def test_every_form_of_split_says_the_same(split: Any) -> None:
    model, x = sample_model(), torch.randn(6, 4)
    pieces = cut(model, 3, split)
    assert names(pieces) == [("first", "act"), ("inner", "norm"), ("last",)]
    assert torch.equal(run(pieces, x), model(x))


def test_split_by_the_modules_where_stages_begin() -> None:
    model = sample_model()
    assert names(cut(model, 3, [model.inner, model.last])) == [("first", "act"), ("inner", "norm"), ("last",)]


def test_split_may_be_the_stages_themselves() -> None:
    two, add = Two(), Sum()
    assert [piece.target for piece in cut(sample_model(), 2, [two, add])] == [two, add]
    assert all(piece.target(None) is two for piece in cut(sample_model(), 2, lambda stage: two))


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (["iner", "last"], ["'iner'", "nearest is 'inner'"]),
        (["inner"], ["1 such places for 3 stages", "2 are needed", "Change split or pp"]),
        (["inner", "last", "norm"], ["3 such places"]),
        (["last", "inner"], ["begin with 'first', 'last', 'inner'", "in the order"]),
        (["inner", "inner"], ["none is empty"]),
        (["first", "last"], ["none is empty", "begin with 'first', 'first'"]),
        (["inner.0", "last"], ["'inner.0'", "inside 'inner'", "never inside"]),
        ({"inner": "BEGINNING", "last": 3}, ["'last': 3", "SplitPoint"]),
        ({"inner": SplitPoint.BEGINNING, "last": SplitPoint.END}, ["'first', 'inner', nothing", "none is empty"]),
        ([["first", "act"], ["inner"], ["last"]], ["nothing of 'norm'"]),
        ([["first", "act"], ["inner", "act"], ["norm", "last"]], ["'act' in stage 1", "already in stage 0"]),
        ([["first", "inner"], ["act", "norm"], ["last"]], ["consecutive", "['first', 'inner']"]),
        ([["first", "act", "inner", "norm", "last"], [], []], ["consecutive", "none is empty"]),
        ([["first"], ["last"]], ["2 lists for 3 stages"]),
        ([["first"], "act", ["last"]], ["split is", "Change split"]),
        ([nn.ReLU(), nn.ReLU()], ["found ReLU", "none of them"]),
        ([], ["split is", "found []"]),
        ({}, ["0 such places"]),
    ],
    ids=str,
)
def test_a_split_that_does_not_fit_is_told_why(split: Any, says: list[str]) -> None:
    with pytest.raises(PartitionError) as caught:
        cut(sample_model(), 3, split)
    assert [word for word in says if word not in str(caught.value)] == []


# ---- balance ------------------------------------------------------------------------------------------------------------


@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=300, deadline=None)
def test_balance_is_the_optimum_for_unequal_devices(data: strategies.DataObject) -> None:
    units = data.draw(strategies.integers(1, 8))
    groups = data.draw(strategies.integers(1, units))
    costs = data.draw(strategies.lists(strategies.integers(0, 30), min_size=units, max_size=units))
    sizes = data.draw(strategies.lists(strategies.integers(0, 30), min_size=units, max_size=units))
    speeds = data.draw(strategies.lists(strategies.sampled_from([0.5, 1, 2, 3]), min_size=groups, max_size=groups))
    limits = data.draw(strategies.lists(strategies.integers(1, 90), min_size=groups, max_size=groups))
    shared: list[tuple[int, int, float]] = []
    if units > 1 and data.draw(strategies.booleans()):
        first, second = sorted(data.draw(strategies.permutations(range(units)))[:2])
        shared.append((first, second, min(sizes[first], sizes[second])))

    def slowest(cut: list[int]) -> float:
        times: list[float] = []
        edges = list(pairwise(accumulate(cut, initial=0)))
        for (start, end), speed, limit in zip(edges, speeds, limits, strict=True):
            once = sum(size for one, other, size in shared if start <= one and other < end)
            fits = sum(sizes[start:end]) - once <= limit
            times.append(sum(costs[start:end]) / speed if fits else math.inf)
        return max(times)

    best = min(map(slowest, every_cut(units, groups)))
    found = balance(costs, groups, speeds=speeds, sizes=sizes, shared_sizes=shared, limits=limits)
    assert (math.inf if found is None else slowest(found)) == best


def test_balance_by_weights_and_speeds_and_memory() -> None:
    model = nn.Sequential(*layers(400, 400, 400, 400))
    assert names(cut(model, 2, balance=[3, 1, 1, 1])) == [("0",), ("1", "2", "3")]
    assert names(cut(model, 2, balance=Balance(speeds=[1, 3]))) == [("0",), ("1", "2", "3")]
    assert names(cut(model, 2, balance=Balance(by=[1, 1, 1, 5], memory=[800, 1200]))) == [("0", "1"), ("2", "3")]
    assert names(cut(model, 2, "auto", "parameters")) == [("0", "1"), ("2", "3")]


@pytest.mark.parametrize(
    ("weighed", "says"),
    [
        ("size", ["'size'", "parameters", "Change balance"]),
        ([1, 2], ["2 numbers for 5 children"]),
        ([1, 1, 1, 1, -1], ["at least 0"]),
        ([1, 1, 1, 1, float("nan")], ["at least 0"]),
        (Balance(speeds=[1]), ["speeds", "[1] for 2 stages"]),
        (Balance(speeds=[1, 0]), ["above 0"]),
        (Balance(memory=[10, 10]), ["at most 10, 10 bytes", "Change pp, or memory"]),
    ],
)
def test_a_balance_that_does_not_fit_is_told_why(weighed: Any, says: list[str]) -> None:
    with pytest.raises(PartitionError) as caught:
        cut(sample_model(), 2, "auto", weighed)
    assert [word for word in says if word not in str(caught.value)] == []


# ---- lists and build functions ------------------------------------------------------------------------------------------


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor, scale: int = 1) -> Tensor:
        return (x + y) * scale


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_modules_is_taken_as_it_is(kind: Callable[[list[nn.Module]], Sequence[nn.Module]]) -> None:
    two, add = Two(), Sum()
    pieces = cut(kind([two, add]), 2)
    assert pieces[0].target is two
    assert pieces[1].target is add
    assert names(pieces) == [("Two",), ("Sum",)]
    assert torch.equal(run(pieces, torch.ones(3)), torch.full((3,), 3.0))  # a tuple became two arguments


def test_build_runs_in_the_stage() -> None:
    def build(stage: StageInfo) -> nn.Module:
        raise AssertionError("not here")

    pieces = cut(build, 3)
    assert pieces == (StagePiece(target=build, module_names=(), unpack=True),) * 3


def test_a_module_class_is_a_build_function() -> None:
    class Stage(nn.Module):
        def __init__(self, stage: StageInfo) -> None:
            super().__init__()

    assert [piece.target for piece in cut(Stage, 2)] == [Stage, Stage]


def test_pieces_survive_the_journey() -> None:
    model, x = sample_model(), torch.randn(6, 4)
    sent = [cloudpickle.loads(cloudpickle.dumps(piece)) for piece in cut(model, 3)]
    assert torch.equal(run(sent, x), model(x))


# ---- what is refused ----------------------------------------------------------------------------------------------------


class Special(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def hooked() -> nn.Module:
    model = sample_model()
    model.register_forward_hook(lambda *_: None)
    return model


def patched() -> nn.Module:
    model = sample_model()
    model.forward = lambda x: x
    return model


def with_own_buffer() -> nn.Module:
    model = sample_model()
    model.register_buffer("scale", torch.ones(1))
    return model


@pytest.mark.parametrize(
    ("model", "pp", "split", "says"),
    [
        (sample_model(), 0, "auto", ["at least 1", "found 0", "Change pp"]),
        (sample_model(), -2, "auto", ["at least 1", "found -2"]),
        (sample_model(), True, "auto", ["found True"]),
        (sample_model(), 2.0, "auto", ["found 2.0"]),
        (sample_model(), 6, "auto", ["5 children for 6 stages", "Change pp to 5 or less"]),
        (sample_model(), 6, [1] * 6, ["5 children for 6 stages"]),
        (sample_model(), 2, [2, 2], ["[2, 2]", "makes 4", "5 children", "Change split"]),
        (sample_model(), 2, [2, 2, 1], ["3 numbers", "2 stages", "Change split or pp"]),
        (sample_model(), 2, [5, 0], ["at least 1", "[5, 0]"]),
        (sample_model(), 2, [6, -1], ["[6, -1]"]),
        (sample_model(), 2, [2.5, 2.5], ["[2.5, 2.5]"]),
        (sample_model(), 2, [4, True], ["[4, True]"]),
        (sample_model(), 2, "even", ["'even'", "auto"]),
        (sample_model(), 2, None, ["found None"]),
        (sample_model(), 2, 5, ["found 5"]),
        (nn.Sequential(), 1, "auto", ["found none", "Change model"]),
        (Special(nn.ReLU(), nn.ReLU()), 2, "auto", ["Special", "forward", "build(stage)"]),
        (hooked(), 2, "auto", ["Sequential", "hook"]),
        (patched(), 2, "auto", ["Sequential", "forward"]),
        (with_own_buffer(), 2, "auto", ["Sequential", "'scale'"]),
        ([nn.ReLU()], 2, "auto", ["1 modules for 2 stages", "Change pp"]),
        ([], 2, "auto", ["0 modules for 2 stages"]),
        ([nn.ReLU(), torch.relu], 2, "auto", ["index 1", "builtin_function_or_method"]),
        ([nn.ReLU, nn.ReLU()], 2, "auto", ["index 0", "found type"]),
        ([nn.ReLU(), nn.ReLU()], 2, [1, 1], ["list of modules", "[1, 1]", 'Leave split at "auto"']),
        (lambda stage: nn.ReLU(), 2, [1, 1], ["build(stage)", "[1, 1]", 'Leave split at "auto"']),
        (nn.Linear(2, 2), 2, "auto", ["found Linear", "nn.Sequential", "list of pp modules", "build(stage", "Change model"]),
        (nn.ModuleList([nn.ReLU(), nn.ReLU()]), 2, "auto", ["found ModuleList", "list of pp modules"]),
        ("model.gguf", 2, "auto", ["found str", "Change model"]),
        (None, 2, "auto", ["found NoneType"]),
    ],
)
def test_what_can_not_be_cut_is_told_why(model: Any, pp: Any, split: Any, says: list[str]) -> None:
    with pytest.raises(PartitionError) as caught:
        cut(model, pp, split)
    assert [word for word in says if word not in str(caught.value)] == []
    assert isinstance(caught.value, ValueError)


def test_one_stage_takes_any_module() -> None:
    model = nn.Bilinear(2, 3, 4)
    [piece] = cut(model, 1)
    assert piece.target is model
    with pytest.raises(PartitionError, match="found Bilinear"):
        cut(model, 2)
    with pytest.raises(PartitionError, match="split"):
        cut(model, 1, [1])
