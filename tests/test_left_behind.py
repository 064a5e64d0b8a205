"""`no_stages_left` tells of every stage process that is left, and of nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
import trio
from torch import nn

from stageflow import Pipeline
from stageflow.controller import _process
from stageflow.testing import no_stages_left, stage_processes


def two() -> list[nn.Module]:
    return [nn.Identity(), nn.Identity()]


async def test_nothing_is_left_by_a_pipeline_that_has_ended() -> None:
    assert stage_processes() == {}
    with no_stages_left(grace=0):
        async with Pipeline.launch(two(), pp=2) as pipe:
            pids = [stage.pid for stage in pipe.stages]
            assert stage_processes() == dict(zip(pids, ["stageflow stage 0/2", "stageflow stage 1/2"], strict=True))
    assert stage_processes() == {}


async def test_an_open_pipeline_is_told_by_its_processes() -> None:
    block = Pipeline.launch(two(), pp=2)
    with trio.fail_after(30):
        try:
            with pytest.raises(AssertionError, match="2 stage processes are left") as caught, no_stages_left(grace=0.05):
                pipe = await block.__aenter__()
            lines = sorted(str(caught.value).splitlines()[1:])
            assert lines == [f"  {stage.pid}: stageflow stage {stage.stage_index}/2" for stage in pipe.stages]
        finally:
            await block.__aexit__(None, None, None)


async def test_what_was_open_before_does_not_count() -> None:
    async with Pipeline.launch(two(), pp=2):
        with no_stages_left(grace=0):
            async with Pipeline.launch(two(), pp=2) as pipe:
                assert await pipe(1) == 1


async def test_the_blocks_own_error_is_kept() -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught, no_stages_left():
        raise mine
    assert caught.value is mine


@pytest.fixture
def left() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stageflow believes to have started as a stage."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def register(process: subprocess.Popen[bytes]) -> None:
    _process._started[process.pid] = ("stageflow stage 0/1", _process._born(process.pid))


def test_one_that_is_left_comes_with_the_error_of_the_block(left: subprocess.Popen[bytes]) -> None:
    mine = KeyError("mine")
    with pytest.raises(AssertionError, match="1 stage processes are left") as caught, no_stages_left(grace=0):
        register(left)
        raise mine
    assert caught.value.__cause__ is mine


def test_one_that_is_stopped_is_left(left: subprocess.Popen[bytes]) -> None:
    with pytest.raises(AssertionError, match=re.escape(f"{left.pid}: stageflow stage 0/1")), no_stages_left(grace=0):
        register(left)
        left.send_signal(signal.SIGSTOP)
        os.waitpid(left.pid, os.WUNTRACED)


def test_a_zombie_is_not_left(left: subprocess.Popen[bytes]) -> None:
    with no_stages_left():
        register(left)
        left.kill()


def test_another_process_with_its_pid_is_not_it(left: subprocess.Popen[bytes]) -> None:
    with no_stages_left(grace=0):
        _process._started[left.pid] = ("stageflow stage 0/1", "1")


def test_one_that_ends_in_time_is_waited_for_and_no_longer(left: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    with no_stages_left(grace=30):
        register(left)
        subprocess.Popen(["sh", "-c", f"sleep 0.2; kill {left.pid}"]).wait()
    assert time.monotonic() - began < 10
