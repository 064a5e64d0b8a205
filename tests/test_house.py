"""The house keeps its shape: who may import whom, what is public, how long a module may be, what the docs must name."""

from __future__ import annotations

import ast
import inspect
import os
import re
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

REPOSITORY = Path(__file__).resolve().parent.parent
HOUSE = REPOSITORY / "stageflow"
MODULES = sorted(HOUSE.rglob("*.py"))

# ---- the direction of imports -------------------------------------------------------------------------------------------

# From ground to roof: each room, and the rooms it may import from. A new room gets its place here first.
# The child side (stage) and the parent side (controller) meet only in what lies under both.
GROUND = ["errors", "_frames", "_lifecycle"]
ROOMS: dict[str, list[str]] = {
    "errors": [],
    "_frames": ["errors"],
    "_lifecycle": ["errors", "_frames"],
    "partition": GROUND,
    "transport": GROUND,
    "observe": GROUND,
    "stage": [*GROUND, "transport", "observe"],
    "controller": [*GROUND, "partition", "transport", "observe"],
    "__init__": [*GROUND, "partition", "transport", "observe", "stage", "controller"],
    "testing": [*GROUND, "partition", "transport", "observe", "stage", "controller", "__init__"],
    "llm": [*GROUND, "partition", "transport", "observe", "stage", "controller", "__init__"],
    "cli": [*GROUND, "partition", "transport", "observe", "stage", "controller", "__init__", "llm"],
    "__main__": ["cli"],
}

# And the world outside: each package, and the rooms that may import it. Trio runs in the parent only; the ground is plain
# Python and attrs; transformers is an extra, so what works without it doesn't import it.
NOT_GROUND = [room for room in ROOMS if room not in GROUND]
PARENT = ["controller", "__init__", "testing", "llm", "cli"]
WORLD: dict[str, list[str]] = {
    "attrs": list(ROOMS),
    "torch": NOT_GROUND,
    "cloudpickle": NOT_GROUND,
    "trio": PARENT,
    "tricycle": PARENT,
    "outcome": PARENT,
    "rich": ["controller", "cli"],
    "setproctitle": ["stage"],
    "transformers": ["llm", "cli"],
    "safetensors": ["llm", "cli"],
    "gguf": ["llm", "cli"],
}


def _room(parts: tuple[str, ...]) -> str:
    """The room of a module, given by its path below `stageflow`: the first name on it."""
    return parts[0] if parts else "__init__"


def _imports(module: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and dotted path of every import, also of those inside functions and for type checkers only."""
    package = module.relative_to(REPOSITORY).parent.parts
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:  # `from stageflow import errors` is an import of the room, not of the roof
                inner = HOUSE.parent.joinpath(*base, alias.name)
                is_module = base[0] == "stageflow" and (inner.is_dir() or inner.with_suffix(".py").exists())
                yield node.lineno, (*base, alias.name) if is_module else base


def _violations(module: Path) -> Iterator[str]:
    below = module.relative_to(HOUSE).with_suffix("").parts
    room = _room(below)
    if room not in ROOMS:
        yield f"{module.relative_to(REPOSITORY)}: room {room!r} has no place in ROOMS"
        return
    for line, (top, *rest) in _imports(module):
        where = f"{module.relative_to(REPOSITORY)}:{line}: {room!r}"
        if top == "stageflow":
            target = _room(tuple(rest))
            if target != room and target not in ROOMS[room]:
                yield f"{where} may not import {target!r}"
        elif top not in sys.stdlib_module_names:
            if top not in WORLD:
                yield f"{where} imports {top!r}, which has no place in WORLD"
            elif room not in WORLD[top]:
                yield f"{where} may not import {top!r}"


def test_rooms_lie_on_each_other() -> None:
    rooms = list(ROOMS)
    upward = [(room, other) for room, below in ROOMS.items() for other in below if rooms.index(other) >= rooms.index(room)]
    assert upward == []
    assert "stage" not in ROOMS["controller"]
    assert "controller" not in ROOMS["stage"]


def test_a_module_imports_only_from_floors_below() -> None:
    assert [violation for module in MODULES for violation in _violations(module)] == []


def test_upward_import_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check itself, on a house of one bad module: every way to write an import is seen."""
    monkeypatch.setitem(globals(), "REPOSITORY", tmp_path)
    monkeypatch.setitem(globals(), "HOUSE", tmp_path / "stageflow")
    for folder in ("stage", "controller"):
        tmp_path.joinpath("stageflow", folder).mkdir(parents=True)
    module = tmp_path / "stageflow" / "stage" / "_main.py"
    for source, why in {
        "import stageflow.controller._ranks": "may not import 'controller'",
        "from stageflow.controller import Pipeline": "may not import 'controller'",
        "from stageflow import controller": "may not import 'controller'",
        "from ..controller import Pipeline": "may not import 'controller'",
        "from .. import controller": "may not import 'controller'",
        "from stageflow import Pipeline": "may not import '__init__'",
        "import stageflow": "may not import '__init__'",
        "def late():\n    import trio.lowlevel": "may not import 'trio'",
        "import flask": "has no place in WORLD",
    }.items():
        module.write_text(source)
        (violation,) = _violations(module)
        assert violation.endswith(why)
    module.write_text("import os\nimport torch\nfrom stageflow.stage._guard import arm\nfrom . import _guard\n")
    assert list(_violations(module)) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(HOUSE)))
