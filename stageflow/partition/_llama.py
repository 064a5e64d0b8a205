"""Cutting a transformers causal LM of the Llama kind: embeddings, a list of equal decoder layers, a norm, a head.

Rules of this file:

* transformers is never imported, only recognised: whoever has such a model has imported it.
* A stage runs transformers' own code. It holds a base model like the unsplit one, with fewer layers, and identities in the
  place of the embeddings and the norm where they aren't its own. Masks and rotary embeddings are made anew in each stage
  from what the caller gave, by the same code from the same values, so the result is the same bit for bit.
* The caller's arguments travel from stage to stage beside the hidden states. None of them is interpreted here, except those
  that are refused and those that belong to one end of the model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, cast

from torch import Tensor, nn

from stageflow.errors import PartitionError
from stageflow.partition._pieces import StagePiece, Unit, refuse_altered
from stageflow.partition._sizes import Balance, sizes_of

__all__ = ["FAMILIES", "LlamaStage", "StageLayers", "cut_llama", "is_transformers_model"]

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""The classes that are known to be cut right; each has its tests."""

_PARTS = ["lm_head", "model"]
_BASE_PARTS = ["embed_tokens", "layers", "norm", "rotary_emb"]
_INPUTS = ("input_ids", "inputs_embeds")  # what the first stage consumes
_HEAD_ARGUMENTS = ("labels", "logits_to_keep", "return_dict")  # what the causal LM takes and its base model doesn't
_WITHOUT_CACHE = "the stages keep no key/value cache: leave it out, and give the whole sequence each time"
_ELSEWHERE = "they come to be in other processes than the result: run the unsplit model for them"
_REFUSED = {
    "use_cache": _WITHOUT_CACHE,
    "cache": _WITHOUT_CACHE,
    "past_key_values": _WITHOUT_CACHE,
    "output_hidden_states": _ELSEWHERE,
    "output_attentions": _ELSEWHERE,
}


# ---- what runs in a stage -----------------------------------------------------------------------------------------------


class StageLayers(nn.ModuleList):
    """Consecutive layers of a longer list, under their numbers there: ``layers.12.…`` is ``layers.12.…`` in any stage.

    Iteration, length and slices go by place, as transformers uses them; so does an index.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], *, training: bool) -> None:
        super().__init__()
        self.training = training
        for name, layer in layers:
            self.add_module(name, layer)

    def __getitem__(self, idx: int | slice) -> Any:  # as in torch, where it is Module or ModuleList
        layers = list(self._modules.items())
        return StageLayers(layers[idx], training=self.training) if isinstance(idx, slice) else layers[idx][1]


class LlamaStage(nn.Module):
    """One stage of a causal LM.

    The first is called like the unsplit model, a later one with what the one before returned: the hidden states and the
    caller's arguments. The last returns what the unsplit model returns. Each takes further keyword arguments, which win.
    """

    def __init__(self, causal_lm: Any, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.family: type[nn.Module] = type(causal_lm)
        self.model: nn.Module = causal_lm.model
        self.lm_head: nn.Module | None = causal_lm.lm_head if is_last else None
        # In a tuple, so that torch doesn't see it as a child: its children have the unsplit model's names only without it.
        self._causal_lm = (causal_lm,) if is_last else ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers of this stage. See the class."""
        call = self._as_call(args, kwargs)
        for name, reason in _REFUSED.items():
            value = call.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name}={value!r:.60} isn't possible in a pipeline: {reason}.")
        if self._causal_lm:
            return self._causal_lm[0](**call, use_cache=False)
        to_base = {name: value for name, value in call.items() if name not in _HEAD_ARGUMENTS}
        hidden: Tensor = self.model(**to_base, use_cache=False, return_dict=True).last_hidden_state
        return hidden, {name: value for name, value in call.items() if name not in _INPUTS}

    def _as_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, as the unsplit model's forward has them."""
        if self.is_first:
            signature = _signature(self.family)
            signature.bind(self, *args, **kwargs)  # a TypeError where the unsplit model has one
            return {**dict(zip(list(signature.parameters)[1:], args, strict=False)), **kwargs}
        hidden, carried = args
        return {**carried, **kwargs, "input_ids": None, "inputs_embeds": hidden}


