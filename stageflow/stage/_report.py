"""An exception in a stage as plain data.

Rules of this file:

* A report is made of any exception, however odd: one that can't be pickled, whose ``str()`` raises, whose text is endless.
* It always fits into a frame of the ring.
* Its traceback begins with the first line that isn't ours: the user's own.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from stageflow._frames import Report, StageInfo

_OURS = str(Path(__file__).parent)

_TEXT_LIMIT = 8 * 1024
"""Bytes of a report's traceback, and a quarter of that for its message."""


class Reporter:
    """Makes the reports of one rank."""

    def __init__(self, info: StageInfo) -> None:
        self._info = info
        self.phase = "rendezvous"
        """What the rank is doing, in the words of ``_lifecycle.State``."""

    def report(
        self, error: BaseException, *, seq: int | None = None, phase: str | None = None, transport: bool = False
    ) -> Report:
        """The report of an exception. Never raises.

        Args:
            error: the exception.
            seq: the micro-batch it belongs to, if to one.
            phase: what the rank was doing, if not ``self.phase``.
            transport: whether it is the transport's.
        """
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            text = str(error)
        except Exception as second:
            text = f"<its str() raised {type(second).__name__}>"
        try:
            # From the first line that isn't ours: the user's own.
            shown = error.__traceback__
            while shown is not None and shown.tb_next is not None and shown.tb_frame.f_code.co_filename.startswith(_OURS):
                shown = shown.tb_next
            lines = "".join(traceback.format_exception(error.with_traceback(shown)))
        except Exception:
            lines = "".join(traceback.format_tb(error.__traceback__)) + name
        return Report(
            rank=self._info.rank,
            stage_index=self._info.stage_index,
            tp_index=self._info.tp_index,
            phase=phase or self.phase,
            seq=seq,
            remote_type=name[:256],
            text=_cut(text, _TEXT_LIMIT // 4),
            traceback=_cut(lines, _TEXT_LIMIT),
            monotonic_ns=time.monotonic_ns(),
            transport=transport,
        )


def _cut(text: str, limit: int) -> str:
    """At most about ``limit`` bytes: the end of a traceback says most, its beginning the rest. Always encodable."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode()
    head, tail = data[: limit // 4], data[-limit * 3 // 4 :]
    return f"{head.decode(errors='ignore')}\n… {len(data) - limit} bytes left out …\n{tail.decode(errors='ignore')}"
