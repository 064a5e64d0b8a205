"""The end of the program that holds the pipeline, in every way: its stages are gone in bounded time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

SOON = 3.0
"""Seconds that stand for "at once" on a machine that others use, too."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PRELUDE = """
import ctypes, os, select, signal, sys, threading, time
import torch, trio
from torch import nn
from stageflow import Pipeline

class AddOne(nn.Module):
    def forward(self, x):
        return x + 1

def hold_the_gil(stage):
    print("held", flush=True)
    os.close(os.open(f"fifo{stage.rank}", os.O_WRONLY))  # until the controller opens the other end
    sum(range(10**11))

def sleep(stage):
    os.close(os.open(f"fifo{stage.rank}", os.O_WRONLY))
    time.sleep(10_000)

def meet(rank):
    os.close(os.open(f"fifo{rank}", os.O_RDONLY))

def launch(**options):
    return Pipeline.launch([AddOne(), AddOne(), AddOne()], pp=3, **options)

def tell(pipe):
    print("pids", *(stage.pid for stage in pipe.stages), flush=True)

async def all_busy(pipe, nursery, what):
    for rank in range(3):
        os.mkfifo(f"fifo{rank}")
    nursery.start_soon(pipe.call, what)
    for rank in range(3):
        await trio.to_thread.run_sync(meet, rank)
"""


def script(body: str) -> str:
    return PRELUDE + textwrap.dedent(body)


def told(name: str, output: str) -> list[int]:
    """The numbers on the line that begins so."""
    return [int(word) for line in output.splitlines() if line.startswith(name + " ") for word in line.split()[1:]]


def assert_gone(pids: list[int], seconds: float = SOON) -> None:
    """All these processes end in that time, by the kernel's word: a zombie counts as ended."""
    assert pids
    deadline = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                assert poll.poll(max(0.0, deadline - time.monotonic()) * 1000), f"{pid} is still there"
            finally:
                os.close(descriptor)


ENDS = {
    "os._exit(3)": 3,
    "ctypes.string_at(0)": -signal.SIGSEGV,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "fork_sleeper(); os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
}


def test_stages_that_hold_the_gil_are_gone_soon_after_the_controller_however_it_ends(run_script: Run) -> None:
    """Several controllers, forked at once off a process that has imported all, because that is what takes long."""
    done = run_script(
        script("""
        def fork_sleeper():
            child = os.fork()
            if child == 0:
                while True:
                    signal.pause()
            print("child", child, flush=True)

        async def main(end):
            async with launch() as pipe, trio.open_nursery() as nursery:
                os.write(ready[1], b"x")
                os.read(go[0], 1)
                await all_busy(pipe, nursery, hold_the_gil)
                tell(pipe)
                exec(end)

        ready, controllers = os.pipe(), []
        for number, end in enumerate(sys.argv[1:]):
            go = os.pipe()
            controllers.append((os.fork(), go[1]))
            if controllers[-1][0] == 0:
                os.mkdir(str(number))
                os.chdir(str(number))
                sys.stdout = open("out", "w")
                trio.run(main, end)
                os._exit(77)
        for _ in controllers:
            os.read(ready[0], 1)
        for number, (controller, go) in enumerate(controllers):  # one by one: they shall not take each other's cores
            os.write(go, b"x")
            print("code", os.waitstatus_to_exitcode(os.waitpid(controller, 0)[1]))
            start = time.monotonic()
            with open(f"{number}/out") as out:
                text = out.read()
            pids = dict(line.split(" ", 1) for line in text.splitlines())["pids"].split()
            assert len(pids) == 3
            for pid in pids:
                try:
                    descriptor = os.pidfd_open(int(pid))
                except ProcessLookupError:
                    continue
                select.select([descriptor], [], [], 10)  # until it has ended, though nobody may have reaped it
            print("milliseconds", round((time.monotonic() - start) * 1000))
            print(text)
        """),
        *ENDS,
    )
    children = told("child", done.stdout)
    try:
        late = told("milliseconds", done.stdout)
        assert len(late) == len(ENDS), done.stdout + done.stderr
        assert max(late) < SOON * 1000
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    assert told("code", done.stdout) == list(ENDS.values()), done.stderr
    assert len(children) == 1


