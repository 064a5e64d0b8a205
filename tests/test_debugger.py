"""`breakpoint()` in a stage: pdb on the terminal, one stage at a time, with all clocks stopped meanwhile."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TAKE_THE_TERMINAL = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


class Terminal:
    """A program on a terminal of its own, and somebody who types."""

    def __init__(self, script: Path) -> None:
        self.screen = ""
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_THE_TERMINAL, str(script)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        os.close(theirs)

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """What the screen has shown up to this text, since the last one waited for."""
        deadline = time.monotonic() + seconds
        while text not in self.screen:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            if not ready or not (data := self._read()):
                pytest.fail(f"{text!r} did not come; the screen shows\n{self.screen}", pytrace=False)
            self.screen += data.replace("\r\n", "\n")
        before, self.screen = self.screen.split(text, 1)
        return before

    def _read(self) -> str:
        try:
            return os.read(self._ours, 4096).decode()
        except OSError:  # nobody has the other side open any more
            return ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode() + b"\n")

    def control_c(self) -> None:
        os.write(self._ours, b"\x03")

    def end(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.close()

    def close(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[[str], Terminal]]:
    """`terminal(source)`: run a script on a terminal."""
    opened: list[Terminal] = []

    def run(source: str) -> Terminal:
        script = tmp_path / "script.py"
        script.write_text(source if "import torch" in source else HEAD + textwrap.dedent(source))
        opened.append(Terminal(script))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


HEAD = """\
import os, sys, time, torch, trio
from torch import nn
from stageflow import Pipeline, PipelineBroken, StageError

class Look(nn.Module):
    def forward(self, x):
        y = x + 1
        breakpoint()
        return y

