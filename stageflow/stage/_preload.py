"""Imported once by the fork server, so that every stage starts with torch in place. Nothing may be imported here that starts
threads: a forked child has none of them.
"""

import stageflow.stage._main  # noqa: F401  # pyright: ignore[reportUnusedImport]
