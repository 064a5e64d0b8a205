"""What stages print and log: shown on the controller's own stdout and stderr, marked with the stage, and by its handlers.

Rules of this file:

* One thread for all ranks reads and never blocks on anything else: a flood never holds a stage up, whatever the Trio loop,
  the terminal or the user's logging handlers do.
* Another one shows, and may block on the user's terminal or handlers as long as it likes. Between the two lies a bounded
  backlog for each stream: what does not fit is dropped and counted, and the count is shown, twice a second at most.
* The last lines of stderr are kept beside that, dropped or not: they may say why a stage died.
* Reads end when told, not when the pipes close: a process that a stage forked may hold them.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import attrs

from stageflow._frames import StageInfo
from stageflow.controller._logs import count_records, handle_lost, handle_record

_CHUNK = 64 * 1024

_BACKLOG = 2**20
"""Bytes of each stream of each rank that may wait to be shown: some ten thousand lines."""

_SAY_S = 0.5
"""How long what is missing is counted before it is said: a flood is not answered by a flood."""

_TAIL_LINES = 40
_TAIL_BYTES = 16 * 1024
"""What is kept of a rank's stderr for its errors."""

SHOW_S = 1.0
"""For the last lines to be shown when all has ended."""

_LINE_LIMIT = 8 * 1024
"""A line longer than this is shown in pieces: an endless one fills no memory."""


class Source(Protocol):
    """One stream of one rank."""

    connection: Connection

    def count(self, data: bytes) -> int:
        """How many lines or records this is."""
        ...

    def show(self, data: bytes) -> int:
        """Show them; returns how many others are missing, if they say so. For the showing thread, as the next two."""
        ...

    def show_lost(self, count: int) -> None:
        """Say that so many are missing."""
        ...

    def show_rest(self) -> None:
        """The stream has ended: show what lacks its end."""
        ...


class _Text:
    """A rank's stdout or stderr."""

    def __init__(self, label: str, connection: Connection, *, to_stderr: bool) -> None:
        self.connection = connection
        self._label = label
        self._to_stderr = to_stderr
        self._rest = b""

    def count(self, data: bytes) -> int:
        return data.count(b"\n") or 1

    def show(self, data: bytes) -> int:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_LIMIT:
            lines.append(self._rest)
            self._rest = b""
        self._write([line.decode("utf-8", "replace").rstrip("\r") for line in lines])
        return 0

    def show_lost(self, count: int) -> None:
        self.show_rest()
        self._write([f"... {count} lines dropped: they came faster than they could be shown ..."])

    def show_rest(self) -> None:
        if self._rest:
            self.show(b"\n")

    def _write(self, lines: Sequence[str]) -> None:
        stream = sys.stderr if self._to_stderr else sys.stdout
        try:
            stream.write("".join(f"[{self._label}] {line}\n" for line in lines))
            stream.flush()
        except Exception:  # the user's stream: closed, or none, or one of its own making
            return


class _Log:
    """A rank's log records: one in each datagram."""

    def __init__(self, info: StageInfo, connection: Connection) -> None:
        self.connection = connection
        self._info = info

    def count(self, data: bytes) -> int:
        return count_records(data)

    def show(self, data: bytes) -> int:
        return handle_record(self._info, data)

    def show_lost(self, count: int) -> None:
        handle_lost(self._info, count)

    def show_rest(self) -> None:
        pass


@attrs.define(eq=False)
class _Account:
    """What of one source waits to be shown, and what is missing."""

    source: Source
    waiting: int = 0
    lost: int = 0
    """Since it was last said."""
    lost_since: float = 0.0


