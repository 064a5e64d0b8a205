"""Where a pipeline can be launched from: scripts with no main guard, `-c`, stdin, `-m`, a REPL (A12)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

MODEL = """
import os, sys, torch, trio
from torch import nn
from stageflow import Pipeline

with open("runs", "a") as runs:
    runs.write(f"{os.getpid()}\\n")

class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.shift = lambda x: x + HUNDRED

    def forward(self, x):
        return self.shift(x * self.factor)

HUNDRED = 100

def add(n):
    def closure(x):
        return x + n
    return closure

class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)

async def main(**options):
    with trio.fail_after(50):
        async with Pipeline.launch(nn.Sequential(Times(2), Apply(add(1000))), pp=2, **options) as pipe:
            print("result", (await pipe(torch.arange(3))).tolist())
            pids = await pipe.call(lambda stage: os.getpid())
            print("processes", len({os.getpid(), *pids}))
"""
PRINTED = ["result [1100, 1102, 1104]", "processes 3"]


Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """`python(*args, given="")`: run Python in `tmp_path` with that on its stdin; it must end with code 0."""

    def run(*args: str, given: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *args]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHISTFILE": os.devnull}
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(given, timeout=60)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, err
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run


def assert_ran_once(tmp_path: Path) -> None:
    assert len((tmp_path / "runs").read_text().splitlines()) == 1, "the body of __main__ ran in a stage too"


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_script_with_no_main_guard_runs_its_body_once(run_script, tmp_path: Path, method: str) -> None:
    done = run_script(MODEL + f"trio.run(lambda: main(start_method={method!r}))\n")
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, PRINTED, "")
    assert_ran_once(tmp_path)


def test_python_c(python: Python, tmp_path: Path) -> None:
    done = python("-c", MODEL + "trio.run(main)\n")
    assert (done.stdout.splitlines(), done.stderr) == (PRINTED, "")
    assert_ran_once(tmp_path)


def test_a_script_on_stdin(python: Python, tmp_path: Path) -> None:
    done = python("-", given=MODEL + "trio.run(main)\n")
    assert (done.stdout.splitlines(), done.stderr) == (PRINTED, "")
    assert_ran_once(tmp_path)


def test_python_m(python: Python, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text(MODEL + "trio.run(main)\n")
    done = python("-m", "package")
    assert (done.stdout.splitlines(), done.stderr) == (PRINTED, "")
    assert_ran_once(tmp_path)


STATEMENTS = """
import os, torch, trio
from torch import nn
from stageflow import Pipeline
class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.shift = lambda x: x + factor
    def forward(self, x):
        return self.shift(x * 2)

async def main():
    with trio.fail_after(50):
        async with Pipeline.launch(nn.Sequential(Times(10), Times(20)), pp=2) as pipe:
            return (await pipe(torch.arange(3))).tolist()

print("result", trio.run(main))
class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
    def forward(self, x):
        return -x

print("again", trio.run(main))
"""
"""Typed line by line; the class is then defined anew, under the same name."""


def test_python_i(python: Python) -> None:
    done = python("-i", "-q", given=STATEMENTS)
    assert [line for line in done.stdout.splitlines() if line] == ["result [40, 44, 48]", "again [0, 1, 2]"], done.stderr
    assert "Traceback" not in done.stderr
