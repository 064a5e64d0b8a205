"""Errors are one tree of plain data: they carry the same facts, pickle, copy, and say everything in `str()`."""

from __future__ import annotations

import pickle
import traceback

import pytest

import stageflow

TREE = {
    stageflow.StageflowError: Exception,
    stageflow.PartitionError: stageflow.StageflowError,
    stageflow.LaunchError: stageflow.StageflowError,
    stageflow.StageError: stageflow.StageflowError,
    stageflow.PipelineBroken: stageflow.StageflowError,
    stageflow.StageDied: stageflow.PipelineBroken,
    stageflow.StageStalled: stageflow.PipelineBroken,
}
FACTS = {
    "stage_index": 2,
    "tp_index": 1,
    "rank": 5,
    "seq": 17,
    "phase": "serve",
    "remote_type": "builtins.ZeroDivisionError",
    "remote_traceback": "Traceback (most recent call last):\n  the line that failed\nZeroDivisionError: by zero\n",
    "exitcode": -9,
    "signal": "SIGKILL",
    "stderr_tail": ("one", "two"),
    "holders": "stage 2  computing  holds 17\nstage 3  waiting    holds none",
    "stacks": {5: "Thread 1:\n  receive\n\nCurrent thread 2:\n  forward\n", 6: "Thread 1:\n  receive\n"},
    "secondary": (stageflow.StageError("the other", rank=6),),
}
EMPTY = {**dict.fromkeys(FACTS), "stderr_tail": (), "secondary": ()}

every_error = pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)


def facts_of(error: stageflow.StageflowError) -> dict[str, object]:
    return {name: getattr(error, name) for name in FACTS if name != "secondary"}


@every_error
def test_the_tree(kind: type[stageflow.StageflowError]) -> None:
    assert kind.__bases__[0] is TREE[kind]
    assert issubclass(kind, Exception)
    assert kind.__module__ == "stageflow"
    assert kind.__doc__


def test_no_other_public_error() -> None:
    public = {getattr(stageflow, name) for name in stageflow.__all__}
    assert {kind for kind in public if isinstance(kind, type) and issubclass(kind, BaseException)} == set(TREE)


def test_a_partition_error_is_a_value_error_and_no_other_is() -> None:
    assert [kind for kind in TREE if issubclass(kind, ValueError)] == [stageflow.PartitionError]


@every_error
def test_attributes_are_the_same_on_every_class(kind: type[stageflow.StageflowError]) -> None:
    bare = kind("the sentence")
    assert vars(bare) == {"message": "the sentence", **EMPTY}
    assert str(bare) == "the sentence"
    full = kind("the sentence", **FACTS)
    assert vars(full) == {"message": "the sentence", **FACTS}


def test_every_attribute_is_documented() -> None:
    for name in ("message", *FACTS):
        assert f"        {name}: " in (stageflow.StageflowError.__doc__ or "")


def test_an_unknown_fact_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        stageflow.StageError("the sentence", colour="red")  # type: ignore[call-arg]


@every_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles_with_facts_and_notes(kind: type[stageflow.StageflowError], protocol: int) -> None:
    error = kind("the sentence", **FACTS)
    error.add_note("a note")
    error.add_note("another")
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is kind
    assert back.args == error.args
    assert (back.message, str(back)) == (error.message, str(error))
    assert facts_of(back) == facts_of(error)
    assert [type(one) for one in back.secondary] == [stageflow.StageError]
    assert str(back.secondary[0]) == "the other"
    assert back.secondary[0].rank == 6
    assert back.__notes__ == ["a note", "another"]


def test_an_error_without_notes_pickles_without() -> None:
    assert not hasattr(pickle.loads(pickle.dumps(stageflow.StageDied("gone"))), "__notes__")


@every_error
def test_a_copy_has_the_facts_and_the_notes_but_no_traceback(kind: type[stageflow.StageflowError]) -> None:
    with pytest.raises(kind) as caught:
        raise kind("the sentence", **FACTS) from OSError("below")
    caught.value.add_note("a note")
    copy = caught.value.copy()
    assert copy is not caught.value
    assert type(copy) is kind
    assert copy.__traceback__ is None
    assert vars(copy) == vars(caught.value)
    copy.add_note("the copy's own")
    assert caught.value.__notes__ == ["a note"]


def test_a_copy_can_be_copied_and_pickled() -> None:
    error = stageflow.StageStalled("the sentence", **FACTS).copy().copy()
    assert str(pickle.loads(pickle.dumps(error))) == str(stageflow.StageStalled("the sentence", **FACTS))


def test_str_is_the_sentence_then_traceback_then_stderr_then_stacks() -> None:
    assert str(stageflow.StageDied("Stage 2 is gone.", **FACTS)) == (
        "Stage 2 is gone.\n"
        "\n"
        "In the stage process:\n"
        "Traceback (most recent call last):\n"
        "  the line that failed\n"
        "ZeroDivisionError: by zero\n"
        "\n"
        "Last lines on its stderr:\n"
        "  one\n"
        "  two\n"
        "\n"
        "Who holds which micro-batch:\n"
        "  stage 2  computing  holds 17\n"
        "  stage 3  waiting    holds none\n"
        "\n"
        "Stack of rank 5:\n"
        "Current thread 2:\n"
        "  forward\n"
        "\n"
        "Stack of rank 6:\n"
        "Thread 1:\n"
        "  receive"
    )


@pytest.mark.parametrize(
    ("fact", "says"),
    [
        ("remote_traceback", "In the stage process:\n"),
        ("stderr_tail", "Last lines on its stderr:\n  one\n  two"),
        ("holders", "Who holds which micro-batch:\n  stage 2  computing  holds 17\n  stage 3"),
        ("stacks", "Stack of rank 5:\n"),
    ],
)
def test_str_says_only_what_there_is(fact: str, says: str) -> None:
    text = str(stageflow.StageError("the sentence", **{fact: FACTS[fact]}))
    assert text.startswith("the sentence\n\n" + says)
    assert sum(heading in text for heading in ("In the stage", "Last lines", "Who holds", "Stack of rank 5")) == 1


def test_what_python_prints_has_the_sentence_the_remote_text_and_the_notes() -> None:
    error = stageflow.StageError("the sentence", remote_traceback=str(FACTS["remote_traceback"]))
    error.add_note("a note")
    printed = "".join(traceback.format_exception(error))
    assert printed.startswith("stageflow.StageError: the sentence")
    assert "the line that failed" in printed
    assert printed.endswith("a note\n")
