"""Watching one forward pass of a model on the meta device: which blocks it calls, and what each of them needs.

Rules of this file:

* Nothing is computed: the model is a copy on the meta device, so a model of any size is watched in seconds, also one that
  has no weights yet.
* A unit is one call of a block, numbered in order; blocks are modules of the model, none inside another. What runs between
  the units is glue: embeddings, masks, norms, the head.
* Every tensor is followed: an operation's result comes from all that its arguments come from. What comes out of a unit comes
  from that unit alone. So what a unit is given says which earlier units and which modules of the glue it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stageflow.partition._tensors import answer_of, leaves_of, map_tensors, modules_of, within

__all__ = ["DryRun", "Source", "UnitCall", "Work", "dry_run"]

Source = tuple[str, Any]
"""Where a value comes from: ``("unit", 3)``, ``("module", "model.embed_tokens")``, ``("input", 0)``."""

_NOWHERE: frozenset[Source] = frozenset()


@attrs.define
class Work:
    """What something costs, counted in one forward pass."""

    flops: int = 0
    activations: int = 0
    """Bytes of all tensors made on the way."""

    def add(self, other: Work) -> None:
        """Count the other as well."""
        self.flops += other.flops
        self.activations += other.activations


@attrs.define
class UnitCall:
    """One call of a block."""

    name: str
    """The block's name in the model."""
    sources: frozenset[Source]
    """All that its arguments come from."""
    form: Any
    """What it returned: None for each tensor's place, so its form alone."""
    nbytes: int
    """Bytes of the tensors that it returned."""
    shapes: tuple[torch.Size, ...]
    work: Work


@attrs.frozen
class DryRun:
    """What was seen."""

    units: list[UnitCall]
    end: frozenset[Source]
    """All that the model's result comes from."""
    glue: list[tuple[int, str]]
    """Calls of modules with parameters outside the blocks, none inside another such one: each the number of units that were
    called before, and its name."""
    work_between: list[Work]
    """Of the glue before each unit, and after the last."""
    used_directly: dict[str, int]
    """Modules whose tensors were used from outside their own forward: each with the number of units called before."""
    asked: list[tuple[int, frozenset[Source]]]
    """What the glue asked the value of, to decide what to do next, each with the number of units called before: every stage
    that comes by there has to find the same value."""
    written: frozenset[str]
    """Modules that change a buffer of theirs."""
    in_place: bool
    """Whether the glue changes what a unit returned."""
    called: frozenset[str]
    """Names of all modules that were called."""
    result: Any
    half: bool = False
    """Whether the model was in bfloat16 for it, since one of its operators knows nothing else on the meta device."""


