"""Measures what the docs say of faults, and writes it there: `nox -s matrix`, or python tests/write_matrix.py.

Rules of this file:

* The cells and what must come of them are the tests' (matrix.py); a cell that comes out otherwise stops the script.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import matrix
import pytest
import torch
import trio
from tables import markdown, write

RUNS = 10

CONTROLLER = """
import ctypes, os, signal, sys, time, torch, trio
from torch import nn
from stageflow import Pipeline

async def main():
    async with Pipeline.launch([nn.Identity() for _ in range(4)], pp=4) as pipe:
        await pipe(torch.ones(1))
        print(*(stage.pid for stage in pipe.stages), flush=True)
        {body}

trio.run(main)
"""
HOLD_THE_GIL = "await pipe.submit(torch.ones(1)); await pipe.call(lambda stage: sum(range(2**62)))"
DEATHS = {
    "SIGKILL, stages idle": ("await trio.sleep_forever()", signal.SIGKILL),
    "SIGKILL, every stage in C code that holds the GIL": (HOLD_THE_GIL, signal.SIGKILL),
    "SIGSEGV": ("await trio.sleep_forever()", signal.SIGSEGV),
    "SIGTERM": ("await trio.sleep_forever()", signal.SIGTERM),
    "`os._exit(1)` in the body": ("sys.stdin.readline(); os._exit(1)", None),
}


async def measure_cells() -> dict[tuple[str, str], str]:
    """By fault and time: the error, and the slowest of all positions."""
    found: dict[tuple[str, str], str] = {}
    await matrix.warm_up()
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        for fault in matrix.FAULTS:
            for when in matrix.TIMES:
                slowest = 0.0
                for position in range(matrix.PP):
                    cell = matrix.Cell(fault, when, position)
                    if not cell.exists:
                        break
                    run = await matrix.run_cell(cell, Path(directory), patch)
                    want = matrix.expected(cell)
                    error = run.results[matrix.MICRO_BATCHES[when]] if want.stage_error else run.error
                    if type(error) is not (want.kind or type(None)) or run.seconds > want.within:
                        sys.exit(f"{cell}: expected {want}, got {error!r} after {run.seconds:.2f} s")
                    slowest = max(slowest, run.seconds)
                if not cell.exists:
                    found[fault.__name__, when] = ""
                elif want.kind is None:
                    found[fault.__name__, when] = "ends" if fault not in matrix.HARMLESS else "goes on"
                    if fault in matrix.HANGS:
                        found[fault.__name__, when] += f" {slowest:.2f}"
                else:
                    found[fault.__name__, when] = f"{want.kind.__name__} {slowest:.2f}"
            print(fault.__name__, file=sys.__stdout__, flush=True)
    return found


def cells_table(found: dict[tuple[str, str], str]) -> str:
    rows = [["fault", *matrix.TIMES]]
    rows += [[matrix.label(fault), *(found[fault.__name__, when] for when in matrix.TIMES)] for fault in matrix.FAULTS]
    return markdown(rows)


def measure_death(body: str, how: int | None) -> float:
    """Seconds from the end of a controller until the last of its four stages is gone."""
    source = textwrap.dedent(CONTROLLER).format(body=body)
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    handles = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
    time.sleep(0.3)  # the calls have begun
    began = time.monotonic()
    if how is None:
        process.stdin.write(b"\n")
        process.stdin.flush()
    else:
        process.send_signal(how)
    for handle in handles:
        ready, _, _ = select.select([handle], [], [], 10)
        if not ready:
            sys.exit("a stage is still there 10 s after its controller")
        os.close(handle)
    seconds = time.monotonic() - began
    process.communicate()
    return seconds


def deaths_table() -> str:
    rows = [["the controller dies by", "median", "slowest"]]
    for name, (body, how) in DEATHS.items():
        times = [1000 * measure_death(body, how) for _ in range(RUNS)]
        rows.append([name, f"{statistics.median(times):.0f} ms", f"{max(times):.0f} ms"])
        print(name, file=sys.__stdout__, flush=True)
    return markdown(rows)


def main() -> None:
    torch.set_num_threads(1)
    write("deaths of the controller", deaths_table())
    # What stages print as they are hit is not what is looked at here.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for good
    write("faults", cells_table(trio.run(measure_cells)))


if __name__ == "__main__":
    main()
