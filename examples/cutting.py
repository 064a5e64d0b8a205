"""Cutting: a model with skip connections that nobody prepared, two ways to balance it, and the same from files.

The U-Net below keeps what its first half found for its second half, so its skips cross every stage. With example arguments
it is cut as it stands. From a file each stage reads its own weights only, and this program none.
"""

import tempfile
from pathlib import Path

import torch
import trio
from safetensors.torch import save_model
from torch import Tensor, nn

from stageflow import Balance, Checkpoint, Pipeline


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 16), (16, 32)))
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in ((16, 32), (8, 16), (8, 8)))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for conv in self.down:
            x = torch.relu(conv(x))
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = torch.relu(self.middle(x))
        for conv in self.up:
            x = torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], dim=1)
            x = torch.relu(conv(x))
        return self.head(x)


async def main() -> None:
    torch.manual_seed(0)
    model, x = UNet().eval(), torch.randn(4, 3, 64, 64)
    with torch.inference_mode():
        expected = model(x)

    for balance in ("parameters", "time", Balance(by="activations", speeds=[1, 2, 2])):
        async with Pipeline.launch(model, pp=3, example=x, balance=balance) as pipe:
            assert torch.allclose(await pipe(x), expected, atol=1e-5)
            print(balance if isinstance(balance, str) else "activations, the first device half as fast")
            for stage in pipe.stages:
                print(f"  stage {stage.stage_index}: {', '.join(stage.module_names)}")

    with tempfile.TemporaryDirectory() as directory:
        save_model(model, str(Path(directory) / "model.safetensors"))
        checkpoint = Checkpoint(directory, build=lambda: UNet().eval())
        async with Pipeline.launch(checkpoint, pp=3, example=x) as pipe:
            assert torch.allclose(await pipe(x), expected, atol=1e-5)
            print("from files:", [stage.bytes for stage in pipe.stages], "bytes in each stage")


if __name__ == "__main__":
    trio.run(main)
