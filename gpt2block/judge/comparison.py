"""Compare the outputs of a user's kernel on the current device with float64 results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import isnan
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import CudaArray, cupy
from gpt2block.cuda.arrays import mapped
from gpt2block.judge.arguments import Output, Values, values
from gpt2block.judge.cases import Case
from gpt2block.judge.finding import Finding
from gpt2block.judge.kernel import Geometry, Kernel
from gpt2block.ops import workload
from gpt2block.ops.operation import Sizes

if TYPE_CHECKING:
    from gpt2block.ops.bench.ceilings import Ceilings
    from gpt2block.ops.bench.variants import Measurement

GUARD = 4096  # bytes of each guard area, before and after an output
GUARD_BYTE = 0xA5
# Bytes that fill an output before a launch: NaN, a large positive and a large negative number.
# fmaxf and fminf ignore NaN, so that only the two numbers reveal a kernel that reads its output.
NAN_BYTE, POSITIVE_BYTE, NEGATIVE_BYTE = 0xFF, 0x7B, 0xFB
SMALLEST = 2.0**-126  # a kernel may round smaller magnitudes to 0
MAX_EXCHANGED = 2**16  # elements of a result up to which exchanged indexes are tried
LIMIT = "rounding explains at most {:.1e} of the largest value"
NOT_FINITE = (
    "look for a division by 0, for expf of a number above 88, for sqrtf or logf of a negative "
    "number, and for memory that is read before it is written"
)

SECOND_LAUNCH = (
    "right in the first launch of a process, wrong in a later one: variables of the file "
    "(__device__) keep their values between launches: set them back in the kernel"
)
OLD_VALUES = (
    "right if the output holds NaN before the launch, wrong if it holds other numbers: the "
    "kernel reads elements of the output that it has not written, as in "
    "out[i] = fmaxf(out[i], v); fmaxf and fminf ignore NaN"
)


@dataclass(frozen=True)
class Checked:
    """The result of checking a kernel at one size. problem: description, or "" if correct."""

    sizes: Sizes
    geometry: Geometry
    max_abs: float
    max_rel: float
    bound: float  # largest relative error that rounding can cause
    problem: str = ""
    printed: str = ""  # text that the kernel printed in the first run
    inputs: str = ""  # name of special inputs; "" for ordinary inputs
    first_wrong: tuple[str, int] | None = None  # the first wrong element: output and flat index

    @property
    def label(self) -> str:
        """Text with the sizes and the name of the inputs, for tables."""
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{sizes}, {self.inputs}" if self.inputs else sizes

    @property
    def launched(self) -> tuple[str, str, int]:
        """Grid, block and bytes of dynamic shared memory, for tables."""
        grid, block, shared = self.geometry
        return " x ".join(map(str, grid)), " x ".join(map(str, block)), shared


@dataclass(frozen=True)
class BenchmarkResult:
    """Measurements of the benchmark; `ceiling` has copy and cuBLAS rates from the same process."""

    rows: list[Measurement]
    skipped: list[str]
    ceiling: Ceilings


def compare(kernel: Kernel, case: Case, guarded: bool, fill: int = NAN_BYTE) -> Checked:
    """Run the kernel once on outputs filled with a byte, and compare them with the exact values.

    guarded: put guard areas around each output, to detect writes outside of it. fill: the byte that
    fills the outputs before the launch.
    """
    arrays = tuple(map(workload.uploaded, case.inputs))
    guards: list[CudaArray] = []

    def allocate(output: Output) -> CudaArray:
        array, memory = _allocate(output, GUARD if guarded else 0, fill)
        guards.append(memory)
        return array

    run = kernel.bind(arrays, allocate=allocate, **case.attrs)
    arguments = values(kernel.operation, arrays, case.attrs)
    names = kernel.outputs(arguments)
    for launch in run.launches:
        launch.run()
    cupy.cuda.get_current_stream().synchronize()
    outs = [cupy.asnumpy(each) for each in (run.out, *run.extra)]
    truths = [case.truths[name].reshape(out.shape) for name, out in zip(names, outs, strict=True)]
    errors = map(workload.errors, outs, truths)
    worst = max(errors, key=lambda each: np.inf if np.isnan(each[1]) else each[1])
    problem = (guarded and _find_overwrite(names, guards)) or ""
    off = None
    for name, out, truth in zip(names, outs, truths, strict=True):
        bad = _bad(out, truth, case.bound)
        if bad.any():
            off = name, int(np.argmax(bad))
            problem = problem or wrong(name, out, truth, bad) + exchanged(kernel, case, outs[0])
            break
    problem = problem or _find_change(arguments, names, case, kernel)
    geometry = kernel.geometry(arguments.sizes)
    return Checked(case.sizes, geometry, *worst, case.bound, problem, "", case.name, off)


def finding(checked: Checked, case: Case) -> Finding:
    """Return a Finding, which describes a check's problem to the user."""
    what = checked.problem
    if case.name:
        what = f"fragile: right for ordinary inputs, wrong for these ({case.name}): {what}"
    error: dict[str, float] = {}
    exact = all(truth.dtype.kind in "iu" for truth in case.truths.values())
    if not exact and not checked.max_rel <= checked.bound:
        error = {name: getattr(checked, name) for name in ("max_abs", "max_rel", "bound")}
        share = f" {checked.max_abs:.1e}, which is {checked.max_rel:.1e} of the largest value: "
        said = f": NaN or infinity: {NOT_FINITE}" if isnan(checked.max_rel) else share + LIMIT
        what += "\nlargest error" + said.format(checked.bound)
    what += f"\n{case.hint}" if case.hint else ""
    return Finding(what, (), f"at {case.label}", checked.printed, **error)