"""


def test_pdb_stops_in_a_stage_and_the_program_goes_on(terminal: Callable[[str], Terminal]) -> None:
    here = terminal("""
        async def main():
            async with Pipeline.launch([nn.Identity(), Look()], pp=2) as pipe:
                print("result", int(await pipe(torch.tensor(1))))

        trio.run(main)
    """)
    assert "return y" in here.wait_for("[stage 1] (Pdb) ")
    here.type("p int(y) + 100")
    assert "102" in here.wait_for("[stage 1] (Pdb) ")
    here.type("y = y + 5")
    here.wait_for("[stage 1] (Pdb) ")
    here.type("n")
    here.wait_for("[stage 1] (Pdb) ")
    here.type("c")
    here.wait_for("result 7")
    assert here.end() == 0


def test_the_docs_show_what_the_screen_shows(terminal: Callable[[str], Terminal]) -> None:
    page = (REPOSITORY / "docs" / "seeing-inside.md").read_text()
    [(program, transcript)] = re.findall(
        r"^```{code-block} python\n(.*?)^```$.*?^```none\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    here = terminal(program)
    shown = ""
    for line in transcript.splitlines():
        _, found, typed = line.partition("(Pdb) ")
        if found:
            shown += here.wait_for(found) + found
            here.type(typed)
    shown += here.wait_for("result 43") + "result 43"
    assert here.end() == 0

    def plain(text: str) -> str:
        return " ".join(re.sub(r"> .*\(\d+\)forward", "> app.py(N)forward", text).split())

    assert plain(shown) == plain(transcript)


def test_every_clock_stands_still(terminal: Callable[[str], Terminal]) -> None:
    here = terminal("""
        def build(stage):
            if stage.is_first:
                breakpoint()
            return Look()

        async def main():
            async with Pipeline.launch(
                build, pp=1, start_timeout=1.5, stall_timeout=0.4, shutdown_timeout=0.4
            ) as pipe:
                print("launched")
                await pipe.submit(torch.tensor(1))
                ticket = await pipe.submit(torch.tensor(2))
                print("result", int(await ticket))
                with trio.move_on_after(0.1):
                    await pipe(torch.tensor(3))
                print("leaving")
            print("left")

        trio.run(main)
    """)
    for said, after in ((None, 2.5), ("launched", 1.5), (None, 1.5), ("result 3", 0.5)):
        if said:
            here.wait_for(said)
        here.wait_for("[stage 0] (Pdb) ")
        time.sleep(after)  # longer than the timeout that would strike
        here.type("c")
    here.wait_for("left")
    assert here.end() == 0


def test_two_stages_stop_one_after_the_other(terminal: Callable[[str], Terminal]) -> None:
    here = terminal("""
        class Last(Look):
            pass

        async def main():
            async with Pipeline.launch([Look(), Last()], pp=2, stall_timeout=0.4) as pipe:
                async with pipe.map(torch.tensor(i) for i in range(2)) as outputs:
                    print("results", [int(y) async for y in outputs])

        trio.run(main)
    """)
    stops = []
    for _ in range(4):
        here.wait_for("[stage ")
        stage = here.wait_for("] (Pdb) ")
        time.sleep(0.3)  # now the other stage wants the terminal, too
        here.type("p 'seen', __import__('os').getpid()")
        before = here.wait_for("] (Pdb) ")
        assert "[stage" in before
        assert before.rpartition("[stage ")[2] == stage
        here.type("c")
        stops.append(int(stage))
    here.wait_for("results [2, 3]")
    assert here.end() == 0
    assert sorted(stops) == [0, 0, 1, 1]


def test_quit_fails_that_micro_batch_alone(terminal: Callable[[str], Terminal]) -> None:
    here = terminal("""
        async def main():
            async with Pipeline.launch([Look()], pp=1) as pipe:
                try:
                    await pipe(torch.tensor(1))
                except StageError as error:
                    print("failed", error.remote_type)
                print("result", int(await pipe(torch.tensor(1))))

        trio.run(main)
    """)
    here.wait_for("(Pdb) ")
    here.type("q")
    here.wait_for("failed bdb.BdbQuit")
    here.wait_for("(Pdb) ")
    here.type("c")
    here.wait_for("result 2")
    assert here.end() == 0


def test_control_c_waits_for_the_debugger_and_the_second_one_does_not(terminal: Callable[[str], Terminal]) -> None:
    here = terminal("""
        async def main():
            async with Pipeline.launch([Look()], pp=1, shutdown_timeout=0.2) as pipe:
                try:
                    await pipe(torch.tensor(1))
                except BaseException:
                    print("interrupted")
                    raise

        try:
            trio.run(main)
        except KeyboardInterrupt:
            print("ended")
    """)
    here.wait_for("(Pdb) ")
    here.control_c()
    here.wait_for("interrupted")
    time.sleep(1.0)  # longer than shutdown_timeout
    here.type("p int(y)")
    assert "2" in here.wait_for("(Pdb) ")
    here.control_c()
    here.wait_for("ended")
    assert here.end() == 0


def test_a_stage_that_is_killed_at_its_prompt_is_a_death_like_any_other(terminal: Callable[[str], Terminal]) -> None:
    here = terminal("""
        async def main():
            async with Pipeline.launch([nn.Identity(), Look()], pp=2) as pipe:
                print("pid", pipe.stages[1].pid, ".")
                await pipe(torch.tensor(1))

        try:
            trio.run(main)
        except PipelineBroken as error:
            print("broken", type(error).__name__, error.stage_index, error.signal)
    """)
    here.wait_for("pid ")
    pid = int(here.wait_for(" ."))
    here.wait_for("(Pdb) ")
    os.kill(pid, signal.SIGKILL)
    here.wait_for("broken StageDied 1 SIGKILL")
    assert here.end() == 0


def test_without_a_terminal_the_error_says_so(run_script) -> None:
    done = run_script(
        HEAD
        + textwrap.dedent("""
        async def main():
            async with Pipeline.launch([nn.Identity(), Look()], pp=2) as pipe:
                try:
                    await pipe(torch.tensor(1))
                except StageError as error:
                    print(error.message)
                os.environ["PYTHONBREAKPOINT"] = "0"
            async with Pipeline.launch([nn.Identity(), Look()], pp=2) as pipe:
                print(int(await pipe(torch.tensor(1))))

        trio.run(main)
        """)
    )
    assert done.returncode == 0, done.stderr
    says, passed_over = done.stdout.splitlines()
    assert "breakpoint() in stage 1 needs a terminal, and this program has none" in says
    assert "PYTHONBREAKPOINT" in says
    assert passed_over == "2"  # a later launch sees the environment that the program has by then
