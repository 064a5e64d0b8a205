"""Every fault, at every time, in every stage: the right error, the right stage, in time, and nothing left."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from matrix import CELLS, COUNT, FAULTS, MICRO_BATCHES, PP, TIMES, Cell, child_that_is_forked, expected, run_cell, warm_up

from stageflow import StageError
from stageflow.testing import no_stages_left


@pytest.fixture
def cell(request: pytest.FixtureRequest, stray_processes: Callable[[], dict[int, str]]) -> Iterator[Cell]:
    """A cell, and the end of the child that its stage forked, which is not stageflow's to end."""
    yield request.param
    if request.param.fault is child_that_is_forked:
        for pid in stray_processes():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("cell", CELLS, ids=str, indirect=True)
async def test_cell(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_fds: Callable[[], dict[int, str]]
) -> None:
    with trio.fail_after(60), no_stages_left():
        if not multiprocessing.forkserver._forkserver._forkserver_pid:  # which stays, with its descriptors
            await warm_up()
        before, threads = open_fds(), threads_of_ours()
        run = await run_cell(cell, tmp_path, monkeypatch)
        want = expected(cell)
        if want.stage_error:
            at = MICRO_BATCHES[cell.when]
            assert run.error is None
            assert [result for result in run.results if isinstance(result, int)] == numbers(COUNT, but=at)
            error = run.results[at]
            assert isinstance(error, StageError)
        else:
            error = run.error
            assert type(error) is (want.kind or type(None)), error
            done = MICRO_BATCHES.get(cell.when, 0 if error is not None and cell.when not in ("drain", "teardown") else COUNT)
            assert run.results == numbers(COUNT if error is None else done)[: len(run.results)]
            assert len(run.results) == COUNT or error is not None
        if error is not None:
            assert (error.stage_index, error.tp_index, error.rank) == (cell.position, 0, cell.position)
            assert {name: getattr(error, name) for name in want.facts} == want.facts
        assert run.seconds < want.within
        assert (open_fds(), threads_of_ours()) == (before, threads)
        await warm_up()  # the next launch works


def numbers(count: int, but: int | None = None) -> list[int]:
    """The results of micro-batches."""
    return [value + PP for value in range(count) if value != but]


def threads_of_ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("Trio thread"))


def test_every_cell_is_there() -> None:
    assert len(CELLS) == (len(FAULTS) * len(TIMES) - 6) * PP
    assert len({str(cell) for cell in CELLS}) == len(CELLS)
