"""What stages print: each line on the controller's own stdout or stderr, marked with its stage; the last lines are kept.

Rules of this file:

* One thread for all ranks, which only reads and shows: a flood never blocks a stage for longer than it takes to show it,
  whatever the Trio loop or the reader does.
* Showing may block, if nobody reads the controller's own output; then it blocks that thread and nothing else: it is done
  outside the lock, and the end waits for it only so long.
* Reads never block; the thread ends when it is told, not when the pipes close: a process that a stage forked may hold them.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

_CHUNK = 64 * 1024
_TAIL_LINES = 20
_SHOW_S = 1.0
"""For the last lines to be shown when all has ended."""

_LINE_LIMIT = 8 * 1024
"""A line longer than this is shown in pieces: an endless one fills no memory."""


class _Stream:
    """One of a rank's two streams."""

    def __init__(self, label: str, connection: Connection, to_stderr: bool) -> None:
        self.connection = connection
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._label = label
        self._to_stderr = to_stderr
        self._rest = b""
        os.set_blocking(connection.fileno(), False)

    def read(self) -> tuple[list[str], bool]:
        """The lines that are there, ready to be shown, and whether there may be more to come."""
        try:
            data = os.read(self.connection.fileno(), _CHUNK)
        except BlockingIOError:
            return [], True
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LINE_LIMIT):
            lines.append(self._rest)
            self._rest = b""
        texts = [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
        self.tail.extend(texts)
        return texts, bool(data)

    @property
    def unfinished(self) -> list[str]:
        """The last line, if its end is still to come."""
        return [self._rest.decode("utf-8", "replace")] if self._rest else []

    def show(self, lines: Sequence[str]) -> None:
        """Print lines on the controller's stream."""
        stream = sys.stderr if self._to_stderr else sys.stdout
        try:
            for line in lines:
                stream.write(f"[{self._label}] {line}\n")
            stream.flush()
        except Exception:  # the user's stream: closed, or none, or one of its own making
            return


class Output:
    """The output of all ranks of a pipeline."""

    def __init__(self, labels: Sequence[str], pipes: Sequence[tuple[Connection, Connection]]) -> None:
        """The pipes are (stdout, stderr) of each rank; they are closed by ``stop``."""
        self._streams = [
            (_Stream(label, out, False), _Stream(label, err, True)) for label, (out, err) in zip(labels, pipes, strict=True)
        ]
        self._lock = threading.Lock()
        self._unshown: list[tuple[_Stream, list[str]]] = []
        """What ``stderr_tail`` read, for the thread to show."""
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="stageflow output", daemon=True)
        self._thread.start()

    def stderr_tail(self, rank: int) -> tuple[str, ...]:
        """The last lines of a rank's stderr, with what it has just written."""
        stream = self._streams[rank][1]
        with self._lock:
            lines, _ = stream.read()
            self._unshown.append((stream, lines))
            return (*stream.tail, *stream.unfinished)

    def stop(self) -> None:
        """Show what is left, and end. Bounded: a reader of ours that has stopped reading is left to itself."""
        os.write(self._wake_write, b"q")
        self._thread.join(_SHOW_S)
        if self._thread.is_alive():
            return
        for stream in (stream for pair in self._streams for stream in pair):
            stream.connection.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        streams = {stream.connection.fileno(): stream for pair in self._streams for stream in pair}
        for descriptor in streams:
            poll.register(descriptor, select.POLLIN)
        ending = False
        while not ending:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    ending = True
                elif not self._pump(streams[descriptor]):
                    poll.unregister(descriptor)
        for stream in streams.values():
            for _ in range(16):  # what a pipe holds, not what a left-over child may go on writing
                if not self._pump(stream):
                    break

    def _pump(self, stream: _Stream) -> bool:
        with self._lock:
            lines, more = stream.read()
            batches = [*self._unshown, (stream, lines)]
            self._unshown.clear()
        for one, texts in batches:
            one.show(texts)
        return more
