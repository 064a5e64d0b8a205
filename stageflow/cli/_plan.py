"""`stageflow plan MODEL`: how a model would be cut, from its config alone, before anything is loaded or launched."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from stageflow.cli._ends import OK, Refused
from stageflow.cli._model import find_model
from stageflow.cli._values import as_bytes, as_count, positive, sizes, table
from stageflow.errors import PartitionError
from stageflow.partition import Balance, PlannedStage, plan

__all__ = ["HELP", "add_arguments"]

HELP = "print how a model of transformers would be cut into stages, from its config alone"
_DTYPES: dict[str, Any] = {"auto": "auto", **{name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stageflow plan`."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a directory with a config.json, a config file, or a .gguf file (default: SmolLM2-135M of its package)",
    )
    add("--pp", type=positive, default=2, metavar="N", help="number of stages (default: 2)")
    add("--split", metavar="WHERE", help="layers of each stage, 8,8,8,6, or names where stages begin, layers.8,layers.16")
    add(
        "--balance",
        default="parameters",
        metavar="BY",
        help="parameters, time (estimated), activations, or a number for each layer: 1,1,2 (default: parameters)",
    )
    add("--devices", metavar="D", help="one, or one for each stage: cuda:0,cuda:1 (default: not said)")
    add("--speeds", type=_numbers, metavar="S", help="how fast each stage's device is: 1,2")
    add("--memory", type=sizes, metavar="SIZE", help="bytes that each stage may hold, or all: 16GiB,24GiB")
    add("--batch", type=positive, default=1, metavar="N", help="rows of a micro-batch (default: 1)")
    add("--length", type=positive, default=128, metavar="N", help="tokens of a row (default: 128)")
    add("--n", type=positive, default=32, metavar="N", help="micro-batches, for the predicted bubble (default: 32)")
    add("--threads", type=positive, metavar="N", help="torch threads of a stage (default: torch's own)")
    add("--dtype", choices=_DTYPES, default="auto", help="of the weights (default: auto, as the config says)")
    add("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, and say what came out."""
    pp: int = arguments.pp
    if arguments.model is None:
        arguments.model = str(find_model(None).directory)
    devices = (arguments.devices or "").split(",")
    devices = devices * pp if len(devices) == 1 else devices
    if len(devices) != pp:
        raise Refused(f"--devices names one device, or one for each stage: found {len(devices)} for {pp} stages")
    memory: list[int] | None = arguments.memory
    by: Any = arguments.balance
    if by[:1].isdigit():
        try:
            by = _numbers(by)
        except argparse.ArgumentTypeError as error:
            raise Refused(f"--balance: {error}") from error
    balance = Balance(by=by, speeds=arguments.speeds, memory=memory * pp if memory and len(memory) == 1 else memory)
    try:
        stages = plan(
            arguments.model,
            pp,
            split=_split(arguments.split),
            balance=balance,
            batch=arguments.batch,
            length=arguments.length,
            threads=arguments.threads,
            dtype=_DTYPES[arguments.dtype],
        )
    except PartitionError as error:
        raise Refused(str(error)) from error
    if arguments.json:
        print(json.dumps(_figures(stages, devices, arguments.n), indent=2))
    else:
        _describe(stages, devices, arguments)
    return OK


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers are needed, like 1,2 or 1,1,2, not {text!r}") from None


def _split(text: str | None) -> object:
    if text is None or text == "auto":
        return "auto"
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else parts


def bubble(seconds: Sequence[float], n: int) -> float:
    """The share of the stages' time in which they wait: n micro-batches take no less than sum + (n - 1) × largest."""
    whole = sum(seconds) + (n - 1) * max(seconds)
    return 1 - n * sum(seconds) / (len(seconds) * whole)


# ---- saying -------------------------------------------------------------------------------------------------------------


def _describe(stages: Sequence[PlannedStage], devices: Sequence[str], arguments: argparse.Namespace) -> None:
    seconds = [stage.seconds for stage in stages]
    whole, slowest = sum(seconds), seconds.index(max(seconds))
    print(
        f"{Path(arguments.model).name} in {len(stages)} stages, balanced by {arguments.balance}; "
        f"micro-batches of {arguments.batch} x {arguments.length}\n"
    )
    head = ["stage", "modules", "parameters", "bytes", "GFLOP", "time", "share", "sends"]
    head += ["device"] * any(devices)
    rows = [
        [
            str(stage.stage_index),
            _modules(stage.module_names),
            as_count(stage.parameters),
            as_bytes(stage.bytes),
            f"{stage.flops / 1e9:.2f}",
            f"{stage.seconds * 1000:.2f} ms",
            f"{stage.seconds / whole:.1%}",
            as_bytes(stage.edge_bytes) if stage.edge_bytes else "-",
            *[devices[stage.stage_index]] * any(devices),
        ]
        for stage in stages
    ]
    print(table(head, rows) + "\n")
    print("times are estimated from operations and bytes at this machine's CPU rates: shares say more than milliseconds")
    print(f"stage {slowest} binds: {1 / max(seconds):.1f} micro-batches/s at best")
    print(f"bubble with {arguments.n} micro-batches: {bubble(seconds, arguments.n):.1%}")


def _modules(names: Sequence[str]) -> str:
    """``model.embed_tokens, model.layers.0 … 7``."""
    runs: list[list[str]] = []
    for name in names:
        stem, _, last = name.rpartition(".")
        if (
            runs
            and last.isdecimal()
            and runs[-1][0].rpartition(".")[0] == stem
            and runs[-1][0].rpartition(".")[2].isdecimal()
        ):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(one[0] if len(one) == 1 else f"{one[0]} … {one[-1].rpartition('.')[2]}" for one in runs)


def _figures(stages: Sequence[PlannedStage], devices: Sequence[str], n: int) -> dict[str, object]:
    seconds = [stage.seconds for stage in stages]
    return {
        "stages": [
            {**attrs.asdict(stage), "share": stage.seconds / sum(seconds), "device": devices[stage.stage_index] or None}
            for stage in stages
        ],
        "binding_stage": seconds.index(max(seconds)),
        "n_microbatches": n,
        "bubble": bubble(seconds, n),
    }
