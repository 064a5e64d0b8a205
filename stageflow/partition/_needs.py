"""What each stage of a model cut by replay is made of: names and numbers, read off a dry run.

Rules of this file:

* Nothing here holds a module or a tensor, so that it can be sent to a stage that loads its own weights.
* A module of the glue is in every stage that needs its value. One that nobody needs is where it is called; one that is never
  called is in the first stage or the last, so that the state dicts of the stages together are the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs
from torch import nn

from stageflow.partition._dry_run import DryRun, Source
from stageflow.partition._tensors import leaves_of, modules_of, structure_of, within

__all__ = ["Needs", "Subject", "as_call", "needs_of"]


@attrs.frozen
class Subject:
    """A model to be cut, and what is known of it."""

    model: nn.Module
    args: tuple[Any, ...]
    """Of an example call."""
    kwargs: dict[str, Any]
    refused: Mapping[str, str] = attrs.field(factory=dict[str, str])
    fixed: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    word: str = "blocks"
    """What its units are called."""


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as the caller gives it, as arguments by place and by name."""
    if isinstance(example, Mapping):
        return (), dict(cast("Mapping[str, Any]", example))
    if isinstance(example, tuple):
        given = cast("tuple[Any, ...]", example)
        if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
            return cast("Any", given)
        return given, {}
    return (example,), {}


@attrs.frozen(kw_only=True)
class Needs:
    """What one stage is made of."""

    start: int
    end: int
    """Its own units."""
    is_last: bool
    carried: frozenset[int]
    """Units whose outputs it passes on."""
    stand_in: dict[int, int]
    """For units of earlier stages whose output isn't needed: another of the same kind that is."""
    fresh: bool
    """Whether the model changes the outputs of units in place."""
    present: frozenset[str]
    """Modules that run here."""
    order: tuple[str, ...]
    """The block of each unit, of the whole model."""
    glue: tuple[str, ...]
    """Likewise."""
    uncalled: tuple[str, ...]
    for_shape: tuple[str, ...]
    """Absent modules that are called before the stage is done, and whose output nothing stands in for."""
    refused: dict[str, str]
    """Arguments that must be None or False, each with the reason."""
    fixed: dict[str, Any]
    """Arguments that it is always called with."""
    shapes_only: frozenset[str]
    """Names, or places, of arguments of which later stages need at most the shape."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """All of the model."""
        return tuple(dict.fromkeys(self.order))

    def absent(self) -> list[str]:
        """Modules that aren't here."""
        return [name for name in (*self.blocks, *self.glue, *self.uncalled) if name not in self.present]


def needs_of(subject: Subject, seen: DryRun, edges: Iterable[tuple[int, int]]) -> list[Needs]:
    """Of each stage: of that which runs the units from ``start`` to before ``end``."""
    reader = _Reader(subject, seen)
    return [reader.needs(start, end) for start, end in edges]


class _Reader:
    def __init__(self, subject: Subject, seen: DryRun) -> None:
        self._subject, self._seen = subject, seen
        self._units = len(seen.units)
        self._glue = {name: position for position, name in reversed(seen.glue)}
        self._uncalled = self._find_uncalled()
        self._used = [cast("str", at) for kind, at in self._sources(0, self._units) if kind == "module"]

    def needs(self, start: int, end: int) -> Needs:
        """See ``needs_of``."""
        seen, is_last = self._seen, end == self._units
        modules = {cast("str", at) for kind, at in self._sources(start, end) if kind == "module"}
        present = {unit.name for unit in seen.units[start:end]}
        for name, position in self._glue.items():
            here = start <= position < end or (is_last and position == end)
            is_needed = any(within(one, name) for one in modules)
            if is_needed or (here and not any(within(one, name) for one in self._used)):
                present.add(name)
        for name, position in seen.used_directly.items():
            holds_blocks = any(within(unit.name, name) for unit in seen.units)  # so it is everywhere
            if not holds_blocks and (position < end or is_last):
                present.add(next((whole for whole in self._glue if within(name, whole)), name))
        present |= {name for name, first in self._uncalled.items() if (start == 0 if first else is_last)}
        received = self._units_before(start)
        stand_in = self._stand_ins(start, received)
        for_shape = [seen.units[unit].name for unit in range(start) if unit not in {*received, *stand_in}]
        for_shape += [name for name, position in self._glue.items() if position < end and name not in present]
        return Needs(
            start=start,
            end=end,
            is_last=is_last,
            carried=frozenset() if is_last else self._units_before(end),
            stand_in=stand_in,
            fresh=seen.in_place,
            present=frozenset(present),
            order=tuple(unit.name for unit in seen.units),
            glue=tuple(self._glue),
            uncalled=tuple(self._uncalled),
            for_shape=tuple(dict.fromkeys(for_shape)),
            refused=dict(self._subject.refused),
            fixed=dict(self._subject.fixed),
            shapes_only=frozenset() if is_last else self._unneeded_inputs(end),
        )

    def _sources(self, start: int, end: int) -> frozenset[Source]:
        """What its units, the questions asked up to its end, and the result if it is the last, come from."""
        is_last = end == self._units
        asked = (sources for position, sources in self._seen.asked if position < end or is_last)
        found = frozenset[Source]().union(*(unit.sources for unit in self._seen.units[start:end]), *asked)
        return found | self._seen.end if is_last else found

    def _units_before(self, edge: int) -> frozenset[int]:
        later = self._sources(edge, self._units)
        return frozenset(cast("int", at) for kind, at in later if kind == "unit" and cast("int", at) < edge)

    def _find_uncalled(self) -> dict[str, bool]:
        """Modules with parameters that no forward calls; each with whether it comes before the first block."""
        blocks = {unit.name for unit in self._seen.units}
        found: dict[str, bool] = {}
        first = True
        for name, module in modules_of(self._subject.model):
            inside = any(within(name, one) for one in (*blocks, *self._glue, *found))
            outside = any(within(one, name) for one in (*blocks, *self._glue))
            first = first and name not in blocks
            has_any = next(module.parameters(), next(module.buffers(), None)) is not None
            if not inside and not outside and has_any and name not in self._seen.called:
                found[name] = first
        return found

    def _unneeded_inputs(self, end: int) -> frozenset[str]:
        """Arguments of the example of which later stages need at most the shape."""
        later = {at for kind, at in self._sources(end, self._units) if kind == "input"}
        found: set[str] = set()
        index = 0
        named = [(str(place), arg) for place, arg in enumerate(self._subject.args)]
        for name, arg in [*named, *{**self._subject.kwargs, **self._subject.fixed}.items()]:
            count = len(leaves_of([arg]))
            if count and not later.intersection(range(index, index + count)):
                found.add(name)
            index += count
        return frozenset(found)

    def _stand_ins(self, start: int, received: Iterable[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        units = self._seen.units
        for index in range(start):
            mine = units[index]
            for other in sorted(received):
                theirs = units[other]
                alike = structure_of(mine.form)[0] == structure_of(theirs.form)[0] and mine.shapes == theirs.shapes
                if other > index and alike and mine.name.rpartition(".")[0] == theirs.name.rpartition(".")[0]:
                    found[index] = other
                    break
        return found
