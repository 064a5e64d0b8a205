"""The log records of a stage, on their way to the controller.

Rules of this file:

* Logging never holds a stage up: a record goes in one datagram, or, if the controller is not reading, it is dropped and
  counted, and the next one that gets through says how many are missing.
* A record leaves as plain data: its message made, its traceback as text, other fields as they are if JSON knows them, else
  by their ``repr``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

RECORD_LIMIT = 32 * 1024
"""Bytes of one record; what is longer is cut. The reader takes up to twice that at once."""

_ESSENTIAL = ("name", "levelno", "levelname", "msg", "args", "exc_info", "exc_text", "created", "lost")


class Forwarder(logging.Handler):
    """Sends every record to the controller. On the root logger of a stage process."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        os.set_blocking(connection.fileno(), False)
        self._connection = connection
        self._lost = 0
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, or count it as lost."""
        try:
            fields = self._plain(record)
            if len(data := json.dumps(fields).encode()) > RECORD_LIMIT:
                fields = self._plain(record, cut=RECORD_LIMIT // 16)
                if len(data := json.dumps(fields).encode()) > RECORD_LIMIT:  # a great many fields of the user's
                    data = json.dumps({name: fields[name] for name in _ESSENTIAL if name in fields}).encode()
            os.write(self._connection.fileno(), data)
            self._lost = 0
        except OSError:  # full; or the controller is gone
            self._lost += 1
        except Exception:
            self.handleError(record)

    def _plain(self, record: logging.LogRecord, cut: int | None = None) -> dict[str, Any]:
        fields = {name: _plain(value, cut) for name, value in vars(record).items()}
        text = record.exc_text
        if record.exc_info and not text:
            text = self._formatter.formatException(record.exc_info)
        fields |= {
            "msg": record.getMessage()[:cut],
            "args": None,
            "exc_info": None,
            "exc_text": text and text[-(cut or 0) :],
        }
        if self._lost:
            fields["lost"] = self._lost
        return fields


def _plain(value: object, cut: int | None) -> object:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    try:
        return (value if isinstance(value, str) else repr(value))[:cut]
    except Exception as error:
        return f"<its repr() raised {type(error).__name__}>"


def forward_logs(connection: Connection) -> None:
    """Send the log records of this process to the controller, from now on."""
    logging.getLogger().addHandler(Forwarder(connection))


def set_levels(levels: Mapping[str, int]) -> None:
    """Let loggers let through what the controller's do."""
    for name, level in levels.items():
        with contextlib.suppress(ValueError, TypeError):
            logging.getLogger(name or None).setLevel(level)
