"""The life of a stage as a table, and the choice of the one cause among the signs of a loss."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from torch import nn

from stageflow import LaunchError, PipelineBroken, StageDied, StageflowError
from stageflow._frames import Bye, Fatal, Hello, Phase, Ready, Report, StageInfo
from stageflow._lifecycle import STARTING_UP, TABLE, Event, ProtocolError, State, advance
from stageflow.controller._launch import make_plan
from stageflow.controller._ranks import start_ranks
from stageflow.controller._stalls import late_start, stalled_rank
from stageflow.controller._supervisor import Supervisor
from stageflow.observe import Activity, ProgressBoard, RankProgress, draw_holders

# ---- the table ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state_is_in_the_table_or_a_protocol_error(state: State, event: Event) -> None:
    if (state, event) in TABLE:
        assert advance(state, event) is TABLE[state, event]
    else:
        with pytest.raises(ProtocolError, match=f"'{event.value}'.*'{state.value}'"):
            advance(state, event)


def test_the_good_life_goes_through_every_state_but_lost() -> None:
    state, seen = State.STARTING, [State.STARTING]
    for event in (Event.HELLO, Event.IMPORT, Event.BUILD, Event.WARM_UP, Event.READY, Event.BYE, Event.EXIT):
        state = advance(state, event)
        seen.append(state)
    assert seen == [state for state in State if state is not State.LOST]


@pytest.mark.parametrize("state", [*STARTING_UP, State.SERVING])
@pytest.mark.parametrize("event", [Event.FATAL, Event.EXIT])
def test_a_running_stage_that_reports_or_ends_is_lost(state: State, event: Event) -> None:
    assert advance(state, event) is State.LOST


@pytest.mark.parametrize("event", Event)
def test_nothing_comes_after_gone(event: Event) -> None:
    with pytest.raises(ProtocolError):
        advance(State.GONE, event)


@pytest.mark.parametrize("event", [event for event in Event if event is not Event.EXIT])
def test_a_lost_stage_can_only_end(event: Event) -> None:
    assert advance(State.LOST, Event.EXIT) is State.LOST
    with pytest.raises(ProtocolError):
        advance(State.LOST, event)


# ---- the cause ----------------------------------------------------------------------------------------------------------


class Scene:
    """A supervisor of three real stage processes, which wait for their model; what they would say, the test says."""

    def __init__(self, directory: Path) -> None:
        self.plan = make_plan(
            [nn.Identity() for _ in range(3)],
            3,
            split="auto",
            balance="parameters",
            example=None,
            window=None,
            devices="cpu",
            backend="auto",
            threads=1,
            seed=0,
            start_method=None,
            start_timeout=60.0,
            stall_timeout=math.inf,
            shutdown_timeout=1.0,
        )
        self.board = ProgressBoard(directory / "progress", 3, create=True)
        self.started = start_ranks(self.plan, directory)
        self.supervisor = Supervisor(self.plan, self.started.ranks, self.started.output, self.board)

    def serve(self) -> None:
        """All ranks become ready, and the body begins."""
        for rank in range(3):
            for frame in (Hello(1), Phase(Event.IMPORT), Phase(Event.BUILD), Phase(Event.WARM_UP)):
                self.supervisor.said(rank, frame)
            self.supervisor.said(rank, Ready(self.plan.infos[rank]))
        assert self.supervisor.all_ready.is_set()
        self.supervisor.launched = True

    def fatal(self, rank: int, text: str, *, transport: bool, at: int, phase: str = "serve") -> None:
        report = Report(
            rank=rank,
            stage_index=rank,
            tp_index=0,
            phase=phase,
            seq=None,
            remote_type="RuntimeError",
            text=text,
            traceback="",
            monotonic_ns=at,
            transport=transport,
        )
        self.supervisor.said(rank, Fatal(report))

    async def failure(self) -> StageflowError:
        """What the supervisor makes of the signs so far, and of processes that ended."""
        got: list[StageflowError] = []
        self.supervisor.on_break(got.append)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for rank in self.started.ranks:
                    nursery.start_soon(self.supervisor.watch, rank)
                await self.supervisor.settle()
        assert got == [self.supervisor.failure]
        return got[0]

    def end(self) -> None:
        for rank in self.started.ranks:
            rank.kill()
            rank.process.join(10)
        self.started.output.stop()
        for rank in self.started.ranks:
            rank.close()
        for end in ("header_in", "header_out", "payload_in", "payload_out"):
            getattr(self.started, end).close()
        self.board.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.end()


def kinds(error: StageflowError) -> list[tuple[Any, Any]]:
    return [(type(one), one.stage_index) for one in error.secondary]


async def test_a_death_goes_before_everything_that_was_reported_earlier(scene: Scene) -> None:
    scene.serve()
    scene.fatal(2, "connection closed", transport=True, at=1)
    scene.fatal(0, "no memory", transport=False, at=2)
    scene.started.ranks[1].kill()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.supervisor.watch, scene.started.ranks[1])
        with trio.fail_after(10):
            await scene.started.ranks[1].gone.wait()
    with trio.fail_after(10):
        await scene.supervisor.settle()
    error = scene.supervisor.failure
    assert type(error) is StageDied
    assert (error.stage_index, error.signal, error.phase) == (1, "SIGKILL", "serve")
    assert kinds(error) == [(PipelineBroken, 0), (PipelineBroken, 2)]


async def test_the_earliest_error_that_is_not_the_transports_goes_first(scene: Scene) -> None:
    scene.serve()
    scene.fatal(1, "lost the peer", transport=True, at=1)
    scene.fatal(2, "second", transport=False, at=30)
    scene.fatal(0, "first", transport=False, at=20)
    error = await scene.failure()
    assert (type(error), error.stage_index) == (PipelineBroken, 0)
    assert "first" in str(error)
    assert kinds(error) == [(PipelineBroken, 2), (PipelineBroken, 1)]


async def test_a_lost_connection_waits_for_the_death_behind_it(scene: Scene) -> None:
    scene.serve()
    scene.fatal(2, "connection closed", transport=True, at=1)
    scene.started.ranks[1].kill()
    error = await scene.failure()
    assert (type(error), error.stage_index) == (StageDied, 1)
    assert kinds(error) == [(PipelineBroken, 2)]


async def test_a_lost_connection_alone_is_the_cause_after_a_while(scene: Scene) -> None:
    scene.serve()
    start = time.monotonic()
    scene.fatal(2, "connection closed", transport=True, at=1)
    error = await scene.failure()
    assert time.monotonic() - start < 3
    assert (type(error), error.stage_index) == (PipelineBroken, 2)
    assert "connection closed" in str(error)


async def test_a_rank_that_speaks_out_of_turn_breaks_the_pipeline(scene: Scene) -> None:
    scene.serve()
    scene.supervisor.said(1, Hello(1))
    error = await scene.failure()
    assert (type(error), error.stage_index) == (PipelineBroken, 1)
    assert "'hello'" in str(error)


async def test_a_goodbye_before_its_time_and_then_an_end_is_a_death(scene: Scene) -> None:
    scene.serve()
    scene.supervisor.said(1, Bye())
    scene.started.ranks[1].kill()
    error = await scene.failure()
    assert (type(error), error.stage_index, error.signal, error.phase) == (StageDied, 1, "SIGKILL", "exit")


async def test_a_death_before_ready_is_a_launch_error_of_its_phase(scene: Scene) -> None:
    scene.supervisor.said(2, Hello(1))
    scene.supervisor.said(2, Phase(Event.IMPORT))
    scene.started.ranks[2].kill()
    error = await scene.failure()
    assert (type(error), error.stage_index, error.signal, error.phase) == (LaunchError, 2, "SIGKILL", "import")


async def test_who_is_told_after_the_break_is_told_at_once(scene: Scene) -> None:
    scene.serve()
    scene.started.ranks[0].kill()
    error = await scene.failure()
    got: list[StageflowError] = []
    scene.supervisor.on_break(got.append)
    assert got == [error]
    copy = error.copy()
    assert copy is not error
    assert (str(copy), copy._facts()) == (str(error), error._facts())


async def test_a_start_that_takes_too_long_names_the_rank_that_is_furthest_behind(scene: Scene) -> None:
    for rank, frames in enumerate([[Hello(1), Phase(Event.IMPORT)], [Hello(1)], [Hello(1), Phase(Event.IMPORT)]]):
        for frame in frames:
            scene.supervisor.said(rank, frame)
    error = await late_start(scene.started.ranks, scene.board, scene.started.output, 60.0)
    assert list(error.stacks or ()) == [1, 0, 2]
    assert (error.stage_index, error.phase) == (1, "rendezvous")
    scene.supervisor.kill_all()


# ---- stalls -------------------------------------------------------------------------------------------------------------


def at(activity: Activity, *, handled: int, seq: int | None = None, since: int = 0) -> RankProgress:
    return RankProgress(activity, seq, since, handled, 0, 0, 1, 1, 0, dict.fromkeys(Activity, 0))


W, C = Activity.WAITING, Activity.COMPUTING
STALLS = {
    "the one at work": ([at(W, handled=9), at(C, handled=3, seq=3), at(W, handled=3)], 1, 9, 1),
    "at work for longest": ([at(W, handled=9), at(C, handled=3, since=20), at(C, handled=2, since=10)], 1, 9, 2),
    "all wait: the first that holds some": ([at(W, handled=9), at(W, handled=9), at(W, handled=3)], 1, 9, 2),
    "all wait: nothing has come in": ([at(W, handled=2), at(W, handled=2), at(W, handled=2)], 1, 9, 0),
    "all wait, and have all done": ([at(W, handled=9), at(W, handled=9), at(W, handled=9)], 1, 9, 0),
    "two ranks in a stage": ([at(W, handled=9), at(W, handled=9), at(W, handled=9), at(W, handled=3)], 2, 9, 3),
    "of two ranks the one at work": ([at(W, handled=9), at(W, handled=9), at(W, handled=3), at(C, handled=3)], 2, 9, 3),
}


@pytest.mark.parametrize(("seen", "tp", "submitted", "rank"), STALLS.values(), ids=STALLS)
def test_the_rank_that_the_others_wait_for(seen: list[RankProgress], tp: int, submitted: int, rank: int) -> None:
    assert stalled_rank(seen, tp, submitted) == rank


def test_who_holds_which_micro_batch_is_drawn() -> None:
    infos = [StageInfo(stage_index=stage, num_stages=3) for stage in range(3)]
    now = time.monotonic_ns()
    seen = [at(W, handled=8, since=now), at(C, handled=3, seq=3, since=now - 2 * 10**9), at(W, handled=3, since=now)]
    drawn = draw_holders(list(zip(infos, seen, strict=True)), submitted=9, arrived=2)
    assert drawn.splitlines() == [
        "stage 0     waiting for 0.0 s                  holds 8",
        "stage 1     computing micro-batch 3 for 2.0 s  holds 3 … 7",
        "stage 2     waiting for 0.0 s                  holds none",
        "controller  has got 0 … 1                      holds 2",
    ]


def test_ranks_of_a_stage_are_told_apart_in_the_drawing() -> None:
    places = [(stage, tp) for stage in range(2) for tp in range(2)]
    infos = [StageInfo(stage_index=stage, num_stages=2, tp_index=tp, tp=2) for stage, tp in places]
    seen = [at(W, handled=count, since=time.monotonic_ns()) for count in (5, 5, 5, 2)]
    drawn = draw_holders(list(zip(infos, seen, strict=True)), submitted=5, arrived=5)
    assert [line.split()[1] for line in drawn.splitlines()[:4]] == ["0.0", "0.1", "1.0", "1.1"]
    assert [line.partition("holds ")[2] for line in drawn.splitlines()] == ["none", "none", "none", "2 … 4", "none"]
