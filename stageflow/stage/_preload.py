"""Imported once by the fork server, so that every stage starts with torch in place. `_preloaded` undoes what it sets.

Nothing may be imported between the two that starts threads: a forked child has none of them.
"""

import os
import signal

# Ctrl-C goes to the whole foreground group; a fork server that dies of it while importing would take the launch with it.
# When it has imported everything it sets its own handling.
interrupt_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)

# numpy, where it is installed, comes with torch, and its OpenBLAS starts a thread per core on import unless told not to.
openblas_threads = os.environ.get("OPENBLAS_NUM_THREADS")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import stageflow.stage._main  # noqa: E402, F401  # pyright: ignore[reportUnusedImport]
