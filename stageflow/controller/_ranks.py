"""One stage process as its parent sees it, and the start of all of them.

Rules of this file:

* A rank's pipes are made here, and what belongs to the child is closed here as soon as it has started.
* Starting is all or nothing: if one can't be started, those that were are killed and reaped before the error goes on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal as signals
import socket
import sys
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import attrs
import trio
from torch import Tensor, nn

from stageflow._frames import Build, Door, Report, StageInfo, encode
from stageflow._lifecycle import State
from stageflow.controller._output import Output, OutputPipes
from stageflow.controller._process import open_handle, open_sentinel, start_process
from stageflow.errors import LaunchError
from stageflow.partition import StagePiece
from stageflow.transport import close_in_forked_children, open_memory, take_apart, write_tensors

_JOIN_LATER_S = 5.0
"""A rank at the rendezvous gives up that much later than the start does, so that it isn't taken for the culprit."""


@attrs.frozen(kw_only=True)
class Plan:
    """Everything decided before anything is started."""

    infos: tuple[StageInfo, ...]
    """By rank."""
    pieces: list[StagePiece]
    """By stage; empty once they have been handed over, so that the model is only the caller's to keep."""
    loads: tuple[int, ...]
    """By stage, the bytes that it reads from files by itself."""
    backend: str
    threads: int
    seed: int
    start_method: str
    window: int
    start_timeout: float
    stall_timeout: float
    shutdown_timeout: float
    environ: dict[str, str]
    """Of this program, for the stages."""
    log_levels: dict[str, int]


@attrs.define(eq=False)
class Rank:
    """One stage process: its life, and the parent's ends of its pipes."""

    info: StageInfo
    process: BaseProcess
    down: Connection
    up: Connection
    death: Connection
    memory: Connection
    sentinel: int
    """Readable when the process has ended."""
    handle: int | None
    """The kernel's own handle of the process, where it has such: a pid may come to mean another."""
    stacks: int
    """The file that it writes its stacks to, open for reading."""
    state: State = State.STARTING
    exitcode: int | None = None
    died_at: float | None = None
    """Trio time at which the end of the process was seen."""
    died_in: State | None = None
    """The state it was in then."""
    report: Report | None = None
    """What it said before it could not go on."""
    heard: trio.Event = attrs.field(factory=trio.Event)
    """Everything it said has been read."""
    gone: trio.Event = attrs.field(factory=trio.Event)

    @property
    def label(self) -> str:
        """For people: ``stage 2``."""
        return self.info.label

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """Send a signal, unless the process has ended."""
        if self.exitcode is None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                if self.handle is not None:
                    signals.pidfd_send_signal(self.handle, signal)
                else:
                    os.kill(self.process.pid, signal)

    @property
    def stopped(self) -> str:
        """That a signal has stopped the process, for people; empty if none has. Linux."""
        with contextlib.suppress(OSError):
            if Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                return "(the process is stopped, by a signal or a debugger)"
        return ""

    def reap(self) -> int:
        """The exit code of a process whose sentinel is readable."""
        code = self.process.exitcode
        if code in (None, 255):
            self.kill()  # that is also what is told when the fork server is gone, and its child still there
        self.exitcode = 255 if code is None else code
        return self.exitcode

    def close(self) -> None:
        """Close the parent's ends. The up pipe is the reader's until that has ended."""
        for connection in (self.down, self.up, self.death, self.memory):
            connection.close()
        for descriptor in (self.sentinel, self.handle, self.stacks):
            if descriptor is not None:
                os.close(descriptor)
        with contextlib.suppress(ValueError):  # one that hangs in the kernel can't be closed
            self.process.close()


@attrs.frozen
class Started:
    """All ranks, and the controller's two ends of the ring."""

    ranks: tuple[Rank, ...]
    output: Output
    header_out: Connection
    header_in: Connection
    payload_out: Connection
    payload_in: Connection


