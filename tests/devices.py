"""Devices that a test runs on: the CPU emulator in two orders of threads, and a GPU.

A test takes the fixture `device`, which is CuPy or its substitute for the emulator, and calls
operations in the same way on every device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import cuda, emulator
from gpt2block.cuda import arrays as cuda_arrays
from gpt2block.cuda import kernels, requests
from gpt2block.emulator import Order, stand_in
from gpt2block.emulator.ptx.engine import CHECKED
from gpt2block.emulator.stand_in import EmulatorError
from gpt2block.engine import recording
from gpt2block.models.weights import conversions
from gpt2block.ops.log_likelihood import choose_geometry as of_likelihood
from gpt2block.ops.sample_token import choose_geometry as of_token
from gpt2block.ops.top_logprobs import choose_geometry as of_top

Array = NDArray[Any]
IN_TESTS: tuple[Order, ...] = ("forward", "shuffled")
EMULATED = frozenset(map(repr, (*emulator.ORDERS, "hopper", "turing", "emulator")))
ON_CPU = [pytest.param(order, id=f"emulator-{order}") for order in IN_TESTS]
EVERYWHERE = [*ON_CPU, pytest.param("gpu", marks=pytest.mark.gpu)]
GPU = EVERYWHERE[-1]
SOMEWHERE = ["shuffled", GPU]  # for tests that need only one thread order
every_device = pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
one_order = pytest.mark.parametrize("device", SOMEWHERE, indirect=True)
on_hopper = pytest.mark.parametrize("device", ["hopper", GPU], indirect=True)
on_gpu = pytest.mark.parametrize("device", [GPU], indirect=True)
# Devices as names `where`: for helpers, and for tests with hypothesis, which takes no fixtures.
ORDERS = [pytest.param(order, id=f"cpu-{order}") for order in IN_TESTS]
in_every_order = pytest.mark.parametrize("where", ORDERS)
on_every_device = pytest.mark.parametrize("where", [*ORDERS, GPU])
on_one_order = pytest.mark.parametrize("where", [ORDERS[-1], GPU])
on_every_backend = pytest.mark.parametrize("where", ["numpy", *ORDERS, GPU])
on_one_of_each = pytest.mark.parametrize("where", ["numpy", ORDERS[-1], GPU])
on_emulator = pytest.mark.skipif(
    emulator.missing() is not None, reason=f"no CUDA on the CPU: {emulator.missing()}"
)  # for tests that emulate a device themselves
H200 = 132  # multiprocessors
FEW_THREADS = 64


def slow(*case: Any) -> Any:
    """Return a case that runs only with --slow."""
    return pytest.param(*case, marks=pytest.mark.slow)


def combinations(*, times: int = 2, along: str = "", **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize `device` and these axes: all combinations on a GPU, a part on the emulator.

    Each combination may be a program for the emulator to compile. There each value of axis `along`,
    by default the longest, appears `times` times, each time with other values of the other axes.
    """
    values = list(axes.values())
    longest = len(axes[along]) if along else max(map(len, values))
    some = {
        tuple(axis[(i + again * (n > 0)) % len(axis)] for n, axis in enumerate(values)): None
        for again in range(times)
        for i in range(longest)
    }
    cases = [(SOMEWHERE[0], case) for case in some]
    cases += [("gpu", case) for case in itertools.product(*values)]
    return pytest.mark.parametrize(
        ("device", *axes),
        [
            pytest.param(
                where,
                *case,
                id="-".join(map(str, (where, *case))),
                marks=GPU.marks if where == "gpu" else (),
            )
            for where, case in cases
        ],
        indirect=["device"],
    )


