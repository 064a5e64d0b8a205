"""`stageflow plan`, balance by time and activations, and the benchmarks of cutting."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageflow import Balance, PartitionError
from stageflow.cli import main
from stageflow.cli._plan import bubble
from stageflow.partition import cut, seconds_of_children

transformers = pytest.importorskip("transformers")

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    return str(file)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_from_a_config_alone(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = planned(capsys, config, "--pp", "2", "--devices", "cpu,cuda:0", "--batch", "3", "--length", "5")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).to(torch.bfloat16)
    stages = figures["stages"]
    pieces = cut(model, 2)
    assert [tuple(stage["module_names"]) for stage in stages] == [piece.module_names for piece in pieces]
    assert [stage["parameters"] for stage in stages] == [
        sum(one.numel() for one in piece.target.parameters())  # type: ignore[union-attr]
        for piece in pieces
    ]
    assert [stage["edge_bytes"] for stage in stages] == [3 * 5 * 64 * 2, 0]
    assert [stage["device"] for stage in stages] == ["cpu", "cuda:0"]
    assert sum(stage["share"] for stage in stages) == pytest.approx(1)
    # Of each layer: the four projections and the gated MLP; at the end the head. Two operations for each multiplication.
    of_layer = 2 * 15 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128)
    whole = sum(stage["flops"] for stage in stages)
    assert whole == pytest.approx(8 * of_layer + 2 * 15 * 64 * 1000, rel=0.1)  # attention itself comes on top
    seconds = [stage["seconds"] for stage in stages]
    assert figures["binding_stage"] == seconds.index(max(seconds))
    assert figures["bubble"] == pytest.approx(bubble(seconds, 32))


def test_the_bubble_is_that_of_the_formula() -> None:
    assert bubble([1.0] * 4, 8) == pytest.approx(3 / 11)
    assert bubble([1.0], 5) == pytest.approx(0)


def test_a_plan_for_people(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--pp", "3", "--split", "2,2,4", "--n", "8"]) == 0
    out = capsys.readouterr().out
    assert "model.embed_tokens, model.layers.0 … 1 " in out
    assert "model.layers.4 … 7, model.norm, lm_head" in out
    assert "bubble with 8 micro-batches" in out
    assert main(["plan", config, "--pp", "3", "--split", "layers.2,layers.4"]) == 0
    assert "model.layers.2 … 3 " in capsys.readouterr().out


def test_speeds_memory_and_weights(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    def layers(*arguments: str) -> list[int]:
        stages = planned(capsys, config, "--pp", "2", *arguments)["stages"]
        return [sum("layers" in name for name in stage["module_names"]) for stage in stages]

    assert layers() == [4, 4]
    assert layers("--speeds", "1,3") == [1, 7]
    assert layers("--balance", "7,1,1,1,1,1,1,1") == [1, 7]
    assert layers("--balance", "time", "--speeds", "3,1")[0] > 4
    one = planned(capsys, config, "--pp", "2")["stages"][0]["bytes"]
    assert layers("--balance", "1,1,1,1,1,1,9,9", "--memory", f"{one},{10 * one}") == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pp", "9"], "8 decoder layers for 9 stages"),
        (["--devices", "cpu,cpu,cpu"], "found 3 for 2 stages"),
        (["--balance", "size"], "'size'"),
        (["--balance", "1,x"], "numbers are needed"),
        (["--memory", "10B"], "at most 10, 10 bytes"),
        (["--split", "layers.99"], "'layers.99'"),
    ],
)
def test_a_plan_that_can_not_be_is_told(config: str, arguments: list[str], says: str, capsys: Any) -> None:
    assert main(["plan", config, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_nothing_there_to_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "nothing")]) == 2
    assert "nothing at" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_for_405_billion_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the meta device: 800 GB of weights would not be there to be made."""
    large = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL | large | {"num_key_value_heads": 8, "vocab_size": 128256}))
    stages = planned(capsys, str(file), "--pp", "16")["stages"]
    assert sum(stage["parameters"] for stage in stages) == pytest.approx(405.9e9, rel=0.01)


