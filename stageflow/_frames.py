"""What crosses a pipe: the frames, as frozen plain data.

Rules of this file:

* Plain Python and attrs only; a frame has no behaviour and holds no tensor. (`transport` puts tensors into payloads.)
* A frame on the ring (header pipes) is at most ``FRAME_LIMIT`` bytes; whoever builds one moves what is larger into a
  payload. So no write to a header pipe can block for long.
* A new kind of frame is added to the ring or to the up pipe here, to the table in ``_lifecycle.py`` if it changes the life
  of a stage, and to the one ``match`` that reads it on the other side.

The ring is the ordered stream: controller → stage 0 → … → stage pp-1 → controller. The up and down pipes of a rank carry
what is out of order.
"""

from __future__ import annotations

import pickle
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

__all__ = [
    "DESCRIPTION_LIMIT",
    "FRAME_LIMIT",
    "INLINE_LIMIT",
    "STACKS_SIGNAL",
    "Announcement",
    "Build",
    "Bye",
    "Call",
    "CallPart",
    "Door",
    "EndOfStream",
    "Failed",
    "Fatal",
    "Hello",
    "MicroBatch",
    "Phase",
    "Ready",
    "Report",
    "RingFrame",
    "StageInfo",
    "UpFrame",
    "Warmup",
    "decode",
    "encode",
]

FRAME_LIMIT = 32 * 1024
"""The most bytes of a frame on a header pipe. Half of a pipe's buffer on Linux."""

INLINE_LIMIT = 16 * 1024
"""The most bytes of tensors that may ride inside one frame."""

DESCRIPTION_LIMIT = 15 * 1024
"""The most bytes of descriptions in one frame. With ``INLINE_LIMIT`` it leaves a frame 1 KiB for everything else."""


@attrs.frozen(kw_only=True)
class StageInfo:
    """One rank of a pipeline, as plain facts: what ``build(stage)`` is given and what ``pipe.stages`` lists."""

    stage_index: int
    """The stage, 0 … ``num_stages`` - 1."""
    num_stages: int
    """Number of stages, the ``pp`` of the launch."""
    tp_index: int = 0
    """The place inside the stage, 0 … ``tp`` - 1."""
    tp: int = 1
    """Ranks per stage."""
    device: str = "cpu"
    """The device of this rank, as torch writes it: ``"cpu"``, ``"cuda:1"``."""
    pid: int | None = None
    """Process id; None while the stage is being built."""
    module_names: tuple[str, ...] = ()
    """Names of the unsplit model's modules that live here, in order."""
    parameters: int = 0
    """Number of parameters held here."""
    bytes: int = 0
    """Bytes of parameters and buffers held here."""

    @property
    def rank(self) -> int:
        """``stage_index * tp + tp_index``: stage-major, tp fastest."""
        return self.stage_index * self.tp + self.tp_index

    @property
    def label(self) -> str:
        """For people: ``"stage 2"``, or ``"stage 2.1"`` where a stage is several ranks."""
        return f"stage {self.stage_index}" + (f".{self.tp_index}" if self.tp > 1 else "")

    @property
    def is_first(self) -> bool:
        """Whether this is the stage that gets the caller's arguments."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the stage whose output is the result."""
        return self.stage_index == self.num_stages - 1


STACKS_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of all its threads to its file in the pipeline's directory. (SIGUSR1: to its stderr.)"""

Announcement = tuple[bytes | int, bytes | None]
"""What a frame says of a payload before it is sent, so that nobody posts a receive for something not announced.

First the description: the pickled skeleton and tensor specs; or, when larger than ``DESCRIPTION_LIMIT``, how many bytes:
they then travel first, as a payload of their own. Then the payload itself, where it is small enough to ride in the frame.
"""


@attrs.frozen
class Report:
    """An exception in a stage, as text and plain data: an exotic exception can't break its own report."""

    rank: int
    stage_index: int
    tp_index: int
    phase: str
    seq: int | None
    remote_type: str
    text: str
    traceback: str
    monotonic_ns: int
    transport: bool
    """Whether it came from the transport: then it is an echo of somebody else's death, if there is one."""


# ---- the ring: its values are announced by the edge that sends it, and None until then ----------------------------------


