"""What a function of ``pipe.call`` is given: the stage as its own process sees it."""

from __future__ import annotations

import torch
from torch import nn

from stageflow._frames import StageInfo


class Stage:
    """A stage, inside its own process: its module, its device, its place.

    ``pipe.call(fn, *args)`` runs ``fn(stage, *args)`` on every rank with one of these. It lives as long as the process, so
    what ``fn`` stores on it (``stage.counter = 0``) is there for the next call.

    Attributes:
        module: the piece of the model that this stage runs.
        info: the facts of this rank, as in ``pipe.stages``.
        seq: the number of the micro-batch that it computes, for hooks and the like; None between two, and in a call.
    """

    def __init__(self, module: nn.Module, info: StageInfo) -> None:
        self.module = module
        self.info = info
        self.seq: int | None = None

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self.info.device)

    @property
    def stage_index(self) -> int:
        """The stage, 0 … ``num_stages`` - 1."""
        return self.info.stage_index

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.info.num_stages

    @property
    def rank(self) -> int:
        """The process, ``stage_index * tp + tp_index``."""
        return self.info.rank

    @property
    def is_first(self) -> bool:
        """Whether this stage gets the caller's arguments."""
        return self.info.is_first

    @property
    def is_last(self) -> bool:
        """Whether this stage's output is the result."""
        return self.info.is_last

    def __repr__(self) -> str:
        work = "" if self.seq is None else f", at micro-batch {self.seq}"
        return f"<Stage {self.stage_index} of {self.num_stages} on {self.info.device}: {type(self.module).__name__}{work}>"
