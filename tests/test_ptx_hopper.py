"""Kernels of kernels_cu for sm_90a on the PTX engine."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from gpt2block import ops
from gpt2block.cuda import arrays, kernels, replaced_by, requests, tensor_maps
from gpt2block.emulator import stand_in
from gpt2block.ptx import engine, nvrtc, parse
from gpt2block.ptx.tensor_maps import TensorMap
from tests.attentions import assert_right
from tests.products import KERNELS, Case
from tests.test_attention_mma import made

pytestmark = pytest.mark.slow  # the engine is compiled first

MAP = struct.Struct("<Q4I5Q5I5I")  # as TensorMap.encoded
ITEMS = {0: 1, 6: 2, 7: 4, 9: 2}  # values of CUtensorMapDataType → bytes
_modules: dict[tuple[str, tuple[str, ...]], parse.Module] = {}


class RawModule:
    """A module of kernels on the engine, instead of those on the emulator."""

    def __init__(self, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        own = [each for each in options if each.startswith("-I")]
        if (code, options) not in _modules:
            compiled = nvrtc.compile(code, name="kernel.cu", arch="sm_90a", options=own)
            assert isinstance(compiled, nvrtc.Compiled), compiled
            _modules[code, options] = parse.Module(compiled.ptx)
        self.module = _modules[code, options]

    def compile(self) -> None:
        pass

    def get_function(self, name: str) -> Function:
        return Function(self.module, name)


class Function:
    """A kernel on the engine. A launch must have no findings."""

    def __init__(self, module: parse.Module, name: str) -> None:
        self.module, self.name = module, name
        self.kernel = self
        self.ptr = 0

    def __call__(self, grid: Any, block: Any, args: Sequence[Any], shared_mem: int = 0) -> None:
        spans: dict[int, Any] = {}
        values = [_value(arg, spans) for arg in args]
        result = engine.launch(self.module, self.name, grid, block, values, shared=shared_mem)
        assert result.findings == ()


def _value(arg: Any, spans: dict[int, Any]) -> Any:
    if isinstance(arg, np.void):
        address, rank, item, swizzle, _, *numbers = MAP.unpack_from(arg.tobytes())
        if not address:
            return bytes(128)
        strides, sizes, box = (tuple(numbers[k : k + rank]) for k in (0, 5, 10))
        return TensorMap(*_span(address, spans), item, sizes, strides[1:], box, swizzle)
    if isinstance(arg, np.uintp):
        return engine.Pointer(*_span(int(arg), spans)) if arg else None
    return arg


def _span(address: int, spans: dict[int, Any]) -> tuple[Any, int]:
    """Return the allocation that contains an address, as an array, and the address's offset."""
    found = stand_in._allocation(address)
    assert found
    start, size = found
    memory = (ctypes.c_uint8 * size).from_address(start)
    return spans.setdefault(start, np.ctypeslib.as_array(memory)), address - start


def _encode(place: int, dtype: int, rank: int, address: int, *layout: Any) -> int:
    sizes, strides, box, _, _, swizzle, *_ = layout
    item, unused = ITEMS[dtype], (0,) * (5 - rank)
    numbers = (0, item, *strides, *unused, *sizes, *unused, *box, *unused)
    ctypes.memmove(place, MAP.pack(address, rank, item, 16 << swizzle, *numbers), MAP.size)
    return 0


@pytest.fixture
def cp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the substitute of CuPy, for a device of compute capability 9.0 on the engine."""
    monkeypatch.setattr(stand_in, "RawModule", RawModule)
    monkeypatch.setattr(stand_in.Device, "compute_capability", "90")
    monkeypatch.setitem(stand_in.ATTRIBUTES, "MaxSharedMemoryPerBlockOptin", 232448)
    for name in ("float64", "exp", "abs", "where", "nextafter"):  # for the references
        monkeypatch.setattr(stand_in, name, getattr(np, name), raising=False)
    monkeypatch.setattr(tensor_maps, "_encode", lambda: _encode)
    monkeypatch.setattr(requests, "_kernels", {})
    caches = tensor_maps._encoded, kernels._function, arrays._capability, arrays._attribute
    for cache in caches:
        cache.cache_clear()
    with replaced_by(stand_in), stand_in.device("forward", 4):
        yield stand_in
    for cache in caches:
        cache.cache_clear()


HOPPER = [name for name in KERNELS if "hopper" in name]


@pytest.mark.parametrize("name", HOPPER)
def test_products(name: str, cp: Any) -> None:
    kernel, case = KERNELS[name], Case(70, 128, 192)
    given = kernel.made(case)
    kernel.assert_right(kernel.run(cp, given, case, False, ()), given, case, "gpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "B", "T"), [("float16", 2, 30), ("bfloat16", 16, 40)])
def test_attention(dtype: str, B: int, T: int, causal: bool, cp: Any) -> None:
    x = made(dtype, B * T, 1).reshape(B, T, -1)
    got = ops.attention(cp.asarray(x), 1, causal, "hopper").get()
    assert_right(got.reshape(B * T, -1), x.reshape(B * T, -1), [T] * B, (1, 1, 64), causal)
