"""Pipeline parallelism for PyTorch from one ordinary Python program.

The house, ground to roof; a module imports only from floors below it, and `tests/test_house.py` holds that:

    errors.py        every error, as one tree
    _frames.py       what crosses a pipe                       (plain Python + attrs)
    _lifecycle.py    the life of a stage as a table            (plain Python)
    partition/       cutting a model                           (torch)
    transport/       edges: header pipe + payload; packing     (torch.distributed)
    observe/         what can be seen of a running pipeline    (written by stage, read by controller)
    stage/           the child side                            (no Trio)
    controller/      the parent side                           (Trio, tricycle)
    testing/         for users' tests: faults, a pipeline in memory
    cli/             `stageflow …`
"""

from stageflow._frames import StageInfo
from stageflow.controller import Pipeline, Ticket
from stageflow.errors import (
    LaunchError,
    PartitionError,
    PipelineBroken,
    StageDied,
    StageError,
    StageflowError,
    StageStalled,
)
from stageflow.observe import StageStatistics, Statistics
from stageflow.partition import Balance, Checkpoint
from stageflow.stage import Stage

__version__ = "0.1.0"

__all__ = [
    "Balance",
    "Checkpoint",
    "LaunchError",
    "PartitionError",
    "Pipeline",
    "PipelineBroken",
    "Stage",
    "StageDied",
    "StageError",
    "StageInfo",
    "StageStalled",
    "StageStatistics",
    "StageflowError",
    "Statistics",
    "Ticket",
    "__version__",
]

# Errors, docs and tracebacks show the public names.
for _public in (value for name, value in list(globals().items()) if name in __all__ and isinstance(value, type)):
    _public.__module__ = __name__
