"""Cutting a traced graph: for models that call too few modules to be cut between them.

Rules of this file:

* `torch.export` traces the model on its example, through torch.distributed.pipelining's ``pipeline()``, which splits the
  graph and keeps the names of parameters. Any operation may be where a stage begins.
* What a later stage needs is carried along by every stage between, under its name in the graph.
* A trace holds for the shapes and the plain values of its example alone. Other ones are refused, never run wrongly.
"""

from __future__ import annotations

import functools
import logging
import warnings
from itertools import accumulate
from typing import Any, cast

import attrs
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from stageflow.errors import PartitionError
from stageflow.partition._balance import balance as cut_chain
from stageflow.partition._needs import Subject
from stageflow.partition._pieces import StagePiece
from stageflow.partition._sizes import Balance
from stageflow.partition._tensors import map_tensors, structure_of

__all__ = ["cut_exported"]


@attrs.frozen
class _Value:
    """The result of an earlier step."""

    name: str


@attrs.frozen
class _Step:
    """One node of a graph."""

    op: str
    name: str
    target: Any
    is_overload: bool
    """Whether the target is the name of an operator below ``torch.ops``."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    over: tuple[str, ...]
    """Values that nobody needs after it."""


class ExportedStage(nn.Module):
    """One part of a traced graph. The first is called like the model, a later one with the values that are still needed."""

    def __init__(self, part: nn.Module, steps: list[_Step], index: int, is_last: bool, wiring: dict[str, Any]) -> None:
        super().__init__()
        self.training = part.training
        # Its children and tensors are this module's own, so they have their own names; itself is no child.
        self._modules, self._parameters, self._buffers = part._modules, part._parameters, part._buffers  # pyright: ignore[reportPrivateUsage]
        self._steps = steps
        self._index, self._is_last = index, is_last
        self._wiring = wiring

    def forward(self, *given: Any, **extra: Any) -> Any:
        """Run the operations of this stage. See the class."""
        wiring = self._wiring
        values: dict[str, Any] = given[0] if self._index else self._inputs(given, extra)
        result = self._run([values[name] for name in wiring["inputs"]])
        for name, place in wiring["outputs"]:
            values[name] = result if place is None else result[place]
        if not self._is_last:
            return {name: values[name] for name in wiring["carried"]}
        return _filled(wiring["result"], values)

    def _run(self, inputs: list[Any]) -> Any:
        """What the graph returns."""
        values: dict[str, Any] = {}
        given = iter(inputs)

        for step in self._steps:
            if step.op == "placeholder":
                values[step.name] = next(given)
                continue
            if step.op == "get_attr":
                values[step.name] = functools.reduce(getattr, step.target.split("."), self)
                continue
            args, kwargs = _filled((step.args, step.kwargs), values)
            if step.op == "output":
                return args[0]
            values[step.name] = self._target(step)(*args, **kwargs)
            for name in step.over:
                del values[name]
        raise AssertionError("a graph ends with its output")

    def _target(self, step: _Step) -> Any:
        if step.op == "call_module":
            return self.get_submodule(step.target)
        return functools.reduce(getattr, step.target.split("."), cast("Any", torch.ops)) if step.is_overload else step.target

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        wiring = self._wiring
        names = wiring["kwargs"]
        if set(kwargs) == set(names):
            kwargs = {name: kwargs[name] for name in names}  # in the order of the trace
        found = _form((args, kwargs))
        if found != wiring["called"]:
            raise ValueError(
                "A model that was traced is called as its example was, with the same structure, shapes, dtypes and plain "
                f"values: found {found!r:.300}, where the example was {wiring['called']!r:.300}. Give micro-batches like "
                "it, or change example of the launch."
            )
        tensors = [leaf for leaf in structure_of((args, kwargs))[1] if isinstance(leaf, Tensor)]
        return dict(zip(wiring["placeholders"], tensors, strict=True))


def _filled(value: Any, values: dict[str, Any]) -> Any:
    def fill(leaf: Any) -> Any:
        return values[leaf.name] if isinstance(leaf, _Value) else leaf

    return tree_map(fill, value)


def _form(call: Any) -> Any:
    """Of a call, all that a trace depends on; comparable, and short in messages."""
    return map_tensors(lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}", call)


def cut_exported(subject: Subject, num_stages: int, split: object, balance: Balance, why: str) -> tuple[StagePiece, ...]:
    """Cut a model between any two of its operations.

    Args:
        subject: the model and its example.
        num_stages: number of stages.
        split: only ``"auto"`` is possible.
        balance: by parameters or activations.
        why: for messages, why it isn't cut between its modules.

    Raises:
        PartitionError: ``torch.export`` can't trace it, or it can't be cut so.
    """
    if split != "auto" or balance.by not in ("parameters", "activations"):
        raise PartitionError(
            f'{why} It can be cut between operations, but only by split="auto", with balance "parameters" or "activations": '
            f"found split={split!r:.80}, balance by {balance.by!r:.80}. Change split or balance."
        )
    model = subject.model
    sizes: list[int] = []

    def place(traced: fx.GraphModule) -> fx.GraphModule:
        operations = [node for node in traced.graph.nodes if node.op == "call_function"]
        if len(operations) < num_stages:
            raise PartitionError(
                f"{why} Every stage needs at least one operation: found {len(operations)} for {num_stages} stages. "
                "Change pp."
            )
        sizes.extend(_sizes(traced, operations, num_stages, balance))
        for start in list(accumulate(sizes))[:-1]:
            with traced.graph.inserting_before(operations[start]):
                split_here = traced.graph.call_function(torch.ops.pippy._pipe_split.default, ())
            split_here.meta["nn_module_stack"] = operations[start].meta.get("nn_module_stack", {})
        traced.recompile()
        return traced

    from torch.distributed.pipelining import pipeline  # what no other launch needs, and takes a second

    noisy = logging.getLogger("torch.distributed.pipelining")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with torch.no_grad():
            result = model(*subject.args, **subject.kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe: Any = pipeline(model, subject.args, dict(subject.kwargs), split_policy=place)
            graph: fx.GraphModule = pipe.split_gm
            return _pieces(graph, [pipe.get_stage_module(index) for index in range(num_stages)], subject, result)
    except PartitionError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise PartitionError(
            f"{why} It can then only be cut if torch.export traces it, which said {type(error).__name__}: {said:.600}. "
            "Three ways out: put its parts into modules that its forward calls; pass a list of pp modules as model; or pass "
            "build(stage), which makes each stage."
        ) from error
    finally:
        noisy.setLevel(level)


def _sizes(traced: fx.GraphModule, operations: list[fx.Node], num_stages: int, balance: Balance) -> list[int]:
    """Operations of each stage; a parameter weighs where it is used first."""
    tensors: dict[str, Tensor] = {**dict(traced.named_parameters()), **dict(traced.named_buffers())}
    seen: set[str] = set()
    held: list[int] = []
    made: list[int] = []
    for node in operations:
        names = {str(one.target) for one in node.all_input_nodes if one.op == "get_attr"} - seen
        seen |= names
        held.append(sum(tensors[name].nbytes for name in names if name in tensors))
        value = node.meta.get("val")
        made.append(sum(leaf.nbytes for leaf in structure_of(value)[1] if isinstance(leaf, Tensor)))
    costs = held if balance.by == "parameters" else made
    sizes = cut_chain(costs, num_stages, speeds=balance.speeds, sizes=held, limits=balance.memory)
    if sizes is None:
        raise PartitionError(
            "The stages together have room for the model: found that no cut keeps within memory in balance."
        )
    return sizes


def _pieces(graph: fx.GraphModule, parts: list[nn.Module], subject: Subject, result: Any) -> tuple[StagePiece, ...]:
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    (end,) = (node for node in graph.graph.nodes if node.op == "output")
    strange = [node for node in graph.graph.nodes if node.op in ("call_function", "get_attr", "call_method")]
    if len(calls) != len(parts) or any(node.name not in _outputs_of(calls) for node in strange):
        raise RuntimeError(f"the graph holds more than its parts: {[str(node) for node in strange]}")
    returned = [leaf.name for leaf in structure_of(end.args[0])[1] if isinstance(leaf, fx.Node)]
    tensors = iter(returned)
    wiring: dict[str, Any] = {
        "placeholders": [node.name for node in graph.graph.nodes if node.op == "placeholder" and _is_tensor(node)],
        "kwargs": list(subject.kwargs),
        "called": _form((subject.args, dict(subject.kwargs))),
        "result": map_tensors(lambda _tensor: _Value(next(tensors)), result),
    }
    pieces: list[StagePiece] = []
    ready: set[str] = set(wiring["placeholders"])
    for index, (node, part) in enumerate(zip(calls, parts, strict=True)):
        inputs = [one.name for one in node.args]
        later = {one.name for other in calls[index + 1 :] for one in other.args} | set(returned)
        items = [user for user in node.users if user.op == "call_function"]
        outputs = [(user.name, user.args[1]) for user in items] or [(node.name, None)]
        ready.update(name for name, _ in outputs)
        carried = sorted(later & ready)
        own = {**wiring, "inputs": inputs, "outputs": outputs, "carried": carried}
        names = tuple(name for name, _ in (*part.named_parameters(), *part.named_buffers()))
        stage = ExportedStage(part, _steps_of(cast("Any", part).graph), index, index == len(calls) - 1, own)
        pieces.append(StagePiece(target=stage, module_names=names or (f"part {index}",), unpack=True))
    return tuple(pieces)


def _value_of(node: fx.Node) -> _Value:
    return _Value(node.name)


def _steps_of(graph: fx.Graph) -> list[_Step]:
    """A graph as what can be pickled: an fx graph itself holds much that can't."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last.update(dict.fromkeys(node.all_input_nodes, node))
    steps: list[_Step] = []
    for node in graph.nodes:
        is_overload = isinstance(node.target, OpOverload)
        target: Any = str(node.target) if is_overload else node.target
        args, kwargs = cast("Any", map_arg)((node.args, dict(node.kwargs)), _value_of)
        over = tuple(one.name for one in node.all_input_nodes if last[one] is node)
        steps.append(_Step(node.op, node.name, target, is_overload, args, dict(kwargs), over))
    return steps


def _outputs_of(calls: list[fx.Node]) -> set[str]:
    return {user.name for node in calls for user in node.users}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) or bool(node.users) or "val" not in node.meta
