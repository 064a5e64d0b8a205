"""`stageflow …`: the command line.

The rooms:

    _ends.py     how a command ends: exit codes, errors as sentences
    _values.py   reading and writing numbers, sizes and tables as plain text
    _model.py    a language model and its tokenizer, from a package, a directory or a file
    _screen.py   texts that grow, on a terminal and elsewhere
    _demo.py     `stageflow demo`
    _plan.py     `stageflow plan`
    _bench.py    `stageflow bench pipeline`
    _bench_cutting.py    `stageflow bench load` and `stageflow bench balance`

Rules of this room:

* A command is a file with ``add_arguments(parser)``, which sets ``run``: a function from the arguments to an exit code.
  A new one gets its two lines in ``_parser`` below.
* What a command prints is for people, on stdout, in plain text; errors are sentences on stderr.
* transformers is imported when a model is loaded, not before: `stageflow --help` works without it.
"""

from __future__ import annotations

import argparse
import io
import platform
import sys
from collections.abc import Sequence

import torch

from stageflow import __version__
from stageflow.cli import _bench, _bench_cutting, _demo, _plan
from stageflow.cli._ends import ended

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `stageflow` with these arguments, by default the program's own.

    Returns:
        The exit code: 0, all is well; 1, it failed; 2, it can't be done so, and stderr says what to change; 130, Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model may write what the terminal can't show
    arguments = _parser().parse_args(argv)
    return ended(lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stageflow", description="Pipeline parallelism for PyTorch.")
    versions = f"stageflow {__version__} (torch {torch.__version__}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    bench = commands.add_parser("bench", help="measure").add_subparsers(metavar="WHAT", required=True)
    _demo.add_arguments(commands.add_parser("demo", help=_demo.HELP, description=_demo.HELP))
    _plan.add_arguments(commands.add_parser("plan", help=_plan.HELP, description=_plan.HELP))
    _bench.add_arguments(bench.add_parser("pipeline", help=_bench.HELP, description=_bench.HELP))
    _bench_cutting.add_load(bench.add_parser("load", help=_bench_cutting.LOAD, description=_bench_cutting.LOAD))
    _bench_cutting.add_balance(bench.add_parser("balance", help=_bench_cutting.BALANCE, description=_bench_cutting.BALANCE))
    return parser
