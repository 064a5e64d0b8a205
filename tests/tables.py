"""Measured tables in the docs: each stands between two comments that name it, and is written by a script, never by hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "when-a-stage-dies.md"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def read(name: str, page: Path = PAGE) -> list[list[str]]:
    """The rows of a table, with its head; none if it has not been written."""
    found = re.search(rf"<!-- {name}: .*? -->\n(.*?)<!-- end of {name} -->", page.read_text(), re.DOTALL)
    if not found:
        sys.exit(f"{page} has no place for {name}")
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:1] + lines[2:]]


def write(name: str, table: str, page: Path = PAGE) -> None:
    """Put a table in its place."""
    read(name, page)
    pattern = rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)"
    text = re.sub(pattern, lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page.read_text(), flags=re.DOTALL)
    page.write_text(text)
