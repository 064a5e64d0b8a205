"""Quickstart: a model cut into four stages, each a process of its own, gives what the whole model gives.

Run it: `python examples/quickstart.py`. No main guard is needed: the stages never import this file.
"""

import torch
import trio
from torch import nn

from stageflow import Pipeline

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]).eval()


async def main() -> None:
    async with Pipeline.launch(model, pp=4) as pipe:
        for stage in pipe.stages:
            print(
                f"stage {stage.stage_index}: process {stage.pid} on {stage.device},",
                f"layers {', '.join(stage.module_names)}, {stage.parameters:,} parameters",
            )

        # One micro-batch: await the pipeline as you would call the module.
        x = torch.randn(16, 256)
        y = await pipe(x)
        with torch.inference_mode():
            torch.testing.assert_close(y, model(x))
        print("one micro-batch:", tuple(y.shape), "as the whole model's")

        # Many: a stream, in order, with several in the stages at once.
        batches = [torch.randn(16, 256) for _ in range(100)]
        async with pipe.map(batches) as outputs:
            results = [y async for y in outputs]
        print("a stream:", len(results), "results, stages busy", *(f"{s.busy_share:.0%}" for s in pipe.statistics().stages))

        # A large batch: split, sent through, joined.
        y = await pipe.run_batch(torch.randn(1000, 256), n_microbatches=8)
        print("a large batch:", tuple(y.shape))

    print("the block has ended, and with it the four processes")


trio.run(main)
