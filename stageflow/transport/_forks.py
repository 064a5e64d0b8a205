"""What a forked child must not keep: our ends of pipes and sockets.

A process that is forked off the controller (a DataLoader's worker) or off a stage has a copy of every descriptor. While it
holds a write end, the reader at the other side never sees the end of file that means that we are gone.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> None: ...


_ends: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_forked_children(*ends: _Closable) -> None:
    """Close these connections and sockets in every process that is forked off this one from now on."""
    _ends.update(ends)


def _close_ends() -> None:
    for end in list(_ends):
        end.close()  # not only its descriptor: the object would close the number again, whatever it stands for by then


os.register_at_fork(after_in_child=_close_ends)
