"""Every error stageflow raises, as one tree.

    StageflowError
    ├── PartitionError(ValueError)   the model can't be cut so: what, where, which argument to change
    ├── LaunchError                  never became ready: stage, phase, cause
    ├── StageError                   your code raised, for one micro-batch or one call
    └── PipelineBroken               final: a stage is lost
        ├── StageDied
        └── StageStalled

Rules of this file:

* An error carries its facts as attributes, the same on every class; ``None`` (or empty) where one does not apply.
* Facts are plain data, so every error pickles whatever raised it. What a stage raised crosses the process border as text.
* ``str(error)`` alone is enough to understand what happened: the sentence, then the remote traceback, stderr or stacks.

Use after close is ``trio.ClosedResourceError`` and a full window ``trio.WouldBlock``: Trio's own words, not ours.
"""

from __future__ import annotations

from typing import Any, Self

__all__ = [
    "LaunchError",
    "PartitionError",
    "PipelineBroken",
    "StageDied",
    "StageError",
    "StageStalled",
    "StageflowError",
]


class StageflowError(Exception):
    """Base of every error of stageflow.

    Attributes:
        message: the sentence, without the remote text that ``str()`` adds.
        stage_index: the stage it happened in.
        tp_index: the place inside that stage (0 without tensor parallelism).
        rank: the process, ``stage_index * tp + tp_index``.
        seq: the number of the micro-batch, or None where it does not apply.
        phase: what the stage was doing, e.g. ``"build"`` or ``"serve"``.
        remote_type: qualified name of the exception type that code in a stage raised.
        remote_traceback: its traceback, as text.
        exitcode: exit code of a stage process that died (negative: killed by a signal).
        signal: name of that signal, e.g. ``"SIGKILL"``.
        stderr_tail: the last lines the process wrote on stderr.
        holders: where a stage stalled: what each place of the pipeline does and which micro-batches it holds, a line each.
        stacks: text of all Python stacks by rank, where a stage stalled; that rank first. ``str()`` shows main threads only.
        secondary: other errors that followed from this one and were set aside.
    """

    def __init__(
        self,
        message: str,
        *,
        stage_index: int | None = None,
        tp_index: int | None = None,
        rank: int | None = None,
        seq: int | None = None,
        phase: str | None = None,
        remote_type: str | None = None,
        remote_traceback: str | None = None,
        exitcode: int | None = None,
        signal: str | None = None,
        stderr_tail: tuple[str, ...] = (),
        holders: str | None = None,
        stacks: dict[int, str] | None = None,
        secondary: tuple[StageflowError, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage_index = stage_index
        self.tp_index = tp_index
        self.rank = rank
        self.seq = seq
        self.phase = phase
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback
        self.exitcode = exitcode
        self.signal = signal
        self.stderr_tail = stderr_tail
        self.holders = holders
        self.stacks = stacks
        self.secondary = secondary

    def __str__(self) -> str:
        parts = [self.message]
        if self.remote_traceback:
            parts.append(f"In the stage process:\n{self.remote_traceback.rstrip()}")
        if self.stderr_tail:
            parts.append("Last lines on its stderr:\n" + "\n".join(f"  {line}" for line in self.stderr_tail))
        if self.holders:
            parts.append("Who holds which micro-batch:\n" + "\n".join(f"  {line}" for line in self.holders.splitlines()))
        for rank, text in (self.stacks or {}).items():
            parts.append(f"Stack of rank {rank}:\n{_main_thread(text)}")
        return "\n\n".join(parts)

    def _facts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("message", "__notes__")}

    def copy(self) -> Self:
        """A fresh error with the same facts and no traceback, so that many waiters can each raise their own."""
        fresh = type(self)(self.message, **self._facts())
        for note in getattr(self, "__notes__", ()):
            fresh.add_note(note)
        return fresh

    def __reduce__(self) -> tuple[Any, ...]:
        notes = getattr(self, "__notes__", None)
        return _rebuild, (type(self), self.message, self._facts()), {"__notes__": notes} if notes else None


def _main_thread(stacks: str) -> str:
    """The part of a rank's stacks that says what it is at: of the thread that computes."""
    threads = stacks.strip().split("\n\n")
    return next((thread for thread in reversed(threads) if thread.startswith("Current thread")), stacks.rstrip())


def _rebuild(cls: type[StageflowError], message: str, facts: dict[str, Any]) -> StageflowError:
    return cls(message, **facts)


class PartitionError(StageflowError, ValueError):
    """The model can't be cut in this way. The message says the rule, what was found and which argument to change."""


class LaunchError(StageflowError):
    """A stage never became ready. Everything that had been started is gone when this is raised."""


class StageError(StageflowError):
    """Your code raised in a stage, for one micro-batch or one call. The pipeline lives on."""


class PipelineBroken(StageflowError):
    """A stage is lost and with it the pipeline. Final: launch a new one."""


class StageDied(PipelineBroken):
    """A stage process ended that should not have: by a signal, by ``os._exit``, by ``sys.exit``, or with no goodbye."""


class StageStalled(PipelineBroken):
    """A stage made no progress for ``stall_timeout`` seconds while it had work."""
