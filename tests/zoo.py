"""Models of all kinds, small and with random weights: what `test_zoo.py` cuts, and `write_zoo.py` lists in the docs.

Each is cut by ``split="auto"`` without a word more; those that aren't of transformers with their inputs as ``example``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

_CHANCE = torch.Generator().manual_seed(5)
IDS = torch.randint(3, 60, (2, 9), generator=_CHANCE)
MASK = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
TEXT = {"input_ids": IDS, "attention_mask": MASK}
PICTURE = {"pixel_values": torch.randn(2, 3, 32, 32, generator=_CHANCE)}
SOUND = {"input_features": torch.randn(2, 8, 40, generator=_CHANCE)}
BOTH = {**TEXT, "decoder_input_ids": IDS.flip(1)}


@attrs.frozen
class Animal:
    """One model."""

    name: str
    kind: str
    make: Callable[[], nn.Module]
    inputs: dict[str, Any]
    by_example: bool = False


# ---- transformers -------------------------------------------------------------------------------------------------------

_USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PLAIN = {key: value for key, value in _USUAL.items() if key not in ("num_key_value_heads", "head_dim")}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_LANGUAGE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _USUAL,
    "MistralForCausalLM": {**_USUAL, "sliding_window": 4},
    "Qwen2ForCausalLM": _PLAIN | {"num_key_value_heads": 2},
    "Qwen3ForCausalLM": _USUAL,
    "GemmaForCausalLM": _USUAL,
    "Gemma2ForCausalLM": {**_USUAL, "sliding_window": 4},
    "Gemma3ForCausalLM": {**_USUAL, "sliding_window": 4},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 4, "n_head": 4, **_PLAIN},
    "GPTNeoForCausalLM": {
        **{key: value for key, value in _PLAIN.items() if not key.startswith("num_")},
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 4,
    },
    "GPTNeoXForCausalLM": _PLAIN,
    "GPTJForCausalLM": {**_PLAIN, "rotary_dim": 4},
    "GPTBigCodeForCausalLM": _PLAIN,
    "CodeGenForCausalLM": {**_PLAIN, "rotary_dim": 4},
    "OPTForCausalLM": {**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "PhiForCausalLM": _PLAIN,
    "Phi3ForCausalLM": _PLAIN,
    "FalconForCausalLM": _PLAIN,
    "BloomForCausalLM": _PLAIN,
    "MptForCausalLM": {**_PLAIN, "d_model": 32, "n_layers": 4, "n_heads": 4},
    "MixtralForCausalLM": _USUAL | _EXPERTS,
    "Qwen2MoeForCausalLM": _PLAIN | {"num_key_value_heads": 2} | _EXPERTS,
    "Qwen3MoeForCausalLM": _USUAL | _EXPERTS,
    "DeepseekV3ForCausalLM": _PLAIN | _DEEPSEEK,
    "GptOssForCausalLM": _USUAL | _EXPERTS,
    "StableLmForCausalLM": _PLAIN | {"num_key_value_heads": 4},
    "OlmoForCausalLM": _PLAIN,
    "Olmo2ForCausalLM": _PLAIN,
    "CohereForCausalLM": _PLAIN,
    "GraniteForCausalLM": _PLAIN,
    "Starcoder2ForCausalLM": _PLAIN | {"num_key_value_heads": 2},
    "GlmForCausalLM": _USUAL,
    "SmolLM3ForCausalLM": _USUAL,
    "NemotronForCausalLM": _USUAL,
    "Ernie4_5ForCausalLM": _USUAL,
    "HeliumForCausalLM": _USUAL,
    "BioGptForCausalLM": _PLAIN,
    "XGLMForCausalLM": {**_PLAIN, "d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 48},
    "MambaForCausalLM": _PLAIN,
    "JambaForCausalLM": _PLAIN | {"num_key_value_heads": 2} | {"num_experts": 4},
    "RecurrentGemmaForCausalLM": _PLAIN,
}
_SEQUENCE = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_VISION = {key: value for key, value in _PLAIN.items() if key not in ("vocab_size",)} | {"image_size": 32, "patch_size": 8}
_WHISPER = {**_SEQUENCE, "max_source_positions": 20, "num_mel_bins": 8}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0}
_SWIN = {"embed_dim": 16, "depths": [1, 2, 2], "num_heads": [2, 2, 4], "image_size": 32, "patch_size": 2, "window_size": 4}
_OTHERS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("BertModel", "encoder", _PLAIN, TEXT),
    ("BertForMaskedLM", "encoder", _PLAIN, TEXT),
    ("RobertaForSequenceClassification", "encoder", _PLAIN, TEXT),
    ("AlbertModel", "encoder, one layer used again and again", {**_PLAIN, "embedding_size": 16}, TEXT),
    ("DistilBertModel", "encoder", {"dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4, "vocab_size": 64}, TEXT),
    ("ViTForImageClassification", "vision encoder", _VISION, PICTURE),
    ("CLIPVisionModel", "vision encoder", _VISION, PICTURE),
    ("SwinModel", "vision encoder in levels", _SWIN, PICTURE),
    ("WhisperEncoder", "audio encoder", _WHISPER, SOUND),
    ("WhisperForConditionalGeneration", "encoder-decoder", _WHISPER, {**SOUND, "decoder_input_ids": IDS}),
    ("BartForConditionalGeneration", "encoder-decoder", _SEQUENCE, BOTH),
    ("T5ForConditionalGeneration", "encoder-decoder", _T5, BOTH),
]


def _of_transformers(name: str, config: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers
        from transformers.models.whisper import modeling_whisper

        family: Any = modeling_whisper.WhisperEncoder if name == "WhisperEncoder" else getattr(transformers, name)
        known = {**config}
        return family(family.config_class(**known))

    return make


# ---- plain modules ------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None if inside == out else nn.Sequential(nn.Conv2d(inside, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        aside = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += aside
        return self.relu(out)


class ResNet(nn.Module):
    """As in torchvision: levels of blocks, and a head behind a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.layer3 = nn.Sequential(Residual(16, 32, 2), Residual(32, 32, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _unet() -> nn.Module:
    """The example's: skip connections across the whole depth, so across every stage."""
    from examples.cutting import UNet  # late, since that needs safetensors

    return UNet()


class SkipAndParameters(nn.Module):
    """A skip over the cut, parameters used directly, one of them twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 16))
        self.second = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("constant", torch.randn(4, 16))
        self.lin0 = nn.Linear(16, 16)
        self.lin1 = nn.Linear(16, 16)
        self.lin2 = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = torch.mm(x, self.first)
        skip = x
        x = self.lin0(torch.relu(x) + self.constant)
        x = self.lin1(torch.mm(torch.relu(x), self.first))
        x = torch.mm(x, self.second) + skip * scale
        return self.lin2(torch.relu(x))


class Keywords(nn.Module):
    """Several values between stages, keyword arguments, a dict for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, *, bias: Tensor, twice: bool = False) -> dict[str, Tensor]:
        seen: list[Tensor] = []
        for layer in self.layers:
            x = torch.tanh(layer(x)) + bias
            seen.append(x)
        return {"out": 2 * x if twice else x, "sum": seen[0] + seen[2], "bias": bias}


class TwoStreams(nn.Module):
    """Blocks that take and return two tensors."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            left, right = pair
            return left + torch.relu(self.right(right)), right + torch.relu(self.left(left))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Mix() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, x.flip(1))
        for block in self.blocks:
            pair = block(pair)
        return pair[0] * pair[1]


class Asks(nn.Module):
    """Looks at values to decide what to do: at its input, and at what a block returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if x.abs().sum() > 1 else 0.5
        first = None
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
            first = x if first is None else first
            if first.abs().sum() > 1:
                x = x + 1
        return x


class TiedEnds(nn.Module):
    """A small GPT: the head is the embeddings' matrix, the positions are a parameter of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.positions = nn.Parameter(torch.randn(16, 32))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(self.norm(x))


_SQUARE = {"x": torch.randn(4, 16, generator=_CHANCE)}
_PLAIN_ONES: list[tuple[str, str, Callable[[], nn.Module], dict[str, Any]]] = [
    ("ResNet", "CNN with residuals, in place", ResNet, {"x": PICTURE["pixel_values"]}),
    ("U-Net", "CNN with skips across all stages", _unet, {"x": PICTURE["pixel_values"]}),
    ("SkipAndParameters", "a skip, parameters used directly and twice", SkipAndParameters, {**_SQUARE, "scale": 0.5}),
    ("Keywords", "keyword arguments, a dict for a result", Keywords, {**_SQUARE, "bias": torch.ones(16), "twice": True}),
    ("TwoStreams", "two tensors between blocks", TwoStreams, _SQUARE),
    ("Asks", "decides by values", Asks, _SQUARE),
    ("TiedEnds", "tied ends, positions of the whole", TiedEnds, {"ids": IDS}),
    (
        "nn.Transformer",
        "encoder-decoder of torch",
        lambda: nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True),
        {"src": torch.randn(2, 5, 16, generator=_CHANCE), "tgt": torch.randn(2, 4, 16, generator=_CHANCE)},
    ),
]

ZOO = [
    *(Animal(name, "causal LM", _of_transformers(name, config), TEXT) for name, config in _LANGUAGE.items()),
    *(Animal(name, kind, _of_transformers(name, config), inputs) for name, kind, config, inputs in _OTHERS),
    *(Animal(name, kind, make, inputs, by_example=True) for name, kind, make, inputs in _PLAIN_ONES),
]
