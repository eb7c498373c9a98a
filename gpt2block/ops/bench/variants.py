"""Time the variants of an operation for `gpt2block kernels`, and compare them with float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpt2block import ops
from gpt2block.cuda import doctor, timing
from gpt2block.errors import InputError
from gpt2block.ops import workload
from gpt2block.ops.bench.ceilings import Ceilings
from gpt2block.ops.bench.race import Contender, bind_copies, capture_bound, input_copies, race
from gpt2block.ops.registry import Operation, Variant

REPLAY_BYTES = 8 << 30  # total bytes that the calls in one graph move
MAX_LAUNCHES = 4096  # maximum number of a variant's calls in one graph
CEILINGS = ("float32", "float16")  # arithmetics of cuBLAS with which results are compared


@dataclass(frozen=True)
class Measurement:
    """The measurement of one variant at one block size."""

    operation: str
    variant: str
    block: int | None  # threads per block; None: the variant sets the block size
    sizes: Mapping[str, int]
    gpu_us: float  # GPU µs per call, with inputs and outputs that exceed the L2 cache
    call_us: float | None  # host µs per call from Python, including allocation of the output
    rate: float  # GB/s or TFLOP/s
    unit: str
    percent: float  # rate as % of the rate of a copy or of cuBLAS
    max_abs: float  # largest absolute difference from float64
    max_rel: float  # max_abs relative to the largest absolute value
    peers: Mapping[str, float] = field(default_factory=dict)  # other libraries, by name → GPU µs
    dtype: str = "float32"

    @property
    def right(self) -> bool:
        """Whether rounding can cause an error as large as max_rel; False for NaN."""
        return self.max_rel <= workload.tolerance(self.dtype)


def measure_variants(
    operation: Operation,
    variants: Iterable[Variant],
    sizes: Mapping[str, int],
    ceilings: Ceilings,
    stored: tuple[str, str],
    sweep: bool = False,
    peers: Callable[[Sequence[tuple[Any, ...]]], list[Contender]] = lambda inputs: [],
) -> tuple[list[Measurement], list[str]]:
    """Measure variants; return the measurements, and a line of text per variant that cannot run.

    stored: (dtype, layout), as `workload.check_storage` returns them. sweep: measure every block
    size. peers: returns contenders of other libraries for copies of the inputs. Raises InputError
    if no variant can run, or for invalid sizes; DeviceError without a GPU.
    """
    doctor.require_cuda("kernels")
    dtype, layout = stored
    host, truth = workload.inputs_and_truth(operation, sizes, dtype, layout)
    counted = workload.counted_sizes(sizes, dtype)
    traffic = operation.workload.traffic(counted)
    copies = input_copies({str(i): array for i, array in enumerate(host)}, traffic)
    inputs = [tuple(each.values()) for each in copies]
    of = operation.name
    entrants = peers(inputs)
    others = [each.name for each in entrants]
    outs: list[Any] = [None] * len(inputs)
    measured: list[tuple[Variant, int | None, tuple[float, float], partial[Any]]] = []
    skipped = []
    for variant in variants:
        for block in (variant.blocks or (None,)) if sweep else (None,):
            chosen = workload.options_for(operation, variant, block)
            options = {**operation.workload.attrs, **chosen}
            try:
                bound = bind_copies(partial(operation.bind, **options), inputs, outs)
            except InputError as error:
                at = f", block {block or variant.block}" if variant.blocks else ""
                skipped.append(f"{variant.name}{at}: {error}")
                continue
            _restore(inputs[0], host, bound[0].out)
            workload.poison(bound[0].out, inputs[0])
            # Check before the capture runs the launches, as some operations modify their inputs.
            off = workload.errors(bound[0].run(), truth)
            capture = partial(capture_bound, bound)
            entrants.append(Contender(f"{variant.name}/{block}", capture, dtype))
            measured.append((variant, block, off, partial(getattr(ops, of), *inputs[0], **options)))
    if not measured:
        raise InputError(f"{of}: {skipped[-1]}")
    timed, _ = race(entrants, len(inputs), rounds=rounds_for(len(inputs), traffic))
    us = {each.contender.name: each.us for each in timed}
    rows = []
    for variant, block, (max_abs, max_rel), call in measured:
        gpu_us = us[f"{variant.name}/{block}"]
        rate, unit, percent = _rate(operation, counted, dtype, gpu_us, ceilings)
        rows.append(
            Measurement(
                operation=of,
                variant=variant.name,
                block=block,
                sizes=sizes,
                gpu_us=gpu_us,
                call_us=None if variant.own else timing.call_times(call)[1],
                rate=rate,
                unit=unit,
                percent=percent,
                max_abs=max_abs,
                max_rel=max_rel,
                peers={name: us[name] for name in others},
                dtype=dtype,
            )
        )
    return rows, skipped


def _restore(inputs: tuple[Any, ...], host: tuple[Any, ...], out: Any) -> None:
    """Copy `host` again to an input that is also the output and may have been overwritten."""
    for array, before in zip(inputs, host, strict=True):
        if array is out:
            array.set(before)


def rounds_for(copies: int, traffic: int) -> int:
    """Return the number of rounds (calls on every copy) in a graph that takes some ms."""
    return max(1, min(REPLAY_BYTES // (copies * traffic), MAX_LAUNCHES // copies))


def ceiling_for(ceilings: Ceilings, dtype: str) -> float:
    """Return cuBLAS's TFLOP/s, with which products in `dtype` are compared."""
    return ceilings.tflop_s["float32" if dtype == "float32" else "float16"]


def _rate(
    operation: Operation, sizes: Mapping[str, int], dtype: str, us: float, ceilings: Ceilings
) -> tuple[float, str, float]:
    """Return (rate, unit, % of a copy's or cuBLAS's rate): GB/s if memory-bound, else TFLOP/s."""
    moved = 1e-3 * operation.workload.traffic(sizes) / us
    computed = 1e-6 * operation.workload.flops(sizes) / us
    of_copy = 100 * moved / ceilings.copy_gb_s
    of_product = 100 * computed / ceiling_for(ceilings, dtype)
    memory = operation.workload.bound == "memory"
    if operation.workload.bound == "either":
        memory = not of_product > of_copy  # of_product is NaN without cuBLAS
    return (moved, "GB/s", of_copy) if memory else (computed, "TFLOP/s", of_product)
