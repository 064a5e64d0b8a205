"""What is known of transformers' models: how they are called, and what of it isn't possible in a pipeline.

Rules of this file:

* transformers is never imported, only recognised: whoever has such a model has imported it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from stageflow.errors import PartitionError
from stageflow.partition._needs import Subject, as_call

__all__ = ["is_transformers_model", "subject_of"]

_WITHOUT_CACHE = "the stages keep no key/value cache: leave it out, and give the whole sequence each time"
_ELSEWHERE = "they come to be in other processes than the result: run the unsplit model for them"
_REFUSED = {
    "use_cache": _WITHOUT_CACHE,
    "cache": _WITHOUT_CACHE,
    "past_key_values": _WITHOUT_CACHE,
    "output_hidden_states": _ELSEWHERE,
    "output_attentions": _ELSEWHERE,
}
_BATCH, _LENGTH = 2, 8
"""Of the example, where nobody says."""


def is_transformers_model(model: object) -> bool:
    """Whether this is a model of transformers, of any kind."""
    module: Any = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def subject_of(
    model: Any,
    example: Any = None,
    batch: int = _BATCH,
    length: int = _LENGTH,
) -> Subject:
    """The model with an example call: the given one, or one that its config tells.

    Raises:
        PartitionError: the model returns what no last stage has.
    """
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(model.config, name, False):
            raise PartitionError(
                f"A pipeline returns what its last stage has: found {name} in the model's config. Set it to False there."
            )
    parameters = inspect.signature(model.forward).parameters
    args, kwargs = as_call(example) if example is not None else ((), _example_of(model, parameters, batch, length))
    fixed = {"use_cache": False} if "use_cache" in parameters else {}
    return Subject(
        model,
        args,
        {k: v for k, v in kwargs.items() if k not in fixed},
        _REFUSED,
        fixed,
        "decoder layers" if "CausalLM" in type(model).__name__ else "layers",
    )


def _example_of(model: Any, parameters: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
    config = model.config
    dtype = next((p.dtype for p in cast("nn.Module", model).parameters() if p.is_floating_point()), torch.float32)
    device = next((p.device for p in cast("nn.Module", model).parameters()), torch.device("cpu"))
    ids = torch.ones(batch, length, dtype=torch.long, device=device)
    name = model.main_input_name
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size: Any = getattr(vision, "image_size", None) or 224
        sides: Any = (size, size) if isinstance(size, int) else size
        height, width = map(int, sides)
        shape = (batch, int(getattr(vision, "num_channels", 3)), height, width)
        made: dict[str, Any] = {name: torch.zeros(shape, dtype=dtype, device=device)}
    elif name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        made = {name: torch.zeros(batch, getattr(config, "num_mel_bins", 80), frames, dtype=dtype, device=device)}
    elif name == "input_values":
        made = {name: torch.zeros(batch, 16000, dtype=dtype, device=device)}
    else:
        made = {name: ids}
    if "input_ids" in parameters and name != "input_ids" and not getattr(config, "is_encoder_decoder", False):
        made["input_ids"] = ids
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        made["decoder_input_ids"] = ids.clone()  # another tensor: each is followed by itself
    return made
