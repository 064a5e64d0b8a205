"""A stage that fails on one micro-batch: that one raises `StageError`, the others come as if nothing had happened."""

import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline, StageError


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError(f"no root of {x.min():.0f}")
        return x.sqrt()


async def main() -> None:
    async with Pipeline.launch([nn.Identity(), Root(), nn.Identity()], pp=3) as pipe:

        async def one(value: float) -> None:
            try:
                y = await pipe(torch.tensor([value]))
            except StageError as error:
                print(f"{value:3.0f}: stage {error.stage_index} raised {error.remote_type} for micro-batch {error.seq}")
                print(*(f"     | {line}" for line in str(error).splitlines()[-3:]), sep="\n")  # with your own lines
            else:
                print(f"{value:3.0f}: {y.item():.0f}")

        async with trio.open_nursery() as nursery:  # all at once
            for value in (1, 4, 9, -16, 25, 36):
                nursery.start_soon(one, value)

        print("the pipeline lives on:", (await pipe(torch.tensor([49.0]))).item())


trio.run(main)
