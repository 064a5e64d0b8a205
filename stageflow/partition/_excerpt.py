"""A stage of a model cut by replay, made from the model: a copy of its modules, with those of other stages absent.

Rules of this file:

* The copy holds the very tensors of the model. What is absent reaches none of them.
* Modules keep their names, so a state dict's keys are the unsplit model's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from stageflow.partition._needs import Needs
from stageflow.partition._replay import PLACEHOLDERS, Absent, Block, Progress, ReplayStage
from stageflow.partition._tensors import on_meta, same_tensors

__all__ = ["excerpt", "retire"]


def excerpt(model: nn.Module, needs: Needs, *, deep: bool) -> ReplayStage:
    """The stage.

    Args:
        model: whole.
        needs: what the stage is made of.
        deep: whether what is absent still has its children, absent too, for models that look into them.
    """
    memo = same_tensors(model)
    progress = Progress(needs)
    kept = {id(module) for name in needs.present for module in model.get_submodule(name).modules()}
    absent = {id(one): Absent(on_meta(one)) for one in map(model.get_submodule, needs.for_shape)}
    for name in needs.absent():
        module = model.get_submodule(name)
        if id(module) not in memo and id(module) not in kept:
            memo[id(module)] = _shell(module, memo, deep=deep or name not in needs.blocks)
    copied = copy.deepcopy(model, memo)
    modules = [model.get_submodule(name) for name in needs.order]
    for name in (*needs.blocks, *needs.glue):
        module, original = copied.get_submodule(name), model.get_submodule(name)
        if name in needs.blocks:
            own = frozenset(unit for unit, one in enumerate(modules) if one is original)
            module.forward = Block(progress, module, absent.get(id(original)), own)
        elif name not in needs.present and id(original) in absent:
            module.forward = absent[id(original)]
    _drop_recorders(copied)
    return ReplayStage(copied, progress)


def retire(stage: ReplayStage, name: str, *, called: bool) -> None:
    """Make a module of the glue absent after all, whose tensors were needed while others were loaded."""
    parent, _, child = name.rpartition(".")
    module = stage.get_submodule(name)
    shell = _shell(module, {}, deep=True)
    if called:
        shell.forward = Absent(on_meta(module))
    stage.get_submodule(parent).add_module(child, shell)


def _shell(module: nn.Module, memo: dict[int, Any], *, deep: bool) -> nn.Module:
    """A module of the same class with nothing in it: for models that ask an absent module what it is, and has."""
    shell = type(module).__new__(type(module))
    nn.Module.__init__(shell)
    shell.training = module.training
    vars(shell)["_is_hf_initialized"] = True  # so that transformers doesn't fill what isn't there
    for name, value in vars(module).items():
        if name not in vars(shell) and _is_plain(value):
            setattr(shell, name, value)
        elif name == "config":
            shell.config = copy.deepcopy(value, memo)
    if deep:
        for name, child in module._modules.items():  # pyright: ignore[reportPrivateUsage]
            shell.add_module(name, None if child is None else _shell(child, memo, deep=True))
        tensors = {**module._parameters, **module._buffers}  # pyright: ignore[reportPrivateUsage]
        placeholders = [(name, one.shape, one.dtype) for name, one in tensors.items() if one is not None]
        vars(shell)[PLACEHOLDERS] = placeholders
        for name in [name for name, one in tensors.items() if one is None]:
            vars(shell)[name] = None
    return shell


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, cast("Sequence[object]", value)))
    return value is None or isinstance(value, (str, int, float, torch.dtype))


def _drop_recorders(model: nn.Module) -> None:
    """Take off the hooks that transformers leaves behind when hidden states or attentions were once asked for.

    They do nothing in between, but can't be pickled.
    """
    for module in model.modules():
        hooks = cast("dict[int, Any]", module._forward_hooks)  # pyright: ignore[reportPrivateUsage]
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("transformers.")]:
            del hooks[key]
