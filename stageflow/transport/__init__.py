"""Edges of the ring: a header pipe for frames, a way for payloads; and taking values apart for travel.

The rooms:

    _packing.py   any Python value ↔ a pickle with its tensors taken out, and the tensors as flat bytes
    _groups.py    the process group of an edge between stages
    _stream.py    the pair of sockets of the controller's two edges
    _edge.py      the two ends of an edge
    _memory.py    a model's tensors by shared memory, once, at the start
    _forks.py     what a forked child must not keep
"""

from stageflow.transport._edge import Arrival, EdgeReceiver, EdgeSender, Sent
from stageflow.transport._forks import close_in_forked_children
from stageflow.transport._groups import Rendezvous, TransportError
from stageflow.transport._memory import open_memory, read_tensors, write_tensors
from stageflow.transport._packing import SMALL, Packed, from_bytes, pack, put_together, take_apart, to_bytes, unpack
from stageflow.transport._stream import StreamGroup

__all__ = [
    "SMALL",
    "Arrival",
    "EdgeReceiver",
    "EdgeSender",
    "Packed",
    "Rendezvous",
    "Sent",
    "StreamGroup",
    "TransportError",
    "close_in_forked_children",
    "from_bytes",
    "open_memory",
    "pack",
    "put_together",
    "read_tensors",
    "take_apart",
    "to_bytes",
    "unpack",
    "write_tensors",
]