# ---- balance ------------------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Takes long and weighs little."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds if x.device.type == "cpu" else 0)
        return self.linear(x)


def test_balance_by_measured_time() -> None:
    model, x = nn.Sequential(*[Slow(0.002) for _ in range(6)], Slow(0.02)).eval(), torch.ones(2, 4)
    assert [len(piece.module_names) for piece in cut(model, 2, balance="time", example=x)] == [6, 1]
    assert [len(piece.module_names) for piece in cut(model, 2, example=x)] == [4, 3]
    by = Balance(by="time", speeds=[1, 10])
    assert len(cut(model, 2, balance=by, example=x)[0].module_names) < 6
    seconds = seconds_of_children(model, x, 1)
    assert len(seconds) == 7
    assert seconds[6] > 3 * max(seconds[:6])


def test_balance_by_activations() -> None:
    class Wide(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.times = times

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.repeat(1, self.times))[..., :4] if self.times == 1 else x.repeat(1, self.times)[..., :4]

    model = nn.Sequential(*[Wide(1) for _ in range(4)], Wide(64)).eval()
    assert [len(piece.module_names) for piece in cut(model, 2, balance="activations", example=torch.ones(2, 4))] == [4, 1]


@pytest.mark.parametrize("by", ["time", "activations"])
def test_balance_that_needs_an_example_says_so(by: Any) -> None:
    with pytest.raises(PartitionError, match=f"balance by {by}.*Give example"):
        cut(nn.Sequential(nn.ReLU(), nn.ReLU()), 2, balance=by)


def test_a_module_in_two_stages_that_changes_its_buffers_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            aside = self.norm(x)
            for layer in self.layers:
                x = layer(x) + aside
            return x

    x = torch.randn(3, 4)
    with pytest.raises(PartitionError, match=r"'norm' in stages 0 and 1.*model\.eval"):
        cut(Shared().train(), 2, example=x)
    assert len(cut(Shared().eval(), 2, example=x)) == 2


def test_an_example_that_does_not_fit_is_told() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    with pytest.raises(PartitionError, match=r"run once on example arguments: found that it raises .*example"):
        cut(model, 2, example=torch.ones(2, 3))


def test_a_chain_that_is_too_short_or_more_than_a_chain_is_cut_inside() -> None:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    class Twice(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(super().forward(input))

    x = torch.randn(3, 4)
    for model, pp in ((nn.Sequential(block(), block()), 4), (Twice(nn.Linear(4, 4), nn.Linear(4, 4)), 3)):
        model.eval()
        pieces = cut(model, pp, example=x)
        with torch.inference_mode():
            value = pieces[0].target(x)  # type: ignore[call-arg, arg-type]
            for piece in pieces[1:]:
                value = piece.target(*value)  # type: ignore[call-arg, misc]
            assert torch.equal(value, model(x))


def test_a_forward_that_takes_another_way_is_found() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor, turned: bool = False, skip: int = 0) -> Tensor:
            layers = list(self.layers)[skip:]
            for layer in reversed(layers) if turned else layers:
                x = layer(x)
            return x

    x = torch.randn(3, 4)
    pieces = cut(Turns(), 2, example=x)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="takes another way"):
            pieces[0].target(x, turned=True)  # type: ignore[call-arg, arg-type]
        with pytest.raises(RuntimeError, match="takes another way"):
            pieces[0].target(x, skip=1)  # type: ignore[call-arg, arg-type]


# ---- benchmarks ---------------------------------------------------------------------------------------------------------


def test_bench_load(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("memory is measured as Linux counts it")
    assert main(["bench", "load", "--size", "1MiB", "--stages", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["checkpoint_bytes"] > 100e6  # two layers at least
    assert figures["controller_above_start"] < figures["checkpoint_bytes"] + 300e6
    assert all(0 < share < figures["checkpoint_bytes"] for share, _ in figures["stages"])


def test_bench_balance(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "balance", "--n", "4", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert "time beats parameters by" in out
    assert "[8, 1]" in out
