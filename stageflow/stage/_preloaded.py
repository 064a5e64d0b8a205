"""The end of what the fork server imports: sets back what `_preload` changed, for the processes that come of it."""

import atexit
import os
import signal

from stageflow.stage._preload import interrupt_handler, openblas_threads

if openblas_threads is None:
    del os.environ["OPENBLAS_NUM_THREADS"]
else:
    os.environ["OPENBLAS_NUM_THREADS"] = openblas_threads
signal.signal(signal.SIGINT, interrupt_handler)

_server = os.getpid()


def _leave_at_once() -> None:
    # The fork server ends when the program has, and holds its stdout until then: an interpreter full of torch takes half a
    # second to take itself apart, for nothing.
    if os.getpid() == _server:
        os._exit(0)


atexit.register(_leave_at_once)
