"""The child side: what a stage process is and does. Runs no Trio, imports nothing of the controller's."""

from stageflow.stage._stage import Stage

__all__ = ["Stage"]
