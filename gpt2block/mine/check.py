"""Compare a user's kernel with float64 on the current device, at sizes that are odd and small."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.bench import measure
from gpt2block.cuda import cupy
from gpt2block.mine.arguments import Output, Values, values
from gpt2block.mine.cases import Case
from gpt2block.mine.finding import Finding
from gpt2block.mine.kernel import Geometry, Kernel
from gpt2block.ops.operation import Sizes

GUARD = 4096  # bytes before and after an output
GUARD_BYTE = 0xA5
# The bytes of an output before a launch: a NaN, a large positive and a large negative number. A
# maximum of NaN and a number is the number: only the others show that an output was read.
NAN_BYTE, POSITIVE_BYTE, NEGATIVE_BYTE = 0xFF, 0x7B, 0xFB


@dataclass(frozen=True)
class Checked:
    """The result at one size. `problem` says what is wrong with it, "" if nothing."""

    sizes: Sizes
    geometry: Geometry
    max_abs: float
    max_rel: float
    bound: float  # the largest relative error that is rounding
    problem: str = ""
    printed: str = ""  # by the kernel, in the first run
    inputs: str = ""  # the name of special ones

    @property
    def label(self) -> str:
        """Sizes and inputs, for tables."""
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{sizes}, {self.inputs}" if self.inputs else sizes

    @property
    def launched(self) -> tuple[str, str, int]:
        """Grid, block and bytes of shared memory, for tables."""
        grid, block, shared = self.geometry
        return " x ".join(map(str, grid)), " x ".join(map(str, block)), shared


def compare(kernel: Kernel, given: Case, guarded: bool, fill: int = NAN_BYTE) -> Checked:
    """The result of running the kernel once on poisoned outputs.

    guarded: put known bytes around each output, and find writes to them. fill: the bytes that the
    outputs hold before.
    """
    arrays = tuple(map(measure.uploaded, given.inputs))
    guards: list[Any] = []

    def allocate(output: Output) -> Any:
        array, memory = _guarded(output, GUARD if guarded else 0, fill)
        guards.append(memory)
        return array

    run = kernel.bind(arrays, allocate=allocate, **given.attrs)
    found = values(kernel.operation, arrays, given.attrs)
    names = kernel.outputs(found)
    for launch in run.launches:
        launch.run()
    cupy.cuda.get_current_stream().synchronize()
    outs = [cupy.asnumpy(each) for each in (run.out, *run.extra)]
    pairs = list(zip(names, outs, strict=True))
    off = [measure.errors(out, given.truths[name].reshape(out.shape)) for name, out in pairs]
    worst = max(off, key=lambda each: np.inf if np.isnan(each[1]) else each[1])
    bound = measure.tolerance(kernel.dtype) + given.slack
    problem = (
        (guarded and _overwritten(names, guards))
        or next(filter(None, (wrong(n, o, given.truths[n], bound) for n, o in pairs)), "")
        or _changed(found, names, given, kernel)
    )
    geometry = kernel.geometry(found.sizes)
    return Checked(given.sizes, geometry, *worst, bound, problem, inputs=given.name)


def finding(found: Checked, given: Case) -> Finding:
    """A result with a problem, in words."""
    what = found.problem
    if given.name:
        what = f"fragile: right for ordinary inputs, wrong for these ({given.name}): {what}"
    numbers: tuple[float, ...] = (found.max_abs, found.max_rel, found.bound)
    if isnan(found.max_rel):
        what += f"\nlargest error: not finite; a relative error of {found.bound:.1e} is rounding"
    elif found.max_rel > found.bound:
        what += (
            f"\nlargest error {found.max_abs:.1e}, relative to the largest value "
            f"{found.max_rel:.1e}: at most {found.bound:.1e} is rounding"
        )
    else:
        numbers = ()
    what += f"\n{given.hint}" if given.hint else ""
    names = ("max_abs", "max_rel", "bound")
    error = dict(zip(names, numbers, strict=False))
    where = f"at {given.label}"
    return Finding(what, (), where, found.printed, fragile=bool(given.name), **error)


def of_second_launch(found: Finding) -> Finding:
    """A finding of a launch that was right as the first one of a process."""
    what = (
        "right in the first launch of a process, wrong in a later one: variables of the file "
        "(__device__) keep their values between launches: set them back in the kernel"
    )
    return replace(found, what=f"{what}\n{found.what}")


def of_old_values(found: Finding) -> Finding:
    """A finding of a launch that is right where the outputs hold NaN before it."""
    what = (
        "right if the output holds NaN before the launch, wrong if it holds other numbers: the "
        "kernel reads elements of the output that it has not written, as in "
        "out[i] = fmaxf(out[i], v); fmaxf and fminf ignore NaN"
    )
    return replace(found, what=f"{what}\n{found.what}")


def wrong(name: str, out: NDArray[Any], truth: NDArray[Any], bound: float) -> str:
    """The first wrong element of an output in words; "" if all are right.

    bound: the largest error that is rounding, relative to the largest value.
    """
    truth = truth.reshape(out.shape)
    exact = truth.dtype.kind in "iu"
    if exact:
        bad = out != truth
    else:
        known = np.isfinite(truth)
        limit = bound * float(np.abs(truth).max(where=known, initial=0.0))
        with np.errstate(invalid="ignore"):
            bad = known & ~(np.abs(out.astype(np.float64) - truth) <= limit)
    count = int(bad.sum())
    if not count:
        return ""
    unwritten = bad & _poisoned(out)
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    where = f"{name}[{', '.join(map(str, place))}]"
    of = f"{count:,} of {out.size:,} elements of {name} are wrong"
    if int(unwritten.sum()) == count:
        return (
            f"{of}: they are NaN, the first is {where}: never written, or computed from memory "
            "that is never written"
        )
    return f"{of}: {where} is {_number(out[place])}, expected {_number(truth[place])}"


def _number(value: Any) -> str:
    return str(int(value)) if np.asarray(value).dtype.kind in "iu" else f"{float(value):.6g}"


def _poisoned(out: NDArray[Any]) -> NDArray[np.bool_]:
    """The elements that are as NAN_BYTE has filled them."""
    raw = np.frombuffer(out.tobytes(), np.uint8).reshape(*out.shape, out.itemsize)
    found: NDArray[np.bool_] = (raw == NAN_BYTE).all(axis=-1)
    return found


def _guarded(output: Output, guard: int, fill: int) -> tuple[Any, Any]:
    """An array of such bytes between two guards, and all of its memory as bytes."""
    dtype = np.dtype(output.dtype)
    nbytes = int(np.prod(output.shape)) * dtype.itemsize
    memory = cupy.full(guard + nbytes + guard, GUARD_BYTE, "uint8")
    part = memory[guard : guard + nbytes]
    part[...] = fill
    return part.view(dtype).reshape(output.shape), memory


def _overwritten(names: list[str], guards: list[Any]) -> str:
    """Which output was overrun, and where."""
    for name, memory in zip(names, guards, strict=False):
        found = cupy.asnumpy(memory)
        size = len(found) - 2 * GUARD
        for start, part in ((-GUARD, found[:GUARD]), (size, found[-GUARD:])):
            changed = np.flatnonzero(part != GUARD_BYTE)
            if len(changed):
                at = start + int(changed[0])
                return f"writes out of bounds: byte {at:,} of {name}, which has {size:,} bytes"
    return ""


def _changed(found: Values, names: list[str], given: Case, kernel: Kernel) -> str:
    """An input that the kernel has written to."""
    before = values(kernel.operation, given.inputs, given.attrs).inputs
    for name, array in found.inputs.items():
        if name not in names and cupy.asnumpy(array).tobytes() != before[name].tobytes():
            return f"the kernel changes its input {name}"
    return ""
