"""Verify and time the variants of an operation: what `gpt2block kernels` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import doctor, reference, timing
from gpt2block.block import errors
from gpt2block.errors import InputError
from gpt2block.operations import Inputs, Operation, Variant
from gpt2block.peers import torch_replays

CACHES = 4  # the rotated data is this many times the L2 cache
MOST_SETS = 256
REPLAY_BYTES = 8 << 30
MOST_LAUNCHES = 4096  # of a variant in one graph


@dataclass(frozen=True)
class Ceilings:
    """What this GPU does at best, measured in the same run."""

    copy_gb_s: float  # device-to-device copy, bytes read and written
    fp32_tflop_s: float  # cuBLAS, 8192³, float32 without TF32; NaN where cuBLAS is not installed


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


def ceilings() -> Ceilings:
    """Measured on the current device, in about a second."""
    doctor.require_cuda("kernels")
    import cupy  # noqa: PLC0415

    size = 1 << 30
    a, b = cupy.zeros(size, "uint8"), cupy.zeros(size, "uint8")
    copy = {"copy": lambda: b.data.copy_from_device_async(a.data, size)}
    copy_ms = timing.interleaved_ms(copy)["copy"]
    m = cupy.asarray(np.random.default_rng(0).standard_normal((8192, 8192), dtype=np.float32))
    out = cupy.empty_like(m)
    try:  # cuBLAS is a ceiling here and nothing more: the package does without it
        product_ms = timing.interleaved_ms({"product": lambda: cupy.matmul(m, m, out=out)})[
            "product"
        ]
    except ImportError:
        product_ms = nan
    return Ceilings(2e-6 * size / copy_ms, 2e-9 * 8192**3 / product_ms)


def measure(
    operation: Operation,
    variants: Iterable[Variant],
    sizes: Mapping[str, int],
    ceiling: Ceilings,
    sweep: bool = False,
    peer: str | None = None,
) -> tuple[list[Measurement], list[str]]:
    """Every variant (at every block size, with `sweep`) against float64, timed; with its peers.

    And a line for each that cannot run at these sizes. Raises InputError when none can, or for
    sizes or peers that do not fit; DeviceError without a GPU.
    """
    doctor.require_cuda("kernels")
    from gpt2block import ops  # noqa: PLC0415

    host, truth = _inputs_and_truth(operation, sizes)
    sets, rounds = _rotated(host, operation.traffic(sizes))
    replays = torch_replays(operation.name, sets, rounds) if peer == "torch" else {}
    peers = tuple(replays)
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, tuple[Variant, int | None, tuple[float, float]]] = {}
    outs: list[Any] = [None] * len(sets)  # shared by all variants
    kept, skipped = [], []  # a graph holds pointers only: what is bound must stay alive
    for variant in variants:
        for block in (variant.blocks or (None,)) if sweep else (None,):
            options = {**operation.attrs, **chosen(operation, variant, block)}
            bind = partial(ops.BINDERS[operation.name], **options)
            try:
                bound = [bind(arrays, out) for arrays, out in zip(sets, outs, strict=True)]
            except InputError as error:
                skipped.append(f"{variant.name}, block {block or variant.block}: {error}")
                continue
            outs = [b.out for b in bound]
            kept.append(bound)
            name = f"{variant.name}/{block}"
            found[name] = variant, block, _errors(bound[0].run().get(), truth)
            launches = [launch for b in bound for launch in b.launches]
            replays[name] = timing.captured(launches * rounds)
            calls[name] = partial(getattr(ops, operation.name), *sets[0], **options)
    if not found:
        raise InputError(f"{operation.name}: {skipped[-1]}")
    times = timing.interleaved_ms(replays)
    gpu = {name: 1e3 * ms / (len(sets) * rounds) for name, ms in times.items()}
    rows = [
        _measurement(
            operation,
            *found[name],
            sizes,
            gpu[name],
            timing.call_times(calls[name])[1],
            ceiling,
            {p: gpu[p] for p in peers},
        )
        for name in found
    ]
    return rows, skipped


def _errors(got: NDArray[Any], truth: NDArray[Any]) -> tuple[float, float]:
    """`errors` where the truth is a number: elsewhere an operation promises nothing."""
    stated = np.isfinite(truth)
    return errors(got, truth) if stated.all() else errors(got[stated], truth[stated])


def chosen(operation: Operation, variant: Variant, block: int | None) -> dict[str, Any]:
    """Keyword arguments that pick a variant; none for an operation that has one only."""
    if len(operation.variants) == 1:
        return {}
    return {"variant": variant.name} | ({} if block is None else {"block": block})


def _measurement(
    operation: Operation,
    variant: Variant,
    block: int | None,
    error: tuple[float, float],
    sizes: Mapping[str, int],
    gpu_us: float,
    call_us: float,
    ceiling: Ceilings,
    peers: Mapping[str, float],
) -> Measurement:
    if operation.bound == "memory":
        rate, best, unit = 1e-3 * operation.traffic(sizes) / gpu_us, ceiling.copy_gb_s, "GB/s"
    else:
        rate, best, unit = 1e-6 * operation.flops(sizes) / gpu_us, ceiling.fp32_tflop_s, "TFLOP/s"
    return Measurement(
        operation.name,
        variant.name,
        block,
        sizes,
        gpu_us,
        call_us,
        rate,
        unit,
        100 * rate / best,
        *error,
        peers,
    )


def _inputs_and_truth(
    operation: Operation, sizes: Mapping[str, int]
) -> tuple[Inputs, NDArray[Any]]:
    """float32 inputs and the float64 result; InputError when these sizes make no sense together."""
    try:
        host = operation.make(sizes, np.random.default_rng(0))
        wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in host]
        truth: NDArray[Any] = getattr(reference, operation.name)(*wide, **operation.attrs)
    except ValueError as error:
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(f"{operation.name} cannot run at {at}: {error}") from error
    return host, truth


def _rotated(host: Inputs, traffic: int) -> tuple[list[tuple[Any, ...]], int]:
    """Copies of the inputs, so many that a round of them moves several times the L2 cache.

    And how many rounds make a replay of some milliseconds, long against a graph's own launch.
    """
    import cupy  # noqa: PLC0415

    cache = cupy.cuda.Device().attributes["L2CacheSize"]
    count = min(MOST_SETS, max(1, ceil(CACHES * cache / traffic)))
    rounds = max(1, min(REPLAY_BYTES // (count * traffic), MOST_LAUNCHES // count))
    return [tuple(cupy.asarray(a) for a in host) for _ in range(count)], rounds
