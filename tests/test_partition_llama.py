"""Cutting transformers' causal LMs, four families to the bottom: every form of call gives the unsplit model's logits bit for
bit. All other families are in `test_zoo.py`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from stageflow import PartitionError
from stageflow.partition import StagePiece, cut

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
    "initializer_range": 0.3,  # so that layers matter: with 0.02 attention is all but uniform
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Every family as it comes, and those that have them with sliding windows narrower than the sample below.
SLIDING = {"sliding_window": 3}
SLIDING_LATER = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
KINDS = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-sliding": ("MistralForCausalLM", SLIDING),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-sliding": ("Qwen2ForCausalLM", SLIDING_LATER),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-sliding": ("Qwen3ForCausalLM", SLIDING_LATER),
}


def make(kind: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A tiny model with random weights, in eval mode."""
    torch.manual_seed(0)
    name, own = KINDS[kind]
    family = getattr(transformers, name)
    return family(family.config_class(**{**TINY, **own, **config})).eval().to(dtype)


IDS = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(9) >= torch.tensor([[0], [4], [2]])).long()  # padded on the left


def run(pieces: Sequence[StagePiece], *args: Any, stage_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """What a pipeline of these pieces returns: they are called one after the other, as stages are."""
    extra = stage_kwargs or {}
    with torch.inference_mode():
        value = pieces[0].target(*args, **kwargs, **extra)
        for piece in pieces[1:]:
            assert piece.unpack
            assert type(value) is tuple
            value = piece.target(*value, **extra)
    return value


def unsplit(model: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.inference_mode():
        return model(*args, **kwargs, use_cache=False)


def check(result: Any, expected: Any) -> None:
    """The very same result: its class, its fields and every bit."""
    assert type(result) is type(expected)
    assert list(result) == list(expected)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


# ---- the same answer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_the_same_bit_for_bit(kind: str, dtype: torch.dtype, tied: bool) -> None:
    model = make(kind, dtype, tie_word_embeddings=tied)
    plain, padded = unsplit(model, IDS), unsplit(model, IDS, attention_mask=MASK)
    assert plain.logits.dtype == dtype
    assert not torch.equal(plain.logits, padded.logits)
    for pp in (1, 2, 3, 4):
        pieces = cut(model, pp)
        check(run(pieces, IDS), plain)
        check(run(pieces, IDS, attention_mask=MASK), padded)


POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
CALLS: dict[str, dict[str, Any]] = {
    "input_ids": {"input_ids": IDS},
    "inputs_embeds": {"inputs_embeds": torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(4))},
    "position_ids": {"input_ids": IDS, "position_ids": torch.arange(9)[None] ** 2},
    "packed": {"input_ids": IDS[:1], "position_ids": POSITIONS},
    "padded positions": {"input_ids": IDS, "attention_mask": MASK, "position_ids": (MASK.cumsum(-1) - 1).clamp(0)},
    "bool mask": {"input_ids": IDS, "attention_mask": MASK.bool()},
    "4d mask": {"input_ids": IDS[:1], "attention_mask": torch.full((1, 1, 9, 9), -1e9).triu(2)},
    "labels": {"input_ids": IDS, "labels": IDS},
    "masked labels": {"input_ids": IDS, "labels": IDS.where(MASK == 1, -100), "attention_mask": MASK},
    "loss by count": {"input_ids": IDS, "labels": IDS, "num_items_in_batch": 5},
    "last logits": {"input_ids": IDS, "logits_to_keep": 2},
    "some logits": {"input_ids": IDS, "logits_to_keep": torch.tensor([1, 4])},
    "not causal": {"input_ids": IDS, "is_causal": False},
    "nothing said": {"input_ids": IDS, "attention_mask": None, "labels": None},
    "refused politely": {"input_ids": IDS, "output_attentions": False, "output_hidden_states": None},
    "one token": {"input_ids": IDS[:1, :1]},
}


@pytest.mark.parametrize("kind", ["llama", "qwen3-sliding"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_whatever_the_caller_gives_reaches_who_needs_it(call: dict[str, Any], kind: str) -> None:
    model = make(kind)
    expected = unsplit(model, **call)
    for pp in (1, 2, 4):
        check(run(cut(model, pp), **call), expected)


def test_arguments_by_position_are_the_unsplit_model_s() -> None:
    model = make()
    expected = unsplit(model, IDS, MASK, torch.arange(9)[None] ** 2)
    pieces = cut(model, 3)
    check(run(pieces, IDS, MASK, torch.arange(9)[None] ** 2), expected)
    with pytest.raises(TypeError, match="multiple values"):
        run(pieces, IDS, input_ids=IDS)
    with pytest.raises(TypeError, match="too many"):
        run(pieces, *[None] * 20)


def test_the_tuple_is_returned_where_it_is_asked_for() -> None:
    model = make()
    result = run(cut(model, 3), IDS, return_dict=False)
    assert type(result) is tuple
    assert torch.equal(result[0], unsplit(model, IDS).logits)


@pytest.mark.parametrize(
    "extra",
    [{"attention_mask": MASK}, {"position_ids": 3 * torch.arange(9)[None] ** 2}, {"logits_to_keep": 1}],
    ids=lambda extra: next(iter(extra)),
)
def test_every_stage_takes_stage_kwargs(extra: dict[str, Any]) -> None:
    model = make()
    expected = unsplit(model, IDS, **extra)
    assert not torch.equal(expected.logits, unsplit(model, IDS).logits)
    for pp in (1, 3):
        check(run(cut(model, pp), IDS, stage_kwargs=extra), expected)


def test_saying_that_there_is_no_cache_is_fine() -> None:
    model = make()
    expected = unsplit(model, IDS)
    for pp in (1, 3):
        pieces = cut(model, pp)
        check(run(pieces, IDS, use_cache=False, past_key_values=None, cache=None), expected)
        check(run(pieces, IDS, stage_kwargs={"use_cache": False}), expected)


def test_all_arguments_may_be_stage_kwargs() -> None:
    model = make()
    check(run(cut(model, 3), stage_kwargs={"input_ids": IDS, "attention_mask": MASK}), unsplit(model, IDS, MASK))


def test_a_split_by_hand_gives_the_same() -> None:
    model = make("qwen2-sliding")
    for split in ([1, 4], [4, 1], [1, 1, 3], [2, 1, 1, 1], [1, 1, 1, 1, 1]):
        check(run(cut(model, len(split), split), IDS, attention_mask=MASK), unsplit(model, IDS, attention_mask=MASK))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_stays_as_it_was_chosen(implementation: str) -> None:
    model = make(attn_implementation=implementation)
    pieces = cut(model, 2)
    layers = [module for piece in pieces for name, module in piece.target.named_modules() if name.endswith("self_attn")]
    assert {layer.config._attn_implementation for layer in layers} == {implementation}
    check(run(pieces, IDS, attention_mask=MASK), unsplit(model, IDS, attention_mask=MASK))


def test_rotary_embeddings_that_change_as_they_go() -> None:
    """Each stage sees what the others see, so all change alike; and the caller's model isn't changed by its stages."""
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, twin = (make(max_position_embeddings=6, rope_parameters=scaled) for _ in range(2))
    before = model.model.rotary_emb.inv_freq.clone()
    pieces = cut(model, 3)
    for length in (4, 9, 7, 5):
        check(run(pieces, IDS[:, :length]), unsplit(twin, IDS[:, :length]))
        assert torch.equal(twin.model.rotary_emb.inv_freq, before) == (length < 6)  # so there was something to get wrong
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_a_pruned_model_is_cut_as_it_is() -> None:
    model = make("qwen3-sliding")
    model.model.layers = model.model.layers[:3]
    pieces = cut(model, 3)
    assert pieces[2].module_names == ("model.layers.2", "model.norm", "lm_head")
    check(run(pieces, IDS), unsplit(model, IDS))


def test_modes_come_along() -> None:
    model = make(attention_dropout=0.5)
    model.model.layers[3].train()
    modes = {name: module.training for name, module in model.named_modules()}
    pieces = cut(model, 2)
    for piece in pieces:
        now = {name: module.training for name, module in piece.target.named_modules()}
        assert now == {name: modes[name] for name in now}
    assert {name: module.training for name, module in model.named_modules()} == modes


# ---- what is where ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_parameter_is_in_its_stage_under_its_name(pp: int, tied: bool) -> None:
    model = make(tie_word_embeddings=tied)
    pieces = cut(model, pp)
    assert sum((piece.module_names for piece in pieces), ()) == (
        "model.embed_tokens",
        *(f"model.layers.{index}" for index in range(5)),
        "model.norm",
        "lm_head",
    )
    whole = model.state_dict()
    states = [piece.target.state_dict() for piece in pieces]
    assert [key for state in states for key in state] == list(whole)
    assert all(value.data_ptr() == whole[key].data_ptr() for state in states for key, value in state.items())
    for piece, state in zip(pieces, states, strict=True):
        assert all(key.startswith(piece.module_names) for key in state)
        assert {name for name, _ in piece.target.named_parameters(remove_duplicate=False)} == set(state)
        assert {id(buffer) for buffer in piece.target.buffers()} == {id(buffer) for buffer in model.buffers()}  # rotary


def tensors_shipped(target: nn.Module) -> tuple[bytes, list[Tensor]]:
    """What cloudpickle makes of a piece when its tensors travel by themselves, and all the tensors that it reaches."""
    tensors: dict[int, Tensor] = {}

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, Tensor) or obj.is_meta:
                return None
            tensors[id(obj)] = obj
            return list(tensors).index(id(obj))

    file = io.BytesIO()
    Pickler(file).dump(target)
    return file.getvalue(), list(tensors.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_piece_reaches_no_other_stage(kind: str, tied: bool) -> None:
    model = make(kind, tie_word_embeddings=tied)
    unsplit(model, IDS, output_hidden_states=True, output_attentions=True)  # leaves hooks in the model
    for piece in cut(model, 3):
        skeleton, tensors = tensors_shipped(piece.target)
        own = {id(tensor) for tensor in (*piece.target.parameters(), *piece.target.buffers())}
        assert {id(tensor) for tensor in tensors} == own
        assert len(skeleton) < 50_000
        assert b"__main__" not in skeleton


def test_pieces_survive_the_journey() -> None:
    model = make("qwen3-sliding", tie_word_embeddings=True)
    unsplit(model, IDS, output_hidden_states=True)
    pieces = cut(model, 3)
    sent = [cloudpickle.loads(cloudpickle.dumps(piece)) for piece in pieces]
    check(run(sent, IDS, attention_mask=MASK), unsplit(model, IDS, attention_mask=MASK))
    for piece in sent:  # and can be moved there, as one moves any module
        piece.target.to(torch.bfloat16)
    check(run(sent, IDS), unsplit(model.to(torch.bfloat16), IDS))
    for piece in pieces:  # everything by reference: nothing that only cloudpickle could send
        assert type(pickle.loads(pickle.dumps(piece.target))) is type(piece.target)


def test_the_whole_is_tied_in_one_stage() -> None:
    (piece,) = cut(make(tie_word_embeddings=True), 1)
    target = cloudpickle.loads(cloudpickle.dumps(piece.target))
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_cutting_leaves_the_model_alone() -> None:
    model = make("qwen3-sliding")
    unsplit(model, IDS, output_hidden_states=True)
    modules = {name: id(module) for name, module in model.named_modules()}
    config, expected = model.config.to_dict(), unsplit(model, IDS, output_hidden_states=True)
    for pp in (1, 3, 5):
        run(cut(model, pp), IDS)
    assert {name: id(module) for name, module in model.named_modules()} == modules
    assert model.config.to_dict() == config
    again = unsplit(model, IDS, output_hidden_states=True)
    assert len(again.hidden_states) == 6
    assert all(torch.equal(one, other) for one, other in zip(again.hidden_states, expected.hidden_states, strict=True))


def sizes(pieces: Sequence[StagePiece]) -> list[int]:
    return [sum("layers" in name for name in piece.module_names) for piece in pieces]


def test_auto_counts_embeddings_and_head() -> None:
    assert sizes(cut(make(num_hidden_layers=8, vocab_size=8), 4)) == [2, 2, 2, 2]
    # A layer has 7,744 parameters here, and the embeddings of 1,000 tokens have 32,000: as much as four layers.
    assert sizes(cut(make(num_hidden_layers=10, vocab_size=1000), 3)) == [2, 6, 2]
    assert sizes(cut(make(num_hidden_layers=10, vocab_size=1000), 2)) == [5, 5]
    # A tied head is a copy in the last stage, and counts there as well.
    assert sizes(cut(make(num_hidden_layers=10, vocab_size=1000, tie_word_embeddings=True), 2)) == [5, 5]


# ---- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"use_cache": True}, "use_cache=True .* leave it out"),
        ({"past_key_values": ((1, 2),)}, "past_key_values=.* leave it out"),
        ({"cache": ((1, 2),)}, "cache=.* leave it out"),
        ({"output_hidden_states": True}, "output_hidden_states=True .* unsplit model"),
        ({"output_attentions": True}, "output_attentions=True .* unsplit model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_pipeline_can_not_do_is_refused(extra: dict[str, Any], says: str) -> None:
    for pp in (1, 3):
        pieces = cut(make(), pp)
        with pytest.raises(ValueError, match=says):
            run(pieces, IDS, **extra)
        with pytest.raises(ValueError, match=says):
            run(pieces, IDS, stage_kwargs=extra)


def with_own_forward() -> Any:
    model = make()
    model.model.layers[1].mlp.forward = lambda x: x
    return model


def with_hook(on: str) -> Any:
    model = make()
    model.get_submodule(on).register_forward_pre_hook(lambda *_: None)
    return model


def without_layers() -> Any:
    model = make()
    model.model.layers = nn.ModuleList()
    return model


@pytest.mark.parametrize(
    ("model", "pp", "split", "says"),
    [
        (make, 6, "auto", ["5 decoder layers for 6 stages", "Change pp to 5 or less"]),
        (make, 2, [2, 2], ["makes 4", "5 decoder layers", "Change split"]),
        (make, 2, [5, 0], ["decoder layers of each stage", "[5, 0]"]),
        (make, 3, [2, 3], ["2 numbers", "3 stages"]),
        (with_own_forward, 2, "auto", ["'model.layers.1.mlp'", "device_map", "build(stage)"]),
        (lambda: with_hook(""), 2, "auto", ["LlamaForCausalLM", "hook"]),
        (lambda: with_hook("model"), 2, "auto", ["'model'", "hook"]),
        (without_layers, 9, "auto", ["for 9 stages", "LlamaForCausalLM", "modules in it"]),
        (lambda: make(output_hidden_states=True), 2, "auto", ["output_hidden_states", "config"]),
    ],
)
def test_what_can_not_be_cut_is_told_why(model: Any, pp: int, split: Any, says: list[str]) -> None:
    with pytest.raises(PartitionError) as caught:
        cut(model(), pp, split)
    assert [word for word in says if word not in str(caught.value)] == []


# ---- a real one ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_in_two_and_three_stages(smollm2: Path) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    ids = torch.tensor([[1, 504, 3575, 282, 4649, 314], [2, 2, 1, 504, 3575, 282]])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    expected = unsplit(model, ids, attention_mask=mask)
    for pp in (2, 3):
        pieces = cut(model, pp)
        assert sum(sizes(pieces)) == 30
        check(run(pieces, ids, attention_mask=mask), expected)
