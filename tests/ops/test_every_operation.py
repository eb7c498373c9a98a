"""Every variant of every operation, in each dtype, at odd sizes, and with inputs that do not fit.

The same `bind` runs on the CPU emulator and on a GPU. A new operation or variant is tested here as
soon as the registry lists it; its special features are tested in its own file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpt2block import InputError, emulator, ops, reference
from gpt2block.checks import SCALARS
from gpt2block.cuda import cupy
from gpt2block.emulator import stand_in
from gpt2block.ops import workload
from gpt2block.ops.operation import Operation, Variant
from gpt2block.ops.registry import OPERATIONS
from tests import devices, norms, products

SIZES = (
    {"B": 1, "T": 5, "C": 24, "N": 7, "NH": 3, "HS": 8, "V": 11, "M": 3, "K": 5, "H": 3, "D": 8},
    {"B": 2, "T": 33, "C": 128, "N": 19, "NH": 2, "HS": 12, "V": 70, "M": 17, "K": 40, "H": 1}
    | {"D": 34},
)
WITH_HEADS = ({"M": 3, "K": 64, "N": 128}, {"M": 17, "K": 96, "N": 256})  # sizes of products
DEVICES = [pytest.param("shuffled", id="emulator"), pytest.param("gpu", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES, indirect=True)


KERNELS: Sequence[Any] = (*products.KERNELS.values(), *norms.KERNELS.values())
LISTED = {(kernel.operation.name, kernel.variant) for kernel in KERNELS}


def cases() -> Iterator[Any]:
    """Yield all dtypes, both sizes and all block sizes: most cases are slow on the emulator.

    The emulator compiles a program for each case. It runs one dtype and size of a variant by
    default, and the smallest block of the first variant. Variants of LISTED run only with --slow:
    laws of products and norms test them. Kernels of tensor cores have other instructions on GPUs of
    compute capability 7.5 ("turing").
    """
    for name, operation in OPERATIONS.items():
        for place, variant in enumerate(operation.variants):
            dtypes = variant.dtypes or operation.workload.dtypes
            usual = variant.dtypes[place % len(variant.dtypes)] if variant.dtypes else dtypes[0]
            for dtype, size in product(dtypes, range(2)):
                case = f"{name}-{variant.name}-{dtype}-{size}"
                arguments = operation, variant, dtype, size, None
                of_variant = place % 2 or int(variant.name == "wgmma")
                is_usual = (name, variant.name) not in LISTED and (dtype, size) == (
                    usual,
                    of_variant,
                )
                on = {"hopper" if variant.name == "wgmma" else "emulator": is_usual}
                if variant.name in ("mma", "tri6"):
                    on["turing"] = (dtype, size) == (dtypes[0], 1)
                for device, fast in on.items():
                    order = "shuffled" if device == "emulator" else device
                    marks = () if fast else pytest.mark.slow
                    yield pytest.param(order, *arguments, id=f"{case}-{device}", marks=marks)
                yield pytest.param("gpu", *arguments, id=f"{case}-gpu", marks=pytest.mark.gpu)
            for n, block in enumerate(variant.blocks):
                one, case = (
                    (operation, variant, usual, 1, block),
                    f"{name}-{variant.name}-block{block}",
                )
                marks = pytest.mark.slow if n or place else ()
                yield pytest.param("shuffled", *one, id=case, marks=marks)
                yield pytest.param("gpu", *one, id=f"{case}-gpu", marks=pytest.mark.gpu)


every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda o: o.name)


def sizes_of(operation: Operation, size: int) -> dict[str, int]:
    if operation.workload.matrices:
        return {name: WITH_HEADS[size][name] for name in operation.workload.sizes}
    return {name: SIZES[size][name] for name in operation.workload.sizes}


def attrs_of(operation: Operation, size: int) -> dict[str, Any]:
    """Return the documented attributes, with a number of heads that fits the channels."""
    heads = (
        {"n_head": (3, 2)[size]}
        if "C" in operation.workload.sizes and "n_head" in operation.workload.attrs
        else {}
    )
    return {**operation.workload.attrs, **heads}


def prepared(operation: Operation) -> tuple[Operation, tuple[Any, ...], Any]:
    """Return the operation with attributes for its first sizes, its inputs and their result."""
    here = operation.with_workload(attrs=attrs_of(operation, 0))
    dtype, layout = operation.workload.dtypes[0], operation.workload.layout
    return here, *workload.inputs_and_truth(here, sizes_of(operation, 0), dtype, layout)


def assert_right(got: Any, truth: Any, dtype: str) -> None:
    assert workload.errors(got, truth)[1] <= workload.tolerance(dtype)


@pytest.mark.parametrize(
    ("device", "operation", "variant", "dtype", "size", "block"), list(cases()), indirect=["device"]
)
def test_a_variant_is_right(
    operation: Operation, variant: Variant, dtype: str, size: int, block: int | None, device: Any
) -> None:
    here = operation.with_workload(attrs=attrs_of(operation, size))
    layout = (operation.workload.layout, "NK")[size]
    host, truth = workload.inputs_and_truth(here, sizes_of(operation, size), dtype, layout)
    arrays = tuple(map(workload.uploaded, host))
    options = {**here.workload.attrs, **workload.options_for(here, variant, block)}
    try:
        bound = here.bind(arrays, **options)
    except InputError as problem:
        pytest.skip(str(problem))
    workload.poison(bound.out, arrays)
    got = bound.run().get()
    assert_right(got, truth, dtype)
    again = tuple(map(workload.uploaded, host))  # a launch does not keep its arrays alive
    second = here.bind(again, **options)
    workload.poison(second.out, again)  # an operation may leave elements unwritten
    np.testing.assert_array_equal(second.run().get(), got)


@every_operation
def test_host_arrays_run_on_the_emulator(operation: Operation) -> None:
    if problem := emulator.missing():
        pytest.skip(problem)
    here, host, truth = prepared(operation)
    bound = here.bind(host, **here.workload.attrs)
    assert_right(np.asarray(bound.run()), truth, operation.workload.dtypes[0])
    assert isinstance(bound.out, np.ndarray)


@on_devices
@every_operation
def test_the_function_takes_arrays_in_strides(operation: Operation, device: Any) -> None:
    """It copies them, and gives the bits of contiguous arrays where they are specified."""
    here, host, truth = prepared(operation)
    there = tuple(map(workload.uploaded, host))  # a launch does not keep its arrays alive
    expected = here.bind(there, **here.workload.attrs).run()
    arrays = [
        cupy.asarray(np.repeat(array, 2, axis=-1))[..., ::2]
        if isinstance(array, np.ndarray) and array.ndim
        else workload.uploaded(array)
        for array in host
    ]
    got = getattr(ops, operation.name)(*arrays, **here.workload.attrs)
    got = got[0] if isinstance(got, tuple) else got
    one, other = (np.where(np.isnan(truth), 0, each.get()) for each in (got, expected))
    devices.assert_same_bits(one, other)


@on_devices
@every_operation
def test_arrays_at_any_address(operation: Operation, device: Any) -> None:
    """Inputs, all or one, and the output begin one element after a multiple of 512 bytes.

    The operation refuses them or is right, perhaps with another variant or narrower loads.
    """
    here, host, truth = prepared(operation)
    there = tuple(map(workload.uploaded, host))  # a launch does not keep its arrays alive
    function, options = getattr(ops, operation.name), here.workload.attrs
    arrays = [n for n, each in enumerate(host) if isinstance(each, np.ndarray) and each.ndim]
    calls: list[Callable[[], Any]] = []
    for places in (arrays, *([n] for n in arrays)):
        given = [devices.moved(host[n], 1) if n in places else e for n, e in enumerate(there)]
        calls.append(partial(function, *given, **options))
    bound = here.bind(there, **options)
    if not any(bound.out is each for each in there):
        out = devices.moved(bound.out.get(), 1)
        calls.append(lambda: here.bind(there, out, **options).run())
    refusals = list[str]()
    for call in calls:
        try:
            got = call()
        except InputError as problem:
            refusals.append(str(problem))
        else:
            got = got[0] if isinstance(got, tuple) else got
            assert_right(got.get(), truth, operation.workload.dtypes[0])
    assert all("expected data aligned to" in each for each in refusals)


@every_operation
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_reference_computes_in_float32_and_in_any_byte_order(
    operation: Operation, dtype: Any
) -> None:
    """Results for values up to 1500, whose squares exceed float16, equal results in float32."""
    function = getattr(reference, operation.name)
    names = set(inspect.signature(function).parameters)
    attrs = {n: v for n, v in attrs_of(operation, 0).items() if n in names}
    drawn = operation.make(sizes_of(operation, 0), np.random.default_rng(0))
    made = [a * np.float32(300) if a.dtype == np.float32 else a for a in drawn]
    narrow = [a.astype(dtype) if a.dtype == np.float32 else a for a in made]
    wide = [a.astype(np.float32) if a.dtype == dtype else a for a in narrow]
    orders = [
        a if a.dtype == ml_dtypes.bfloat16 else a.astype(a.dtype.newbyteorder()) for a in narrow
    ]

    def computed(arrays: Sequence[Any]) -> list[Any]:
        with np.errstate(all="ignore"):
            found = function(*(a.copy() for a in arrays), **attrs)
        return list(found) if isinstance(found, tuple) else [found]

    for got, swapped, exact in zip(*map(computed, (narrow, orders, wide)), strict=True):
        assert got.dtype == (dtype if exact.dtype == np.float32 else exact.dtype)
        with np.errstate(over="ignore"):
            rounded = exact.astype(got.dtype).astype(np.float64)
        np.testing.assert_array_equal(got.astype(np.float64), rounded)
        np.testing.assert_array_equal(swapped.astype(np.float64), got.astype(np.float64))


@every_operation
def test_arrays_of_another_byte_order_are_refused(operation: Operation) -> None:
    if problem := emulator.missing():
        pytest.skip(problem)
    first, *others = operation.make(sizes_of(operation, 0), np.random.default_rng(0))
    swapped = first.astype(first.dtype.newbyteorder())
    with pytest.raises(InputError, match=f"got {swapped.dtype.str}"):
        operation.bind((swapped, *others), **attrs_of(operation, 0))


@on_devices
@every_operation
def test_options_that_do_not_fit_are_refused(operation: Operation, device: Any) -> None:
    """test_contracts.py tests arrays."""
    here, host, _ = prepared(operation)
    given, options = tuple(map(workload.uploaded, host)), here.workload.attrs
    for name in operation.options.keys() & SCALARS.keys():
        for value in ["text", *([] if operation.options[name] is None else [None])]:
            with pytest.raises(InputError, match=rf"{name}\b.*expected"):
                here.bind(given, **{**options, name: value})
    if len(operation.variants) > 1:
        with pytest.raises(InputError, match="unknown variant 'nothing'"):
            here.bind(given, **{**options, "variant": "nothing"})
    with pytest.raises(InputError, match="CuPy array"):
        getattr(ops, operation.name)(*host, **options)


def test_an_array_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The array only claims another device, as few machines have two GPUs."""
    with devices.running_on("forward") as device:
        x = device.zeros((2, 4), "float32")
        monkeypatch.setattr(stand_in.ndarray, "device", SimpleNamespace(id=7))
        with pytest.raises(InputError, match=r"x: .* it is on device 7: use"):
            ops.gelu(x)
