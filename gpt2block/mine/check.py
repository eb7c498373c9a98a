"""Compare a user's kernel with float64 on the current device, at sizes that are odd and small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.bench import measure
from gpt2block.cuda import cupy
from gpt2block.mine.arguments import Output, Values, values
from gpt2block.mine.kernel import Geometry, Kernel
from gpt2block.ops.operation import Attrs, Sizes

GUARD = 4096  # bytes before and after an output
GUARD_BYTE = 0xA5


@dataclass(frozen=True)
class Checked:
    """The result at one size. `problem` says what is wrong with it, "" if nothing."""

    sizes: Sizes
    geometry: Geometry
    max_abs: float
    max_rel: float
    problem: str = ""
    printed: str = ""  # by the kernel, in the first run


@dataclass(frozen=True)
class Case:
    """Inputs on the host, and the exact value of every output."""

    sizes: Sizes
    attrs: Attrs
    inputs: tuple[Any, ...]
    truths: Mapping[str, NDArray[Any]]


def case(kernel: Kernel, sizes: Sizes, attrs: Attrs, layout: str) -> Case:
    """Random inputs of these sizes; raises InputError for sizes that do not fit together."""
    own = replace(kernel.operation, attrs={**kernel.operation.attrs, **attrs})
    host, truth = measure.inputs_and_truth(own, sizes, kernel.dtype, layout)
    truths = [truth]
    if own.further is not None:
        truths += own.further(*map(measure.widened, host), **own.attrs)
    outputs = values(own, host, own.attrs).outputs
    return Case(sizes, own.attrs, host, dict(zip(outputs, truths, strict=True)))


def compare(kernel: Kernel, given: Case, guarded: bool) -> Checked:
    """The result of running the kernel once on poisoned outputs.

    guarded: put known bytes around each output, and find writes to them.
    """
    arrays = tuple(map(measure.uploaded, given.inputs))
    guards: list[Any] = []

    def allocate(output: Output) -> Any:
        array, memory = _guarded(output, GUARD if guarded else 0)
        guards.append(memory)
        return array

    bound = kernel.bind(arrays, allocate=allocate, **given.attrs)
    found = values(kernel.operation, arrays, given.attrs)
    names = kernel.outputs(found)
    for launch in bound.launches:
        launch.run()
    cupy.cuda.get_current_stream().synchronize()
    outs = [cupy.asnumpy(each) for each in (bound.out, *bound.extra)]
    pairs = list(zip(names, outs, strict=True))
    off = [measure.errors(out, given.truths[name].reshape(out.shape)) for name, out in pairs]
    worst = max(off, key=lambda each: np.inf if np.isnan(each[1]) else each[1])
    problem = (
        (guarded and _overwritten(names, guards))
        or next(filter(None, (wrong(n, o, given.truths[n], kernel.dtype) for n, o in pairs)), "")
        or _changed(found, names, given, kernel)
    )
    return Checked(given.sizes, kernel.geometry(found), *worst, problem)


def wrong(name: str, out: NDArray[Any], truth: NDArray[Any], dtype: str) -> str:
    """The first wrong element of an output in words; "" if all are right."""
    truth = truth.reshape(out.shape)
    exact = truth.dtype.kind in "iu"
    if exact:
        bad = out != truth
    else:
        known = np.isfinite(truth)
        limit = measure.tolerance(dtype) * float(np.abs(truth).max(where=known, initial=0.0))
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
    """The elements whose bytes are all 0xFF."""
    raw = np.frombuffer(out.tobytes(), np.uint8).reshape(*out.shape, out.itemsize)
    found: NDArray[np.bool_] = (raw == 0xFF).all(axis=-1)
    return found


def _guarded(output: Output, guard: int) -> tuple[Any, Any]:
    """A poisoned array between two guards, and all of its memory as bytes."""
    dtype = np.dtype(output.dtype)
    nbytes = int(np.prod(output.shape)) * dtype.itemsize
    memory = cupy.full(guard + nbytes + guard, GUARD_BYTE, "uint8")
    part = memory[guard : guard + nbytes]
    part[...] = 0xFF
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
