"""``breakpoint()`` in a stage: pdb on the program's terminal.

Rules of this file:

* A stage has no stdin, and its stdout is a pipe; the debugger opens the terminal itself, in the mode that it is in, so there
  is nothing to put right if the process is killed.
* One stage at a time: a lock that the kernel gives back with the process, held from a stop until ``continue`` or ``quit``.
* Meanwhile the rank says so on the progress board, and the controller stops its clocks.
"""

from __future__ import annotations

import fcntl
import os
import pdb
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from stageflow.observe import Activity, ProgressWriter

_TERMINAL = "/dev/tty"


class StageDebugger(pdb.Pdb):
    """pdb that takes the terminal when it stops, and gives it back when the program goes on."""

    def __init__(self, label: str, lock: int, progress: ProgressWriter) -> None:
        try:
            terminal_in, terminal_out = open(_TERMINAL), open(_TERMINAL, "w")  # noqa: SIM115 - for good
        except OSError as error:
            raise RuntimeError(
                f"breakpoint() in {label} needs a terminal, and this program has none ({_TERMINAL}: {error.strerror}). Run "
                "it from one; or set PYTHONBREAKPOINT to another debugger, or to 0 to pass over breakpoints"
            ) from error
        super().__init__(stdin=terminal_in, stdout=terminal_out, nosigint=True)
        self.prompt = f"[{label}] (Pdb) "
        self._lock = lock
        self._progress = progress
        self._before: tuple[Activity, int | None] | None = None

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """A stop: the prompt, until a command lets the program run."""
        if self._before is None:
            self._before = self._progress.current
            self._progress.enter(Activity.DEBUGGING, self._before[1])
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        super().interaction(*args, **kwargs)

    def set_continue(self) -> None:
        """Run until the next breakpoint."""
        super().set_continue()
        self._let_go()

    def set_quit(self) -> None:
        """Raise ``bdb.BdbQuit`` where the program stands."""
        super().set_quit()
        self._let_go()

    def _let_go(self) -> None:
        if self._before is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._progress.enter(*self._before)
            self._before = None


def debug_on_terminal(label: str, lock: Path, progress: ProgressWriter) -> None:
    """Let ``breakpoint()`` in this process open pdb on the terminal.

    Args:
        label: of this stage, for the prompt.
        lock: a file that all ranks of the pipeline have in common.
        progress: this rank's slot.
    """
    lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    debugger: StageDebugger | None = None

    def hook(*args: Any, **kwargs: Any) -> None:
        nonlocal debugger
        if os.environ.get("PYTHONBREAKPOINT") not in (None, "", "pdb.set_trace"):
            sys.__breakpointhook__(*args, **kwargs)
            return
        debugger = debugger or StageDebugger(label, lock_fd, progress)
        caller: FrameType = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        debugger.set_trace(caller)

    sys.breakpointhook = hook
