"""Taking a value apart for travel, and putting it together again.

Rules of this file:

* A value is any Python object. Its *skeleton* is a pickle in which each dense tensor is replaced by a number (pickle's
  persistent id), so tensors are found wherever they sit: in nested containers, dataclasses, ModelOutputs, modules.
* Plain structure (builtin containers and scalars) takes the fast pickler; everything else cloudpickle, which sends classes
  and functions of the user's ``__main__`` by value and gives the sender its own class back.
* Bytes on the wire are fixed by the specs alone: both ends derive the same list of *wires* (flat uint8 tensors) from them.
  Tensors of at most ``SMALL`` bytes share the first wire; each larger one is a wire of its own, sent from where it lies.
* Memory layout travels with a tensor when it is a permutation of a contiguous one (transposed, channels_last), since
  kernels may round differently for another layout; anything else arrives contiguous. Values are always equal.

A tensor subclass, a sparse or a quantised tensor takes itself apart by its own ``__reduce__``; the dense parts inside are
found in turn. Autograd history does not travel: a pipeline is forward only.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import pickle
import types
from collections import ChainMap, Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import cloudpickle
import torch
from torch import Tensor

SMALL = 16 * 1024
"""Tensors of at most this many bytes are gathered into one wire: a message costs as much as copying about this much."""

ALIGNMENT = 64
"""Tensors start at multiples of this in a wire and in shared memory, as torch's own allocator has them."""

DTYPES: list[torch.dtype] = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(DTYPES)}

TensorSpec = tuple[int, tuple[int, ...], tuple[int, ...] | None]
"""(dtype code, shape as laid out in memory, permutation that gives the tensor's own shape, or None for none)."""


Wire = Tensor | bytes
"""A flat run of bytes: a uint8 tensor, or plain bytes where small host tensors were gathered."""


@attrs.define
class Packed:
    """A value taken apart: its description and its wires."""

    description: bytes
    """Pickled skeleton and specs."""
    wires: list[Wire]
    """The small tensors together (if there are any), then each large one."""
    pending: list[Any] = attrs.field(factory=list[Any])
    """Works to wait for before the wires may be read: receives that a device is still carrying out."""

    @classmethod
    def of_bytes(cls, nbytes: int) -> Packed:
        """A payload of so many bytes and no meaning: what the warm-up sends."""
        return pack(torch.zeros(nbytes, dtype=torch.uint8))

    def private(self) -> Packed:
        """The same with wires of its own: for a value that is unpacked here and passed on as well."""
        for work in self.pending:
            work.wait()
        self.pending.clear()
        return Packed(self.description, [wire.clone() if isinstance(wire, Tensor) else wire for wire in self.wires])

    def own(self) -> None:
        """Copy what somebody else could still change: a wire whose memory has another holder.

        A module may return a buffer that it overwrites for the next micro-batch. Call this when the value that was packed
        has been let go: a storage that still has a holder besides our wires is not ours to send from; nor is one
        that isn't torch's own memory, such as numpy's, whose holders can't be counted.
        """
        tensors = [(at, wire) for at, wire in enumerate(self.wires) if isinstance(wire, Tensor)]
        ours = Counter(wire.untyped_storage().data_ptr() for _, wire in tensors)
        for at, wire in tensors:
            storage = wire.untyped_storage()
            if not storage.resizable() or _holders(wire) > _ALONE - 1 + ours[storage.data_ptr()]:
                self.wires[at] = wire.clone()


def _holders(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType, reportAttributeAccessIssue]


_ALONE = _holders(torch.empty(1))


# ---- taking apart -------------------------------------------------------------------------------------------------------


class _NotPlain(Exception):
    """The value holds something besides builtin containers, scalars and dense tensors."""


