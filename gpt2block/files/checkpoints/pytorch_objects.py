"""Objects allowed in a pickle of `torch.save`: storages, tensors in storages, plain values.

Each class describes an object of PyTorch without its data. In such a pickle, a tensor is a call of
`torch._utils._rebuild_tensor_v2` with a storage, an offset, sizes and strides; a storage is a
persistent id. `Unpickler` refuses every name that is not in `FUNCTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.pickles import Function, GlobalName, OrderedDict, describe

_MAX_DIMENSIONS = 8

# Name of a dtype in `torch` → bytes per number
ITEMSIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.storage.UntypedStorage": "uint8",
}


@dataclass(frozen=True)
class Storage:
    """A PyTorch storage: `numel` numbers of one dtype, stored outside the pickle."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class Tensor:
    """A tensor as a view of a storage; offset and strides are in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def order(self) -> str | None:
        """Memory order: "C" for contiguous, "F" for a transposed contiguous matrix, else None."""
        if self._contiguous(self.shape, self.strides):
            return "C"
        transposed = len(self.shape) == 2 and self._contiguous(self.shape[::-1], self.strides[::-1])
        return "F" if transposed else None

    @staticmethod
    def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        expected = 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in shape
            expected *= size
        return True


def _ordered_dict(arguments: tuple[object, ...]) -> OrderedDict:
    if arguments:
        raise CheckpointError("OrderedDict: expected no arguments in a pickle of torch.save")
    return OrderedDict()


def _size(arguments: tuple[object, ...]) -> tuple[int, ...]:
    if len(arguments) != 1:
        raise CheckpointError(f"torch.Size: expected one argument, got {len(arguments)}")
    return _counts("torch.Size", arguments[0])


def _device(arguments: tuple[object, ...]) -> str:
    if not arguments or not isinstance(arguments[0], str):
        raise CheckpointError("torch.device: expected a name")
    return arguments[0]


def _parameter(arguments: tuple[object, ...]) -> Tensor:
    if len(arguments) != 3 or not isinstance(arguments[0], Tensor):
        raise CheckpointError("a parameter: expected a tensor and two other arguments")
    return arguments[0]


def _rebuild(count: int) -> Function:
    """Return a replacement of a `torch._utils._rebuild_…` function with `count` arguments.

    Arguments: storage, offset, sizes, strides; with a count of 6 or 7 also requires_grad and hooks;
    with 7 also the dtype, for dtypes without a typed storage. Metadata: negated, conjugated, …
    """

    def call(arguments: tuple[object, ...]) -> Tensor:
        metadata = arguments[count:]
        if not count <= len(arguments) <= count + (count > 4) or any(arguments[5:6] + metadata):
            raise CheckpointError(
                f"a tensor: expected {count} arguments, no hooks and no metadata, got "
                f"{len(arguments)}"
            )
        if count < 7:
            return _tensor(None, *arguments[:4])
        dtype = arguments[6]
        name = dtype.text.removeprefix("torch.") if isinstance(dtype, GlobalName) else ""
        if name not in ITEMSIZES:
            raise CheckpointError(f"a tensor: expected a dtype, got {describe(dtype)}")
        return _tensor(name, *arguments[:4])

    return call


def _tensor(dtype: str | None, storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
    """Return a Tensor, which must lie inside `storage`. `dtype`: None for the storage's dtype."""
    if not isinstance(storage, Storage):
        raise CheckpointError(f"a tensor: expected a storage, got {describe(storage)}")
    shape, strides = _counts("a tensor's shape", shape), _counts("a tensor's strides", strides)
    (offset,) = _counts("a tensor's offset", (offset,))
    if len(shape) != len(strides):
        raise CheckpointError(f"a tensor: got shape {shape} and strides {strides}")
    tensor = Tensor(storage, dtype or storage.dtype, offset, shape, strides)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * ITEMSIZES[tensor.dtype] > storage.nbytes:
        raise CheckpointError(
            f"a tensor of shape {shape}, strides {strides} and offset {offset} goes beyond its "
            f"storage of {storage.nbytes:,} bytes"
        )
    return tensor


def _counts(name: str, values: object) -> tuple[int, ...]:
    """Return `values`. Raises CheckpointError unless `values` is a short tuple of integers ≥ 0."""
    if type(values) is not tuple or len(values) > _MAX_DIMENSIONS:
        raise CheckpointError(f"{name}: expected up to {_MAX_DIMENSIONS} integers")
    for value in values:
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{name}: expected integers of at least 0, got {describe(value)}")
    return values


FUNCTIONS: Mapping[str, Function | None] = {
    **dict.fromkeys((*_STORAGES, *(f"torch.{dtype}" for dtype in ITEMSIZES))),
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch.device": _device,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_tensor": _rebuild(4),
    "torch._utils._rebuild_tensor_v2": _rebuild(6),
    "torch._utils._rebuild_tensor_v3": _rebuild(7),
}


class Storages:
    """Callable that converts persistent ids of a pickle to storages, and collects the storages."""

    def __init__(self) -> None:
        self.by_key: dict[str, Storage] = {}

    def __call__(self, identity: Any) -> Storage:
        """Return the Storage for a persistent id: ("storage", type, key, device, numel[, None])."""
        parts = identity if type(identity) is tuple else ()
        if len(parts) == 6 and parts[5] is None:  # legacy; PyTorch 0.3 has a view in parts[5]
            parts = parts[:5]
        known = len(parts) == 5 and isinstance(parts[1], GlobalName) and parts[1].text in _STORAGES
        if not known or parts[0] != "storage" or type(parts[2]) is not str:
            raise CheckpointError("expected a persistent id of a storage, got another")
        _, kind, key, _, numel = parts
        (numel,) = _counts("a storage's size", (numel,))
        storage = Storage(key, _STORAGES[kind.text], numel)
        if self.by_key.setdefault(key, storage) != storage:
            raise CheckpointError(f"storage {key[:40]} has two types or sizes")
        return storage
