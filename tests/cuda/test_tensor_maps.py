"""Tensor maps: arguments of the driver's call, with a fake driver; kernel tests test the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpt2block.cuda import tensor_maps
from gpt2block.cuda.tensor_maps import NO_MAP, tensor_map
from gpt2block.errors import DeviceError


class Driver:
    """A fake driver that writes 7s into every map and records its arguments."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.status = 0

    def __call__(self, *given: Any) -> int:
        place, dtype, rank, address, sizes, strides, box, steps, _, swizzle, *_ = given
        assert place % 64 == 0
        assert rank == len(sizes) == len(box) == len(strides) + 1
        assert list(steps) == [1] * rank
        lists = {"sizes": list(sizes), "strides": list(strides), "box": list(box)}
        self.told.append({"dtype": dtype, "address": address, **lists, "swizzle": swizzle})
        ctypes.memset(place, 7, tensor_maps.BYTES)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    stand_in = Driver()
    monkeypatch.setattr(tensor_maps, "_encode", lambda: stand_in)
    tensor_maps._encoded.cache_clear()
    yield stand_in
    tensor_maps._encoded.cache_clear()


def array(shape: tuple[int, ...], dtype: Any, address: int = 4096) -> Any:
    like = np.empty(shape, dtype)
    return SimpleNamespace(
        shape=shape, strides=like.strides, dtype=like.dtype, data=SimpleNamespace(ptr=address)
    )


def test_the_driver_counts_from_the_last_axis(driver: Driver) -> None:
    made = tensor_map(array((2, 1000, 768), np.float16), (1, 128, 64))
    assert made.encoded().tobytes() == bytes([7]) * 128
    assert NO_MAP.encoded().tobytes() == bytes(128)
    (told,) = driver.told
    lists = {"sizes": [768, 1000, 2], "strides": [1536, 1_536_000], "box": [64, 128, 1]}
    assert told == {"dtype": 6, "address": 4096, **lists, "swizzle": 3}


@pytest.mark.parametrize(
    ("dtype", "columns", "number", "swizzle"),
    [
        (ml_dtypes.bfloat16, 64, 9, 3),
        (ml_dtypes.bfloat16, 32, 9, 2),
        (np.float16, 16, 6, 1),
        (np.float32, 32, 7, 3),
    ],
)
def test_a_row_of_a_box_says_the_swizzle(
    driver: Driver, dtype: Any, columns: int, number: int, swizzle: int
) -> None:
    tensor_map(array((1, 8, 768), dtype), (1, 8, columns)).encoded()
    assert (driver.told[0]["dtype"], driver.told[0]["swizzle"]) == (number, swizzle)


def test_the_same_array_is_told_once_and_another_address_again(driver: Driver) -> None:
    box = (1, 64, 64)
    first = tensor_map(array((1, 64, 768), np.float16), box).encoded()
    assert tensor_map(array((1, 64, 768), np.float16), box).encoded() is first
    tensor_map(array((1, 64, 768), np.float16, 8192), box).encoded()
    tensor_map(array((1, 65, 768), np.float16), box).encoded()
    assert [told["address"] for told in driver.told] == [4096, 8192, 4096]


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.status = 1
    with pytest.raises(DeviceError, match=r"CUDA error 1 for float16 \(1, 8, 12\), strides"):
        tensor_map(array((1, 8, 12), np.float16), (1, 8, 64)).encoded()


@pytest.mark.gpu
def test_a_thread_that_never_used_the_gpu() -> None:
    import cupy  # noqa: PLC0415

    memory = cupy.zeros((1, 128, 64), "float16")
    tensor_maps._encoded.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(tensor_map(memory, (1, 64, 64)).encoded).result()
    tensor_maps._encoded.cache_clear()
    assert there.tobytes() == tensor_map(memory, (1, 64, 64)).encoded().tobytes()
