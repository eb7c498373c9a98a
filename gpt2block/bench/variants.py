"""What `gpt2block kernels` measures: the variants of an operation, compared with float64, timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpt2block import doctor, ops
from gpt2block.bench import measure, torch_peers
from gpt2block.bench.ceilings import Ceilings
from gpt2block.bench.contenders import Contender, bind_copies, capture_bound
from gpt2block.bench.race import race
from gpt2block.cuda import timing
from gpt2block.errors import InputError
from gpt2block.ops.registry import Operation, Variant

REPLAY_BYTES = 8 << 30  # that the calls in one graph move
MOST_LAUNCHES = 4096  # of a variant in one graph
CEILINGS = ("float32", "float16")  # that results are compared with


@dataclass(frozen=True)
class Measurement:
    """One variant at one block size."""

    operation: str
    variant: str
    block: int | None  # None: the variant has one block size, or chooses it
    sizes: Mapping[str, int]
    gpu_us: float  # of one call; the inputs and outputs exceed the L2 cache
    call_us: float | None  # host time of a call from Python, which allocates its output
    rate: float  # GB/s or TFLOP/s
    unit: str
    percent: float  # of the ceiling
    max_abs: float  # largest difference from float64
    max_rel: float  # the same relative to the largest value
    peers: Mapping[str, float] = field(default_factory=dict)  # name → its GPU µs
    dtype: str = "float32"

    @property
    def right(self) -> bool:
        """Whether the error is rounding; False for NaN."""
        return self.max_rel <= measure.tolerance(self.dtype)


def measure_variants(
    operation: Operation,
    variants: Iterable[Variant],
    sizes: Mapping[str, int],
    ceilings: Ceilings,
    stored: tuple[str, str],
    sweep: bool = False,
    peer: str | None = None,
) -> tuple[list[Measurement], list[str]]:
    """A measurement of every variant, and a line for each that cannot run at these sizes.

    stored: dtype and layout, as `measure.check_storage` returns them. sweep: measure every block
    size. peer: "torch" or None. Raises InputError if no variant can run, or for sizes or peers that
    do not fit; DeviceError without a GPU.
    """
    doctor.require_cuda("kernels")
    dtype, layout = stored
    host, truth = measure.inputs_and_truth(operation, sizes, dtype, layout)
    counted = measure.counted_sizes(sizes, dtype)
    traffic = operation.traffic(counted)
    copies = measure.rotated({str(i): array for i, array in enumerate(host)}, traffic)
    inputs = [tuple(each.values()) for each in copies]
    entrants = torch_peers.operation_peers(operation.name, inputs, dtype) if peer else []
    peers = [each.name for each in entrants]
    outs: list[Any] = [None] * len(inputs)
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, tuple[Variant, int | None, tuple[float, float]]] = {}
    skipped = []
    for variant in variants:
        for block in (variant.blocks or (None,)) if sweep else (None,):
            options = {**operation.attrs, **measure.options_for(operation, variant, block)}
            try:
                bound = bind_copies(partial(operation.bind, **options), inputs, outs)
            except InputError as error:
                at = f", block {block or variant.block}" if variant.blocks else ""
                skipped.append(f"{variant.name}{at}: {error}")
                continue
            _restore(inputs[0], host, bound[0].out)
            measure.poison(bound[0].out, inputs[0])
            # Before the capture, which runs every launch: an operation may have a state.
            off = measure.errors(bound[0].run(), truth)
            name = f"{variant.name}/{block}"
            found[name] = variant, block, off
            if not variant.own:
                calls[name] = partial(getattr(ops, operation.name), *inputs[0], **options)
            entrants.append(Contender(name, False, partial(capture_bound, bound), dtype))
    if not found:
        raise InputError(f"{operation.name}: {skipped[-1]}")
    rounds = rounds_for(len(inputs), traffic)
    timed, _ = race(entrants, len(inputs), rounds=rounds, strict=True)
    us = {each.contender.name: each.us for each in timed}
    rows = []
    for name, (variant, block, off) in found.items():
        rate, unit, percent = _rate(operation, counted, dtype, us[name], ceilings)
        rows.append(
            Measurement(
                operation=operation.name,
                variant=variant.name,
                block=block,
                sizes=sizes,
                gpu_us=us[name],
                call_us=timing.call_times(calls[name])[1] if name in calls else None,
                rate=rate,
                unit=unit,
                percent=percent,
                max_abs=off[0],
                max_rel=off[1],
                peers={peer: us[peer] for peer in peers},
                dtype=dtype,
            )
        )
    return rows, skipped


def _restore(inputs: tuple[Any, ...], host: tuple[Any, ...], out: Any) -> None:
    """Undo what an earlier variant, which works in place, has done to its input."""
    for array, before in zip(inputs, host, strict=True):
        if array is out:
            array.set(before)


def rounds_for(copies: int, traffic: int) -> int:
    """Rounds over all copies in one graph: some milliseconds, long against launching the graph."""
    return max(1, min(REPLAY_BYTES // (copies * traffic), MOST_LAUNCHES // copies))


def ceiling_for(ceilings: Ceilings, dtype: str) -> float:
    """TFLOP/s of cuBLAS that products of arrays of `dtype` are compared with."""
    return ceilings.tflop_s["float32" if dtype == "float32" else "float16"]


def _rate(
    operation: Operation, sizes: Mapping[str, int], dtype: str, us: float, ceilings: Ceilings
) -> tuple[float, str, float]:
    """The rate of what limits the operation at these sizes, its unit, and % of the ceiling."""
    moved = 1e-3 * operation.traffic(sizes) / us
    computed = 1e-6 * operation.flops(sizes) / us
    of_copy = 100 * moved / ceilings.copy_gb_s
    of_product = 100 * computed / ceiling_for(ceilings, dtype)
    memory = operation.bound == "memory"
    if operation.bound == "either":
        memory = not of_product > of_copy  # NaN without cuBLAS
    return (moved, "GB/s", of_copy) if memory else (computed, "TFLOP/s", of_product)
