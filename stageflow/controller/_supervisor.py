"""Who is alive, what the cause is when one isn't, and the end of all of them.

Rules of this file:

* One for all: a stage that is lost breaks the pipeline, and broken is final.
* The first sign of a loss opens a settle window, in which further signs are collected; a conclusive one closes it. Then one
  cause is chosen: deaths, then the earliest error that is not the transport's, then stalls, then "connection closed" echoes.
  The others are kept in ``secondary``.
* A break does, at once and without waiting for the user's body: kill every stage, fail every waiter, cancel the body.
* The end is a ladder with a bound on every step: end of stream → ``shutdown_timeout`` → SIGTERM → 2 s → SIGKILL → 10 s.
* Tasks here run in the reaper nursery, outside the service nursery: a body that won't end can't keep stages alive.
"""

from __future__ import annotations

import logging
import signal as signals
from collections.abc import Callable, Sequence
from typing import Any

import trio

from stageflow._frames import Bye, Fatal, Hello, Phase, Ready, Report
from stageflow._lifecycle import STARTING_UP, Event, ProtocolError, State, advance
from stageflow.controller._interrupts import on_interrupt, protected, to_the_end
from stageflow.controller._output import Output
from stageflow.controller._ranks import Plan, Rank, signal_name
from stageflow.errors import LaunchError, PipelineBroken, StageDied, StageflowError, StageStalled
from stageflow.observe import Activity, ProgressBoard

logger = logging.getLogger("stageflow")

SETTLE_S = 0.25
"""How long signs of a loss are collected before a cause is chosen among inconclusive ones. Judgement, not data."""

TERMINATE_S = 2.0
"""Between SIGTERM, which has its default effect in a stage, and SIGKILL."""

REAP_S = 10.0
"""After SIGKILL: a process that is still there then hangs in the kernel, and nothing in user space can end it."""

PATIENCE_S = 0.2
"""How often it is looked whether somebody sits at a debugger, while a clock runs."""

SILENT_S = 1.0
"""For a process whose up pipe is closed to end."""


