"""The progress bar of a launch whose stages read their weights from files; on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import trio

from stageflow._lifecycle import State
from stageflow.controller._interrupts import protected
from stageflow.controller._ranks import Rank
from stageflow.observe import ProgressBoard

_LOOK_S = 0.1


@protected
async def show_loading(ranks: Sequence[Rank], loads: Sequence[int], board: ProgressBoard) -> None:
    """Show bytes and stages until cancelled. Draws on stderr, and clears what it drew."""
    if not any(loads) or not sys.stderr.isatty():
        return
    from rich.console import Console  # what no other launch needs, and takes a tenth of a second
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    stages = TextColumn("{task.fields[stages]}")
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), stages)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("loading", total=sum(loads), stages="")
        with contextlib.suppress(ValueError):  # the board is closed, so all is over
            while True:
                loaded = sum(board.read(rank.info.rank).loaded for rank in ranks)
                ready = sum(rank.state in (State.WARMING_UP, State.SERVING) for rank in ranks)
                bar.update(task, completed=loaded, stages=f"{ready} of {len(ranks)} stages loaded")
                await trio.sleep(_LOOK_S)
