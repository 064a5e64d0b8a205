"""Plain text: reading numbers and sizes from arguments, writing them and tables for people."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

__all__ = ["as_bytes", "as_count", "milliseconds", "positive", "sizes", "table"]

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


# ---- reading: each is an argparse type ----------------------------------------------------------------------------------


def positive(text: str) -> int:
    """A number of things, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {text!r}")
    return int(text)


def sizes(text: str) -> list[int]:
    """Numbers of bytes: ``8KiB``, or several, ``8KiB,1MiB``."""
    return [_size(part) for part in text.split(",")]


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]iB|B|)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"a size like 512B, 8KiB or 1MiB is needed, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def milliseconds(text: str) -> list[float]:
    """Times: ``5``, or several, ``2,5,3,4``."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value < 60_000 for value in values):
        raise argparse.ArgumentTypeError(f"milliseconds are needed, like 5 or 2,5,3,4, not {text!r}")
    return values


# ---- writing ------------------------------------------------------------------------------------------------------------


def as_bytes(nbytes: int) -> str:
    """``8 KiB``, ``310.6 MiB``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def as_count(count: int) -> str:
    """``960``, ``2.1 k``, ``134.5 M``."""
    value, unit = float(count), ""
    for larger in (" k", " M", " G"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f}".removesuffix(".0") + unit


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain text. Columns of numbers are set to the right, those of words to the left."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numbers = [all(cell[:1].isdigit() for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in (head, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines)
