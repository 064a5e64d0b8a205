"""A stage that dies, and a program that starts the pipeline again and goes on where it was.

Results that have come are kept; the micro-batches that were in flight are sent again. After three deaths it gives up.
"""

import os
import signal

import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline, PipelineBroken


class Unlucky(nn.Module):
    """Adds one; in the first two lives of the pipeline it doesn't get through its work."""

    def __init__(self, life: int) -> None:
        super().__init__()
        self.life = life

    def forward(self, x: Tensor) -> Tensor:
        if x.item() == 4 * self.life:
            os.kill(os.getpid(), signal.SIGKILL)
        return x + 1


async def main() -> None:
    inputs = [torch.tensor(i) for i in range(10)]
    results: list[int] = []
    for life in range(1, 4):
        model = [nn.Identity(), Unlucky(life if life < 3 else 100), nn.Identity()]
        print(f"launch {life}, from micro-batch {len(results)} on")
        try:
            async with Pipeline.launch(model, pp=3) as pipe, pipe.map(inputs[len(results) :]) as outputs:
                async for y in outputs:
                    results.append(y.item())
            break
        except PipelineBroken as error:
            print(f"stage {error.stage_index} was lost: {error.signal}")
            await trio.sleep(0.1 * 2**life)  # somebody else may need the memory first
    print(results)


trio.run(main)
