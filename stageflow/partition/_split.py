"""What ``split`` says: all its forms, brought down to the number of units of each stage.

Rules of this file:

* A form is known by its types alone; what it says is then checked against the model's units.
* A stage begins with a unit. A name is a unit's own, or any unambiguous end of it: ``layers.8`` for ``model.layers.8``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NoReturn, cast

from torch import nn

from stageflow.errors import PartitionError
from stageflow.partition._pieces import Unit

__all__ = ["Split", "counts_of"]

Split = Literal["auto"] | Sequence[int] | Sequence[str] | Mapping[str, Any] | Sequence[Sequence[str]] | Sequence[nn.Module]
"""How the caller says the cut."""

_FORMS = (
    'split is "auto"; the number of {word} of each stage, ints of at least 1 like [8, 8, 8, 6]; the names where stages but '
    'the first begin, like ["layers.8", "layers.16"], or {{"layers.8": SplitPoint.BEGINNING}}; the names in each stage, '
    'like [["layers.0"], ["layers.1", "head"]]; or the modules where stages but the first begin'
)


def counts_of(split: object, units: Sequence[Unit], num_stages: int, word: str) -> list[int]:
    """Number of units of each stage, as ``split`` says, which isn't ``"auto"``.

    Raises:
        PartitionError: it is none of the forms, or doesn't fit the model.
    """
    if isinstance(split, Mapping):
        points = cast("Mapping[object, object]", split)
        return _between(_split_points(points, units, word), units, num_stages, word)
    said: list[Any] = []
    if isinstance(split, Sequence) and not isinstance(split, (str, bytes)):
        said = list(cast("Sequence[Any]", split))
    if not said:
        _refuse(cast("object", split), word)
    if all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in said):
        return _check_counts(said, units, num_stages, word)
    if all(isinstance(one, str) for one in said):
        return _between([_start(_find(one, units, word), one, units, word) for one in said], units, num_stages, word)
    if all(isinstance(one, nn.Module) for one in said):
        return _between([_start(_find_module(one, units), one, units, word) for one in said], units, num_stages, word)
    if not all(_is_names(one) for one in said):
        _refuse(said, word)
    return _name_lists([list(one) for one in said], units, num_stages, word)


def _refuse(split: object, word: str) -> NoReturn:
    raise PartitionError(f"{_FORMS.format(word=word)}: found {split!r:.200}. Change split.")


def _is_names(one: object) -> bool:
    if isinstance(one, str) or not isinstance(one, Sequence):
        return False
    return all(isinstance(name, str) for name in cast("Sequence[object]", one))


# ---- counts -------------------------------------------------------------------------------------------------------------


def _check_counts(counts: list[int], units: Sequence[Unit], num_stages: int, word: str) -> list[int]:
    if len(counts) != num_stages:
        raise PartitionError(
            f"split has one number for each stage: found {len(counts)} numbers, {counts}, for {num_stages} stages. "
            "Change split or pp."
        )
    if sum(counts) != len(units):
        raise PartitionError(
            f"The numbers in split add up to the number of {word}: found {counts}, which makes {sum(counts)}, for "
            f"{len(units)} {word}. Change split."
        )
    return counts


# ---- where stages begin -------------------------------------------------------------------------------------------------


def _between(starts: list[int], units: Sequence[Unit], num_stages: int, word: str) -> list[int]:
    if len(starts) != num_stages - 1:
        raise PartitionError(
            f"split says where each stage but the first begins: found {len(starts)} such places for {num_stages} stages, "
            f"where {num_stages - 1} are needed. Change split or pp."
        )
    edges = [0, *starts, len(units)]
    counts = [end - start for start, end in pairwise(edges)]
    if min(counts) < 1:
        found = ", ".join(repr(units[start].name) if start < len(units) else "nothing" for start in edges[:-1])
        raise PartitionError(
            f"Stages begin one after the other, the first with {units[0].name!r}, and none is empty: found stages that "
            f"begin with {found}. "
            f"Change split: the {word} come in the order of the model."
        )
    return counts


def _split_points(split: Mapping[object, object], units: Sequence[Unit], word: str) -> list[int]:
    """Of torch's own spelling, ``{"layers.8": SplitPoint.BEGINNING}``; the order in the mapping means nothing."""
    starts: list[int] = []
    for name, point in split.items():
        which = getattr(point, "name", point)
        if not isinstance(name, str) or which not in ("BEGINNING", "END"):
            raise PartitionError(
                "A mapping in split has names of modules, each with SplitPoint.BEGINNING or SplitPoint.END of "
                f"torch.distributed.pipelining: found {name!r}: {point!r}. Change split."
            )
        unit, part = _find(name, units, word)
        if which == "BEGINNING":
            starts.append(_start((unit, part), name, units, word))
        elif part == len(units[unit].parts) - 1:
            starts.append(unit + 1)
        else:
            _refuse_place(name, units[unit], word)
    return sorted(starts)


