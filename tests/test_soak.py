"""The soak, short: fifty random faults; and that it would tell if something were wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import soak
import trio

from stageflow.controller import _process

SEED = 20261201
"""Draws every kind of fault that is drawn often."""


@pytest.mark.slow
async def test_fifty_faults_leave_no_hang_no_orphan_and_no_wrong_stage(tmp_path: Path) -> None:
    wrong: list[object] = []
    with trio.fail_after(110):
        tallies = await soak.soak(50, SEED, tmp_path, lambda *each: wrong.append(each) if not each[1].right else None)
    assert wrong == []
    assert sum(tally.count for tally in tallies.values()) == 50
    assert sum(tally.count > 0 for tally in tallies.values()) >= 10
    shown = soak.table(tallies)
    print(shown)
    assert [line.split("  ")[0] for line in shown.splitlines()][2:] == [*soak.SHARES, "all"]


async def test_the_drawing_is_the_seeds() -> None:
    assert list(soak.draw(7, 100)) == list(soak.draw(7, 100))
    assert list(soak.draw(7, 100)) != list(soak.draw(8, 100))
    assert {case.kind for case in soak.draw(7, 1000)} == set(soak.SHARES)
    assert all(case.stage < case.pp <= 4 for case in soak.draw(7, 1000))


async def test_a_fault_that_ends_otherwise_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(soak.INJECTED, "raise", soak.Exit(3))
    case = soak.Case("raise", pp=2, stage=1, seq=3, delay=0.0, size=1)
    outcome = await soak.run_case(case, tmp_path)
    assert (outcome.name, outcome.right) == ("StageDied", False)


async def test_a_hang_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "HUNG", 0.5)
    monkeypatch.setattr(soak, "STALL", 100.0)
    case = soak.Case("sleep for ever", pp=2, stage=1, seq=3, delay=0.0, size=1)
    outcome = await soak.run_case(case, tmp_path)
    assert (outcome.name, outcome.right) == ("HANG", False)


async def test_an_orphan_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphans: list[subprocess.Popen[bytes]] = []

    async def leave_one_behind(_case: soak.Case) -> soak.Outcome:
        orphans.append(subprocess.Popen(["sleep", "60"]))  # noqa: ASYNC220 - it starts at once
        _process._started[orphans[0].pid] = ("stageflow stage 0/1", _process._born(orphans[0].pid))
        return soak.Outcome("all right", right=True, seconds=0.0)

    monkeypatch.setitem(soak.OTHERS, "cancelled", leave_one_behind)
    try:
        outcome = await soak.run_case(soak.Case("cancelled", pp=1, stage=0, seq=0, delay=0.0, size=1), tmp_path)
        assert outcome.name.startswith("ORPHAN 1 stage processes are left")
        assert not outcome.right
    finally:
        orphans[0].kill()
        orphans[0].wait()
