"""What runs in a stage of a model that is cut by replay: the model's own forward, with some of its modules absent.

Rules of this file:

* Every stage runs the whole forward with the caller's own arguments, so masks, positions and everything else that is made
  from them is made anew, by the model's own code. Only the work of the modules is shared out.
* A unit, the i-th call of a block, that an earlier stage has run returns what came from there. After its own last unit a
  stage leaves the forward, and passes on what later stages need.
* What is absent and not needed returns zeros of the right shape: its value is used by nobody.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stageflow.partition._needs import Needs
from stageflow.partition._tensors import Answering, map_tensors, structure_of, to_meta

__all__ = ["PLACEHOLDERS", "Absent", "Block", "Progress", "ReplayStage"]

_SHAPES_REMEMBERED = 64

PLACEHOLDERS = "_stageflow_placeholders"
"""Attribute of an absent module: name, shape and dtype of each tensor that it would have. Models ask for the dtype and the
device of a weight; in its place stands one number, expanded, which is no parameter and in no state dict."""


class _StageDone(BaseException):
    """Leaves the forward after the stage's last unit. Not an Exception, which the model's own code might catch."""


@attrs.define(eq=False)
class Progress:
    """How far one forward has come, for all blocks of a stage."""

    needs: Needs
    at: int = 0
    """Calls of blocks so far."""
    inside: bool = False
    outputs: dict[int, Any] = attrs.field(factory=dict[int, Any])

    def begin(self, received: Mapping[int, Any]) -> None:
        """Before a forward."""
        self.at, self.inside, self.outputs = 0, False, dict(received)

    def keep(self, unit: int, output: Any) -> None:
        """Of a unit that has run here."""
        if unit in self.needs.carried:
            self.outputs[unit] = self.given_out(output)

    def given_out(self, output: Any) -> Any:
        """An output, or a copy of it if the model changes outputs in place."""
        return map_tensors(torch.clone, output) if self.needs.fresh else output


@attrs.frozen
class _Shape:
    """In the place of a tensor whose value isn't needed any more."""

    shape: torch.Size
    dtype: torch.dtype


def _bare(value: Any) -> Any:
    """Floating-point tensors replaced; others are small, and models look into them."""
    return map_tensors(lambda tensor: _Shape(tensor.shape, tensor.dtype) if tensor.is_floating_point() else tensor, value)


def _filled(value: Any, device: torch.device) -> Any:
    def fill(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, _Shape) else leaf

    return tree_map(fill, value)


class Absent:
    """The forward of a module whose work is done elsewhere, or needed by nobody here: zeros in its output's shapes.

    The shapes come from a copy on the meta device, and are remembered.
    """

    def __init__(self, bare: nn.Module) -> None:
        self._bare = bare
        self._seen: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module is called."""
        leaves = structure_of([args, kwargs])[1]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        form = self._seen.get(key)
        if form is None:
            bare_args, bare_kwargs = to_meta((args, kwargs))
            with Answering():
                form = self._bare(*bare_args, **bare_kwargs)
            if len(self._seen) < _SHAPES_REMEMBERED:
                self._seen[key] = form
        return map_tensors(lambda tensor: torch.zeros_like(tensor, device=device), form)

    def follow(self, fn: Any) -> None:
        """Take on the dtype that ``fn`` gives to the stage's tensors."""
        self._seen.clear()
        for tensor in (*self._bare.parameters(), *self._bare.buffers()):
            tensor.data = torch.empty_like(tensor, dtype=fn(torch.zeros((), dtype=tensor.dtype)).dtype)


