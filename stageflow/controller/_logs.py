"""The log records of stages, in the controller's own logging.

Rules of this file:

* A record that a stage has let through goes to the logger of its name here, as if it had been made here: its level, filters,
  handlers and propagation are the program's own, set once.
* It says where it comes from: ``stage_index``, ``tp_index``, ``rank``, beside logging's own ``process`` and ``processName``.
* A stage sends plain data (JSON), so nothing of a stage's is unpickled here.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from stageflow._frames import StageInfo

logger = logging.getLogger("stageflow")


def levels() -> dict[str, int]:
    """The levels that have been set in this program, by name of logger; the root's under ``""``."""
    everyone = dict(logging.root.manager.loggerDict)  # a copy: other threads may add to it
    loggers = {name: one for name, one in everyone.items() if isinstance(one, logging.Logger)}
    found = {"": logging.root.level, **{name: one.level for name, one in loggers.items() if one.level != logging.NOTSET}}
    return {name: max(level, logging.root.manager.disable + 1) for name, level in found.items()}


def handle_record(info: StageInfo, data: bytes) -> int:
    """Give a stage's record to this program's handlers; returns how many before it the stage had to drop."""
    lost = 0
    try:
        fields: dict[str, Any] = json.loads(data)
        lost = int(fields.pop("lost", 0))
        record = logging.makeLogRecord(
            {**fields, "stage_index": info.stage_index, "tp_index": info.tp_index, "rank": info.rank}
        )
        one = logging.getLogger(record.name)
        if not one.isEnabledFor(record.levelno):
            return lost
        if one.hasHandlers():
            one.handle(record)
        elif record.levelno >= logging.WARNING:  # as logging does where nothing is set up, but marked
            text = logging.Formatter().format(record)
            sys.stderr.write("".join(f"[{info.label}] {line}\n" for line in text.splitlines()))
    except Exception:  # a handler or filter of the user's; those of logging report by themselves
        logger.debug("a log record of stage %d could not be handled", info.stage_index, exc_info=True)
    return lost


def count_records(data: bytes) -> int:
    """How many records are missing if this one is not handled: it may say of others that they are."""
    try:
        return 1 + int(json.loads(data).get("lost", 0))
    except Exception:  # whatever else somebody wrote to that socket
        return 1


def handle_lost(info: StageInfo, count: int) -> None:
    """Say that records of a stage are missing."""
    logger.warning(
        "%d log records of %s were dropped: they came faster than they could be handled",
        count,
        info.label,
        extra={"stage_index": info.stage_index, "tp_index": info.tp_index, "rank": info.rank},
    )
