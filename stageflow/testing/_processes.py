"""No stage process is left: looked up in the kernel, not in what stageflow believes.

Rules of this file:

* Only processes that this program has started count, told by pid and time of birth: other programs' stages, and processes
  that get a dead stage's pid, don't.
* A zombie is dead, though ``kill(pid, 0)`` answers.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress

from stageflow.controller import stage_processes

__all__ = ["no_stages_left", "stage_processes"]


@contextmanager
def no_stages_left(grace: float = 1.0) -> Generator[None]:
    """Fail when a stage process that was started inside this block is there when it ends. Linux.

        with no_stages_left():
            trio.run(main)

    Works around `trio.run`, in an async function, and as a pytest fixture. Pipelines that were open before don't count.
    Processes found are left alone, so that they can be looked at.

    Args:
        grace: seconds that a process which has been told to end may take. Default 1. Blocks the thread, and the Trio loop.

    Raises:
        AssertionError: naming each process; from the block's own error, if it raised one.
    """
    before = stage_processes()
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        left = _left(before, grace)
        if left:
            names = "".join(f"\n  {pid}: {name}" for pid, name in left.items())
            raise AssertionError(f"{len(left)} stage processes are left:{names}") from error


def _left(before: dict[int, str], grace: float) -> dict[int, str]:
    deadline = time.monotonic() + grace
    while left := {pid: name for pid, name in stage_processes().items() if pid not in before}:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        with ExitStack() as stack:
            endings = select.poll()
            for pid in left:
                with suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    stack.callback(os.close, descriptor)
                    endings.register(descriptor, select.POLLIN)
            endings.poll(math.ceil(remaining * 1000))  # until one of them ends
    return left
