import attrs
from collections import OrderedDict
from torch import nn


@attrs.frozen
class StagePiece:
    target: object
    module_names: tuple
    unpack: bool


def cut(model, n, split="auto"):
    if isinstance(model, nn.Sequential):
        items = list(model.named_children())
        k = len(items)
        b = [k * i // n for i in range(n + 1)]
        return tuple(
            StagePiece(
                nn.Sequential(OrderedDict(items[b[i] : b[i + 1]])).train(model.training),
                tuple(a for a, _ in items[b[i] : b[i + 1]]),
                False,
            )
            for i in range(n)
        )
    if isinstance(model, list):
        return tuple(StagePiece(m, (), True) for m in model)
    return tuple(StagePiece(model, (), True) for i in range(n))