class Block:
    """The forward of a block: counts its calls, and runs those of this stage."""

    def __init__(self, progress: Progress, module: nn.Module, absent: Absent | None, units: frozenset[int]) -> None:
        """Args: that of the stage; the block; what to return where it isn't needed; which calls are its own."""
        self._progress = progress
        self._units = units
        self._module = module
        self.absent = absent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block is called."""
        progress, needs, own = self._progress, self._progress.needs, cast("Any", type(self._module)).forward
        if progress.inside:
            return own(self._module, *args, **kwargs)
        unit = progress.at
        progress.at += 1
        if unit not in self._units:
            raise RuntimeError(
                f"a forward called a {type(self._module).__name__} as its block number {unit}, where another one was called "
                "when the model was cut: with these arguments it takes another way. Give an example that takes the same way"
            )
        if unit < needs.start:
            if unit in progress.outputs:
                return progress.given_out(progress.outputs[unit])
            if (other := needs.stand_in.get(unit)) is not None:
                return progress.outputs[other]
            assert self.absent is not None
            return self.absent(*args, **kwargs)
        progress.inside = True
        try:
            output = own(self._module, *args, **kwargs)
        finally:
            progress.inside = False
        progress.keep(unit, output)
        if unit == needs.end - 1 and not needs.is_last:
            raise _StageDone
        return output


class ReplayStage(nn.Module):
    """One stage.

    The first is called like the unsplit model, a later one with what the one before returned: the outputs of units that are
    still needed, and the caller's arguments. The last returns what the unsplit model returns. Each takes further keyword
    arguments, which win. Its modules have the names that they have in the unsplit model.
    """

    def __init__(self, model: nn.Module, progress: Progress) -> None:
        """Args: the excerpt; that of its blocks."""
        super().__init__()
        self.training = model.training
        self.adopt(model)
        self._progress = progress
        self._is_placed = False

    def excerpt_(self) -> nn.Module:
        """The model that it runs. (The name is none that a module of the model has.)"""
        return self._of[0]

    def adopt(self, model: nn.Module) -> None:
        """Make it a stage of this excerpt."""
        # Its children and tensors are this module's own, so they have their own names; itself is no child.
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers  # pyright: ignore[reportPrivateUsage]
        self._non_persistent_buffers_set = model._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        self._of = (model,)

    def train(self, mode: bool = True) -> ReplayStage:
        """Set the mode of everything in it."""
        self._of[0].training = mode
        super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ReplayStage:
        super()._apply(fn, recurse)
        self._place(fn)
        for module in self.modules():
            forward: Any = vars(module).get("forward")
            absent = forward.absent if isinstance(forward, Block) else forward
            if isinstance(absent, Absent):
                absent.follow(fn)
        return self

    def _place(self, fn: Any) -> None:
        """Put placeholders where the stage is, with its dtype."""
        self._is_placed = True
        for module in self.modules():
            for name, shape, dtype in vars(module).get(PLACEHOLDERS, ()):
                vars(module)[name] = fn(torch.zeros((), dtype=dtype)).expand(shape)

    def forward(self, *given: Any, **extra: Any) -> Any:
        """Run the units of this stage. See the class."""
        progress, needs = self._progress, self._progress.needs
        if not self._is_placed:
            self._place(self._onto_device)
        received: dict[int, Any] = {}
        args, kwargs = given, extra
        if needs.start:
            received, args, kwargs = given
            args, kwargs = _filled((args, kwargs), self._device())
            args, kwargs = self._merge(args, kwargs, extra)
        args, kwargs = self._allowed(args, kwargs)
        progress.begin(received)
        try:
            result = self._of[0](*args, **{**kwargs, **needs.fixed})
            if needs.is_last:
                return result
            self._ended_early()
        except _StageDone:
            return {unit: progress.outputs[unit] for unit in sorted(needs.carried)}, *self._passed_on(args, kwargs)
        finally:
            progress.begin({})

    def _ended_early(self) -> NoReturn:
        raise RuntimeError(
            f"a forward of {type(self._of[0]).__name__} called {self._progress.at} blocks, and this stage holds up to "
            f"the call number {self._progress.needs.end}: with these arguments it takes another way than the one it was cut "
            "along"
        )

    def _passed_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, without the numbers in them that no later stage needs."""
        bare = self._progress.needs.shapes_only
        placed = tuple(_bare(arg) if str(place) in bare else arg for place, arg in enumerate(args))
        return placed, {name: _bare(arg) if name in bare else arg for name, arg in kwargs.items()}

    def _device(self) -> torch.device:
        return next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))

    def _onto_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device())

    def _merge(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], extra: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = [name for name, _ in zip(self._signature.parameters, args, strict=False)] if extra else []
        args = tuple(extra.pop(name) if name in extra else arg for name, arg in zip(names, args, strict=False)) or args
        return args, {**kwargs, **extra}

    def _allowed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without those that aren't possible in a pipeline; those given by position too."""
        refused = self._progress.needs.refused
        if not refused:
            return args, kwargs
        self._signature.bind(*args, **kwargs)  # a TypeError where the unsplit model has one
        given = {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs}
        for name, reason in refused.items():
            value = given.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name}={value!r:.60} isn't possible in a pipeline: {reason}.")
        return (), given

    @property
    def _signature(self) -> inspect.Signature:
        return _signature_of(type(self._of[0]))


@functools.cache
def _signature_of(family: type[nn.Module]) -> inspect.Signature:
    whole = inspect.signature(family.forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])
