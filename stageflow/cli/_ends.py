"""How a command ends: an exit code, and a sentence instead of a traceback where that says it all.

Rules of this file:

* What the user can mend, and what happened to a stage, is a sentence. Anything else is a bug: it keeps its traceback.
* Errors out of a nursery come in groups. What they hold counts, not the group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import cast

from stageflow import PartitionError, StageflowError

__all__ = ["FAILED", "INTERRUPTED", "OK", "REFUSED", "Refused", "ended"]

OK = 0
FAILED = 1
REFUSED = 2
"""As for a wrong argument: nothing was tried."""
INTERRUPTED = 130
"""Ctrl-C, as shells have it."""


class Refused(Exception):
    """It can't be done so. The message says why and how to mend it."""


def ended(command: Callable[[], int]) -> int:
    """Run a command to its end, whatever that is.

    Returns:
        Its exit code, or that of the error which ended it.

    Raises:
        BaseException: what isn't known here.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BaseException as error:
        causes = list(_leaves(error))
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            return INTERRUPTED
        if any(isinstance(cause, BrokenPipeError) for cause in causes):  # whoever read our output has gone, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter still wants to flush
            return FAILED
        if not all(isinstance(cause, (Refused, StageflowError)) for cause in causes):
            raise
        first, more = causes[0], len(causes) - 1
        name = "" if isinstance(first, Refused) else f"{type(first).__name__}: "
        print(f"stageflow: {name}{first}" + (f"\n(and {more} more)" if more else ""), file=sys.stderr)
        return REFUSED if isinstance(first, (Refused, PartitionError)) else FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(part)
    else:
        yield error