class Supervisor:
    """Watches the ranks of one pipeline. Trio thread only."""

    def __init__(self, plan: Plan, ranks: Sequence[Rank], output: Output, board: ProgressBoard) -> None:
        self.ranks = ranks
        self.failure: StageflowError | None = None
        """What broke the pipeline; waiters raise copies of it."""
        self.warm = trio.Event()
        """The warm-up has been round the ring."""
        self.all_ready = trio.Event()
        self.launched = False
        """The body has begun: a loss is no longer a ``LaunchError``."""
        self._plan = plan
        self._output = output
        self._board = board
        self._on_break: list[Callable[[StageflowError], None]] = []
        self._over = trio.Event()
        """Every process has ended, or the pipeline is broken."""
        self._conclusive = trio.Event()
        self._first_sign = trio.Event()
        self._stall: StageStalled | None = None
        self._transport: list[tuple[int | None, Exception]] = []
        self._watches: list[trio.CancelScope] = []
        self._ending = False
        """The stages have been told to end, or made to: a connection that closes is no sign any more."""
        self._forced = False
        """Signals are being sent: a process that ends is no sign any more."""

    def on_break(self, callback: Callable[[StageflowError], None]) -> None:
        """Call ``callback(failure)`` when the pipeline breaks; at once if it is broken."""
        if self.failure is not None:
            callback(self.failure)
        else:
            self._on_break.append(callback)

    # ---- signs ----------------------------------------------------------------------------------------------------------

    def said(self, rank: int, frame: Any) -> None:
        """A rank said something on its up pipe."""
        one = self.ranks[rank]
        match frame:
            case Hello():
                self._advance(one, Event.HELLO)
            case Phase(name=name):
                self._advance(one, Event(name))
            case Ready(info=info):
                one.info = info
                self._advance(one, Event.READY)
                if all(other.state is State.SERVING for other in self.ranks):
                    self.all_ready.set()
            case Bye():
                self._advance(one, Event.BYE)
            case Fatal(report=report):
                one.report = report
                one.died_in = one.died_in or one.state
                self._advance(one, Event.FATAL)
                self._sign(conclusive=not report.transport)
            case _:
                self.transport_failed(rank, ProtocolError(f"unknown frame {type(frame).__name__}"))

    def transport_failed(self, rank: int | None, error: Exception) -> None:
        """A pipe or a payload broke at the controller's end."""
        if not self._ending:
            self._transport.append((rank, error))
            self._sign(conclusive=False)

    def _advance(self, rank: Rank, event: Event) -> None:
        try:
            rank.state = advance(rank.state, event)
        except ProtocolError as error:
            if rank.state is not State.LOST:
                self.transport_failed(rank.info.rank, error)

    def _sign(self, *, conclusive: bool) -> None:
        self._first_sign.set()
        if conclusive:
            self._conclusive.set()

    @protected
    async def watch(self, rank: Rank) -> None:
        """Wait for the end of one process. For the reaper nursery."""
        # Shielded: a cancelled block still has to know when its processes are gone. `stop_watching` ends it.
        with trio.CancelScope(shield=True) as scope:
            self._watches.append(scope)
            await trio.lowlevel.wait_readable(rank.sentinel)
            code = rank.reap()
            rank.died_at = trio.current_time()
            with trio.move_on_after(SETTLE_S):  # it may have said why, or goodbye, and that is still being read
                await rank.heard.wait()
            self._ended(rank, code)

    def _ended(self, rank: Rank, code: int) -> None:
        rank.died_in = rank.died_in or rank.state
        clean = rank.state is State.LEAVING and code == 0
        if clean:
            self._advance(rank, Event.EXIT)
        elif self.failure is None and not self._forced and self._stall is None:
            # A rank that reported before it ended has already given its sign.
            rank.state = State.LOST
            self._sign(conclusive=rank.report is None)
        rank.gone.set()
        if all(other.gone.is_set() for other in self.ranks) and not self._first_sign.is_set():
            self._over.set()

    @protected
    async def settle(self) -> None:
        """Wait for a first sign of a loss, choose the cause, break. For the reaper nursery."""
        with trio.CancelScope(shield=True) as scope:
            self._watches.append(scope)
            await self._first_sign.wait()
            with trio.move_on_after(SETTLE_S):
                await self._conclusive.wait()
            self._break()

    @protected
    async def listen(self, rank: Rank) -> None:
        """Wait for a rank to fall silent, which only its end should be. For the reaper nursery."""
        with trio.CancelScope(shield=True) as scope:
            self._watches.append(scope)
            await rank.heard.wait()
            with trio.move_on_after(SILENT_S):
                await rank.gone.wait()
            if not rank.gone.is_set():
                self.transport_failed(rank.info.rank, ConnectionError("it has closed its pipe, but has not ended"))

    def stop_watching(self) -> None:
        """End the tasks of the reaper nursery: nothing is left to watch, or it can't be ended."""
        for scope in self._watches:
            scope.cancel()

    def heard_all(self, rank: int) -> None:
        """The rank's up pipe has been read to its end."""
        self.ranks[rank].heard.set()

    def _break(self) -> None:
        if self.failure is not None:
            return
        self.kill_all()  # first of all: what follows may take its time, a stage must not
        self.failure = self._choose()
        self._over.set()
        for callback in self._on_break:
            callback(self.failure)

    def kill_all(self) -> None:
        """SIGKILL to every rank: from here on, a process that ends is no sign of anything."""
        self._ending = self._forced = True
        for rank in self.ranks:
            rank.kill()

    # ---- the cause ------------------------------------------------------------------------------------------------------

    def _choose(self) -> StageflowError:
        died = [rank for rank in self.ranks if rank.exitcode is not None and rank.report is None]
        died = [rank for rank in died if rank.state not in (State.LEAVING, State.GONE) or rank.exitcode]
        if self._stall is not None:
            died = []  # what died since then, died of being asked for its stacks
        died.sort(key=lambda rank: (signal_name(rank.exitcode or 0) is None, rank.died_at))
        reported = [(rank, rank.report) for rank in self.ranks if rank.report is not None]
        reported.sort(key=lambda pair: (pair[1].transport, pair[1].monotonic_ns))
        candidates = [self._death(rank) for rank in died]
        candidates += [self._fatal(rank, report) for rank, report in reported if not report.transport]
        candidates += [self._stall] if self._stall is not None else []
        candidates += [self._fatal(rank, report) for rank, report in reported if report.transport]
        candidates += [self._broken_transport(rank, error) for rank, error in self._transport]
        cause = candidates[0]
        cause.secondary = tuple(candidates[1:])
        return cause

    def _facts(self, rank: Rank) -> dict[str, Any]:
        state = rank.died_in or rank.state
        return {
            "stage_index": rank.info.stage_index,
            "tp_index": rank.info.tp_index,
            "rank": rank.info.rank,
            "phase": state.value,
        }

    def _kind(self, rank: Rank, after_launch: type[StageflowError]) -> type[StageflowError]:
        early = not self.launched or (rank.died_in or rank.state) in STARTING_UP
        return LaunchError if early else after_launch

    def _death(self, rank: Rank) -> StageflowError:
        code = rank.exitcode if rank.exitcode is not None else 255
        name = signal_name(code)
        progress = self._board.read(rank.info.rank)
        facts = self._facts(rank)
        how = f"was killed by {name}" if name else f"exited with code {code}"
        where = f" at micro-batch {progress.seq}" if progress.seq is not None else ""
        text = f"{rank.label} (rank {rank.info.rank}, pid {rank.process.pid}) {how} in phase {facts['phase']!r}{where}"
        if name == "SIGKILL":
            text += "; SIGKILL that nobody sent by hand is most often the kernel's out-of-memory killer (look at dmesg)"
        elif code == 255:
            text += "; that is also all that is known of a stage whose fork server has been killed"
        elif code == 0:
            text += "; a stage that ends by itself, also by sys.exit(), is lost to the pipeline"
        facts |= {"seq": progress.seq, "exitcode": code, "signal": name}
        return self._kind(rank, StageDied)(text, **facts, stderr_tail=self._output.stderr_tail(rank.info.rank))

    def _fatal(self, rank: Rank, report: Report) -> StageflowError:
        facts: dict[str, Any] = self._facts(rank) | {"phase": report.phase}
        what = "lost its connection" if report.transport else f"raised {report.remote_type}"
        return self._kind(rank, PipelineBroken)(
            f"{rank.label} {what} in phase {report.phase!r}: {report.text}",
            **facts,
            seq=report.seq,
            remote_type=report.remote_type,
            remote_traceback=report.traceback,
        )

    def _broken_transport(self, rank: int | None, error: Exception) -> StageflowError:
        place = self.ranks[-1 if rank is None else rank]
        kind = self._kind(place, PipelineBroken)
        return kind(f"the connection between the controller and {place.label} broke: {error}", **self._facts(place))

    # ---- stalls ---------------------------------------------------------------------------------------------------------

    def stall_found(self, error: StageStalled) -> None:
        """A rank hangs; all are asked for their stacks next, and one that dies of that is no cause of anything."""
        self._stall = error

    def stall_reported(self) -> None:
        """The stacks are there: the pipeline can be broken."""
        self._sign(conclusive=True)

    def debugging(self) -> bool:
        """Whether somebody sits at a debugger in a stage."""
        return any(self._board.read(rank.info.rank).activity is Activity.DEBUGGING for rank in self.ranks)

    async def patience(self, seconds: float, event: trio.Event) -> None:
        """Wait for an event, at most that long, not counting time in which somebody sits at a debugger in a stage."""
        while seconds > 0 and not event.is_set():
            step = min(seconds, PATIENCE_S)
            with trio.move_on_after(step):
                await event.wait()
            if not self.debugging():
                seconds -= step

    # ---- the end --------------------------------------------------------------------------------------------------------

    async def shut_down(self, send_end_of_stream: Callable[[], None]) -> bool:
        """End every process, in bounded time. Shielded; a Ctrl-C meanwhile kills at once.

        Returns:
            Whether there was a Ctrl-C.
        """
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            self.kill_all()

        async def ladder() -> None:
            try:
                await self._ladder(send_end_of_stream)
            except KeyboardInterrupt:  # one that was pending
                interrupt()
                raise

        with on_interrupt(interrupt):
            await to_the_end(ladder)
        return interrupted

    async def _ladder(self, send_end_of_stream: Callable[[], None]) -> None:
        if self.launched and not self._ending:
            send_end_of_stream()
            await self.patience(self._plan.shutdown_timeout, self._over)
            if self.failure is None and (late := self._alive()):
                self._ending = self._forced = True
                logger.warning(
                    "%s did not end within shutdown_timeout=%g s and will be terminated",
                    ", ".join(rank.label for rank in late),
                    self._plan.shutdown_timeout,
                )
                await self._signal_and_wait(signals.SIGTERM, TERMINATE_S)
        self._ending = True
        await self._signal_and_wait(signals.SIGKILL, REAP_S)
        for rank in self._alive():
            logger.error(
                "%s, pid %s, is still there %g s after SIGKILL: it hangs in the kernel, and is left behind",
                rank.label,
                rank.process.pid,
                REAP_S,
            )

    def _alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.gone.is_set()]

    async def _signal_and_wait(self, signal: int, seconds: float) -> None:
        if not (alive := self._alive()):
            return
        for rank in alive:
            rank.kill(signal)
            rank.kill(signals.SIGCONT)  # a process that is stopped takes no other signal but SIGKILL
        with trio.move_on_after(seconds):
            for rank in alive:
                await rank.gone.wait()
