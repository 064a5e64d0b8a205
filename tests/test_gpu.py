"""The same answers with stages on GPUs: several ranks on one (gloo, pinned memory), and one each (NCCL)."""

from __future__ import annotations

import logging

import pytest
import torch
import trio
from torch import nn

from stageflow import Pipeline

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(count))).eval()


async def same_as_unsplit(pipe: Pipeline, model: nn.Sequential) -> None:
    """Small payloads and large ones, streamed; the unsplit model runs on the device of the first stage."""
    whole = layers(len(model)).to(pipe.stages[0].device)
    inputs = [torch.randn(rows, 64) for rows in (8, 4, 1, 4096, 5, 65536, 16)]
    async with pipe.map(inputs) as outputs:
        results = [y async for y in outputs]
    with torch.inference_mode():
        for x, y in zip(inputs, results, strict=True):
            assert y.device.type == "cpu"  # results are in host memory
            assert torch.equal(y, whole(x.to(pipe.stages[0].device)).cpu())


async def test_several_ranks_share_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    model = layers(4)
    with trio.fail_after(110), caplog.at_level(logging.INFO, logger="stageflow"):
        async with Pipeline.launch(model, pp=2, devices=["cuda:0", "cuda:0"]) as pipe:
            assert [stage.device for stage in pipe.stages] == ["cuda:0", "cuda:0"]
            await same_as_unsplit(pipe, model)
    assert "share a GPU" in caplog.text


async def test_cuda_inputs_are_taken_from_where_they_lie() -> None:
    model = layers(2)
    with trio.fail_after(110):
        async with Pipeline.launch(model, pp=2, devices="cuda:0") as pipe:
            x = torch.randn(4096, 64)
            assert torch.equal(await pipe(x.cuda()), await pipe(x))


async def test_host_and_gpu_stages_mix() -> None:
    with trio.fail_after(110):
        async with Pipeline.launch(layers(2), pp=2, devices=["cpu", "cuda:0"]) as pipe:
            y = await pipe(torch.randn(4, 64))
            assert y.shape == (4, 64)


async def test_gpu_memory_is_free_when_the_block_has_ended() -> None:
    torch.cuda.init()
    before = torch.cuda.mem_get_info(0)[0]
    with trio.fail_after(110):
        async with Pipeline.launch([nn.Linear(8192, 8192), nn.Linear(8192, 8192)], pp=2, devices="cuda:0") as pipe:
            await pipe(torch.randn(1, 8192))
            assert before - torch.cuda.mem_get_info(0)[0] > 2 * 8192 * 8192 * 4
    assert before - torch.cuda.mem_get_info(0)[0] < 64 << 20


@two_gpus
async def test_a_gpu_for_each_rank_means_nccl() -> None:
    model = layers(4)
    with trio.fail_after(110):
        async with Pipeline.launch(model, pp=2, devices=["cuda:0", "cuda:1"], backend="nccl") as pipe:
            await same_as_unsplit(pipe, model)
            bias = torch.ones(32768, 64)  # too large for a frame: goes along as payload, from edge to edge
            assert len(await pipe.call(lambda stage, b: float(b.sum()), bias)) == 2
