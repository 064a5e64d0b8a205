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
from stageflow.partition._tensors import leaves_of, modules_of, structure_of

__all__ = ["Needs", "Subject", "needs_of"]


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
    fixed: dict[str, Any]
    shapes_only: frozenset[str]
    """Arguments of which later stages need at most the shape."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """All of the model."""
        return tuple(dict.fromkeys(self.order))

    def absent(self) -> list[str]:
        """Modules that aren't here."""
        return [name for name in (*self.blocks, *self.glue, *self.uncalled) if name not in self.present]


def needs_of(subject: Subject, seen: DryRun, start: int, end: int) -> Needs:
    """Of the stage that runs the units from ``start`` to before ``end``."""
    return _Reader(subject, seen).needs(start, end)


class _Reader:
    def __init__(self, subject: Subject, seen: DryRun) -> None:
        self._subject, self._seen = subject, seen
        self._units = len(seen.units)
        self._glue = {call.name: position for position, call in reversed(seen.glue)}

    def needs(self, start: int, end: int) -> Needs:
        """See ``needs_of``."""
        seen, is_last = self._seen, end == self._units
        modules = {cast("str", at) for kind, at in self._sources(start, end) if kind == "module"}
        present = {unit.name for unit in seen.units[start:end]}
        for name, position in self._glue.items():
            here = start <= position < end or (is_last and position == end)
            if any(one == name or one.startswith(f"{name}.") for one in modules) or (here and not self._is_source(name)):
                present.add(name)
        for name, position in seen.used_directly.items():
            holds_blocks = any(not name or unit.name.startswith(f"{name}.") for unit in seen.units)  # so it is everywhere
            if not holds_blocks and (position < end or is_last):
                present.add(self._glue_of(name))
        uncalled = self._uncalled()
        present |= {name for name, first in uncalled.items() if (start == 0 if first else is_last)}
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
            uncalled=tuple(uncalled),
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
        later = self._sources(edge, len(self._seen.units))
        return frozenset(cast("int", at) for kind, at in later if kind == "unit" and cast("int", at) < edge)

    def _is_source(self, name: str) -> bool:
        return any(
            kind == "module" and (at == name or str(at).startswith(f"{name}."))
            for kind, at in self._sources(0, len(self._seen.units))
        )

    def _glue_of(self, name: str) -> str:
        return next((whole for whole in self._glue if name == whole or name.startswith(f"{whole}.")), name)

    def _uncalled(self) -> dict[str, bool]:
        """Modules with parameters that no forward calls; each with whether it comes before the first block."""
        blocks = {unit.name for unit in self._seen.units}
        found: dict[str, bool] = {}
        first = True
        for name, module in modules_of(self._subject.model):
            inside = any(name == one or name.startswith(f"{one}.") for one in (*blocks, *self._glue, *found))
            outside = name == "" or any(one.startswith(f"{name}.") for one in (*blocks, *self._glue))
            first = first and name not in blocks
            has_any = next(module.parameters(), next(module.buffers(), None)) is not None
            if not inside and not outside and has_any and name not in self._seen.called:
                found[name] = first
        return found

    def _unneeded_inputs(self, end: int) -> frozenset[str]:
        """Arguments of the example of which later stages need at most the shape."""
        later = {at for kind, at in self._sources(end, len(self._seen.units)) if kind == "input"}
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
