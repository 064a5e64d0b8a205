"""Texts that grow: each on a line of its own, redrawn on a terminal; elsewhere one line for each, when it is whole.

Rules of this file:

* Plain ANSI codes, and nothing that a text says may be one: control characters are taken out.
* Whatever ends the block, the terminal is left as it was found.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import attrs

__all__ = ["GrowingText", "Lines", "Screen", "open_screen"]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_BEGIN, _END = "\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h"  # no cursor, no automatic new lines; and back
_CLEAR_LINE, _CLEAR_BELOW = "\x1b[K", "\x1b[J"


@attrs.define
class GrowingText:
    """A prompt and its continuation."""

    prompt: str
    continuation: str = ""
    whole: bool = False

    def parts(self, width: int | None = None) -> tuple[str, str]:
        """Both on one line; their end alone where that is too long."""
        prompt, text = _on_one_line(self.prompt), _on_one_line(self.prompt + self.continuation)
        boundary, excess = len(prompt), 0 if width is None else len(text) - width
        if excess > 0:
            text = "…" + text[excess + 1 :]
            boundary = max(1, boundary - excess)
        return text[:boundary], text[boundary:]


def _on_one_line(text: str) -> str:
    return "".join(char for char in re.sub(r"\s+", " ", text) if char.isprintable())


class Lines:
    """Not a terminal: a text is printed when it is whole, as ``prompt| continuation``."""

    def __init__(self, texts: Sequence[GrowingText]) -> None:
        self._waiting = list(texts)

    def update(self, progress: str) -> None:
        """The texts have grown."""
        for text in [text for text in self._waiting if text.whole]:
            self._waiting.remove(text)
            print("|".join(text.parts()), flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Screen(Lines):
    """A terminal: all texts, always, and a line of progress below them."""

    def __init__(self, texts: Sequence[GrowingText]) -> None:
        super().__init__(texts)
        self._texts = texts
        self._drawn = 0

    def update(self, progress: str) -> None:
        """The texts have grown: draw them over what was there."""
        width = shutil.get_terminal_size().columns - 1
        parts = [text.parts(width) for text in self._texts]
        self._draw([f"{_DIM}{prompt}{_PLAIN}{continuation}" for prompt, continuation in parts] + [progress[:width]])

    def _draw(self, lines: Sequence[str]) -> None:
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        sys.stdout.write(up + "".join(f"\r{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW)
        sys.stdout.flush()
        self._drawn = len(lines)

    def __enter__(self) -> Self:
        sys.stdout.write(_BEGIN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.stdout.write(_END)
        if error is None:  # now each in full, over several lines where it needs them
            self._draw(
                [f"{_DIM}{prompt}{_PLAIN}{continuation}" for prompt, continuation in map(GrowingText.parts, self._texts)]
            )
        sys.stdout.flush()


def open_screen(texts: Sequence[GrowingText]) -> Lines:
    """Where to show the texts: to be used in a ``with`` block, with ``update`` whenever they have grown."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return Screen(texts) if terminal and shutil.get_terminal_size().lines > len(texts) + 1 else Lines(texts)
