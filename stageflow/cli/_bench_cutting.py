"""`stageflow bench load`: what a launch from a checkpoint takes of memory; `stageflow bench balance`: what balance by time
gains where bytes say little.

* Memory is the largest resident size of a process as Linux counts it (VmHWM), imports and mapped files included.
* Both balances take turns in one run; the predicted ratio is made of the units' times, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import trio
from torch import Tensor, nn

from stageflow import Checkpoint, Pipeline, Stage
from stageflow.cli._bench import seconds_of_stream
from stageflow.cli._ends import OK, Refused
from stageflow.cli._values import as_bytes, positive, sizes, table
from stageflow.partition import cut, seconds_of_children

__all__ = ["BALANCE", "LOAD", "add_balance", "add_load"]

LOAD = "measure the memory of controller and stages while a checkpoint is launched"
BALANCE = "compare balance by parameters with balance by time on a model with a heavy head"

_HIDDEN, _INTERMEDIATE = 2048, 5632
_LAYER = 2 * (4 * _HIDDEN**2 + 3 * _HIDDEN * _INTERMEDIATE)
"""Bytes of a layer in bfloat16."""
_WRITE = """
import sys, torch, transformers
directory, layers = sys.argv[1], int(sys.argv[2])
config = transformers.LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16,
                                  vocab_size=1024, dtype="bfloat16")
torch.set_default_dtype(torch.bfloat16)
transformers.LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="500MB")
"""


# ---- loading ------------------------------------------------------------------------------------------------------------


def add_load(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stageflow bench load`."""
    parser.add_argument("--size", type=sizes, default=[2 << 30], metavar="SIZE", help="of the checkpoint (default: 2GiB)")
    parser.add_argument("--stages", type=positive, default=4, metavar="N", help="number of stages (default: 4)")
    parser.add_argument("--json", action="store_true", help="print the raw figures as JSON")
    parser.set_defaults(run=_run_load)


def _run_load(arguments: argparse.Namespace) -> int:
    if not Path("/proc/self/clear_refs").exists():
        raise Refused("memory is measured as Linux counts it, which this system doesn't have")
    layers = max(arguments.stages, round(arguments.size[0] / _LAYER))
    with tempfile.TemporaryDirectory() as directory:
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        written = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _WRITE, directory, str(layers)],
            env=environ,
            capture_output=True,
            text=True,
        )
        if written.returncode:
            raise Refused(f"a checkpoint could not be written: {written.stderr.strip().splitlines()[-1]}")
        nbytes = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
        figures = trio.run(_load, directory, arguments.stages)
    figures["checkpoint_bytes"] = nbytes
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return OK
    print(f"a checkpoint of {as_bytes(nbytes)}, {layers} layers, in {arguments.stages} stages: {figures['seconds']:.1f} s\n")
    rows = [["controller", "-", as_bytes(figures["controller_peak"]), as_bytes(figures["controller_above_start"])]]
    for index, (share, peak) in enumerate(figures["stages"]):
        rows.append([f"stage {index}", as_bytes(share), as_bytes(peak), as_bytes(max(0, peak - share))])
    print(table(["process", "share", "largest", "above start or share"], rows))
    return OK


async def _load(directory: str, pp: int) -> dict[str, Any]:
    before = _status("VmRSS")
    _reset_peak()
    start = time.perf_counter()
    async with Pipeline.launch(Checkpoint(directory), pp=pp, devices="cpu") as pipe:
        seconds = time.perf_counter() - start
        peak = _status("VmHWM")
        await pipe(input_ids=torch.ones(1, 8, dtype=torch.long))  # files are mapped: a weight comes in when it is used
        peaks = await pipe.call(_peak_of)
        stages = [(stage.bytes, peak) for stage, peak in zip(pipe.stages, peaks, strict=True)]
    return {"seconds": seconds, "controller_peak": peak, "controller_above_start": peak - before, "stages": stages}


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # what VmHWM is counted from


def _peak_of(_stage: Stage) -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


# ---- balance ------------------------------------------------------------------------------------------------------------


class Repeated(nn.Module):
    """A head that costs much more time than bytes: one matrix, again and again."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


def add_balance(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stageflow bench balance`."""
    parser.add_argument("--n", type=positive, default=60, metavar="N", help="micro-batches in a run (default: 60)")
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="runs of each (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the raw figures as JSON")
    parser.set_defaults(run=_run_balance)


def _run_balance(arguments: argparse.Namespace) -> int:
    torch.manual_seed(0)
    width = 512
    body = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    model, x = nn.Sequential(*body, Repeated(width, 8)).eval(), torch.randn(256, width)
    splits = {by: [len(one.module_names) for one in cut(model, 2, balance=by, example=x, threads=1)] for by in _BOTH}
    if splits["time"] == splits["parameters"]:
        raise Refused("on this machine both balances are the same")
    units = seconds_of_children(model, x, threads=1)
    slowest: dict[str, float] = {}
    bound: dict[str, float] = {}
    for by, split in splits.items():
        slowest[by] = max(sum(units[start:end]) for start, end in pairwise(accumulate(split, initial=0)))
        bound[by] = sum(units) + (arguments.n - 1) * slowest[by]  # n micro-batches can't be faster
    seconds = trio.run(_measure, model, x, splits, arguments.n, arguments.repeat)
    pairs = [one / other for one, other in zip(seconds["parameters"], seconds["time"], strict=True)]
    predicted, measured = bound["parameters"] / bound["time"], statistics.median(pairs)
    if arguments.json:
        figures = {"splits": splits, "seconds": seconds, "predicted": predicted, "measured": measured, "unit_seconds": units}
        print(json.dumps(figures, indent=2))
        return OK
    rows = [
        [
            by,
            str(splits[by]),
            f"{slowest[by] * 1000:.2f} ms",
            f"{statistics.median(seconds[by]) / arguments.n * 1000:.2f} ms",
        ]
        for by in _BOTH
    ]
    print(table(["balance", "split", "slowest stage", "a micro-batch"], rows))
    print(f"\ntime beats parameters by {measured:.2f} x; predicted {predicted:.2f} x (median of {len(pairs)} pairs)")
    return OK


_BOTH = ("parameters", "time")


async def _measure(model: nn.Module, x: Tensor, splits: dict[str, list[int]], n: int, runs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {by: [] for by in splits}
    for _ in range(runs):
        for by, split in splits.items():
            async with Pipeline.launch(model, pp=2, split=split, devices="cpu", threads=1) as pipe:
                await seconds_of_stream(pipe, x, 4)
                found[by].append(await seconds_of_stream(pipe, x, n))
    return found
