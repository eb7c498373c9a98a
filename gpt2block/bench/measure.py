"""The parts of every measurement: inputs and exact results, copies on the GPU, errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import doctor, reference
from gpt2block.block import resolve_device
from gpt2block.checks import meant
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import mapped
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import Argument, InputError
from gpt2block.ops.registry import Operation, Variant
from gpt2block.weights.matrix import WeightMatrix

CACHES = 4  # a round over all copies of the data moves this many times the L2 cache
MOST_SETS = 256  # copies of the data

Host = Mapping[str, Any]  # name → array, or WeightMatrix
Truth = NDArray[Any]  # float64, or integers


def gpu_index(device: str | None) -> int:
    """The index of the GPU to time. Raises InputError for "cpu", DeviceError without a GPU."""
    if device == "cpu":
        raise InputError(
            "--device cpu: bench measures the speed of a GPU: use `gpt2block kernels OPERATION "
            "--device cpu` for the emulator, which measures no speed"
        )
    doctor.require_cuda("the bench")
    index = resolve_device(device)
    assert index is not None  # only "cpu" has none where CUDA works
    return index


def inputs_and_truth(
    operation: Operation, sizes: Mapping[str, int], dtype: str = "float32", layout: str = "KN"
) -> tuple[tuple[Any, ...], Truth]:
    """Random inputs on the host, as stored, and the result of the NumPy reference in float64.

    Raises InputError for sizes that do not fit together.
    """
    try:
        stored = tuple(
            matrix(array, dtype, layout) if i in operation.matrices else _stored(array, dtype)
            for i, array in enumerate(operation.make(sizes, np.random.default_rng(0)))
        )
        wide = [a if isinstance(a, WeightMatrix) else widened(a) for a in stored]
        truth = getattr(reference, operation.name)(*wide, **operation.attrs)
    except ValueError as error:
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(f"{operation.name} cannot run at {at}: {error}") from error
    return stored, truth[0] if isinstance(truth, tuple) else truth


def _stored(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Activations in `dtype`, or in float16 with FP8 weights; integers unchanged."""
    storage = "float16" if dtype in FP8 else dtype
    return array.astype(np.dtype(storage)) if array.dtype == np.float32 else array


def matrix(array: NDArray[Any], dtype: str, layout: str) -> WeightMatrix:
    """Weights (K, N), stored in a dtype and layout."""
    in_memory = np.ascontiguousarray(array if layout == "KN" else array.T)
    return WeightMatrix.quantize(in_memory, dtype, layout)


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """The array in float64; integers unchanged."""
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


def check_storage(
    operation: Operation, dtype: str | None = None, layout: str | None = None
) -> tuple[str, str]:
    """The dtype of the arrays and the layout of the weights; the operation's default for None.

    dtype: FP8 applies to the weights only, with activations in float16. layout: "KN" or "NK".
    Raises InputError with the dtypes or layouts that the operation takes.
    """
    if dtype not in (None, *operation.dtypes):
        raise InputError(
            f"{operation.name}: ",
            Argument("dtype"),
            f" {dtype!r}: expected one of {', '.join(operation.dtypes)}"
            f"{meant(dtype, operation.dtypes)}",
        )
    layouts = ("KN", "NK") if operation.matrices else ()
    if layout not in (None, *layouts):
        known = f"expected one of {', '.join(layouts)}" if layouts else "it has no weights"
        raise InputError(f"{operation.name}: ", Argument("layout"), f" {layout!r}: {known}")
    return dtype or operation.dtypes[0], layout or operation.layout


def counted_sizes(sizes: Mapping[str, int], dtype: str) -> dict[str, int]:
    """`sizes` with "itemsize" and "weight": the bytes of an activation and of a weight."""
    item = 4 if dtype == "float32" else 2
    return {**sizes, "itemsize": item, "weight": 1 if dtype in FP8 else item}


def options_for(operation: Operation, variant: Variant, block: int | None = None) -> dict[str, Any]:
    """Keyword arguments of `operation.bind` that choose a variant and a block size."""
    built_in = sum(not each.own for each in operation.variants)
    name = {"variant": variant.name} if variant.own or built_in > 1 else {}
    return name | ({} if block is None else {"block": block})


def uploaded(value: Any) -> Any:
    """An array, or a WeightMatrix of one, in device memory."""
    return mapped(cupy.asarray, value)


def rotated(host: Host, traffic: int) -> list[dict[str, Any]]:
    """The inputs in device memory, in so many copies that a round over them exceeds the L2 cache.

    A round moves CACHES times the L2 cache, or MOST_SETS copies. traffic: bytes that one copy
    moves.
    """
    count = copies_for(traffic, cupy.cuda.Device().attributes["L2CacheSize"])
    first = {name: uploaded(value) for name, value in host.items()}
    copies = [
        {name: mapped(lambda array: array.copy(), value) for name, value in first.items()}
        for _ in range(count - 1)
    ]
    return [first, *copies]


def copies_for(traffic: int, cache: int) -> int:
    return min(MOST_SETS, max(1, ceil(CACHES * cache / traffic)))


def poison(out: Any, inputs: Iterable[Any] = ()) -> None:
    """Fill an output with 0xFF bytes, which are NaN, so that elements never written show.

    An output that is one of the inputs, of an operation that works in place, is left unchanged.
    """
    if not any(out is array for array in inputs):
        out.data.memset(0xFF, out.nbytes)


def errors(out: Any, truth: Truth) -> tuple[float, float]:
    """Largest absolute difference of `out` from `truth`, and the same relative to the largest one.

    out: an array in device or host memory; the comparison runs where it is. truth: on the host, n
    rows; row i of `out` is compared with row i mod n. Elements with a truth of NaN or infinity are
    not compared; both results are NaN if any other element of `out` is not finite. Integers are
    bytes, of which a wrong one counts as 255 and 1.
    """
    xp = np if isinstance(out, np.ndarray) else cupy
    if truth.dtype.kind in "iu":
        wrong = float((out != xp.asarray(truth)).any())
        return 255 * wrong, wrong
    truth = truth.reshape(-1, truth.shape[-1])
    n, columns = truth.shape
    narrow = out.dtype.name == "bfloat16"  # widened by a shift, which every CuPy can do
    rows = (out.view("uint16") if narrow else out).reshape(-1, columns)
    truth = truth[: len(rows)]
    exact = xp.asarray(truth)
    worst, finite = xp.zeros((), "float64"), xp.ones((), "bool")
    for start in range(0, len(rows), n):
        part = rows[start : start + n]
        if narrow:
            part = (part.astype("uint32") << np.uint32(16)).view("float32")
        expected = exact[: len(part)]
        with np.errstate(invalid="ignore"):
            difference = xp.abs(part.astype("float64") - expected)
        difference = xp.where(xp.isfinite(expected), difference, 0.0)
        worst = xp.maximum(worst, difference.max())
        finite = finite & xp.isfinite(difference).all()
    if not bool(finite):
        return nan, nan
    tiny = float(np.finfo(np.float64).tiny)
    largest = float(np.abs(truth).max(where=np.isfinite(truth), initial=tiny))
    return float(worst), float(worst) / largest


def tolerance(dtype: str) -> float:
    """The largest relative error that is rounding.

    It is 1e-5 for sums in float32, and two roundings to the dtype of the activations.
    """
    return 1e-5 + 2 * {"float32": 2.0**-24, "bfloat16": 2.0**-8}.get(dtype, 2.0**-11)