@attrs.frozen
class MicroBatch:
    """One micro-batch on its way: the arguments of the next stage, or the result."""

    seq: int
    value: Announcement | None = None
    stage_kwargs: Announcement | None = None


@attrs.frozen
class Failed:
    """In the place of micro-batch ``seq``, whose forward raised: passed on, so that no one waits for it."""

    seq: int
    report: Report


@attrs.frozen
class Call:
    """Every rank of ``ranks`` runs the function that the payload holds, at this place of the stream."""

    call_id: int
    ranks: tuple[int, ...]
    value: Announcement | None = None


@attrs.frozen
class Warmup:
    """Goes once round the ring before the stages are ready: proves every edge, header and payload."""

    value: Announcement | None = None


@attrs.frozen
class EndOfStream:
    """The last frame: pass it on, drain, say bye, exit."""


RingFrame = MicroBatch | Failed | Call | Warmup | EndOfStream

# ---- up: rank → controller ----------------------------------------------------------------------------------------------


@attrs.frozen
class Hello:
    """The process runs and its guard is armed."""

    pid: int


@attrs.frozen
class Phase:
    """The rank enters a phase of its start, or of its end; see ``_lifecycle.py``."""

    name: str


@attrs.frozen
class Ready:
    """Built, joined, warmed up."""

    info: StageInfo


@attrs.frozen
class CallPart:
    """A piece of what a call returned on this rank, in order; ``total`` is the number of bytes of the whole."""

    call_id: int
    total: int
    failed: bool
    piece: bytes


@attrs.frozen
class Fatal:
    """The rank can't go on: its start failed, or the transport did."""

    report: Report


@attrs.frozen
class Bye:
    """Everything was sent and received; the process exits next, with code 0."""


UpFrame = Hello | Phase | Ready | CallPart | Fatal | Bye

# ---- with the process itself --------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Door:
    """What a stage process is started with. Tiny: the model comes later, over ``down`` and ``memory``."""

    title: str
    """What `ps` shows, e.g. ``"stageflow stage 2/4"``."""
    rank: int
    ranks: int
    directory: Path
    """The pipeline's private directory, which is there until all ranks are ready: rendezvous file, progress board, stacks,
    the debugger's lock."""
    join_timeout: float
    """Seconds to wait for a neighbour at the rendezvous."""
    header_in: Connection
    header_out: Connection
    down: Connection
    up: Connection
    payload_in: Connection | None
    """The first stage's: payloads from the controller come by a socket of their own."""
    payload_out: Connection | None
    """The last stage's: so do those to it."""
    death: Connection
    """Read end of the pipe that the controller never writes to: its end of file is the controller's death."""
    stdout: Connection
    stderr: Connection
    log: Connection
    """A socket for log records, one in each datagram."""
    memory: Connection
    """Shared memory with the tensors of the model's piece."""


# ---- down: controller → rank --------------------------------------------------------------------------------------------


@attrs.frozen
class Build:
    """The rank's piece of the model. The tensors lie in the shared memory that the process was started with."""

    info: StageInfo
    skeleton: bytes
    specs: tuple[Any, ...]
    backend: str
    """Between stages: ``"gloo"`` or ``"nccl"``."""
    unpack: bool
    """Whether a plain tuple from the stage before becomes this stage's positional arguments."""
    seed: int
    threads: int
    environ: dict[str, str]
    """The controller's environment at the launch: the fork server has that of the program's first one."""
    log_levels: dict[str, int]
    """By name of logger; the root's under ``""``."""


_KINDS: tuple[Any, ...] = (
    *(MicroBatch, Failed, Call, Warmup, EndOfStream),
    *(Hello, Phase, Ready, CallPart, Fatal, Bye),
    Build,
)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_NAMES = [tuple(field.name for field in attrs.fields(kind)) for kind in _KINDS]


def encode(frame: Any) -> bytes:
    """The bytes of a frame: its kind's number and its fields, which is five times as quick as pickling the object."""
    code = _CODES[type(frame)]
    return pickle.dumps((code, *(getattr(frame, name) for name in _NAMES[code])), protocol=pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> Any:
    """The frame that ``encode`` made these bytes of."""
    content: tuple[Any, ...] = pickle.loads(data)
    return _KINDS[content[0]](*content[1:])
