"""Workloads of operations: random inputs, results in float64, and errors of kernels.

Benchmarks, checks of users' kernels and tests run an operation on these inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.checks import nearest
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import ArrayArg, mapped
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import Argument, InputError
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.operation import Operation, Variant
from gpt2block.sampling import Sampling, draw, masses, random_bits

MARGIN = 2.0**-10  # change of random number u and of top_p that changes no token of `draw_stable`

Host = Mapping[str, Any]  # name of an input → array or WeightMatrix
Truth = np.ndarray  # exact results: float64, or integers


def inputs_and_truth(
    operation: Operation,
    sizes: Mapping[str, int],
    dtype: str = "float32",
    layout: str = "KN",
    seed: int = 0,
) -> tuple[tuple[Any, ...], Truth]:
    """Return random inputs on the host and the result of the NumPy reference in float64.

    The inputs are in the dtype and layout that kernels read. seed: seed of the random numbers.
    Raises InputError for inconsistent sizes.
    """
    try:
        stored = tuple(
            matrix(array, dtype, layout)
            if i in operation.workload.matrices
            else _stored(array, dtype)
            for i, array in enumerate(operation.make(sizes, np.random.default_rng(seed)))
        )
        truth = truth_of(operation, stored, operation.workload.attrs)
    except ValueError as error:
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(f"{operation.name} cannot run at {at}: {error}") from error
    return stored, truth


def truth_of(operation: Operation, inputs: Iterable[Any], attrs: Mapping[str, object]) -> Truth:
    """Return the result of the NumPy reference in float64."""
    wide = [a if isinstance(a, WeightMatrix) else widened(a) for a in inputs]
    truth: Any = getattr(reference, operation.name)(*wide, **attrs)
    found: Truth = truth[0] if isinstance(truth, tuple) else truth
    return found


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """Convert a float32 array to `dtype`, or to float16 if `dtype` is FP8; leave integers as is."""
    storage = "float16" if dtype in FP8 else dtype
    return array.astype(np.dtype(storage)) if array.dtype == np.float32 else array


def matrix(array: np.ndarray, dtype: str, layout: str) -> WeightMatrix:
    """Convert weights (K, N) to a WeightMatrix of this dtype and layout."""
    in_memory = np.ascontiguousarray(array if layout == "KN" else array.T)
    return WeightMatrix.quantize(in_memory, dtype, layout)


def widened(array: np.ndarray) -> np.ndarray:
    """Return the array in float64, or unchanged if it holds integers."""
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


def check_storage(
    operation: Operation, dtype: str | None = None, layout: str | None = None
) -> tuple[str, str]:
    """Check a dtype and a weight layout; return both, with None replaced by the default.

    dtype: FP8 applies to the weights only, with activations in float16. layout: "KN" or "NK".
    Raises InputError, which lists the dtypes or layouts that the operation supports.
    """
    if dtype not in (None, *operation.workload.dtypes):
        raise InputError(
            f"{operation.name}: ",
            Argument("dtype"),
            f" {dtype!r}: expected one of {', '.join(operation.workload.dtypes)}"
            f"{nearest(dtype, operation.workload.dtypes)}",
        )
    layouts = ("KN", "NK") if operation.workload.matrices else ()
    if layout not in (None, *layouts):
        known = f"expected one of {', '.join(layouts)}" if layouts else "it has no weights"
        raise InputError(f"{operation.name}: ", Argument("layout"), f" {layout!r}: {known}")
    return dtype or operation.workload.dtypes[0], layout or operation.workload.layout


def counted_sizes(sizes: Mapping[str, int], dtype: str) -> dict[str, int]:
    """Return `sizes` plus "itemsize" (bytes per activation) and "weight" (bytes per weight)."""
    item = 4 if dtype == "float32" else 2
    return {**sizes, "itemsize": item, "weight": 1 if dtype in FP8 else item}


def options_for(operation: Operation, variant: Variant, block: int | None = None) -> dict[str, Any]:
    """Return the keyword arguments of `operation.bind` that select a variant and a block size."""
    built_in = sum(not each.own for each in operation.variants)
    name = {"variant": variant.name} if variant.own or built_in > 1 else {}
    return name | ({} if block is None else {"block": block})


def uploaded(value: ArrayArg) -> Any:
    """Copy an array, or the arrays of a WeightMatrix, to device memory."""
    return mapped(cupy.asarray, value)


def poison(out: Any, inputs: Iterable[object] = ()) -> None:
    """Fill an output with 0xFF bytes, which are NaN, so that unwritten elements are noticed.

    If an operation works in place, so that the output is one of the inputs, it is left unchanged.
    """
    if not any(out is array for array in inputs):
        out.data.memset(0xFF, out.nbytes)


def errors(out: Any, truth: Truth) -> tuple[float, float]:
    """Return the largest absolute error of `out`, and this error divided by the largest |truth|.

    out: an array in device or host memory; the comparison runs on that device. truth: n rows in
    host memory; row i of `out` is compared with row i mod n. Elements whose truth is NaN or
    infinity are not compared. Both results are NaN if another element of `out` is not finite. For
    integers, the result is (255, 1) if any element differs, else (0, 0).
    """
    xp: Any = np if isinstance(out, np.ndarray) else cupy
    if truth.dtype.kind in "iu":
        wrong = float((out != xp.asarray(truth)).any())
        return 255 * wrong, wrong
    truth = truth.reshape(-1, truth.shape[-1])
    n, columns = truth.shape
    narrow = out.dtype.name == "bfloat16"  # convert bits: not every CuPy converts bfloat16
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
    return float(worst), float(worst) / max(largest(truth), float(np.finfo(np.float64).tiny))


def largest(values: np.ndarray) -> float:
    """Return the largest magnitude of the finite values, or 0 if there is none."""
    return float(np.abs(values).max(where=np.isfinite(values), initial=0))


def tolerance(dtype: str) -> float:
    """Return the largest relative error that rounding can cause, for activations in `dtype`.

    The sum of 1e-5 for sums in float32 and of two roundings to the dtype of the activations.
    """
    return 1e-5 + 2 * {"float32": 2.0**-24, "bfloat16": 2.0**-8}.get(dtype, 2.0**-11)


def draw_stable(
    at: Mapping[str, Any],
    rng: np.random.Generator,
    change: Callable[[NDArray[np.float32]], NDArray[np.float32]] = np.asarray,
) -> NDArray[np.float32]:
    """Return logits (B, V) whose tokens do not depend on rounding. at: sizes and attributes.

    A row is drawn again if a change of u or top_p by up to MARGIN changes its token. The sums of
    floats in a correct kernel have smaller errors. change: applied to each row of random numbers.
    """
    rows: list[NDArray[np.float32]] = []
    while len(rows) < at["B"]:
        row = change(np.float32(3) * rng.standard_normal(at["V"], dtype=np.float32))
        if _stable(row, at["sampling"], at["step"]):
            rows.append(row)
    return np.stack(rows)


def _stable(logits: NDArray[np.float32], sampling: Sampling, step: int) -> bool:
    """Whether a change of u and top_p by up to MARGIN leaves the token unchanged."""
    if sampling.temperature == 0:
        return True
    p, u = sampling.top_p, random_bits(sampling.seed, step, sampling.sample)
    shift, last = round(MARGIN * 2**64), 2**64 - 1
    kept = [
        masses(logits, replace(sampling, top_p=min(max(near, 0), 1)))
        for near in ((p - MARGIN, p, p + MARGIN) if p < 1 else (p,))
    ]
    near_u = max(u - shift, 0), u, min(u + shift, last)
    return len({draw(mass, random) for mass in kept for random in near_u}) == 1
