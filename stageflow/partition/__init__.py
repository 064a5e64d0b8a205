"""Cutting a model into stages: what each one is to hold, before anything is started.

The rooms:

    _balance.py   where to cut a chain, in numbers
    _pieces.py    what every way of cutting shares
    _split.py     what the caller says about the cut
    _sizes.py     how many units each stage gets: as said, or balanced
    _dry_run.py   one forward on the meta device: which blocks are called, and what each needs
    _units.py     which modules are the blocks
    _replay.py    what runs in a stage: the model's own forward, with the modules of other stages absent
    _needs.py     what each such stage is made of, in names and numbers
    _excerpt.py   such a stage, made from the model
    _cut_replay.py    a model cut so, and tried out
    _transformers.py  what is known of transformers' models
    _export.py    a model that calls too few modules: its trace, cut between operations
    _costs.py     what the units cost: measured, or estimated
    _plan.py      a cut, described
    _checkpoint.py    a model on the disk, each stage loading its own piece
    _cut.py       which way a model is cut; Sequentials, lists and build functions
"""

from stageflow.partition._checkpoint import Checkpoint, reading_gguf_once, silence
from stageflow.partition._costs import seconds_of_children
from stageflow.partition._cut import cut
from stageflow.partition._pieces import StagePiece
from stageflow.partition._plan import PlannedStage, plan
from stageflow.partition._sizes import Balance
from stageflow.partition._split import Split

__all__ = [
    "Balance",
    "Checkpoint",
    "PlannedStage",
    "Split",
    "StagePiece",
    "cut",
    "plan",
    "reading_gguf_once",
    "seconds_of_children",
    "silence",
]
