"""Repeated calls of the ops: a recipe serves only calls like the one it was made for.

Without a GPU, CuPy arrays have host memory, and launches are recorded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gpt2block import InputError, ops
from gpt2block.cuda import kernels, overlap, requests
from gpt2block.cuda.tensor_maps import NO_MAP, tensor_map
from gpt2block.ops.recipe import Recipe, addresses_of
from gpt2block.ops.registry import OPERATIONS
from gpt2block.ops.warm import _cached_calls
from tests.threads import together


class Recorder:
    """A recorder of launches instead of a GPU: kernel, grid and arguments."""

    def __init__(self, cp: Any) -> None:
        self.cp = cp
        self.launches: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []
        self.memory: list[Any] = []

    def array(self, shape: Any, dtype: Any = "float32", offset: int = 0) -> Any:
        """Return an array in host memory, `offset` bytes after a multiple of 512; never read it."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize + offset
        raw = (ctypes.c_char * (size + 512))()
        self.memory.append(raw)  # kept, so that no address is reused
        address = -(-ctypes.addressof(raw) // 512) * 512 + offset
        owner = self.cp.cuda.UnownedMemory(address, size, raw, 0)
        return self.cp.ndarray(shape, dtype, self.cp.cuda.MemoryPointer(owner, 0))

    def load(self, file: str, name: str, defines: kernels.Defines = ()) -> Any:
        def function(grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
            self.launches.append((name, grid, tuple(args)))

        function.allow_shared = lambda nbytes: None  # type: ignore[attr-defined]
        return function


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    pytest.importorskip("cupy", reason="the ops need CuPy, if not a GPU")
    from gpt2block.cuda import cards  # noqa: PLC0415
    from gpt2block.cuda import cupy as cp  # noqa: PLC0415

    recorder = Recorder(cp)
    attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}
    device = SimpleNamespace(id=0, attributes=attributes, compute_capability="90")
    monkeypatch.setattr(cp.cuda, "Device", lambda *_: device)
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cp, "empty", recorder.array)
    monkeypatch.setattr(kernels, "load", recorder.load)
    caches = (_cached_calls.clear, cards.attribute_of.cache_clear, cards._capability.cache_clear)
    for forget in caches:
        forget()
    yield recorder
    for forget in caches:  # cached properties belong to this device
        forget()


def test_addresses_alone_change(host: Recorder) -> None:
    outs = []
    for _ in range(3):
        x, gamma = host.array((40, 96)), host.array(96)
        outs.append((x, gamma, ops.layernorm_gelu(x, gamma)))
    assert len(_cached_calls) == 1
    first, *others = host.launches
    for (name, grid, args), arrays in zip(host.launches, outs, strict=True):
        x, gamma, out = arrays
        assert (name, grid) == first[:2]
        assert args[:4] == (x.data.ptr, out.data.ptr, gamma.data.ptr, 0)
        assert args[4:] == first[2][4:]
        assert [type(a) for a in args] == [type(a) for a in first[2]]
    assert len(others) == 2


def test_each_of_these_is_bound_by_itself(host: Recorder) -> None:
    def call(x: Any, **options: Any) -> None:
        ops.rmsnorm(x, host.array(x.shape[-1], x.dtype), **options)

    wide = host.array((4, 128))
    cases: list[tuple[Any, dict[str, Any]]] = [
        (host.array((4, 64)), {}),
        (host.array((4, 64), offset=4), {}),
        (host.array((2, 64)), {}),
        (host.array((4, 64), "float16"), {}),
        (wide[:, :64], {}),
        (host.array((4, 64)), {"eps": 0.5}),
        (host.array((4, 64)), {"eps": 1}),
        (host.array((4, 64)), {"block": 64}),
    ]
    for count, (x, options) in enumerate(cases, 1):
        for _ in range(2):
            call(x, **options)
        assert len(_cached_calls) == count
    call(host.array((4, 64)), eps=np.float64(0.5))  # not a Python number: bound in each call
    assert len(_cached_calls) == len(cases)


def test_what_compares_equal_is_told_apart(host: Recorder) -> None:
    qkv = host.array((1, 8, 3, 2, 4))
    for fill in (0.0, -0.0, 0.0, -0.0):
        ops.trimat(qkv, fill)
        filled = [args for name, _, args in host.launches if name == "trimat_fill"][-1]
        values = [a for a in filled if isinstance(a, np.float32)]
        assert [np.signbit(v) for v in values] == [np.signbit(fill)]
    flat = host.array((4, 12))
    ops.attention(flat, 1, variant="online")
    with pytest.raises(InputError, match="n_head"):
        ops.attention(flat, True, variant="online")


