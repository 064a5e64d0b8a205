"""Streaming with back-pressure: a slow consumer holds the source back, so memory stays flat however long the stream is.

The source below never ends. It is asked for the next item only when a slot of the window is free, and a slot is free when a
result has been taken. So it is never more than the window (and the one item in its hand) ahead of the consumer.
"""

from collections.abc import AsyncIterator

import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
given = 0


async def source() -> AsyncIterator[Tensor]:
    """May wait for the network or a disk; a plain generator does where nothing has to be waited for."""
    global given
    while True:
        given += 1
        yield torch.randn(32, 64)


async def main() -> None:
    async with Pipeline.launch(model, pp=2, window=4) as pipe:
        taken = most = 0
        async with pipe.map(source()) as outputs:
            async for _y in outputs:
                taken += 1
                await trio.sleep(0.01)  # the slow consumer
                most = max(most, given - taken)
                if taken % 20 == 0:
                    print(f"taken {taken:3}, given {given:3}, in flight {pipe.statistics().in_flight} of 4")
                if taken == 100:
                    break  # leaving the block drops what is in flight and closes the source
        print(f"the source was at most {most} ahead")

        # The pipeline is as it was.
        print("and then:", tuple((await pipe(torch.randn(2, 64))).shape))


trio.run(main)
