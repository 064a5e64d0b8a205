"""Ctrl-C while pipelines are being taken down: the second one kills at once.

Rules of this file:

* The first Ctrl-C is Trio's: a KeyboardInterrupt in the user's code, which unwinds into our teardown. During a teardown our
  own handler stands in, so that another one speeds it up instead of tearing it apart.
* One handler for all pipelines of the program, put there by the first teardown and taken back by the last, in whatever order
  they overlap; and only in the place of Python's own or Trio's. A program that handles SIGINT by itself keeps it.
* Our frames and tasks are protected from KeyboardInterrupt (``protected``): it must not tear bookkeeping apart. One that is
  pending can still surface at an await of the main task; ``to_the_end`` is for what must not be skipped then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import trio

protected = trio.lowlevel.enable_ki_protection
"""Decorator: no KeyboardInterrupt in this function, nor in what it calls."""

_callbacks: list[Callable[[], None]] = []
_before: Any = None


@contextmanager
def on_interrupt(callback: Callable[[], None]) -> Generator[None]:
    """Call ``callback`` in the Trio loop for every Ctrl-C inside the block, if SIGINT is not the program's own affair."""
    global _before
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _callbacks:
        current = signal.getsignal(signal.SIGINT)
        if not _is_default(current):
            yield
            return
        _before = signal.signal(signal.SIGINT, _handle)
    token = trio.lowlevel.current_trio_token()

    def pass_on() -> None:
        token.run_sync_soon(callback, idempotent=True)

    _callbacks.append(pass_on)
    try:
        yield
    finally:
        _callbacks.remove(pass_on)
        if not _callbacks and signal.getsignal(signal.SIGINT) is _handle:
            signal.signal(signal.SIGINT, _before)


def _handle(_number: int, _frame: FrameType | None) -> None:
    for pass_on in list(_callbacks):
        pass_on()


def _is_default(handler: Any) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "__module__", "") == "trio._core._ki"


async def to_the_end(step: Callable[[], Awaitable[None]]) -> bool:
    """Run a bounded step whatever is cancelled meanwhile, and again if a pending Ctrl-C surfaces in it.

    Returns:
        Whether one did.
    """
    interrupted = False
    done = False
    with trio.CancelScope(shield=True):
        while not done:
            try:
                await step()
                done = True
            except KeyboardInterrupt:
                interrupted = True
    return interrupted


def is_interrupt(error: BaseException) -> bool:
    """Whether this is a KeyboardInterrupt, or a group with one in it."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_interrupt, cast("BaseExceptionGroup[Any]", error).exceptions))
    return isinstance(error, KeyboardInterrupt)


def is_cancelled(error: BaseException) -> bool:
    """Whether this is the caller's cancellation and nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_cancelled, cast("BaseExceptionGroup[Any]", error).exceptions))
    return isinstance(error, trio.Cancelled)
