"""What a stage process arms before anything else: it can't outlive its controller, and its last words are kept.

Rules of this file:

* SIGINT is ignored (Ctrl-C is the controller's business), SIGTERM keeps its default: a handler in Python would not run while
  C code holds the GIL, and the process would not end.
* The death pipe is armed in the kernel where it can be: async I/O on its read end sends SIGKILL to this process when the
  controller, who holds the only write end, is gone. That needs no thread, no polling and no GIL. The pipe is looked at once
  afterwards, for a controller that was gone before.
* stdout and stderr go to the controller's pipes, line by line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from stageflow._frames import STACKS_SIGNAL

_F_SETSIG = 10
"""Linux: which signal async I/O sends. Not in Python's fcntl module."""


def arm(*, title: str, death: Connection, stdout: Connection, stderr: Connection, stacks: Path) -> None:
    """Set up signals, output, fault reports and the death pipe of this process.

    Args:
        title: what `ps` shows: whole, if setproctitle is installed; else as the kernel's short name, ``stageflow 2/4``.
        death: read end of the pipe that the controller never writes to.
        stdout: write end, becomes file descriptor 1.
        stderr: write end, becomes file descriptor 2.
        stacks: file that ``STACKS_SIGNAL`` writes the stacks of all threads to, even while the GIL is held; SIGUSR1 writes
            them to stderr, for people.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a spawned child starts with it blocked
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _redirect(stdout, 1)
    _redirect(stderr, 2)
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - the process's
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - the process's
    faulthandler.enable(file=2, all_threads=False)  # after a crash, the one that crashed is what matters
    stacks_fd = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if sys.platform == "linux":
        _name_process(title)
        _arm_in_kernel(death.fileno())
    else:
        threading.Thread(target=_watch, args=(death.fileno(),), name="stageflow death watch", daemon=True).start()


def _name_process(title: str) -> None:
    os.environ["SPT_NOENV"] = "1"  # or setproctitle would write the title over what /proc/<pid>/environ shows
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)
    # At most 15 bytes. Afterwards, since setproctitle sets it as well, to the beginning of the title.
    Path("/proc/self/comm").write_text(title.replace(" stage", ""))


def _redirect(connection: Connection, descriptor: int) -> None:
    os.dup2(connection.fileno(), descriptor)
    connection.close()


def _arm_in_kernel(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | fcntl.FASYNC)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if poll.poll(0):
        os._exit(1)


def _watch(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    os._exit(1)