def because(finding: Finding, cause: str) -> Finding:
    """Return a Finding whose text begins with its cause, such as SECOND_LAUNCH."""
    return replace(finding, text=f"{cause}\n{finding.text}")


def wrong(name: str, out: np.ndarray, truth: np.ndarray, bad: NDArray[np.bool_]) -> str:
    """Describe how many elements of an output are wrong, and the first. bad: mask of them."""
    exact = truth.dtype.kind in "iu"
    count = int(bad.sum())
    unwritten = bad & _poison_mask(out)
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    where = f"{name}[{', '.join(map(str, place))}]"
    of = f"{count:,} of {out.size:,} elements of {name} are wrong"
    if int(unwritten.sum()) == count:
        fill = _number(out[place]) if exact else "NaN"
        return (
            f"{of}: they are {fill}, the first is {where}: never written, or computed from memory "
            "that is never written"
        )
    infinite = 0 if exact else int((bad & ~np.isfinite(out)).sum())
    of += f", {infinite:,} of them NaN or infinite" if infinite else ""
    pairs = ([_number(each[place], digits) for each in (out, truth)] for digits in (6, 9, 17))
    got, expected = next(pair for pair in pairs if pair[0] != pair[1] or exact)
    return f"{of}: {where} is {got}, expected {expected}"


def _bad(out: np.ndarray, truth: np.ndarray, bound: float) -> NDArray[np.bool_]:
    """Return the mask of the elements with errors above `bound` times the largest value."""
    if truth.dtype.kind in "iu":
        return np.asarray(out != truth)
    with np.errstate(invalid="ignore"):
        most = max(bound * workload.largest(truth), SMALLEST)
        near = np.abs(out.astype(np.float64) - truth) <= most
    return np.asarray(np.isfinite(truth) & ~near)


def exchanged(kernel: Kernel, case: Case, out: np.ndarray) -> str:
    """Name the array of which a kernel exchanges two indexes; return "" if there is none.

    out: the result of the operation as the kernel has computed it.
    """
    if out.size > MAX_EXCHANGED:
        return ""
    operation = kernel.operation
    result, exact = next(iter(case.truths.items()))
    tried = [(result, out.shape, view, exact) for view in _exchanges(out)]
    for at, (name, array) in enumerate(values(operation, case.inputs, case.attrs).inputs.items()):
        for view in _exchanges(array):
            inputs = list(case.inputs)
            inputs[at] = mapped(lambda part: view if part is array else part, inputs[at])  # noqa: B023
            truth = workload.truth_of(operation, inputs, case.attrs)
            tried.append((name, array.shape, out, truth))
    return next(
        (
            f"\nthe result is right if two indexes of {name}, of shape {shape}, are exchanged: "
            "elements that are adjacent in memory differ in the last index"
            for name, shape, seen, truth in tried
            if not _bad(seen, truth.reshape(out.shape), case.bound).any()
        ),
        "",
    )


def _exchanges(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the array as it is read with each pair of its indexes exchanged."""
    for i, j in combinations([axis for axis, n in enumerate(array.shape) if n > 1], 2):
        shape = list(array.shape)
        shape[i], shape[j] = shape[j], shape[i]
        yield np.ascontiguousarray(array.reshape(shape).swapaxes(i, j))


def _number(value: np.ndarray | np.number, digits: int = 6) -> str:
    exact = np.asarray(value).dtype.kind in "iu"
    return str(int(value)) if exact else f"{float(value):.{digits}g}"


def _poison_mask(out: np.ndarray) -> NDArray[np.bool_]:
    """Return the mask of the elements that still hold the fill byte NAN_BYTE."""
    raw = np.frombuffer(out.tobytes(), np.uint8).reshape(*out.shape, out.itemsize)
    return np.asarray((raw == NAN_BYTE).all(axis=-1))


def _allocate(output: Output, guard: int, fill: int) -> tuple[CudaArray, CudaArray]:
    """Return an array filled with the byte `fill`, and the memory of the array and its guards."""
    dtype = np.dtype(output.dtype)
    nbytes = int(np.prod(output.shape)) * dtype.itemsize
    memory = cupy.full(guard + nbytes + guard, GUARD_BYTE, "uint8")
    part = memory[guard : guard + nbytes]
    part[...] = fill
    return part.view(dtype).reshape(output.shape), memory


def _find_overwrite(names: list[str], guards: list[CudaArray]) -> str:
    """Describe the first write to a guard area, by output and byte; return "" if there is none."""
    for name, memory in zip(names, guards, strict=False):
        data = cupy.asnumpy(memory)
        size = len(data) - 2 * GUARD
        for start, part in ((-GUARD, data[:GUARD]), (size, data[-GUARD:])):
            changed = np.flatnonzero(part != GUARD_BYTE)
            if len(changed):
                at = start + int(changed[0])
                return f"writes out of bounds: byte {at:,} of {name}, which has {size:,} bytes"
    return ""


def _find_change(arguments: Values, names: list[str], case: Case, kernel: Kernel) -> str:
    """Describe an input that the kernel has changed; return "" if there is none."""
    before = values(kernel.operation, case.inputs, case.attrs).inputs
    for name, array in arguments.inputs.items():
        if name not in names and cupy.asnumpy(array).tobytes() != before[name].tobytes():
            return f"the kernel changes its input {name}"
    return ""
