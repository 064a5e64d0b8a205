"""The child side: what a stage process is and does. Runs no Trio, imports nothing of the controller's."""

from stageflow.stage._report import Reporter
from stageflow.stage._run import Runner, build_stage
from stageflow.stage._stage import Stage

__all__ = ["Reporter", "Runner", "Stage", "build_stage"]