def test_a_module_is_short(module: Path) -> None:
    lines = len(module.read_text().splitlines())
    assert lines <= 400, "a room that outgrows this is two rooms"


# ---- the public face ----------------------------------------------------------------------------------------------------

PUBLIC = [
    "Balance",
    "Checkpoint",
    "LaunchError",
    "PartitionError",
    "Pipeline",
    "PipelineBroken",
    "Stage",
    "StageDied",
    "StageError",
    "StageInfo",
    "StageStalled",
    "StageStatistics",
    "StageflowError",
    "Statistics",
    "Ticket",
    "__version__",
]


def test_public_names_are_these() -> None:
    import stageflow

    assert sorted(stageflow.__all__) == PUBLIC


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("_")])
def test_a_public_name_is_at_home_and_documented(name: str) -> None:
    import stageflow

    thing = getattr(stageflow, name)
    assert thing.__module__ == "stageflow"
    assert thing.__doc__
    members = {key: member for key, member in vars(thing).items() if not key.startswith("_")}
    methods = [key for key, member in members.items() if inspect.isroutine(member) or isinstance(member, property)]
    assert [key for key in methods if not inspect.getdoc(getattr(thing, key))] == []


def test_names_for_tests_are_at_home_and_documented() -> None:
    from stageflow import testing

    reference = (REPOSITORY / "docs" / "reference.md").read_text().partition("## Testing")[2]
    for name in testing.__all__:
        thing = getattr(testing, name)
        assert (thing.__module__, bool(thing.__doc__)) == ("stageflow.testing", True)
        assert re.search(rf"^\.\. auto\w+:: {name}\b", reference, re.MULTILINE), name


def test_version_is_the_project_s() -> None:
    import stageflow

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert stageflow.__version__ == project["version"]


def test_reference_names_everything_public() -> None:
    reference = (REPOSITORY / "docs" / "reference.md").read_text()
    missing = [name for name in PUBLIC if not re.search(rf"\b{name}\b", reference)]
    assert missing == []


# ---- the tools around it ------------------------------------------------------------------------------------------------


def test_every_session_says_what_it_does() -> None:
    body = ast.parse((REPOSITORY / "noxfile.py").read_text()).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    sessions = {node.name: ast.get_docstring(node) for node in functions}
    assert set(sessions) == {"tests", "soak", "matrix", "demo", "lint", "types", "docs", "bench"}
    assert all(sessions.values())


async def test_stages_are_seen_by_the_watch_over_every_test(stray_processes) -> None:
    from stageflow import Pipeline

    model = nn.Sequential(nn.Identity(), nn.Identity())
    async with Pipeline.launch(model, pp=2) as pipe:
        assert set(stray_processes()) == {stage.pid for stage in pipe.stages}
    assert stray_processes() == {}


def test_a_stopped_child_is_seen_and_a_zombie_is_not(stray_processes) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        assert list(stray_processes()) == [child]
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert list(stray_processes()) == [child]
    finally:
        os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert stray_processes() == {}
    os.waitpid(child, 0)


def test_an_orphan_is_seen(run_script, stray_processes) -> None:
    result = run_script("""
        import os, signal
        if (pid := os.fork()) == 0:
            os.setsid()
            signal.pause()
        print(pid, flush=True)
        os._exit(3)
    """)
    orphan = int(result.stdout)
    try:
        assert result.returncode == 3
        assert list(stray_processes()) == [orphan]
    finally:
        os.kill(orphan, signal.SIGKILL)
