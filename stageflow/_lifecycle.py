"""The life of a stage process, as one table.

Rules of this file:

* Plain data. What a rank says, and that its process ended, moves its life from one state to the next; a pair that is not
  in the table is a protocol error, and the pipeline that meets one is broken.
* ``RUNNING`` states are those in which the process must be alive; that it ended in one of them is a death.
* Add a phase of the start: here, and where the stage says it (``stage/_main.py``).

    starting ─hello─▶ joining ──▶ importing ──▶ building ──▶ warming up ─ready─▶ serving ─bye─▶ leaving ─exit 0─▶ gone
        └─────────────┴──── fatal or exit: LaunchError ──────────┘                  └── fatal or exit: PipelineBroken
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["STARTING_UP", "TABLE", "Event", "ProtocolError", "State", "advance"]


class State(StrEnum):
    """Where a stage process is in its life. The value is what errors call the phase."""

    STARTING = "start"
    JOINING = "rendezvous"
    IMPORTING = "import"
    BUILDING = "build"
    WARMING_UP = "warm-up"
    SERVING = "serve"
    LEAVING = "exit"
    GONE = "gone"
    LOST = "lost"


class Event(StrEnum):
    """What moves a life on."""

    HELLO = "hello"
    """The process runs, its guard is armed; it joins its edges next."""
    IMPORT = "import"
    BUILD = "build"
    WARM_UP = "warm-up"
    READY = "ready"
    BYE = "bye"
    FATAL = "fatal"
    """It reported that it can't go on."""
    EXIT = "exit"
    """The process ended."""


class ProtocolError(Exception):
    """A rank said something out of turn: a bug of ours, or somebody else writing to its pipes."""


STARTING_UP = (State.STARTING, State.JOINING, State.IMPORTING, State.BUILDING, State.WARMING_UP)
"""The states before ready: a failure in one of them is a ``LaunchError``."""

TABLE: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.HELLO): State.JOINING,
    (State.JOINING, Event.IMPORT): State.IMPORTING,
    (State.IMPORTING, Event.BUILD): State.BUILDING,
    (State.BUILDING, Event.WARM_UP): State.WARMING_UP,
    (State.WARMING_UP, Event.READY): State.SERVING,
    (State.SERVING, Event.BYE): State.LEAVING,
    (State.LEAVING, Event.EXIT): State.GONE,
    **{(state, Event.FATAL): State.LOST for state in (*STARTING_UP, State.SERVING, State.LEAVING)},
    **{(state, Event.EXIT): State.LOST for state in (*STARTING_UP, State.SERVING, State.LOST)},
}


def advance(state: State, event: Event) -> State:
    """The state after ``event``.

    Raises:
        ProtocolError: the event can't happen in that state.
    """
    try:
        return TABLE[state, event]
    except KeyError:
        raise ProtocolError(f"{event.value!r} from a stage in phase {state.value!r}") from None