@functools.cache
def _signature(family: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(family.forward)


# ---- cutting ------------------------------------------------------------------------------------------------------------


def is_transformers_model(model: object) -> bool:
    """Whether this is a model of transformers, of any kind."""
    module: Any = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def cut_llama(model: Any, num_stages: int, split: object, balance: Balance) -> tuple[StagePiece, ...]:
    """Cut a causal LM between its decoder layers; the embeddings go with the first and norm and head with the last.

    A tied head is the embeddings' matrix once more, in the last stage: what is shipped is a copy, and nothing changes it.

    Raises:
        PartitionError: it is of another kind, or has been altered, or can't be cut into so many stages.
    """
    _check(model)
    base = model.model
    first, last = [("model.embed_tokens", base.embed_tokens)], [("model.norm", base.norm), ("lm_head", model.lm_head)]
    layers = [(f"model.layers.{index}", layer) for index, layer in enumerate(base.layers)]
    units = [Unit(layer[0], (*first * (layer is layers[0]), layer, *last * (layer is layers[-1]))) for layer in layers]
    pieces: list[StagePiece] = []
    for start, end in pairwise(accumulate(sizes_of(units, num_stages, split, "decoder layers", balance), initial=0)):
        is_first, is_last = start == 0, end == len(units)
        names = [name for unit in units[start:end] for name, _ in unit.parts]
        stage = LlamaStage(_excerpt(model, start, end), is_first=is_first, is_last=is_last)
        stage.training = model.training  # its own flag only: what is in it keeps the mode it came in
        pieces.append(StagePiece(target=stage, module_names=tuple(names), unpack=True))
    return tuple(pieces)


def _excerpt(model: Any, start: int, end: int) -> Any:
    """A copy of the model with only these layers, which holds the very same tensors.

    The modules are copied, since stages change them: some rotary embeddings replace their buffers as they go.
    """
    base = model.model
    layers = list(base.layers)
    is_first, is_last = start == 0, end == len(layers)
    kept = {id(layer) for layer in layers[start:end]}
    absent = [layer for layer in layers if id(layer) not in kept]
    absent += [] if is_first else [base.embed_tokens]
    absent += [] if is_last else [base.norm, model.lm_head]
    # deepcopy looks here first: tensors are taken as they are, and what is absent isn't even looked at.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo.update((id(module), nn.Identity().train(module.training)) for module in absent)
    excerpt = copy.deepcopy(model, memo)
    base = excerpt.model
    names = map(str, range(start, end))
    base.layers = StageLayers(zip(names, list(base.layers)[start:end], strict=True), training=base.layers.training)
    base.config = _config_of(excerpt.config, start, end)
    _drop_recorders(excerpt)
    return excerpt


def _config_of(config: Any, start: int, end: int) -> Any:
    """The base model's config for some of its layers: it looks up by place which kind of layer each one is."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = end - start
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[start:end]
    return config


def _drop_recorders(model: nn.Module) -> None:
    """Take off the hooks that transformers leaves behind when hidden states or attentions were once asked for.

    They do nothing in between, but can't be pickled.
    """
    for module in model.modules():
        hooks = cast("dict[int, Any]", module._forward_hooks)  # pyright: ignore[reportPrivateUsage]
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("transformers.")]:
            del hooks[key]


def _check(model: Any) -> None:
    kind = cast("type[nn.Module]", type(model))
    way_out = "Pass build(stage), which makes each stage, or a list of pp modules as model."
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        raise PartitionError(
            f"Of transformers' models those that are known to be cut right are {', '.join(FAMILIES)}: found "
            f"{kind.__module__}.{kind.__name__}. Cutting any model is yet to come. {way_out}"
        )
    found = [sorted(name for name, _ in module.named_children()) for module in (model, model.model)]
    if found != [_PARTS, _BASE_PARTS] or not isinstance(model.model.layers, nn.ModuleList):
        raise PartitionError(
            f"A {kind.__name__} is cut along the parts that it has in transformers, {_PARTS}, and {_BASE_PARTS} in model: "
            f"found {found[0]} and {found[1]}. {way_out}"
        )
    refuse_altered(model)
    refuse_altered(model.model)
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise PartitionError(
                f"A stage gets copies of the model's modules, not of functions that are bound to them: found a forward that "
                f"was replaced on {name!r}, as device_map, offloading and use_kernels do. Load the model without, or pass "
                "build(stage) as model."
            )
    layers, config = len(model.model.layers), model.config
    if not layers:
        raise PartitionError(
            f"A {kind.__name__} is cut between its decoder layers: found none in model.layers. Change model."
        )
    if config.num_hidden_layers < layers:
        raise PartitionError(
            f"Every layer is in exactly one stage: found {layers} layers of which the config's num_hidden_layers lets only "
            f"{config.num_hidden_layers} run. Remove the others from the model."
        )
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            raise PartitionError(
                f"A pipeline returns what its last stage has: found {name} in the model's config. Set it to False there."
            )
