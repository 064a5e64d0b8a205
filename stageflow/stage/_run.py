"""What a stage does with one micro-batch or one call: the user's code, and everything that it may do wrong.

Rules of this file:

* The user's code fails alone: whatever it raises for a micro-batch or a call becomes a report, in that one's turn.
* ``SystemExit`` and ``KeyboardInterrupt`` are not caught: a stage that wants to end, ends.
* No process, no thread, no edge is known here; the in-memory pipeline of `stageflow.testing` runs the same code.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
import torch
from torch import nn

from stageflow._frames import Failed, Fatal, MicroBatch, StageInfo, encode
from stageflow.observe import Activity, ProgressWriter
from stageflow.stage._report import Reporter
from stageflow.stage._stage import Stage
from stageflow.transport import Packed, pack, to_bytes, unpack

_ENDINGS = (SystemExit, KeyboardInterrupt)
"""Of what user code raises, this ends the process; anything else fails one micro-batch or call."""


def build_stage(target: Any, info: StageInfo) -> Stage:
    """The stage of a module, or of what the user's ``build(stage)`` returns.

    Raises:
        TypeError: it returned no module.
        Exception: what ``build`` itself raised, or moving the module to its device.
    """
    module: Any = target if isinstance(target, nn.Module) else target(info)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"build(stage) must return a torch.nn.Module for stage {info.stage_index}, not {type(module).__name__}"
        )
    module.to(info.device)
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
    info = attrs.evolve(
        info,
        module_names=info.module_names or tuple(name for name, _ in module.named_children()),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        bytes=sum(tensor.nbytes for tensor in tensors),
    )
    return Stage(module, info)


class Runner:
    """Runs micro-batches and calls on one stage, one at a time."""

    def __init__(
        self,
        stage: Stage,
        *,
        unpack_tuples: bool,
        progress: ProgressWriter,
        reporter: Reporter,
        wire_device: torch.device | None = None,
    ) -> None:
        """Args:
        unpack_tuples: whether a plain tuple from the stage before becomes positional arguments.
        wire_device: where the tensors of an output have to lie to be sent; None for host memory.
        """
        self.stage = stage
        self._unpack_tuples = unpack_tuples
        self._progress = progress
        self._reporter = reporter
        self._wire_device = wire_device

    def forward(
        self, seq: int, value: Packed, stage_kwargs: Packed | None = None
    ) -> tuple[MicroBatch | Failed, list[Packed | None]]:
        """What comes out of this stage for one micro-batch: the frame to pass on, and its values."""
        stage = self.stage
        stage.seq = seq
        self._progress.enter(Activity.COMPUTING, seq)
        try:
            args, kwargs = self._arguments(unpack(value, stage.device))
            value.wires.clear()  # so that what is passed through is not held twice, and input is freed as it is used up
            extra: dict[str, Any] = {} if stage_kwargs is None else self._unpack_shared(stage_kwargs)
            with torch.inference_mode():
                output = stage.module(*args, **kwargs, **extra)
                del args, kwargs, extra
                packed = pack(output, self._wire_device)
                del output
            packed.own()
        except _ENDINGS:
            raise
        except BaseException as error:
            self._progress.finished(failed=True)
            return Failed(seq, self._reporter.report(error, seq=seq)), []
        finally:
            stage.seq = None
        self._progress.finished(failed=False)
        return MicroBatch(seq), [packed] if stage.is_last else [packed, stage_kwargs]

    def _arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first stage gets the caller's arguments; a later one what the stage before returned."""
        if self.stage.is_first:
            return value
        if self._unpack_tuples and type(value) is tuple:  # not a named one, which is a value of its own
            return cast("tuple[Any, ...]", value), {}
        return (value,), {}

    def _unpack_shared(self, value: Packed) -> Any:
        """A value that goes to later stages as well: what user code does to its tensors here must not show there."""
        return unpack(value if self.stage.is_last else value.private(), self.stage.device)

    def call(self, value: Packed) -> tuple[bool, bytes]:
        """Whether a call failed; and the bytes of its result, or of the report."""
        self._progress.enter(Activity.CALLING)
        try:
            fn, args = self._unpack_shared(value)
            with torch.inference_mode():
                return False, to_bytes(pack(fn(self.stage, *args)))
        except _ENDINGS:
            raise
        except BaseException as error:
            return True, encode(Fatal(self._reporter.report(error, phase="call")))
