"""Calling into the stages: `pipe.call(fn)` runs `fn(stage)` in every stage process, between two micro-batches.

For whatever isn't a forward: count, look, change a setting, swap weights while the pipeline runs. Every stage does it at the
same place of the stream: after the micro-batches submitted before, ahead of those submitted after.
"""

import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline, Stage


def new_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4)).eval()


def count(stage: Stage) -> int:
    return sum(parameter.numel() for parameter in stage.module.parameters())


def set_dropout(stage: Stage, active: bool) -> None:
    stage.module.train(active)


def swap(stage: Stage, weights: dict[str, Tensor]) -> list[str]:
    """Each stage takes what is its own: its names are those of the whole model."""
    own = {name: weights[name] for name in stage.module.state_dict()}
    stage.module.load_state_dict(own)
    return list(own)


async def main() -> None:
    old, new = new_model(seed=1), new_model(seed=2)
    x = torch.randn(1, 16)

    async with Pipeline.launch(old, pp=3) as pipe:
        counts = await pipe.call(count)
        print("parameters:", " + ".join(map(str, counts)), "=", sum(counts))

        await pipe.call(set_dropout, True)
        print("with dropout two runs agree:", torch.equal(await pipe(x), await pipe(x)))
        await pipe.call(set_dropout, False)
        print("without it:", torch.equal(await pipe(x), await pipe(x)))

        before = await pipe.submit(x)  # submitted, not awaited: it meets the old weights all the same
        names = await pipe.call(swap, new.state_dict())
        print("weights swapped:", *(", ".join(own) for own in names), sep="\n  ")
        with torch.inference_mode():
            torch.testing.assert_close(await before, old(x))
            torch.testing.assert_close(await pipe(x), new(x))
        print("the micro-batch before the call had the old weights, the one after it has the new ones")

        # Also for one stage alone, with a lambda, and for what only the stage process can tell.
        print("threads of stage 1:", await pipe.call(lambda _stage: torch.get_num_threads(), stages=1))


trio.run(main)