def start_ranks(plan: Plan, directory: Path) -> Started:
    """Start every stage process. Blocks; for a worker thread."""
    count = len(plan.infos)

    def pipe(duplex: bool = False) -> tuple[Connection, Connection]:
        # A forked child of ours (a DataLoader's worker) that held a death pipe would keep the stages alive after our end.
        ends = multiprocessing.Pipe(duplex)
        close_in_forked_children(*ends)
        return ends

    def datagram_pipe() -> tuple[Connection, Connection]:
        # A pipe of whole messages, which a write can't block on halfway. As Connections, like all that a child is given.
        kind = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
        read, write = (Connection(end.detach()) for end in socket.socketpair(socket.AF_UNIX, kind))
        close_in_forked_children(read, write)
        return read, write

    headers = [pipe() for _ in range(count + 1)]  # (read, write) of each edge of the ring
    payload_out, payload_first = pipe(duplex=True)  # a pair of sockets each
    payload_in, payload_last = pipe(duplex=True)
    ranks: list[Rank] = []
    outputs: list[OutputPipes] = []
    ours: list[Connection] = [headers[0][1], headers[-1][0], payload_out, payload_in]
    childs: list[Connection] = [end for edge in headers for end in edge if end not in ours] + [payload_first, payload_last]
    try:
        for info in plan.infos:
            (down_r, down_w), (up_r, up_w), (death_r, death_w) = pipe(), pipe(), pipe()
            (out_r, out_w), (err_r, err_w) = pipe(), pipe()
            log_r, log_w = datagram_pipe()
            memory = open_memory()
            ours += [down_w, up_r, death_w, out_r, err_r, log_r, memory]
            childs += [down_r, up_w, death_r, out_w, err_w, log_w]
            title = f"stageflow {info.label}/{info.num_stages}"
            door = Door(
                title=title,
                rank=info.rank,
                ranks=count,
                directory=directory,
                join_timeout=plan.start_timeout + _JOIN_LATER_S,
                header_in=headers[info.stage_index][0],
                header_out=headers[info.stage_index + 1][1],
                down=down_r,
                up=up_w,
                payload_in=payload_first if info.is_first else None,
                payload_out=payload_last if info.is_last else None,
                death=death_r,
                stdout=out_w,
                stderr=err_w,
                log=log_w,
                memory=memory,
            )
            stacks = os.open(directory / f"stacks.{info.rank}", os.O_RDONLY | os.O_CREAT, 0o600)
            try:
                process = start_process(plan.start_method, title, door)
                handle = open_handle(process)
                sentinel = open_sentinel(process, handle, plan.start_method)
            except BaseException:
                os.close(stacks)
                raise
            ranks.append(Rank(info, process, down_w, up_r, death_w, memory, sentinel, handle, stacks))
            outputs.append(OutputPipes(out_r, err_r, log_r))
        output = Output(plan.infos, [info.label for info in plan.infos], outputs)
    except BaseException:
        for rank in ranks:
            rank.kill()
            rank.process.join(1)
            rank.close()
        for connection in ours:
            connection.close()
        raise
    finally:
        for connection in childs:
            connection.close()
    return Started(tuple(ranks), output, headers[0][1], headers[-1][0], payload_out, payload_in)


def take_piece_apart(rank: Rank, plan: Plan) -> tuple[bytes, list[Tensor]]:
    """Pickle a rank's piece of the model, without its tensors. Runs user code; for a worker thread.

    Raises:
        LaunchError: it can't be pickled.
    """
    info = rank.info
    piece = plan.pieces[info.stage_index]
    try:
        return take_apart(piece.target)
    except Exception as error:
        raise LaunchError(
            f"what {rank.label} is to run can't be sent to it: {type(error).__name__}: {error}{_culprit(piece.target)}. "
            "Build it in the stage instead, by a function build(stage) given as model, or leave it out",
            stage_index=info.stage_index,
            tp_index=info.tp_index,
            rank=info.rank,
            phase="hand-over",
        ) from error


def late_hand_over(rank: Rank, plan: Plan) -> LaunchError:
    """The error for a piece of the model whose pickling takes too long."""
    return LaunchError(
        f"what {rank.label} is to run was not pickled after start_timeout={plan.start_timeout:g} s. Build it in the stage "
        "instead, by a function build(stage) given as model, or give it longer by start_timeout",
        stage_index=rank.info.stage_index,
        tp_index=rank.info.tp_index,
        rank=rank.info.rank,
        phase="hand-over",
    )


def hand_over(rank: Rank, plan: Plan, skeleton: bytes, tensors: Sequence[Tensor]) -> None:
    """Give a rank its piece of the model. Blocks while the rank is slow to read; for a worker thread.

    Raises:
        OSError: the rank is gone. Its supervisor says why.
    """
    info = rank.info
    frame = Build(
        info=info,
        skeleton=skeleton,
        specs=write_tensors(rank.memory, tensors),
        backend=plan.backend,
        unpack=plan.pieces[info.stage_index].unpack,
        seed=(plan.seed + info.stage_index) % 2**64,  # as torch itself takes a negative one
        threads=plan.threads,
        environ=plan.environ,
        log_levels=plan.log_levels,
    )
    rank.down.send_bytes(encode(frame))
    rank.memory.close()  # the pages live on in the stage alone


def signal_name(exitcode: int) -> str | None:
    """``"SIGKILL"`` for -9; None for an exit code that is no signal."""
    if exitcode >= 0:
        return None
    try:
        return signals.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def _culprit(target: object) -> str:
    """Which attribute of which module can't be pickled, for the message; nothing if it isn't a single one."""
    if not isinstance(target, nn.Module):
        return ""
    for name, module in cast("Iterable[tuple[str, nn.Module]]", target.named_modules()):
        for attribute, value in vars(module).items():
            if attribute in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                take_apart(value)
            except Exception:
                path = ".".join(filter(None, [name, attribute]))
                return f" (attribute {path!r} of {type(module).__name__}, a {type(value).__name__})"
    return ""
