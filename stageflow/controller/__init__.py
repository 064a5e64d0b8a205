"""The parent side: everything of a pipeline that lives in the user's process. The only place that runs Trio.

Roof to ground:

    _launch.py       the nesting: reaper, services, body; start and end
    _pipeline.py     the public face
    _supervisor.py   who is alive, what is the cause when one isn't, and the end of all
    _ranks.py        one stage process as its parent sees it; starting them
    _process.py      the start itself, without the user's ``__main__``
    _ledger.py       what is in flight, and who waits for it
    _traffic.py      the reader thread and the writer thread
    _window.py       the slots
    _tickets.py      one submitted micro-batch
    _map.py          a stream of micro-batches
    _batches.py      a batch into micro-batches and back
    _interrupts.py   Ctrl-C during the end
    _output.py       what stages print
    _logs.py         what they log
    _loading.py      the progress bar while they load
    _stalls.py       finding a stage that hangs
    _places.py       devices, backend, threads
"""

from stageflow.controller._launch import make_plan, out_of_nurseries, raise_outcome
from stageflow.controller._ledger import Ledger
from stageflow.controller._pipeline import Pipeline, make_pipeline
from stageflow.controller._process import stage_processes
from stageflow.controller._ranks import Plan
from stageflow.controller._tickets import Ticket

__all__ = [
    "Ledger",
    "Pipeline",
    "Plan",
    "Ticket",
    "make_pipeline",
    "make_plan",
    "out_of_nurseries",
    "raise_outcome",
    "stage_processes",
]
