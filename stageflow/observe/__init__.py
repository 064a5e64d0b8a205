"""What can be seen of a running pipeline without asking it.

The rooms:

    _progress.py     what a rank says of itself, through shared memory
    _statistics.py   the same, for people
    _holders.py      who holds which micro-batch, drawn

Sits under `stage` and `controller`, since the one writes it and the other reads it.
"""

from stageflow.observe._holders import draw_holders
from stageflow.observe._progress import Activity, ProgressBoard, ProgressWriter, RankProgress
from stageflow.observe._statistics import StageStatistics, Statistics, stage_statistics

__all__ = [
    "Activity",
    "ProgressBoard",
    "ProgressWriter",
    "RankProgress",
    "StageStatistics",
    "Statistics",
    "draw_holders",
    "stage_statistics",
]