class _Collector:
    """The tensors met while pickling, each once, in order of first meeting."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def index(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.device.type == "meta":
            return None
        at = self._seen.get(id(obj))
        if at is None:
            at = self._seen[id(obj)] = len(self.tensors)
            self.tensors.append(obj)  # also keeps it alive, so its id can't be given to another
        return at


class _PlainPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, collector: _Collector) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.persistent_id = collector.index

    def reducer_override(self, obj: Any) -> Any:
        # Called for whatever is not a builtin container or scalar.
        raise _NotPlain


_cloudpickle_table: Any = cloudpickle.Pickler.dispatch_table


def _code_reduce(code: types.CodeType) -> tuple[Any, ...]:
    # cloudpickle leaves the file name out; a remote traceback without the user's own lines would be worth little.
    make, fields, *_ = _cloudpickle_table[types.CodeType](code)
    return _make_code, (make, fields, code.co_filename)


def _make_code(make: Callable[..., types.CodeType], fields: tuple[Any, ...], filename: str) -> types.CodeType:
    return make(*fields).replace(co_filename=filename)


class _CloudPickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _code_reduce}, *_cloudpickle_table.maps)

    def __init__(self, file: io.BytesIO, collector: _Collector) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._collector = collector

    def persistent_id(self, obj: Any) -> int | None:
        return self._collector.index(obj)


def take_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """The skeleton of a value and its dense tensors, as they are.

    Raises:
        Exception: whatever pickling part of the value raised.
    """
    with contextlib.suppress(_NotPlain):
        collector, file = _Collector(), io.BytesIO()
        _PlainPickler(file, collector).dump(value)
        return file.getvalue(), collector.tensors
    collector, file = _Collector(), io.BytesIO()
    _CloudPickler(file, collector).dump(value)
    return file.getvalue(), collector.tensors


def pack(value: Any, wire_device: torch.device | None = None) -> Packed:
    """Take a value apart into a description and flat wires.

    Args:
        value: any picklable value; its tensors on any device.
        wire_device: where the edge reads and writes payloads. None: host memory (pinned where a tensor comes from CUDA).

    Returns:
        The packed value. Wires of large tensors share memory with the value's own tensors where no copy was needed.

    Raises:
        Exception: whatever pickling part of the value raised.
    """
    skeleton, tensors = take_apart(value)
    specs: list[TensorSpec] = []
    small: list[Tensor] = []
    large: list[Tensor] = []
    for tensor in tensors:
        laid, permutation = as_laid(tensor.detach())
        specs.append((CODE_OF_DTYPE[laid.dtype], tuple(laid.shape), permutation))
        (small if laid.nbytes <= SMALL else large).append(laid)
    wires = _gather(small, wire_device)
    synchronize = False
    for tensor in large:
        moved, waits = _onto(tensor, wire_device)
        wires.append(flat(moved))
        synchronize |= waits
    if synchronize:
        torch.cuda.current_stream().synchronize()
    return Packed(pickle.dumps((skeleton, specs), protocol=pickle.HIGHEST_PROTOCOL), wires)


def _gather(tensors: Sequence[Tensor], wire_device: torch.device | None) -> list[Wire]:
    """Small tensors as one wire, each at its aligned place; none if there is nothing in them."""
    if not any(tensor.nbytes for tensor in tensors):
        return []
    if wire_device is None and all(tensor.device.type == "cpu" for tensor in tensors):
        # Plain bytes: a few microseconds where torch's own operators would take tens.
        return [b"".join(ctypes.string_at(t.data_ptr(), t.nbytes) + bytes(-t.nbytes % ALIGNMENT) for t in tensors)]
    wire = torch.empty(sum(aligned(tensor.nbytes) for tensor in tensors), dtype=torch.uint8, device=wire_device or "cpu")
    start = 0
    for tensor in tensors:
        wire[start : start + tensor.nbytes].copy_(flat(tensor))
        start += aligned(tensor.nbytes)
    return [wire]


def as_laid(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """The tensor with dimensions in memory order, contiguous, and the permutation that leads back."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor, None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    in_memory_order = tensor.permute(order)
    if in_memory_order.is_contiguous():
        return in_memory_order, tuple(sorted(range(tensor.dim()), key=order.__getitem__))
    return tensor.contiguous(), None


def flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.reshape(-1).view(torch.uint8)