def _start(found: tuple[int, int], said: object, units: Sequence[Unit], word: str) -> int:
    unit, part = found
    if part:
        _refuse_place(said if isinstance(said, str) else units[unit].parts[part][0], units[unit], word)
    return unit


def _refuse_place(name: str, unit: Unit, word: str) -> NoReturn:
    together = " and ".join(repr(part) for part, _ in unit.parts)
    raise PartitionError(
        f"A stage begins and ends with one of the model's {word}, and what belongs to one of them goes where it goes: found "
        f"{name!r}, which is in one stage with {together}. Change split."
    )


# ---- what is in each stage ----------------------------------------------------------------------------------------------


def _name_lists(lists: list[list[str]], units: Sequence[Unit], num_stages: int, word: str) -> list[int]:
    if len(lists) != num_stages:
        raise PartitionError(
            f"split has one list of names for each stage: found {len(lists)} lists for {num_stages} stages. "
            "Change split or pp."
        )
    stage_of: dict[int, int] = {}
    for stage, names in enumerate(lists):
        for name in names:
            for unit in _covered(name, units) or [_find(name, units, word)[0]]:
                if stage_of.setdefault(unit, stage) != stage:
                    raise PartitionError(
                        f"Each of the model's {word} is in exactly one stage, with what belongs to it: found {name!r} in "
                        f"stage {stage}, and {' and '.join(repr(part) for part, _ in units[unit].parts)} already in stage "
                        f"{stage_of[unit]}. Change split.",
                        stage_index=stage,
                    )
    if missing := [unit.name for index, unit in enumerate(units) if index not in stage_of]:
        raise PartitionError(
            f"The lists in split name all of the model's {word}: found nothing of {', '.join(map(repr, missing[:5]))}"
            f"{' and others' if len(missing) > 5 else ''}. Change split."
        )
    order = [stage_of[index] for index in range(len(units))]
    held = [[unit.name for unit, one in zip(units, order, strict=True) if one == stage] for stage in range(num_stages)]
    counts = [order.count(stage) for stage in range(num_stages)]
    if order != sorted(order) or 0 in counts:
        raise PartitionError(
            f"Stages hold consecutive {word}, in the order of the model, and none is empty: found those of each stage to be "
            f"{held}. Change split."
        )
    return counts


def _covered(name: str, units: Sequence[Unit]) -> list[int]:
    """The units below a name, like all layers below ``model.decoder``."""
    return [index for index, unit in enumerate(units) if all(part.startswith(f"{name}.") for part, _ in unit.parts)]


# ---- finding ------------------------------------------------------------------------------------------------------------


def _find(name: str, units: Sequence[Unit], word: str) -> tuple[int, int]:
    """Which unit a name means, and which of its parts."""
    every = {part: (index, place) for index, unit in enumerate(units) for place, (part, _) in enumerate(unit.parts)}
    if name in every:
        return every[name]
    fits = [part for part in every if part.endswith(f".{name}")]
    if len(fits) == 1:
        return every[fits[0]]
    if fits:
        raise PartitionError(
            f"A name in split means one module: found {name!r}, which may be {' or '.join(map(repr, fits))}. Change split."
        )
    if inside := [part for part in every if name.startswith(f"{part}.") or f".{name}".startswith(f".{part}.")]:
        raise PartitionError(
            f"A model is cut between its {word}, never inside one: found {name!r}, which is inside {inside[0]!r}. "
            "Change split."
        )
    near = difflib.get_close_matches(name, [*every, *(part.rpartition(".")[2] for part in every)], n=1, cutoff=0.0)
    raise PartitionError(
        f"split names modules of the model, its {word} and what goes with them: found {name!r}, which is none of them. "
        f"The nearest is {near[0]!r}. Change split."
    )


def _find_module(module: nn.Module, units: Sequence[Unit]) -> tuple[int, int]:
    found = [
        (index, place) for index, unit in enumerate(units) for place, (_, one) in enumerate(unit.parts) if one is module
    ]
    if len(found) == 1:
        return found[0]
    where = "none of them" if not found else f"{len(found)} of them"
    raise PartitionError(
        "The modules in split are those of the model's own modules where stages begin, each there once: found "
        f"{type(module).__name__}, which is {where}. Change split, or pass the list of pp modules as model."
    )
