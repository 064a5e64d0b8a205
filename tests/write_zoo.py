"""Writes the table of models that are known to be cut right into the docs: python tests/write_zoo.py.

Each stands there because `test_zoo.py` holds it; a test compares the two.
"""

from __future__ import annotations

from tables import DOCS, markdown, write
from zoo import ZOO

PAGE = DOCS / "cutting.md"


def rows() -> list[list[str]]:
    """The table, with its head."""
    return [["model", "what it is", "way", "works"]] + [
        [f"`{one.name}`" if one.name.isidentifier() else one.name, one.kind, _way(one.by_example), "yes"] for one in ZOO
    ]


def _way(by_example: bool) -> str:
    return "replay, with `example`" if by_example else "replay"


if __name__ == "__main__":
    write("zoo", markdown(rows()), PAGE)
