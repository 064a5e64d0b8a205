"""The end of what the fork server imports: sets back what `_preload` changed, for the processes that come of it."""

import os
import signal

from stageflow.stage._preload import interrupt_handler, openblas_threads

if openblas_threads is None:
    del os.environ["OPENBLAS_NUM_THREADS"]
else:
    os.environ["OPENBLAS_NUM_THREADS"] = openblas_threads
signal.signal(signal.SIGINT, interrupt_handler)
