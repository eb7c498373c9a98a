"""Random calls of `reference` and the weights' constructors: an InputError, or a right result."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2block import (
    BlockWeights,
    GPT2Config,
    GPT2Weights,
    HiLoMatrix,
    InputError,
    Sampling,
    WeightMatrix,
    random_input,
    reference,
)
from gpt2block.models import number_formats
from gpt2block.ops.registry import OPERATIONS

SIZES = (1, 2, 3, 4, 6, 12)
DTYPES: tuple[Any, ...] = (
    np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8, bool,
    complex, object, "U3", "datetime64[s]",
)  # fmt: skip
CONFIG = GPT2Config(n_layer=1, n_head=2, n_embd=4, n_ctx=3, vocab_size=6)
SCALARS: tuple[Any, ...] = (
    None, True, False, np.True_, -1, 0, 1, 2, 3, 4, 10**400, -(10**400), 1e-5, 1.5, np.inf,
    np.nan, np.int64(2), np.uint8(2), np.float32(0.5), 1j, "KN", "NK", "float8_e5m2", "x", "\ud800",
    b"x", [], {}, (2, 4), (0,), (-1, 2), ((2,),), CONFIG, "gpt3", Sampling(), object(), float, ...,
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for name, function in vars(reference).items()
    if inspect.isfunction(function)
    and function.__module__ in (reference.__name__, number_formats.__name__)
    and not name.startswith("_")
} | {
    "from_packed": BlockWeights.from_packed,
    "BlockWeights.random": BlockWeights.random,
    "GPT2Weights.random": GPT2Weights.random,
    "random_input": random_input,
    "astype": BlockWeights.random(0, CONFIG).astype,
    "HiLoMatrix": HiLoMatrix,
    "HiLoMatrix.from_float32": HiLoMatrix.from_float32,
    "WeightMatrix": WeightMatrix,
    "quantize": WeightMatrix.quantize,
    "Sampling": Sampling,
    "GPT2Config": GPT2Config,
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass")


# Functions whose results are not floats that a call with float64 arrays can check.
EXACT = {"hi_lo", "joined", "to_fp8", "from_fp8", "sample_token", *list(FUNCTIONS)[-11:]}


def random_array(rng: random.Random) -> Any:
    shape = [rng.choice((0, *SIZES) if rng.random() < 0.1 else SIZES)
             for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5)))]  # fmt: skip
    dtype = rng.choice(DTYPES) if rng.random() < 0.4 else rng.choice((np.float32, np.float64))
    array: Any = np.random.default_rng(rng.getrandbits(32)).integers(-1, 4, shape).astype(dtype)
    kind = rng.random()
    if kind < 0.05:
        return np.ma.masked_array(array) if array.ndim != 2 else np.asmatrix(array)
    if kind < 0.1:
        return array.tolist()
    if kind < 0.2:
        return array[..., ::-1] if array.ndim else array
    if (
        kind < 0.25
        and array.ndim == 2
        and array.size
        and array.dtype.name in ("float32", "float16")
    ):
        return WeightMatrix(np.ascontiguousarray(array), array.dtype.name)
    return array


def random_argument(rng: random.Random, parameter: inspect.Parameter) -> Any:
    """Draw an argument, mostly of a fitting kind, so that calls pass the first check."""
    if parameter.name == "config" and rng.random() < 0.5:
        return CONFIG  # the default, GPT-2 small, is slow
    if (
        rng.random() < 0.3
        and parameter.name != "config"
        and parameter.default is not inspect.Parameter.empty
    ):
        return parameter.default
    if rng.random() < 0.15:
        return BlockWeights.random(0, CONFIG)
    return random_array(rng) if rng.random() < 0.7 else rng.choice(SCALARS)


def fitting_arguments(rng: random.Random, name: str) -> dict[str, Any]:
    """Draw arguments of a `reference` function that fit each other: a small workload."""
    few = {"n_head": 2, "n_kv_head": 1, "head_dim": 2, "start": 2}
    workload, parameters = OPERATIONS[name].workload, inspect.signature(FUNCTIONS[name]).parameters
    attrs = {key: few.get(key, value) for key, value in workload.attrs.items()}
    sizes = {letter: 2 if letter in ("NH", "B") else 4 for letter in workload.sizes}
    sizes |= {letter: rng.choice((1, 2, 6)) for letter in ("T", "M") if letter in sizes}
    draw = np.random.default_rng(rng.getrandbits(32))
    arrays = OPERATIONS[name].with_workload(attrs=attrs).make(sizes, draw)
    given = dict(zip(parameters, arrays, strict=False))
    return given | {key: value for key, value in attrs.items() if key in parameters}


def refused_or_right(name: str, arguments: dict[str, Any]) -> str:
    """Return "refused" or "right"; an exception other than InputError propagates."""
    with np.errstate(all="ignore"):
        try:
            found = FUNCTIONS[name](**arguments)
        except InputError:
            return "refused"
        repr(found)
        if name in EXACT:
            return "right"
        floats = [value.dtype for value in arguments.values() if hasattr(value, "dtype")]
        if all(
            np.dtype(dtype).name in ("float32", "float64", "int64", "int32") for dtype in floats
        ):
            truth = FUNCTIONS[name](**{key: in_float64(one) for key, one in arguments.items()})
            for got, expected in zip(parts(found), parts(truth), strict=True):
                assert type(got) in (np.ndarray, np.float32, np.float64)
                np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    return "right"


def in_float64(value: Any) -> Any:
    if isinstance(value, WeightMatrix):
        return value  # dequantized values do not change
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return np.array(value, np.float64)  # also contiguous
    return value


def parts(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def call_randomly(seed: int) -> str:
    rng = random.Random(seed)
    if rng.random() < 0.5:
        name = rng.choice(list(FUNCTIONS))
        parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
        arguments = {one.name: random_argument(rng, one) for one in parameters}
    else:
        name = rng.choice([*OPERATIONS])
        arguments = fitting_arguments(rng, name)
        if rng.random() < 0.8:
            changed = rng.choice(list(arguments))
            arguments[changed] = random_array(rng) if rng.random() < 0.6 else rng.choice(SCALARS)
    try:
        return refused_or_right(name, arguments)
    except Exception as error:
        shown = {
            key: (getattr(value, "dtype", ""), getattr(value, "shape", None) or repr(value)[:80])
            for key, value in arguments.items()
        }
        raise AssertionError(f"seed {seed}: {name}({shown}): {error!r}") from error


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_calls(seed: int) -> None:
    call_randomly(seed)


def test_random_calls_reach_both_ends() -> None:
    found = [call_randomly(seed) for seed in range(600)]
    assert found.count("refused") > 100
    assert found.count("right") > 50


def test_small_numpy_integers_do_not_overflow() -> None:
    two: Any = np.uint8(2)
    qkv = np.random.default_rng(0).standard_normal((3, 1536))
    np.testing.assert_array_equal(reference.attention(qkv, two), reference.attention(qkv, 2))
    x = qkv.reshape(3, 3, 512)
    np.testing.assert_array_equal(reference.rope(x, np.uint8(255)), reference.rope(x, 255))
    packed = BlockWeights.random(0, GPT2Config(n_head=2, n_embd=300)).to_packed()
    assert BlockWeights.from_packed(packed, np.int16(300), two).n_head == 2


def test_calls_that_do_not_fit_the_signature_are_type_errors() -> None:
    x = np.ones((2, 3))
    for args, options in (((), {}), ((x, x), {}), ((x,), {"x": x}), ((x,), {"y": x})):
        with pytest.raises(TypeError, match="gelu"):
            reference.gelu(*args, **options)