def test_sys_exit_in_the_body_ends_the_program_with_that_code(run_script: Run) -> None:
    done = run_script(
        script("""
        async def main():
            async with launch() as pipe:
                tell(pipe)
                ticket = await pipe.submit(torch.zeros(2))
                sys.exit(7)
        trio.run(main)
        """)
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert_gone(told("pids", done.stdout), 0)


def test_ctrl_c_comes_out_of_the_block_alone(run_script: Run) -> None:
    done = run_script(
        script("""
        async def main():
            async with launch(shutdown_timeout=0.3) as pipe, trio.open_nursery() as nursery:
                tell(pipe)
                await all_busy(pipe, nursery, sleep)
                os.kill(os.getpid(), signal.SIGINT)
                await trio.sleep_forever()

        try:
            trio.run(main)
        except* KeyboardInterrupt as error:
            print("interrupted", type(error).__name__)
        """)
    )
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stdout
    assert "Traceback" not in done.stderr
    assert_gone(told("pids", done.stdout), 0)


def test_a_second_ctrl_c_does_not_wait_for_a_stuck_stage(run_script: Run) -> None:
    done = run_script(
        script("""
        async def main():
            async with launch(shutdown_timeout=1000) as pipe:
                tell(pipe)
                os.mkfifo("fifo1")
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(lambda: pipe.call(sleep, stages=1))
                        await trio.to_thread.run_sync(meet, 1)
                        scope.cancel()
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                global start
                start = time.monotonic()
                os.kill(os.getpid(), signal.SIGINT)
                await trio.sleep_forever()

        try:
            trio.run(main)
        except KeyboardInterrupt:
            print("seconds", round(time.monotonic() - start))
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert told("seconds", done.stdout)[0] <= 3
    assert_gone(told("pids", done.stdout), 0)


def test_ctrl_c_during_the_start(run_script: Run) -> None:
    done = run_script(
        script("""
        def make(controller):
            def build(stage):
                print("pids", os.getpid(), flush=True)
                if stage.stage_index == 1:
                    os.kill(controller, signal.SIGINT)
                time.sleep(10_000)
            return build

        async def main():
            async with Pipeline.launch(make(os.getpid()), pp=3):
                print("launched")

        try:
            trio.run(main)
        except KeyboardInterrupt:
            print("interrupted")
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stdout
    assert "launched" not in done.stdout
    assert "Traceback" not in done.stderr


def test_ctrl_c_works_again_after_teardowns_that_overlapped(run_script: Run) -> None:
    done = run_script(
        script("""
        async def one(seconds, ready, go):
            async with launch() as pipe:
                ticket = await pipe.submit(torch.zeros(2))
                call = lambda stage: time.sleep(seconds)
                with trio.move_on_after(0.01):
                    await pipe.call(call, stages=1)  # so that the ends come one after the other
                ready.set()
                await go.wait()

        async def main():
            before = signal.getsignal(signal.SIGINT)
            async with trio.open_nursery() as nursery:
                first, second, go = trio.Event(), trio.Event(), trio.Event()
                nursery.start_soon(one, 0.4, first, go)
                nursery.start_soon(one, 0.8, second, go)
                await first.wait()
                await second.wait()
                go.set()
            print("same", signal.getsignal(signal.SIGINT) is before)
            os.kill(os.getpid(), signal.SIGINT)
            await trio.sleep_forever()

        try:
            trio.run(main)
        except KeyboardInterrupt:
            print("interrupted")
        """),
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["same True", "interrupted"]


def test_a_program_that_handles_sigint_by_itself_keeps_it_during_the_teardown(run_script: Run) -> None:
    done = run_script(
        script("""
        class Interrupt(nn.Module):
            def __init__(self, controller):
                super().__init__()
                self.controller = controller

            def forward(self, x):
                time.sleep(0.5)  # the body ends meanwhile
                os.kill(self.controller, signal.SIGINT)
                time.sleep(0.5)
                return x

        async def main():
            async with trio.open_nursery() as nursery:
                seen = trio.Event()

                async def receive(task_status):
                    with trio.open_signal_receiver(signal.SIGINT) as signals:
                        task_status.started()
                        async for _ in signals:
                            print("received")
                            seen.set()

                await nursery.start(receive)
                async with Pipeline.launch([AddOne(), Interrupt(os.getpid())], pp=2) as pipe:
                    tell(pipe)
                    ticket = await pipe.submit(torch.zeros(2))
                await seen.wait()
                nursery.cancel_scope.cancel()
            print("ended")

        trio.run(main)
        """),
        timeout=30,
    )
    assert done.stdout.splitlines()[-2:] == ["received", "ended"], done.stderr
    assert_gone(told("pids", done.stdout), 0)


def test_a_stage_that_floods_a_stderr_that_nobody_reads_does_not_hold_the_program_up(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        script("""
        class Flood(nn.Module):
            def forward(self, x):
                for _ in range(20_000):
                    sys.stderr.write("y" * 99 + "\\n")
                os._exit(3)

        async def main():
            async with Pipeline.launch([AddOne(), Flood()], pp=2) as pipe:
                tell(pipe)
                with trio.move_on_after(1.0):
                    await pipe(torch.zeros(2))
                os.kill(pipe.stages[0].pid, signal.SIGKILL)
                await trio.sleep_forever()

        try:
            trio.run(main)
        except Exception as error:
            print("raised", type(error).__name__, flush=True)
            os._exit(0)  # what Python itself flushes at exit is its own affair
        """)
    )
    read, write = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    with (tmp_path / "stdout").open("w+") as out:
        try:
            process = subprocess.Popen([sys.executable, str(path)], env=environment, stdout=out, stderr=write)
            os.close(write)
            try:
                code = process.wait(30)
            finally:
                process.kill()
                process.wait()
        finally:
            os.close(read)
    output = (tmp_path / "stdout").read_text()
    assert "raised StageDied" in output
    assert_gone(told("pids", output))
    assert code == 0
