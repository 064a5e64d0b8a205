"""Every model of the zoo in two and in three stages gives what it gives in one piece, bit for bit."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import cloudpickle
import pytest
import torch
from tables import read
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from write_zoo import PAGE, rows
from zoo import ZOO, Animal

from stageflow.partition import cut

pytest.importorskip("transformers")


def tensors(value: Any) -> list[Tensor]:
    leaves = tree_flatten(dict(value) if hasattr(value, "to_tuple") else value)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def made(animal: Animal) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return animal.make().eval()


def nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("animal", ZOO, ids=lambda animal: animal.name)
def test_stages_give_what_the_whole_gives(animal: Animal) -> None:
    model = made(animal)
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.inference_mode():
        expected = tensors(model(**animal.inputs, **no_cache))
    assert expected
    for pp in (2, 3):
        pieces = cut(model, pp, example=animal.inputs if animal.by_example else None)
        keys = {key for piece in pieces for key in piece.target.state_dict()}
        assert keys == set(model.state_dict())
        assert all(piece.module_names for piece in pieces)
        assert all(nbytes(piece.target) < nbytes(model) for piece in pieces)
        pieces = cloudpickle.loads(cloudpickle.dumps(pieces))
        with torch.inference_mode():
            value = pieces[0].target(**animal.inputs)
            for piece in pieces[1:]:
                value = piece.target(*value)
        found = tensors(value)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_docs_list_the_zoo() -> None:
    assert read("zoo", PAGE) == rows()
