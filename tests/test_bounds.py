"""Waits that have no clock of their own: each ends in time, with the reason; and what can be seen of a stage meanwhile."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import trio
from torch import nn

from stageflow import LaunchError, Pipeline, PipelineBroken, StageInfo
from stageflow.testing import no_stages_left, stage_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.ones(1)
SOON = 3.0


def two() -> list[nn.Module]:
    return [nn.Identity(), nn.Identity()]


async def next_launch_works() -> None:
    async with Pipeline.launch(two(), pp=2) as pipe:
        assert await pipe(X) == 1


async def test_a_fork_server_that_does_not_answer_is_a_launch_error() -> None:
    await next_launch_works()
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGSTOP)
    start = time.monotonic()
    with trio.fail_after(30), no_stages_left():
        with pytest.raises(LaunchError, match=r"the fork server had not started it after start_timeout=0\.5 s") as caught:
            async with Pipeline.launch(two(), pp=2, start_timeout=0.5):
                pytest.fail("it was launched")
        assert caught.value.phase == "start"
        assert 0.4 < time.monotonic() - start < 0.5 + SOON
        await next_launch_works()  # with a server of its own


async def test_a_model_whose_pickling_never_ends_is_a_launch_error() -> None:
    release = threading.Event()

    class Endless(nn.Module):
        def __getstate__(self) -> Any:
            release.wait(30)
            return {}

    start = time.monotonic()
    try:
        with trio.fail_after(30), no_stages_left():
            with pytest.raises(LaunchError, match="what stage 1 is to run was not pickled") as caught:
                async with Pipeline.launch([nn.Identity(), Endless()], pp=2, start_timeout=0.5):
                    pytest.fail("it was launched")
            assert (caught.value.stage_index, caught.value.phase) == (1, "hand-over")
            assert time.monotonic() - start < 0.5 + SOON
            await next_launch_works()
    finally:
        release.set()


async def test_a_start_that_takes_too_long_shows_where_each_stage_is() -> None:
    def build(stage: StageInfo) -> nn.Module:
        if stage.stage_index == 1:
            load_for_ever()
        return nn.Identity()

    with trio.fail_after(30), pytest.raises(LaunchError) as caught:
        async with Pipeline.launch(build, pp=2, start_timeout=0.5):
            pytest.fail("it was launched")
    assert caught.value.stacks is not None
    assert list(caught.value.stacks) == [1, 0]
    assert "load_for_ever" in str(caught.value)


def load_for_ever() -> None:
    time.sleep(3600)


async def test_a_spawned_stage_that_is_not_up_in_time_is_named_and_not_killed_by_the_question() -> None:
    with trio.fail_after(60), pytest.raises(LaunchError, match="still in phase 'start'") as caught:
        async with Pipeline.launch(two(), pp=2, start_method="spawn", start_timeout=0.3):
            pytest.fail("it was launched")
    assert (caught.value.stage_index, caught.value.signal) == (0, None)


@pytest.mark.parametrize("position", [0, 1])
async def test_a_stage_that_closes_its_pipes_while_idle_is_found(position: int) -> None:
    def close_all(_stage: Any) -> None:
        def close() -> None:
            os.closerange(3, 256)

        threading.Timer(0.1, close).start()

    start = time.monotonic()
    with trio.fail_after(30), no_stages_left():
        with pytest.raises(PipelineBroken) as caught:
            async with Pipeline.launch(two(), pp=2) as pipe:
                await pipe.call(close_all, stages=position)
                await trio.sleep_forever()
        assert caught.value.stage_index == position
        assert time.monotonic() - start < SOON


async def test_a_stage_that_becomes_another_program_while_idle_is_found() -> None:
    def become_another(_stage: Any) -> None:
        threading.Timer(0.1, os.execvp, ["sleep", ["sleep", "60"]]).start()

    with trio.fail_after(30), no_stages_left():
        with pytest.raises(PipelineBroken) as caught:
            async with Pipeline.launch(two(), pp=2) as pipe:
                await pipe.call(become_another, stages=1)
                await trio.sleep_forever()
        assert caught.value.stage_index == 1


def test_a_daemonic_process_is_told_that_it_can_have_no_stages(run_script) -> None:
    done = run_script("""
        import multiprocessing, sys, trio
        from torch import nn
        from stageflow import LaunchError, Pipeline

        async def main():
            async with Pipeline.launch([nn.Identity()], pp=1):
                pass

        def run():
            try:
                trio.run(main)
            except LaunchError as error:
                print(error, flush=True)

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=run, daemon=True)
            process.start()
            process.join()
    """)
    assert "daemonic processes are not allowed to have children" in done.stdout, done.stderr


def test_a_program_that_is_killed_leaves_no_directory(run_script, tmp_path: Path) -> None:
    done = run_script(
        """
        import os, signal, torch, trio
        from torch import nn
        from stageflow import Pipeline

        async def main():
            async with Pipeline.launch([nn.Identity(), nn.Identity()], pp=2) as pipe:
                await pipe(torch.ones(1))
                os.kill(os.getpid(), signal.SIGKILL)

        trio.run(main)
        """,
        env={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("stageflow-*")) == []
    assert tempfile.gettempdir() != str(tmp_path)


# ---- what can be seen ---------------------------------------------------------------------------------------------------


async def test_sigusr1_shows_what_a_stage_is_at(capfd: pytest.CaptureFixture[str]) -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(two(), pp=2) as pipe:
            os.kill(pipe.stages[1].pid or 0, signal.SIGUSR1)
            shown = ""
            while "_main.py" not in shown:
                await trio.sleep(0.05)
                shown += capfd.readouterr().err
            assert await pipe(X) == 1
    assert "[stage 1] Current thread" in shown
    assert "[stage 0]" not in shown


async def test_a_stage_is_named_in_ps_with_setproctitle_and_without() -> None:
    pytest.importorskip("setproctitle")
    with trio.fail_after(30):
        async with Pipeline.launch(two(), pp=2) as pipe:
            for stage in pipe.stages:
                process = Path(f"/proc/{stage.pid}")
                assert process.joinpath("cmdline").read_bytes().rstrip(b"\0").decode() == f"stageflow {stage.label}/2"
                assert process.joinpath("comm").read_text() == f"stageflow {stage.stage_index}/2\n"
                assert process.joinpath("environ").read_bytes().startswith(b"SPT") is False
            assert set(stage_processes().values()) == {"stageflow stage 0/2", "stageflow stage 1/2"}


async def test_reprs_tell_the_state() -> None:
    launch = Pipeline.launch(two(), pp=2, window=3)
    assert repr(launch) == "<launch of a pipeline of 2 stages: not entered>"
    with trio.fail_after(30):
        async with launch as pipe:
            assert repr(launch) == "<launch of a pipeline of 2 stages: entered>"
            ticket = await pipe.submit(X)
            assert repr(pipe) == "<Pipeline of 2 stages on cpu: 1 of 3 in flight>"
            await ticket
            [said, _] = await pipe.call(repr)
            assert said == "<Stage 0 of 2 on cpu: Identity>"
        assert repr(pipe) == "<Pipeline of 2 stages on cpu: closed>"
        with pytest.raises(PipelineBroken):
            async with Pipeline.launch(two(), pp=2) as broken:
                os.kill(broken.stages[0].pid or 0, signal.SIGKILL)
                await trio.sleep_forever()
        assert repr(broken) == "<Pipeline of 2 stages on cpu: broken, StageDied>"
