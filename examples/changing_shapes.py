"""Changing shapes: every micro-batch may have its own batch size, length, type and structure.

Nothing is declared beforehand: each payload is announced with its shapes before it is sent.
"""

from typing import Any

import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline


class Encode(nn.Module):
    """Takes tokens and a keyword, and hands on a dictionary: the next stage gets it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 32)

    def forward(self, tokens: Tensor, *, name: str = "unnamed") -> dict[str, Any]:
        return {"name": name, "hidden": self.embedding(tokens), "mask": tokens != 0}


class Pool(nn.Module):
    """Takes that dictionary, and returns the mean over what isn't padding."""

    def forward(self, encoded: dict[str, Any]) -> tuple[str, Tensor]:
        mask = encoded["mask"].unsqueeze(-1)
        return encoded["name"], (encoded["hidden"] * mask).sum(1) / mask.sum(1).clamp(min=1)


async def main() -> None:
    async with Pipeline.launch([Encode().eval(), Pool()], pp=2) as pipe:
        for batch, length in (8, 5), (4, 12), (1, 1), (16, 300), (0, 7):
            name, pooled = await pipe(torch.randint(0, 1000, (batch, length)), name=f"{batch} of length {length}")
            print(f"{name:16} -> {tuple(pooled.shape)}")

        tokens = torch.randint(0, 1000, (3, 9), dtype=torch.int32)  # another type will do as well
        _, pooled = await pipe(tokens)
        print(f"{tokens.dtype!s:16} -> {tuple(pooled.shape)} {pooled.dtype}")


trio.run(main)
