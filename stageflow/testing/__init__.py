"""For your own tests: nothing left behind, faults on purpose, and a pipeline without processes.

_processes.py   a context manager that fails when a stage process is left
_faults.py      faults by stage and micro-batch: raise, exit, kill, hang, delay
_memory.py      a pipeline in this process, with the same public face

async def test_my_service_survives_a_dead_stage():
    with no_stages_left():
        with pytest.raises(stageflow.StageDied):
            async with Pipeline.launch(model, pp=3) as pipe:
                await inject(pipe, Kill(), stage=1, seq=5)
                await my_service(pipe)
"""

from stageflow.testing._faults import Delay, Exit, Fault, Hang, Kill, Raise, inject
from stageflow.testing._memory import launch_in_memory
from stageflow.testing._processes import no_stages_left, stage_processes

__all__ = [
    "Delay",
    "Exit",
    "Fault",
    "Hang",
    "Kill",
    "Raise",
    "inject",
    "launch_in_memory",
    "no_stages_left",
    "stage_processes",
]

for _public in (value for name, value in list(globals().items()) if name in __all__):
    _public.__module__ = __name__
