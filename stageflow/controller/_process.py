"""Starting a process that never imports the user's ``__main__``.

Rules of this file:

* ``forkserver`` where there is one: torch is imported once, in the fork server, and a stage is ready in milliseconds. Else
  ``spawn``. Never ``fork``.
* multiprocessing would import the user's main module again in each child; two keys of its preparation data make it do so.
  They are left out for our own starts only: scripts need no main guard, and notebooks, ``-c`` and REPLs work. What a stage
  needs of ``__main__`` comes by cloudpickle.
* Called in a worker thread: a cold start waits about a second for the fork server.
* The stage's code is named here as a string alone, so that no module of the parent side imports the child side.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from stageflow._frames import Door

STAGE_MODULE = "stageflow.stage._main"

_PRELOAD_TOO = ("transformers.modeling_utils",)
"""Slow to import, known to start no thread, and sure to be needed in the stages of a program that has imported it: seconds
of every launch otherwise. The fork server is started once per program, so this is decided at the first launch."""

_start_lock = threading.Lock()

_started: dict[int, tuple[str, str | None]] = {}
"""Name and time of birth of the stage processes that this program has started, by pid; without what has ended since."""


def choose_start_method(start_method: str | None) -> str:
    """``forkserver`` where the platform has it, else ``spawn``, unless told.

    Raises:
        ValueError: a method that this platform lacks, or ``fork``.
    """
    possible = [name for name in ("forkserver", "spawn") if name in multiprocessing.get_all_start_methods()]
    if start_method is None:
        return possible[0]
    if start_method not in possible:
        raise ValueError(
            f"start_method is one of {possible} here: found {start_method!r}. A forked copy of a process that uses torch "
            "and threads is not safe, so 'fork' is never offered"
        )
    return start_method


def start_process(start_method: str, name: str, door: Door) -> BaseProcess:
    """Start one stage process. Blocks until it has been forked or spawned, not until it runs."""
    context: Any = multiprocessing.get_context(start_method)
    process = context.Process(target=importlib.import_module(STAGE_MODULE).main, args=(door,), name=name)
    # The tracker, started lazily by the first spawn, would unblock SIGINT in this thread.
    multiprocessing.resource_tracker.ensure_running()
    with _start_lock, _main_left_alone():
        if start_method == "forkserver":
            context.set_forkserver_preload(
                [
                    "stageflow.stage._preload",
                    *(name for name in _PRELOAD_TOO if name in sys.modules),
                    "stageflow.stage._preloaded",
                ]
            )
        # A fork server or a spawned child takes seconds to get to its guard; Ctrl-C must not kill it on the way.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _forget_the_dead()
    _started[process.pid] = (name, _born(process.pid))
    return process


def stage_processes() -> dict[int, str]:
    """The stage processes that this program has started and that have not ended, by pid; looked up in the kernel."""
    _forget_the_dead()
    return {pid: name for pid, (name, _) in list(_started.items())}


def _forget_the_dead() -> None:
    for pid, (_, born) in list(_started.items()):
        if born is None or _born(pid) != born:
            _started.pop(pid, None)


def _born(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, which tells it from others with its pid; None for one that has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


@contextmanager
def _main_left_alone() -> Generator[None]:
    original = multiprocessing.spawn.get_preparation_data
    ours = threading.get_ident()

    def without_main(name: str) -> dict[str, Any]:
        data: Any = original(name)
        if threading.get_ident() == ours:  # another thread may start a process of the user's meanwhile
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    multiprocessing.spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = original


def open_handle(process: BaseProcess) -> int | None:
    """The kernel's handle of a process, or None where there is no such thing. Ours to close."""
    if not hasattr(os, "pidfd_open") or process.pid is None:
        return None
    try:
        return os.pidfd_open(process.pid)
    except ProcessLookupError:  # it has ended already
        return None


def open_sentinel(process: BaseProcess, handle: int | None, start_method: str) -> int:
    """A descriptor that becomes readable when the process has ended, whoever else holds what it held. Ours to close.

    The fork server tells of the end of its children. A spawned one is our own child, and multiprocessing's sentinel for it
    is a pipe that the process's own forked children keep open; the kernel's handle is not.
    """
    return os.dup(process.sentinel if start_method == "forkserver" or handle is None else handle)


@contextmanager
def fork_server_within(seconds: float) -> Generator[None]:
    """Bound the starts inside: a fork server that has not answered by then is killed, which ends the wait for it."""

    def kill_server() -> None:
        server: Any = multiprocessing.forkserver
        if (pid := server._forkserver._forkserver_pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), kill_server)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
