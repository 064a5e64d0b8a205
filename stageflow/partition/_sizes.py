"""How many units each stage gets: as the caller says it, or balanced.

Rules of this file:

* What a stage costs is what it costs in its own process: a tensor that two of its units share counts once, one that two
  stages share counts in both.
* Everything in ``Balance`` is checked here, against the model and the number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import attrs

from stageflow.errors import PartitionError
from stageflow.partition._balance import balance as cut_chain
from stageflow.partition._pieces import Unit
from stageflow.partition._split import counts_of

__all__ = ["Balance", "Watched", "sizes_of"]


Watched = Callable[[str], Sequence[float]]
"""Gives ``"time"`` or ``"activations"`` of each unit."""


@attrs.frozen
class Balance:
    """How ``split="auto"`` weighs what it cuts: it makes the slowest stage as fast as possible.

        Pipeline.launch(model, pp=2, devices=["cuda:0", "cuda:1"], balance=Balance(speeds=[1, 2], memory=[20e9, 40e9]))

    The cut is exact: of all ways to cut the chain of units into consecutive stages, none has a lighter heaviest stage. The
    method is the dynamic program for chain partitioning (Bokhari, IEEE Trans. Computers 37(1), 1988).
    """

    by: Literal["parameters", "time", "activations"] | Sequence[float] = "parameters"
    """What a unit weighs: ``"parameters"``, the bytes of its parameters and buffers, those that it shares with another unit
    of the same stage counted once; ``"time"``, what it takes for the example, measured here with a stage's threads where the
    model lies on the CPU, else estimated from its operations and bytes; ``"activations"``, the bytes of all tensors made on
    the way; or one number of at least 0 for each unit, in the order of the model."""
    speeds: Sequence[float] | None = None
    """How fast each stage's device is, one number above 0 for each stage, in any unit: a stage of speed 2 gets twice the
    weight of one of speed 1. Default: all are equally fast."""
    memory: Sequence[float] | None = None
    """The most bytes of parameters and buffers that each stage may hold, one number for each stage. Default: any."""

    @staticmethod
    def of(said: object) -> Balance:
        """What ``balance=`` says: itself, or what ``by`` would be."""
        return said if isinstance(said, Balance) else Balance(by=cast("Any", said))


def sizes_of(
    units: Sequence[Unit], num_stages: int, split: object, word: str, balance: Balance, watched: Watched | None = None
) -> list[int]:
    """Number of units of each stage.

    Args:
        units: in the order of the model.
        num_stages: number of stages.
        split: as the caller gave it.
        word: what a unit is, for messages: ``"layers"``.
        balance: used if ``split`` is ``"auto"``.
        watched: what tells time and activations of the units on an example.

    Raises:
        PartitionError: there are too few units, or ``split`` or ``balance`` doesn't fit them.
    """
    if num_stages > len(units):
        raise PartitionError(
            f"Every stage needs at least one of the model's {word}: found {len(units)} {word} for {num_stages} stages. "
            f"Change pp to {len(units)} or less."
        )
    if not isinstance(split, str) or split != "auto":
        return counts_of(split, units, num_stages, word)
    nbytes, shared = _bytes_of(units)
    costs = _costs(balance.by, units, nbytes, word, watched)
    speeds = _per_stage("speeds", balance.speeds, num_stages)
    limits = _per_stage("memory", balance.memory, num_stages)
    by_bytes = costs is nbytes
    sizes = cut_chain(
        costs, num_stages, shared if by_bytes else (), speeds=speeds, sizes=nbytes, shared_sizes=shared, limits=limits
    )
    if sizes is None:
        assert limits is not None
        raise PartitionError(
            f"The stages together have room for the model: found {sum(nbytes):,} bytes in its {word}, the largest of them "
            f"{max(nbytes):,}, for stages of at most {', '.join(f'{limit:,.0f}' for limit in limits)} bytes, which no cut "
            "keeps within. Change pp, or memory in balance."
        )
    return sizes


def _costs(by: object, units: Sequence[Unit], nbytes: list[int], word: str, watched: Watched | None) -> Sequence[float]:
    if isinstance(by, str) and by == "parameters":
        return nbytes
    if isinstance(by, str) and by in ("time", "activations"):
        if watched is None:
            raise PartitionError(
                f"To balance by {by}, the model is run on an example: found none. Give example, arguments of its "
                "forward, or change balance."
            )
        return watched(by)
    weights = _numbers(by)
    if weights is None or min(weights, default=0) < 0:
        raise PartitionError(
            f'balance is "parameters", "time", "activations", one number of at least 0 for each of the '
            f"model's {word}, or a Balance: found {by!r:.100}. Change balance."
        )
    if len(weights) != len(units):
        raise PartitionError(
            f"balance has one number for each of the model's {word}: found {len(weights)} numbers for {len(units)} {word}. "
            "Change balance."
        )
    return weights


def _per_stage(name: str, said: object, num_stages: int) -> list[float] | None:
    if said is None:
        return None
    numbers = _numbers(said)
    if numbers is None or len(numbers) != num_stages or min(numbers) <= 0:
        raise PartitionError(
            f"{name} in balance has one number above 0 for each stage: found {said!r:.100} for {num_stages} stages. "
            "Change balance."
        )
    return numbers


def _numbers(said: object) -> list[float] | None:
    if isinstance(said, str) or not isinstance(said, Sequence):
        return None
    numbers = list(cast("Sequence[object]", said))
    if any(isinstance(one, bool) or not isinstance(one, (int, float)) or not math.isfinite(one) for one in numbers):
        return None
    return cast("list[float]", numbers)


def _bytes_of(units: Sequence[Unit]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Bytes of each unit, and the bytes that it has in common with an earlier one."""
    costs: list[int] = []
    shared: list[tuple[int, int, int]] = []
    last_use: dict[int, int] = {}
    for index, unit in enumerate(units):
        tensors = {id(tensor): tensor for _, module in unit.parts for tensor in (*module.parameters(), *module.buffers())}
        costs.append(sum(tensor.nbytes for tensor in tensors.values()))
        shared += [(last_use[key], index, tensor.nbytes) for key, tensor in tensors.items() if key in last_use]
        last_use.update(dict.fromkeys(tensors, index))
    return costs, shared