class _Backlog:
    """What has been read and not yet shown, in the order in which it came."""

    def __init__(self, accounts: Sequence[_Account]) -> None:
        self._accounts = accounts
        self._items: deque[tuple[_Account, bytes]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, account: _Account, data: bytes) -> None:
        with self._changed:
            if account.waiting + len(data) > _BACKLOG:
                self._lose(account, account.source.count(data))
                return
            account.waiting += len(data)
            self._items.append((account, data))
            self._changed.notify()

    def lose(self, account: _Account, count: int) -> None:
        """Note that so many are missing."""
        with self._changed:
            self._lose(account, count)

    def _lose(self, account: _Account, count: int) -> None:
        if not account.lost:
            account.lost_since = time.monotonic()
            self._changed.notify()  # whoever waits, waits for this as well
        account.lost += count

    def take(self) -> tuple[_Account, bytes | int] | None:
        """The next piece, or the number of pieces that are missing; None at the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                losers = [account for account in self._accounts if account.lost]
                for account in losers:
                    if now >= account.lost_since + _SAY_S or (self._closed and not self._items):
                        count, account.lost = account.lost, 0
                        return account, count
                if self._items:
                    account, data = self._items.popleft()
                    account.waiting -= len(data)
                    return account, data
                if self._closed:
                    return None
                self._changed.wait(min((account.lost_since + _SAY_S - now for account in losers), default=None))

    def close(self) -> None:
        """Nothing comes after what is there."""
        with self._changed:
            self._closed = True
            self._changed.notify()


@attrs.frozen
class OutputPipes:
    """The controller's ends of what one rank prints and logs."""

    stdout: Connection
    stderr: Connection
    log: Connection


class Output:
    """The output of all ranks of a pipeline."""

    def __init__(self, infos: Sequence[StageInfo], labels: Sequence[str], pipes: Sequence[OutputPipes]) -> None:
        """The pipes are closed by ``stop``."""
        self._accounts: dict[int, _Account] = {}
        for info, label, ends in zip(infos, labels, pipes, strict=True):
            sources: tuple[Source, ...] = (
                _Text(label, ends.stdout, to_stderr=False),
                _Text(label, ends.stderr, to_stderr=True),
                _Log(info, ends.log),
            )
            for source in sources:
                descriptor = source.connection.fileno()
                os.set_blocking(descriptor, False)
                self._accounts[descriptor] = _Account(source)
        self._tails = {ends.stderr.fileno(): b"" for ends in pipes}
        self._stderrs = [ends.stderr.fileno() for ends in pipes]
        self._backlog = _Backlog(list(self._accounts.values()))
        self._lock = threading.Lock()
        """One reads at a time, so that what came first is queued first."""
        self._wake_read, self._wake_write = os.pipe()
        self._reading = threading.Thread(target=self._read_all, name="stageflow output", daemon=True)
        self._showing = threading.Thread(target=self._show_all, name="stageflow output show", daemon=True)
        self._reading.start()
        self._showing.start()

    def stderr_tail(self, rank: int) -> tuple[str, ...]:
        """The last lines of a rank's stderr, with what it has just written."""
        descriptor = self._stderrs[rank]
        self._read(descriptor)
        lines = self._tails[descriptor].decode("utf-8", "replace").splitlines()
        return tuple(lines[-_TAIL_LINES:])

    def stop(self) -> None:
        """Show what is left, and end. Bounded: showing that is blocked is left to itself."""
        os.write(self._wake_write, b"q")
        deadline = time.monotonic() + SHOW_S
        self._reading.join()  # it blocks on nothing
        self._showing.join(max(0.0, deadline - time.monotonic()))
        for account in self._accounts.values():
            account.source.connection.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _read_all(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for descriptor in self._accounts:
            poll.register(descriptor, select.POLLIN)
        ending = False
        while not ending:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    ending = True
                elif self._read_some(descriptor, 16) is None:
                    poll.unregister(descriptor)
        for descriptor in self._accounts:
            self._read_some(descriptor, 1024)  # what a pipe or socket holds, not what a left-over child may go on writing
        self._backlog.close()

    def _read_some(self, descriptor: int, times: int) -> bool | None:
        """Read until there is nothing, at most so often; what the last read gave."""
        there: bool | None = True
        while there and times:
            there, times = self._read(descriptor), times - 1
        return there

    def _read(self, descriptor: int) -> bool | None:
        """Read once: whether there was anything, or None at the end of the stream."""
        with self._lock:
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                return False
            except OSError:
                return None
            if not data:
                return None
            if descriptor in self._tails:
                self._tails[descriptor] = (self._tails[descriptor] + data)[-_TAIL_BYTES:]
            self._backlog.put(self._accounts[descriptor], data)
            return True

    def _show_all(self) -> None:
        while (item := self._backlog.take()) is not None:
            account, data = item
            if isinstance(data, bytes):
                if lost := account.source.show(data):
                    self._backlog.lose(account, lost)
            else:
                account.source.show_lost(data)
            del item, data
        for account in self._accounts.values():
            account.source.show_rest()