def _onto(tensor: Tensor, wire_device: torch.device | None) -> tuple[Tensor, bool]:
    if wire_device is not None:
        return tensor.to(wire_device, non_blocking=True), False
    if tensor.device.type == "cpu":
        return tensor, False
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True), True


def nbytes_of(spec: TensorSpec) -> int:
    """Bytes of a tensor of this spec."""
    return math.prod(spec[1]) * DTYPES[spec[0]].itemsize


def aligned(nbytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -nbytes % ALIGNMENT + nbytes


# ---- putting together ---------------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def __init__(self, skeleton: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self.persistent_load = tensors.__getitem__


def put_together(skeleton: bytes, tensors: Sequence[Tensor]) -> Any:
    """The value that ``take_apart`` took apart."""
    return _Unpickler(skeleton, tensors).load()


def wire_sizes(description: bytes) -> list[int]:
    """Number of bytes of each wire, in order: what the receiving end has to provide."""
    specs: Sequence[TensorSpec] = pickle.loads(description)[1]
    sizes = [nbytes_of(spec) for spec in specs]
    small = sum(aligned(size) for size in sizes if size <= SMALL)
    large = [size for size in sizes if size > SMALL]
    return [small, *large] if small else large


def unpack(packed: Packed, device: torch.device | None = None) -> Any:
    """Put a value together.

    Args:
        packed: what arrived. Its tensors become the value's, without a copy on the same device.
        device: where the value's tensors shall lie. None: where the wires lie.

    Returns:
        The value.

    Raises:
        Exception: whatever unpickling the skeleton raised, e.g. a class that can't be imported here.
    """
    for work in packed.pending:
        work.wait()
    packed.pending.clear()
    description: tuple[bytes, Sequence[TensorSpec]] = pickle.loads(packed.description)
    skeleton, specs = description
    sizes = [nbytes_of(spec) for spec in specs]
    wires = map(as_tensor, packed.wires)
    small = next(wires) if any(0 < size <= SMALL for size in sizes) else torch.empty(0)
    start = 0
    tensors: list[Tensor] = []
    for spec, size in zip(specs, sizes, strict=True):
        dtype, shape, permutation = DTYPES[spec[0]], spec[1], spec[2]
        if size > SMALL:
            tensor = next(wires).view(dtype).view(shape)
        elif size:
            tensor = small[start : start + size].view(dtype).view(shape)
            start += aligned(size)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        if permutation is not None:
            tensor = tensor.permute(permutation)
        if device is not None and tensor.device != device:
            tensor = tensor.to(device, non_blocking=True)
        tensors.append(tensor)
    return put_together(skeleton, tensors)


def as_tensor(wire: Wire) -> Tensor:
    """A wire as a tensor that may be written to."""
    return wire if isinstance(wire, Tensor) else torch.frombuffer(bytearray(wire), dtype=torch.uint8)


# ---- as one run of bytes, for pipes -------------------------------------------------------------------------------------


def to_bytes(packed: Packed) -> bytes:
    """A packed value as one run of bytes, each wire at an aligned place. Host wires only."""
    head = pickle.dumps((packed.description, [len(wire) for wire in packed.wires]))
    out = io.BytesIO()
    out.write(len(head).to_bytes(8, "little") + head)
    for wire in packed.wires:
        out.write(bytes(-out.tell() % ALIGNMENT))
        out.write(host_bytes(wire))
    return out.getvalue()


def from_bytes(data: bytearray) -> Packed:
    """The packed value that ``to_bytes`` wrote; its wires are views of ``data``."""
    end = 8 + int.from_bytes(data[:8], "little")
    description, sizes = pickle.loads(data[8:end])
    wires: list[Wire] = []
    for size in sizes:
        start = aligned(end)
        end = start + size
        wires.append(torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start))
    return Packed(description, wires)


def host_bytes(wire: Wire) -> bytes:
    """A host wire as bytes."""
    return wire if isinstance(wire, bytes) else ctypes.string_at(wire.data_ptr(), wire.numel())
