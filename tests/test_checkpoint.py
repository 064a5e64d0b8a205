"""Models on the disk: each stage loads its own piece, and gives what the whole gives."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import trio
from test_zoo import made, tensors
from torch import nn
from zoo import ZOO, Animal

from stageflow import Checkpoint, PartitionError, Pipeline
from stageflow.partition import StagePiece, cut

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

OF_TRANSFORMERS = [animal for animal in ZOO if not animal.by_example and animal.name != "WhisperEncoder"]
"""The encoder alone is no model that transformers saves and loads by itself."""


def loaded(pieces: tuple[StagePiece, ...]) -> list[nn.Module]:
    """As the stages have them."""
    sent: Any = cloudpickle.loads(cloudpickle.dumps(pieces))
    return [piece.target(None) for piece in sent]


def run(stages: list[nn.Module], **inputs: Any) -> Any:
    with torch.inference_mode():
        value = stages[0](**inputs)
        for stage in stages[1:]:
            value = stage(*value)
    return value


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("animal", OF_TRANSFORMERS, ids=lambda animal: animal.name)
def test_stages_load_what_they_need(animal: Animal, tmp_path: Path) -> None:
    made(animal).save_pretrained(tmp_path, max_shard_size="40KB")
    whole: Any = getattr(transformers, animal.name).from_pretrained(tmp_path)
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(whole.forward).parameters else {}
    with torch.inference_mode():
        expected = tensors(whole(**animal.inputs, **no_cache))
    pieces = cut(Checkpoint(tmp_path), 2)
    assert len(cloudpickle.dumps(pieces)) < 100_000
    stages = loaded(pieces)
    assert not any(tensor.is_meta for stage in stages for tensor in (*stage.parameters(), *stage.buffers()))
    assert {key for stage in stages for key in stage.state_dict()} == set(whole.state_dict())
    assert sum(one.nbytes for one in stages[0].parameters()) < sum(one.nbytes for one in whole.parameters())
    found = tensors(run(stages, **animal.inputs))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def llama(**config: Any) -> Any:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **config)).eval()


IDS = torch.arange(3, 12)[None]


def test_a_tied_head_is_there_without_the_embeddings(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    stages = loaded(cut(Checkpoint(tmp_path), 2))
    assert "lm_head.weight" in stages[1].state_dict()
    assert "model.embed_tokens.weight" not in stages[1].state_dict()
    (alone,) = loaded(cut(Checkpoint(tmp_path), 1))
    assert alone.lm_head.weight is alone.get_submodule("model.embed_tokens").weight


def test_dtype_on_load(tmp_path: Path) -> None:
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    for dtype, expected in (("auto", torch.bfloat16), (torch.float32, torch.float32)):
        stages = loaded(cut(Checkpoint(tmp_path, dtype=dtype), 2))
        assert {one.dtype for stage in stages for one in stage.parameters()} == {expected}
        whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        with torch.inference_mode():
            assert torch.equal(run(stages, input_ids=IDS).logits, whole(input_ids=IDS, use_cache=False).logits)


def test_a_weight_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = safetensors.load_file(file)
    del state["model.layers.3.mlp.up_proj.weight"]
    safetensors.save_file(state, file, {"format": "pt"})
    pieces = cut(Checkpoint(tmp_path), 2)
    assert pieces[0].target(None)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"found none for model\.layers\.3\.mlp\.up_proj\.weight"):
        pieces[1].target(None)  # type: ignore[call-arg]


@pytest.mark.parametrize("missing", ["no-such-place", ""])
def test_nothing_there_is_told(tmp_path: Path, missing: str) -> None:
    with pytest.raises(PartitionError, match=r"directory with a config\.json.*Change path"):
        cut(Checkpoint(tmp_path / missing), 2)


def test_a_config_of_nobody_is_told(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text('{"model_type": "mine"}')
    with pytest.raises(PartitionError, match="transformers knows"):
        cut(Checkpoint(tmp_path), 2)


# ---- any module ---------------------------------------------------------------------------------------------------------


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_module_that_is_built(tmp_path: Path, shards: int) -> None:
    model = chain()
    items = list(model.state_dict().items())
    for shard in range(shards):
        safetensors.save_file(dict(items[shard::shards]), tmp_path / f"{shard}.safetensors")
    x = torch.randn(3, 8)
    for dtype in ("auto", torch.float64):
        stages = loaded(cut(Checkpoint(tmp_path, dtype, chain), 2))
        value = x if dtype == "auto" else x.double()
        with torch.inference_mode():
            assert torch.equal(stages[1](stages[0](value)), model.to(value.dtype)(value))


class Computed(nn.Module):
    """Has a buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("scale", torch.arange(8) + 0.5, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def test_a_buffer_that_is_computed(tmp_path: Path) -> None:
    model, x = Computed(), torch.randn(3, 8)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    stages = loaded(cut(Checkpoint(tmp_path, build=Computed), 2, example=x))
    with torch.inference_mode():
        assert torch.equal(stages[1](*stages[0](x)), model(x))


def test_a_tied_module_that_is_built(tmp_path: Path) -> None:
    model, ids = Tied(), torch.arange(6)[None]
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    stages = loaded(cut(Checkpoint(tmp_path, build=Tied), 2, example=ids))
    with torch.inference_mode():
        assert torch.equal(stages[1](*stages[0](ids)), model(ids))


def test_what_the_files_lack_for_a_built_module_is_told(tmp_path: Path) -> None:
    safetensors.save_file({"0.weight": torch.zeros(16, 8)}, tmp_path / "model.safetensors")
    pieces = cut(Checkpoint(tmp_path, build=chain), 2)
    with pytest.raises(ValueError, match=r"found none for 0\.bias"):
        pieces[0].target(None)  # type: ignore[call-arg]
    safetensors.save_file({key: torch.zeros(2) for key in chain().state_dict()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"found \(2,\) for 0\.weight of \(16, 8\)"):
        cut(Checkpoint(tmp_path, build=chain), 2)[0].target(None)  # type: ignore[call-arg]


# ---- a pipeline ---------------------------------------------------------------------------------------------------------


async def test_a_pipeline_of_a_checkpoint(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=IDS, use_cache=False).logits
    async with Pipeline.launch(Checkpoint(tmp_path), pp=2, threads=torch.get_num_threads()) as pipe:
        result = await pipe(input_ids=IDS)
        assert [stage.bytes for stage in pipe.stages] == [
            sum(one.nbytes for one in piece.target(None).parameters())  # type: ignore[call-arg]
            + sum(one.nbytes for one in piece.target(None).buffers())  # type: ignore[call-arg]
            for piece in cut(Checkpoint(tmp_path), 2)
        ]
    torch.testing.assert_close(result.logits, expected)


SCRIPT = """
import sys, trio
from stageflow import Checkpoint, Pipeline

async def main():
    async with Pipeline.launch(Checkpoint(sys.argv[1]), pp=2):
        print("launched")

if __name__ == "__main__":
    trio.run(main)
"""


def test_loading_is_shown_on_a_terminal(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    tmp_path.joinpath("script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    ours, theirs = os.openpty()
    shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=100, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    drawn = os.read(ours, 1 << 20).decode()
    os.close(ours)
    assert (shown.returncode, shown.stdout) == (0, b"launched\n")
    assert "loading" in drawn
    assert "of 2 stages loaded" in drawn
    quiet = subprocess.run(command, capture_output=True, timeout=100)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"launched\n", b"")


def test_what_is_loaded_is_counted(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    for piece in cut(Checkpoint(tmp_path), 2):
        target: Any = piece.target
        assert target.loaded_bytes() == 0
        stage = target(None)
        assert target.loaded_bytes() == piece.loads == sum(one.nbytes for one in stage.parameters())


@pytest.mark.slow
def test_smollm2_from_its_gguf_file(smollm2: Path) -> None:
    ids = torch.tensor([[1, 504, 3575, 282, 4649, 314]])

    async def main() -> torch.Tensor:
        async with Pipeline.launch(Checkpoint(smollm2.parent), pp=2) as pipe:
            return (await pipe(input_ids=ids)).logits

    load = transformers.AutoModelForCausalLM.from_pretrained
    whole = load(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    with torch.inference_mode():
        expected = whole(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(trio.run(main), expected, rtol=1e-3, atol=1e-3)
