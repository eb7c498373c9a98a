"""Warm calls of the ops: a recipe serves what it was made for, and nothing else."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gpt2block import InputError

pytestmark = pytest.mark.gpu


@pytest.fixture
def warm() -> ModuleType:
    from gpt2block.ops import _warm  # noqa: PLC0415

    _warm._recipes.clear()
    module: ModuleType = _warm
    return module


@pytest.fixture
def cp() -> ModuleType:
    import cupy  # noqa: PLC0415

    module: ModuleType = cupy
    return module


def random(cp: ModuleType, seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return cp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def test_a_warm_call_gives_the_bits_of_a_cold_one(warm: ModuleType, cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    for seed in range(3):
        x, gamma = random(cp, seed, 40, 96), random(cp, seed + 9, 96)
        cold = ops.BINDERS["layernorm_gelu"]((x, gamma, None)).run()
        cp.testing.assert_array_equal(ops.layernorm_gelu(x, gamma), cold)
    assert len(warm._recipes) == 1


def test_every_output_is_new(warm: ModuleType, cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    x, one = random(cp, 0, 6, 64), cp.ones(64, "float32")
    results = [ops.layernorm(x, one, one, variant=6, stats=True) for _ in range(3)]
    assert len({array.data.ptr for result in results for array in result}) == 9
    for result in results[1:]:
        for array, first in zip(result, results[0], strict=True):
            cp.testing.assert_array_equal(array, first)


def test_what_a_launch_depends_on_makes_another_recipe(warm: ModuleType, cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    one = cp.ones(64, "float32")
    base = random(cp, 0, 1 + 4 * 64)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (base[: 4 * 64].reshape(4, 64), {}),
        (base[1:].reshape(4, 64), {}),  # not on 16 bytes
        (base[: 2 * 64].reshape(2, 64), {}),
        (base[: 4 * 64].reshape(4, 64), {"eps": 0.5}),
        (base[: 4 * 64].reshape(4, 64), {"block": 128}),
        (base[: 4 * 64].reshape(4, 64).astype("float16"), {}),
    ]
    for count, (x, options) in enumerate(cases, 1):
        gamma = one.astype(x.dtype)
        got = [ops.layernorm(x, gamma, gamma, variant=6, **options) for _ in range(2)]
        cp.testing.assert_array_equal(*got)
        assert len(warm._recipes) == count
    flat, tall = random(cp, 0, 3, 8, 4, 64), random(cp, 0, 3, 4, 8, 64).swapaxes(1, 2)
    assert flat.shape == tall.shape
    assert not np.array_equal(ops.rope(flat).get(), ops.rope(tall).get())
    np.testing.assert_array_equal(ops.rope(tall).get(), ops.rope(tall.copy()).get())


def test_an_array_given_twice_keeps_no_recipe(warm: ModuleType, cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    x, y = random(cp, 0, 5, 7), random(cp, 1, 5, 7)
    cp.testing.assert_array_equal(ops.add(x, x), x + x)
    cp.testing.assert_array_equal(ops.add(x, y), x + y)
    cp.testing.assert_array_equal(ops.add(y, x), x + y)


def test_weights_in_another_format_are_another_recipe(warm: ModuleType, cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415
    from gpt2block.weight_matrix import WeightMatrix  # noqa: PLC0415

    x, gamma = random(cp, 0, 2, 64, dtype=np.float16), cp.ones(64, "float16")
    w = random(cp, 1, 64, 64)
    for dtype in ("float16", "float8_e5m2", "float8_e4m3fn"):
        for layout in ("KN", "NK"):
            matrix = WeightMatrix.quantize(w, dtype, layout)
            cold = ops.BINDERS["rmsnorm_matmul"]((x, gamma, matrix)).run()
            for _ in range(2):
                cp.testing.assert_array_equal(ops.rmsnorm_matmul(x, gamma, matrix), cold)


def test_a_refused_call_is_refused_again(warm: ModuleType, cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    x = random(cp, 0, 4, 64)
    for _ in range(2):
        with pytest.raises(InputError, match="gamma: expected shape"):
            ops.layernorm_gelu(x, cp.ones(63, "float32"))
        with pytest.raises(InputError, match="x: expected a CuPy array"):
            ops.layernorm_gelu(x.get())
    assert not warm._recipes


def test_options_that_compare_equal_are_told_apart(warm: ModuleType, cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    qkv = random(cp, 0, 1, 8, 3, 2, 4)
    for fill in (0.0, -0.0, 0.0):
        above = ops.trimat(qkv, fill)[0, 0].get()[0, 1:]
        assert (np.signbit(above) == np.signbit(fill)).all()
    flat = random(cp, 1, 4, 12)
    ops.attention(flat, 1)
    with pytest.raises(InputError, match="n_head"):
        ops.attention(flat, True)
    count = len(warm._recipes)
    x, gamma = random(cp, 0, 4, 64), cp.ones(64, "float32")
    cp.testing.assert_array_equal(ops.rmsnorm(x, gamma, np.float64(1e-6)), ops.rmsnorm(x, gamma))
    assert len(warm._recipes) == count + 1  # a number that is not Python's own is bound anew


def test_memory_of_a_copy_lives_until_the_kernel_has_read_it(
    warm: ModuleType, cp: ModuleType
) -> None:
    from gpt2block import ops  # noqa: PLC0415

    x, gamma, w = random(cp, 0, 64, 6).T, cp.ones(64, "float32"), random(cp, 1, 64, 32)
    with pytest.raises(InputError, match="x: expected rows at one distance"):
        ops.BINDERS["rmsnorm_matmul"]((x, gamma, w))
    expected = ops.rmsnorm_matmul(cp.ascontiguousarray(x), gamma, w)
    cp.testing.assert_array_equal(ops.rmsnorm_matmul(x, gamma, w), expected)


def test_the_recipes_do_not_grow_without_end(
    warm: ModuleType, cp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpt2block import ops  # noqa: PLC0415

    monkeypatch.setattr(warm, "MOST", 3)
    for n in range(1, 9):
        ops.softmax(random(cp, 0, 2, n))
        assert len(warm._recipes) <= 3