def dry_run(model: nn.Module, blocks: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DryRun:
    """Watch one forward pass.

    Args:
        model: on the meta device.
        blocks: names of the modules whose calls are the units.
        args: of the model's forward, on the meta device.
        kwargs: likewise.

    Raises:
        Exception: what the model's forward raises on the meta device.
    """
    watch = _Watch(model, blocks)
    for index, tensor in enumerate(leaves_of([args, kwargs])):
        watch.mark(tensor, frozenset({("input", index)}))
    with watch.watching(), torch.no_grad(), watch:
        result = model(*args, **kwargs)
    return DryRun(
        units=watch.units,
        end=watch.sources(leaves_of(result)),
        glue=watch.glue,
        work_between=watch.work_between,
        used_directly=watch.used_directly,
        asked=watch.asked,
        written=frozenset(watch.written),
        in_place=watch.in_place,
        called=frozenset(watch.called),
        result=result,
    )


class _Watch(TorchDispatchMode):
    """Follows every tensor, and counts."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        super().__init__()
        self.units: list[UnitCall] = []
        self.glue: list[tuple[int, str]] = []
        self.work_between = [Work()]
        self.used_directly: dict[str, int] = {}
        self.in_place = False
        self.written: set[str] = set()
        self.asked: list[tuple[int, frozenset[Source]]] = []
        self._buffer_of = {id(one): name for name, module in modules_of(model) for one in module.buffers(recurse=False)}
        self.called: set[str] = set()
        self._model = model
        self._blocks = frozenset(blocks)
        self._owners: dict[int, list[str]] = {}
        for name, module in modules_of(model):
            if not self._in_block(name):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    self._owners.setdefault(id(tensor), []).append(name)
        self._from: dict[int, frozenset[Source]] = {}
        self._alive: list[Tensor] = []  # so that no id comes to mean another tensor
        self._stack: list[str] = []
        self._whole: set[str] = set()
        self._given: list[Tensor] = []
        self._in_unit: str | None = None
        self._work = self.work_between[0]

    def _in_block(self, name: str) -> bool:
        return bool(self._parents(name))

    def _parents(self, name: str) -> frozenset[str]:
        parts = name.split(".")
        return self._blocks.intersection(".".join(parts[: n + 1]) for n in range(len(parts)))

    # ---- tensors --------------------------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        """Say where a tensor comes from."""
        self._from[id(tensor)] = sources
        self._alive.append(tensor)

    def sources(self, tensors: Sequence[Tensor]) -> frozenset[Source]:
        """Where they come from."""
        found = _NOWHERE
        for tensor in tensors:
            found |= self._from.get(id(tensor), _NOWHERE)
            if owner := self._owner_of(tensor)[0]:
                found |= {("module", owner)}
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self._in_unit is None:
            self.asked.append((len(self.units), self.sources([args[0]])))
        if (answer := answer_of(func, args)) is not None:
            return answer
        if func._schema.is_mutable and args and id(args[0]) in self._buffer_of:
            self.written.add(self._buffer_of[id(args[0])])
        output = func(*args, **kwargs)
        made = leaves_of(output)
        if self._in_unit is None:
            given = leaves_of([args, kwargs])
            sources = self.sources(given)
            for tensor in given:
                owner, is_running = self._owner_of(tensor)
                if owner is not None and not is_running:
                    self.used_directly.setdefault(owner, len(self.units))
                if func._schema.is_mutable and any(kind == "unit" for kind, _ in self._from.get(id(tensor), ())):
                    self.in_place = True
            for tensor in made:
                self.mark(tensor, sources)
        self._work.activations += sum(tensor.nbytes for tensor in made)
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            with contextlib.suppress(Exception):  # an operator that torch can't count for these arguments
                self._work.flops += int(count(*args, **kwargs, out_val=output))
        return output

    def _owner_of(self, tensor: Tensor) -> tuple[str | None, bool]:
        """Which module of the glue has it, of several the one that is running; and whether it is."""
        owners = self._owners.get(id(tensor))
        if owners is None:
            return None, False
        running = [whole for whole in self._stack if whole in self._whole]
        inside = (one for one in owners if any(within(one, whole) for whole in running))
        one = next(inside, None)
        return (owners[0], False) if one is None else (one, True)

    # ---- modules --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """See every call of the model's modules."""
        undo: list[Callable[[], None]] = []
        for name, module in modules_of(self._model):
            if name in self._blocks:
                before = module.register_forward_pre_hook(self._enter_unit(name), prepend=True, with_kwargs=True)
                after = module.register_forward_hook(self._leave_unit(), with_kwargs=True)
            elif name and not self._in_block(name):
                before = module.register_forward_pre_hook(self._enter(name, module), prepend=True, with_kwargs=True)
                after = module.register_forward_hook(self._leave(name))
            else:
                continue
            undo += [before.remove, after.remove]
        try:
            yield
        finally:
            for one in undo:
                one()

    def _enter(self, name: str, module: nn.Module) -> Callable[..., None]:
        whole = next(module.parameters(), None) is not None and not any(
            block.startswith(f"{name}.") for block in self._blocks
        )

        def enter(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
            if self._in_unit is not None:  # a module of the glue, called from inside a block
                self.used_directly.setdefault(name, len(self.units))
                return
            self.called.add(name)
            if whole and not any(outer in self._whole for outer in self._stack):
                self.glue.append((len(self.units), name))
            if whole:
                self._whole.add(name)
            self._stack.append(name)

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._in_unit is None and self._stack and self._stack[-1] == name:
                self._stack.pop()
                for tensor in leaves_of(output):
                    self.mark(tensor, self.sources([tensor]) | {("module", name)})

        return leave

    def _enter_unit(self, name: str) -> Callable[..., None]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._in_unit is not None:  # a block inside another
                return
            self._in_unit = name
            self.called.add(name)
            self._given = leaves_of([args, kwargs])
            self._work = Work()

        return enter

    def _leave_unit(self) -> Callable[..., None]:
        def leave(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            name = self._in_unit
            if name is None or self._model.get_submodule(name) is not module:
                return
            index, tensors = len(self.units), leaves_of(output)
            form = map_tensors(lambda _tensor: None, output)
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self.units.append(
                UnitCall(name, self.sources(self._given), form, nbytes, tuple(one.shape for one in tensors), self._work)
            )
            for tensor in tensors:
                self.mark(tensor, frozenset({("unit", index)}))
            self._in_unit = None
            self._work = Work()
            self.work_between.append(self._work)

        return leave