def test_an_array_given_twice_is_another_call(host: Recorder) -> None:
    x, y = host.array((5, 7)), host.array((5, 7))
    for calls, (a, b) in enumerate(((x, y), (y, x), (x, x), (y, y)), 1):
        ops.add(a, b)
        assert len(_cached_calls) == (1 if calls < 3 else 2)
        assert host.launches[-1][2][:2] == (a.data.ptr, b.data.ptr)


def test_a_recipe_moves_every_address(host: Recorder) -> None:
    x, y, z = (host.array((1, 64, 64), "float16") for _ in range(3))
    tensors = tensor_map(x, (1, 64, 64)), NO_MAP
    args = (*tensors, np.uintp(y.data.ptr), np.uintp(0), np.int32(y.data.ptr % 4096))
    launch = requests.Launch("f", None, (1,), (32,), args)
    early = overlap.OverlappedLaunch("f", None, (1,), (32,), args)
    recipe = Recipe.of((launch, early), addresses_of((x, y)))
    assert recipe is not None
    moved = recipe.at(addresses_of((z, x)))
    expected = (tensor_map(z, (1, 64, 64)), NO_MAP, np.uintp(x.data.ptr), *args[3:])
    assert [each.args for each in moved] == [expected] * 2
    assert [type(each) for each in moved] == [requests.Launch, overlap.OverlappedLaunch]
    changed = Recipe.of((launch,), addresses_of((x, y, y)))  # an input is also an output
    assert changed is not None
    assert changed.at(addresses_of((z, x, y)))[0].args == expected
    assert Recipe.of((launch,), addresses_of((x, z))) is None  # y is not among the arrays
    assert Recipe.of((launch, x), addresses_of((x, y))) is None  # x is not a launch


def test_the_oldest_recipe_is_forgotten(host: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("gpt2block.ops.warm"), "MAX_CALLS", 3)
    for n in range(1, 9):
        ops.softmax(host.array((2, n)))
        assert len(_cached_calls) <= 3


def test_threads_forget_known_at_once(host: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("gpt2block.ops.warm"), "MAX_CALLS", 3)
    inputs = [host.array((2, n)) for n in range(1, 40)]

    def work(number: int) -> None:
        for x in inputs * 5:
            assert ops.softmax(x).shape == x.shape

    assert together(work) == []
    assert len(_cached_calls) <= 3


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.fixture
def warm() -> ModuleType:
    _cached_calls.clear()
    return import_module("gpt2block.ops.warm")


@pytest.fixture
def cp() -> ModuleType:
    import cupy  # noqa: PLC0415

    return cast("ModuleType", cupy)


def random(cp: ModuleType, seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return cp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


@pytest.mark.gpu
def test_every_output_is_new(warm: ModuleType, cp: ModuleType) -> None:
    x, gamma, beta = random(cp, 0, 6, 64), cp.ones(64, "float32"), cp.zeros(64, "float32")
    results = [ops.layernorm(x, gamma, beta, variant=6, stats=True) for _ in range(3)]
    assert len(warm._cached_calls) == 1
    assert len({array.data.ptr for result in results for array in result}) == 9
    for result in results[1:]:
        for array, first in zip(result, results[0], strict=True):
            cp.testing.assert_array_equal(array, first)


@pytest.mark.gpu
def test_weights_in_another_format_are_another_recipe(warm: ModuleType, cp: ModuleType) -> None:
    from gpt2block.models.weights.matrix import WeightMatrix  # noqa: PLC0415

    x, gamma = random(cp, 0, 2, 64, dtype=np.float16), cp.ones(64, "float16")
    w = random(cp, 1, 64, 64)
    for dtype in ("float16", "float8_e5m2", "float8_e4m3fn"):
        for layout in ("KN", "NK"):
            matrix = WeightMatrix.quantize(w, dtype, layout)
            cold = OPERATIONS["rmsnorm_matmul"].bind((x, gamma, matrix)).run()
            for _ in range(2):
                cp.testing.assert_array_equal(ops.rmsnorm_matmul(x, gamma, matrix), cold)


@pytest.mark.gpu
def test_memory_of_a_copy_lives_until_the_kernel_has_read_it(
    warm: ModuleType, cp: ModuleType
) -> None:
    x, gamma, w = random(cp, 0, 64, 6).T, cp.ones(64, "float32"), random(cp, 1, 64, 32)
    with pytest.raises(InputError, match="x: expected equally spaced contiguous rows"):
        OPERATIONS["rmsnorm_matmul"].bind((x, gamma, w))
    expected = ops.rmsnorm_matmul(cp.ascontiguousarray(x), gamma, w)
    cp.testing.assert_array_equal(ops.rmsnorm_matmul(x, gamma, w), expected)