@contextmanager
def quick(small_blocks: bool) -> Iterator[None]:
    """Reduce work that takes the emulator long and changes no bit of a result: see `running_on`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "RUNS", 2)
        if small_blocks:
            patch.setattr(conversions, "ABSMAX_BLOCK", FEW_THREADS)
            for choose in (of_likelihood, of_token, of_top):
                few = partial(choose, threads=FEW_THREADS)
                patch.setitem(choose.__globals__, "choose_geometry", few)
        yield


@contextmanager
def running_on(
    name: str, multiprocessors: int = 4, *, small_blocks: bool = True, races: bool = True
) -> Iterator[Any]:
    """Yield CuPy for "gpu", else its substitute with thread order `name`, if it can run.

    With `races`, launches in the last order of IN_TESTS search for races. Name "hopper" stands for
    this order on a device of compute capability 9.0 with at least 8 multiprocessors, as clusters
    need, and "turing" on one of 7.5.
    multiprocessors: number of the emulated device. small_blocks: use small blocks in kernels with
    one row per block, which otherwise have 512 or 1024 threads, as rows of large models need. Tests
    of the operations show that no bit depends on the block size. When single steps are timed, the
    emulator runs each one only twice, the minimum.
    """
    if name == "gpu":
        yield cuda.cupy
        return
    if problem := emulator.missing():
        pytest.skip(problem)
    other = {"hopper": "90", "turing": "75"}.get(name)
    order: Any = IN_TESTS[-1] if other else name
    checks = CHECKED if races and order == IN_TESTS[-1] else None
    capability = other or stand_in.CAPABILITY
    multiprocessors = max(multiprocessors, 8 if name == "hopper" else 0)
    with emulator.emulated(order, multiprocessors, checks, capability), quick(small_blocks):
        yield cuda.cupy


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    with running_on(request.param, small_blocks=False) as cupy:
        yield cupy


@pytest.fixture
def small_blocks(device: Any) -> Iterator[None]:
    """Use small blocks, as `running_on` does, in tests of models on `device`."""
    with quick(True) if cuda.replaced() else nullcontext():
        yield


def moved(host: NDArray[Any], offset: int) -> Any:
    """Return a copy on the current device, `offset` elements after a multiple of 512 bytes."""
    memory = np.concatenate([np.zeros(offset, host.dtype), host.ravel()])
    return cuda.cupy.asarray(memory)[offset:].reshape(host.shape)


def assert_same_bits(a: NDArray[Any], b: NDArray[Any]) -> None:
    one, other = (np.frombuffer(array.tobytes(), "uint8") for array in (a, b))
    np.testing.assert_array_equal(one, other)


def outputs(
    where: str,
    bind: Callable[..., Any],
    inputs: tuple[NDArray[Any] | None, ...],
    out: NDArray[Any] | None,
    *,
    multiprocessors: int = H200,
    **options: Any,
) -> list[NDArray[Any]]:
    """Run an operation on copies of NumPy arrays; return its output and its extra outputs.

    out: initial values of the output; None computes in place. No other input may change. On a GPU
    the operation runs twice and must give the same bits.
    """
    runs = []
    with running_on(where, multiprocessors, small_blocks=False) as cupy:
        for _ in range(2 if where == "gpu" else 1):
            arrays: list[Any] = [a if a is None else cupy.asarray(a) for a in inputs]
            to = arrays[0] if out is None else cupy.asarray(out)
            given = {
                k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()
            }
            bound = bind(tuple(arrays), to, **given)
            assert bound.run() is to
            runs.append([array.get() for array in (to, *bound.extra)])
            for array, before in zip(arrays, inputs, strict=True):
                if before is not None and array is not to:
                    assert_same_bits(array.get(), before)
    for first, last in zip(runs[0], runs[-1], strict=True):
        assert_same_bits(first, last)
    return runs[0]


def set_attributes(monkeypatch: pytest.MonkeyPatch, **attributes: int) -> None:
    """Replace attributes of the emulated device; a GPU keeps its own ones."""
    if cuda.replaced():
        known = cuda.cupy.ATTRIBUTES | attributes
        monkeypatch.setattr(cuda_arrays, "attribute_of", lambda _, name: known[name])


BARRIER = "__syncthreads();"


def edited(file: str, old: str, new: str) -> str:
    """Return a source or header of kernels_cu in which `new` replaces the only `old`."""
    text = kernels.read_source(file)
    if text.count(old) != 1:
        raise ValueError(f"{file} has {old!r} {text.count(old)} times")
    return text.replace(old, new)


@contextmanager
def with_source(file: str, text: str) -> Iterator[None]:
    """Let the emulator compile this text instead of a source or a header of kernels_cu."""
    read, options = kernels.read_source, kernels.options
    kernels._function.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
            own = (f"-I{folder}",) if file.endswith(".cuh") else ()
            if own:
                (Path(folder) / file).parent.mkdir(parents=True)
                (Path(folder) / file).write_text(text, "ascii")
            else:
                patch.setattr(kernels, "read_source", lambda at: text if at == file else read(at))
            patch.setattr(kernels, "options", lambda *given: (*own, *options(*given)))
            patch.setattr(requests, "_kernels", {})
            yield
    finally:
        kernels._function.cache_clear()


def assert_barriers_show(
    file: str,
    run: Callable[[Order], object],
    barriers: int = 1,
    barrier: str = BARRIER,
    unused: Collection[int] = (),
) -> None:
    """Assert that each barrier is needed: without it some order of threads races.

    file: a source or a header of kernels_cu, which has `barriers` barriers. run: computes the
    outputs on the emulator in an order. unused: indices of barriers that `run` does not reach.
    """
    if problem := emulator.missing():
        pytest.skip(problem)
    parts = kernels.read_source(file).split(barrier)
    assert len(parts) == barriers + 1
    with checked():
        run("forward")
    for nth in sorted({*range(barriers)} - {*unused}):
        without = barrier.join([*parts[:nth], parts[nth] + parts[nth + 1], *parts[nth + 2 :]])
        with with_source(file, without):
            assert any(finding(run, order) == "race" for order in emulator.ORDERS), nth


def finding(run: Callable[[Order], object], order: Order) -> str:
    """Return the kind of the error that the emulator finds in an order, or ""."""
    try:
        with checked():
            run(order)
    except EmulatorError as error:
        return error.finding.kind
    return ""


@contextmanager
def checked() -> Iterator[None]:
    """Search for races and for memory that nobody has written in every launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in, "USUAL", CHECKED)
        yield
