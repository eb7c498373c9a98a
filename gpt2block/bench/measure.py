"""Verify and time the variants of an operation: what `gpt2block kernels` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import doctor, ops, reference
from gpt2block.bench.peers import torch_replays
from gpt2block.block import errors
from gpt2block.cuda import cupy, timing
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.ops.registry import Operation, Variant
from gpt2block.weights.matrix import WeightMatrix

CACHES = 4  # the rotated data is this many times the L2 cache
MOST_SETS = 256
REPLAY_BYTES = 8 << 30
MOST_LAUNCHES = 4096  # of a variant in one graph


@dataclass(frozen=True)
class Ceilings:
    """What this GPU does at best, measured in the same run; NaN without cuBLAS."""

    copy_gb_s: float  # device-to-device copy, bytes read and written
    fp32_tflop_s: float  # cuBLAS, 8192³, float32 without TF32
    fp16_tflop_s: float = nan  # and float16

    def tflop_s(self, dtype: str) -> float:
        """Of products of arrays of `dtype`."""
        return self.fp32_tflop_s if dtype == "float32" else self.fp16_tflop_s


@dataclass(frozen=True)
class Measurement:
    """One variant at one block size."""

    operation: str
    variant: str
    block: int | None  # None: the one block size the variant has or chooses
    sizes: Mapping[str, int]
    gpu_us: float  # one call, inputs and outputs rotated past the L2 cache
    call_us: float  # host time of a call from Python, with its allocation
    rate: float  # GB/s or TFLOP/s
    unit: str
    percent: float  # of the ceiling
    max_abs: float  # against float64
    max_rel: float  # by the largest value
    peers: Mapping[str, float] = field(default_factory=dict)  # name → its GPU µs
    dtype: str = "float32"

    @property
    def right(self) -> bool:
        """Whether the error is one of rounding; False for NaN."""
        return self.max_rel <= tolerance(self.dtype)


def tolerance(dtype: str) -> float:
    """The largest error, by the largest value, that counts as rounding.

    1e-5 for sums in float32, and two roundings to what the activations are stored in.
    """
    return 1e-5 + 2 * {"float32": 2.0**-24, "bfloat16": 2.0**-8}.get(dtype, 2.0**-11)


def ceilings() -> Ceilings:
    """Measured on the current device, in about a second."""
    doctor.require_cuda("kernels")
    size = 1 << 30
    a, b = cupy.zeros(size, "uint8"), cupy.zeros(size, "uint8")
    copy = {"copy": lambda: b.data.copy_from_device_async(a.data, size)}
    copy_ms = timing.interleaved_ms(copy)["copy"]
    return Ceilings(2e-6 * size / copy_ms, _cublas("float32"), _cublas("float16"))


def _cublas(dtype: str) -> float:
    """TFLOP/s; cuBLAS is a ceiling here and nothing more: the package does without it."""
    host = np.random.default_rng(0).standard_normal((8192, 8192), dtype=np.float32)
    m = cupy.asarray(host.astype(dtype))
    out = cupy.empty_like(m)
    try:
        ms = timing.interleaved_ms({"": lambda: cupy.matmul(m, m, out=out)})[""]
    except ImportError:
        return nan
    return 2e-9 * 8192**3 / ms


def measure(
    operation: Operation,
    variants: Iterable[Variant],
    sizes: Mapping[str, int],
    ceiling: Ceilings,
    stored: tuple[str, str],
    sweep: bool = False,
    peer: str | None = None,
) -> tuple[list[Measurement], list[str]]:
    """Every variant (at every block size, with `sweep`) against float64, timed; with its peers.

    And a line for each that cannot run at these sizes. stored: dtype and layout, as from
    `check_storage`. Raises InputError when no variant can run, or for sizes or peers that do not
    fit; DeviceError without a GPU.
    """
    doctor.require_cuda("kernels")
    dtype, layout = stored
    host, truth = _inputs_and_truth(operation, sizes, dtype, layout)
    counted = counted_sizes(sizes, dtype)
    sets, rounds = _rotated(host, operation.traffic(counted))
    replays = torch_replays(operation.name, sets, rounds) if peer == "torch" else {}
    peers = tuple(replays)
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, tuple[Variant, int | None, tuple[float, float]]] = {}
    outs: list[Any] = [None] * len(sets)  # shared by all variants
    kept, skipped = [], []  # a graph holds pointers only: what is bound must stay alive
    for variant in variants:
        for block in (variant.blocks or (None,)) if sweep else (None,):
            options = {**operation.attrs, **chosen(operation, variant, block)}
            try:
                bound = [
                    operation.bind(arrays, out, **options)
                    for arrays, out in zip(sets, outs, strict=True)
                ]
            except InputError as error:
                at = f", block {block or variant.block}" if variant.blocks else ""
                skipped.append(f"{variant.name}{at}: {error}")
                continue
            outs = [b.out for b in bound]
            kept.append(bound)
            name = f"{variant.name}/{block}"
            poison(bound[0].out, sets[0])
            found[name] = variant, block, _errors(bound[0].run().get(), truth)
            launches = [launch for b in bound for launch in b.launches]
            replays[name] = timing.captured(launches * rounds)
            calls[name] = partial(getattr(ops, operation.name), *sets[0], **options)
    if not found:
        raise InputError(f"{operation.name}: {skipped[-1]}")
    times = timing.interleaved_ms(replays)
    gpu = {name: 1e3 * ms / (len(sets) * rounds) for name, ms in times.items()}
    rows = []
    for name, (variant, block, off) in found.items():
        rate, unit, percent = _rate(operation, counted, dtype, gpu[name], ceiling)
        rows.append(
            Measurement(
                operation.name,
                variant.name,
                block,
                sizes,
                gpu[name],
                timing.call_times(calls[name])[1],
                rate,
                unit,
                percent,
                *off,
                peers={p: gpu[p] for p in peers},
                dtype=dtype,
            )
        )
    return rows, skipped


def check_storage(
    operation: Operation, dtype: str | None = None, layout: str | None = None
) -> tuple[str, str]:
    """How arrays and weights lie in memory, the operation's own way where None is asked for.

    dtype: of the arrays; FP8 is for weights, beside float16. layout: of weights, "KN" or "NK".
    Raises InputError, with what the operation takes.
    """
    if dtype not in (None, *operation.dtypes):
        raise InputError(
            f"{operation.name}: dtype {dtype!r}: expected one of {', '.join(operation.dtypes)}"
        )
    layouts = ("KN", "NK") if operation.matrices else ()
    if layout not in (None, *layouts):
        known = f"expected one of {', '.join(layouts)}" if layouts else "it has no weights"
        raise InputError(f"{operation.name}: layout {layout!r}: {known}")
    return dtype or operation.dtypes[0], layout or operation.layout


def counted_sizes(sizes: Mapping[str, int], dtype: str) -> dict[str, int]:
    """The sizes, and the bytes of an activation and of a weight."""
    item = 4 if dtype == "float32" else 2
    return {**sizes, "itemsize": item, "weight": 1 if dtype in FP8 else item}


def _rate(
    operation: Operation, sizes: Mapping[str, int], dtype: str, us: float, ceiling: Ceilings
) -> tuple[float, str, float]:
    """What limits the operation at these sizes, as a rate, its unit, and % of the ceiling."""
    moved = 1e-3 * operation.traffic(sizes) / us
    computed = 1e-6 * operation.flops(sizes) / us
    of_copy = 100 * moved / ceiling.copy_gb_s
    of_product = 100 * computed / ceiling.tflop_s(dtype)
    memory = operation.bound == "memory"
    if operation.bound == "either":
        memory = not of_product > of_copy  # NaN without cuBLAS
    return (moved, "GB/s", of_copy) if memory else (computed, "TFLOP/s", of_product)


def poison(out: Any, inputs: tuple[Any, ...]) -> None:
    """NaN, or 255, all over an output, so that what a kernel leaves out shows.

    Not where it works in place: then `out` is an input.
    """
    if not any(out is array for array in inputs):
        out.data.memset(0xFF, out.nbytes)


def _errors(got: NDArray[Any], truth: NDArray[Any]) -> tuple[float, float]:
    """`errors` where the truth is a number: elsewhere an operation promises nothing.

    Bytes are right or wrong: one that is not the same counts as all that could be.
    """
    if truth.dtype.kind in "iu":
        wrong = float((got != truth).any())
        return 255 * wrong, wrong
    stated = np.isfinite(truth)
    return errors(got, truth) if stated.all() else errors(got[stated], truth[stated])


def chosen(operation: Operation, variant: Variant, block: int | None) -> dict[str, Any]:
    """Keyword arguments that pick a variant; none for an operation that has nothing to choose."""
    alone = len(operation.variants) == 1
    return ({} if alone else {"variant": variant.name}) | (
        {} if block is None else {"block": block}
    )


def _inputs_and_truth(
    operation: Operation, sizes: Mapping[str, int], dtype: str = "float32", layout: str = "KN"
) -> tuple[tuple[Any, ...], NDArray[Any]]:
    """Inputs as stored and the float64 result; InputError when the sizes do not fit together."""
    try:
        host = operation.make(sizes, np.random.default_rng(0))
        stored = tuple(
            _weights(a, dtype, layout) if i in operation.matrices else _stored(a, dtype)
            for i, a in enumerate(host)
        )
        wide = [a if isinstance(a, WeightMatrix) else _wide(a) for a in stored]
        truth = getattr(reference, operation.name)(*wide, **operation.attrs)
    except ValueError as error:
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(f"{operation.name} cannot run at {at}: {error}") from error
    return stored, truth[0] if isinstance(truth, tuple) else truth


def _stored(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Activations in `dtype`, beside FP8 weights in float16; integers as they are."""
    storage = "float16" if dtype in FP8 else dtype
    return array.astype(np.dtype(storage)) if array.dtype == np.float32 else array


def _weights(array: NDArray[Any], dtype: str, layout: str) -> WeightMatrix:
    in_memory = np.ascontiguousarray(array if layout == "KN" else array.T)
    return WeightMatrix.quantize(in_memory, dtype, layout)


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


def _rotated(host: tuple[Any, ...], traffic: int) -> tuple[list[tuple[Any, ...]], int]:
    """Copies of the inputs, so many that a round of them moves several times the L2 cache.

    And how many rounds make a replay of some milliseconds, long against a graph's own launch.
    """
    cache = cupy.cuda.Device().attributes["L2CacheSize"]
    count = min(MOST_SETS, max(1, ceil(CACHES * cache / traffic)))
    rounds = max(1, min(REPLAY_BYTES // (count * traffic), MOST_LAUNCHES // count))
    return [tuple(_uploaded(a) for a in host) for _ in range(count)], rounds


def _uploaded(array: Any) -> Any:
    if not isinstance(array, WeightMatrix):
        return cupy.asarray(array)
    scale = None if array.scale is None else cupy.asarray(array.scale)
    return replace(array, data=cupy.asarray(array.data), scale=scale)
