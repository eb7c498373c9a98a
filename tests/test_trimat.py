"""The causal half of attention's scores: every variant, on the CPU in three orders and on a GPU."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.errors import InputError
from gpt2block.kernels import signatures
from gpt2block.operations._types import Geometry, check_block
from gpt2block.operations.trimat import FILE, OPERATION, fill_geometry, geometry
from tests import plain
from tests.cpu_cuda import loader

Array = NDArray[Any]
UNTOUCHED = 1e30  # what the output holds before
FILLS = [math.nan, -math.inf, 0.0]
VARIANTS = [variant.name for variant in OPERATION.variants]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


class Backend(Protocol):
    def __call__(
        self, variant: str, qkv: Array, fill: float | None = None, block: int | None = None
    ) -> Array: ...


def untouched(B: int, T: int, NH: int) -> Array:
    return np.full((B, NH, T, T), UNTOUCHED, np.float32)


class OnShim:
    """The shipped `.cu` files compiled for the CPU."""

    def __init__(self, order: loader.Order) -> None:
        self.order = order

    def __call__(
        self, variant: str, qkv: Array, fill: float | None = None, block: int | None = None
    ) -> Array:
        problem = loader.missing()
        if problem:
            pytest.skip(problem)
        chosen = OPERATION.variant(variant)
        B, T, _, NH, HS = qkv.shape
        out = untouched(B, T, NH)
        how = geometry(chosen, B, T, NH, HS, check_block("trimat", chosen, block))
        self._run(chosen.file, how, [qkv, out, T])
        if fill is not None:
            self._run(FILE, fill_geometry(B, T, NH, HS), [out, T, B * NH * T, fill])
        return out

    def _run(self, file: str, how: Geometry, args: list[Any]) -> None:
        where = (how.kernel, how.grid, how.block)
        loader.run(file, *where, args, defines=how.defines, order=self.order)


class OnGpu:
    """The op bound to an output that is not empty, run twice; both must give the same bits."""

    def __call__(
        self, variant: str, qkv: Array, fill: float | None = None, block: int | None = None
    ) -> Array:
        import cupy  # noqa: PLC0415

        from gpt2block.ops import _trimat  # noqa: PLC0415

        B, T, _, NH, _ = qkv.shape
        results: list[Array] = []
        for _ in range(2):
            inputs, out = (cupy.asarray(qkv),), cupy.asarray(untouched(B, T, NH))
            bound = _trimat.bind(inputs, out, fill=fill, variant=variant, block=block)
            results.append(bound.run().get())
        np.testing.assert_array_equal(results[0], results[1])
        return results[0]


on_every_backend = pytest.mark.parametrize(
    "backend",
    [
        *(pytest.param(OnShim(order), id=f"cpu-{order}") for order in loader.ORDERS),
        pytest.param(OnGpu(), id="gpu", marks=pytest.mark.gpu),
    ],
)
one_order = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(OnShim("shuffled"), id="cpu-shuffled"),
        pytest.param(OnGpu(), id="gpu", marks=pytest.mark.gpu),
    ],
)


def random(B: int, T: int, NH: int, HS: int) -> Array:
    rng = np.random.default_rng([B, T, NH, HS])
    return (rng.standard_normal((B, T, 3, NH, HS)) + 0.5).astype(np.float32)


def below(scores: Array) -> Array:
    """The elements on and below the diagonal."""
    half: Array = scores[..., np.tri(scores.shape[-1], dtype=bool)]
    return half


def above(scores: Array) -> Array:
    half: Array = scores[..., ~np.tri(scores.shape[-1], dtype=bool)]
    return half


def one_after_the_other(qkv: Array) -> Array:
    """The plain evaluation."""
    q, k = (np.ascontiguousarray(qkv[:, :, i].swapaxes(1, 2)) for i in range(2))
    total: Array = plain.product(q, k.swapaxes(-1, -2)) / np.float32(math.sqrt(qkv.shape[-1]))
    return total


def assert_right(got: Array, qkv: Array) -> None:
    truth = reference.trimat(qkv.astype(np.float64))
    plain.assert_as_accurate(below(got), below(truth), below(one_after_the_other(qkv)))


# --- what it means


@pytest.mark.parametrize("fill", [None, *FILLS])
def test_the_reference_is_the_formula(fill: float | None) -> None:
    B, T, NH, HS = 2, 5, 3, 4
    qkv = random(B, T, NH, HS).astype(np.float64)
    got = reference.trimat(qkv, fill)
    assert got.shape == (B, NH, T, T)
    for b, h, i, j in np.ndindex(got.shape):
        expected = math.nan if fill is None else fill
        if j <= i:
            expected = sum(qkv[b, i, 0, h, s] * qkv[b, j, 1, h, s] for s in range(HS)) / 2
        np.testing.assert_allclose(got[b, h, i, j], expected, rtol=1e-14, atol=1e-14)
    for dtype in (np.float32, np.float64):
        assert reference.trimat(qkv.astype(dtype), fill).dtype == dtype


def test_the_operation_describes_itself() -> None:
    sizes = {"B": 2, "T": 7, "NH": 3, "HS": 4}
    (qkv,) = OPERATION.make(sizes, np.random.default_rng(0))
    assert qkv.shape == (2, 7, 3, 3, 4)
    assert qkv.dtype == np.float32
    outputs = 2 * 3 * (7 + 6 + 5 + 4 + 3 + 2 + 1)
    assert OPERATION.flops(sizes) == outputs * 4 * 2
    assert OPERATION.traffic(sizes) == 4 * (outputs + qkv.size * 2 // 3)
    for variant in OPERATION.variants:
        assert set(variant.kernels) <= set(signatures(variant.file))


def test_an_unknown_variant_or_block_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'tri6': expected one of naive, registers, tri3, tri4"):
        OPERATION.variant("tri6")
    with pytest.raises(InputError, match=r"block size 48: expected one of 32, 64, 128, 256"):
        check_block("trimat", OPERATION.variant("tri3"), 48)
    with pytest.raises(InputError, match=r"tri4: block size 128: expected one of 256"):
        check_block("trimat", OPERATION.variant("tri4"), 128)


# --- every variant


@every_variant
@on_every_backend
@settings(max_examples=6)
@given(
    B=st.integers(1, 2),
    T=st.integers(1, 40),
    heads=st.sampled_from([(1, 4), (3, 20), (1, 64), (2, 80)]),
)
@example(B=1, T=1, heads=(3, 20))
@example(B=2, T=7, heads=(1, 64))
@example(B=1, T=8, heads=(2, 80))
@example(B=1, T=12, heads=(3, 20))
@example(B=1, T=36, heads=(1, 4))
def test_any_length(backend: Backend, variant: str, B: int, T: int, heads: tuple[int, int]) -> None:
    qkv = random(B, T, *heads)
    assert_right(backend(variant, qkv), qkv)


@pytest.mark.parametrize("T", [128, 129, 140, 259])
@pytest.mark.parametrize("variant", ["tri4", "tri5"])
@on_every_backend
def test_more_than_one_tile(backend: Backend, variant: str, T: int) -> None:
    qkv = random(1, T, 3, 20)
    assert_right(backend(variant, qkv), qkv)


def crossed(variant: str, T: int) -> int:
    """The side of the tiles that the diagonal crosses, which are computed whole."""
    if variant == "tri5":
        return 4 if T % 4 == 0 else 1
    return 128 if variant == "tri4" else 8


@pytest.mark.parametrize("T", [1, 7, 12, 33, 140])
@every_variant
@on_every_backend
def test_tiles_above_the_diagonal_are_untouched(backend: Backend, variant: str, T: int) -> None:
    got = backend(variant, random(1, T, 3, 20))
    i, j = np.indices((T, T)) // crossed(variant, T)
    assert (got[..., j > i] == UNTOUCHED).all()


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("T", [1, 4, 7, 12, 140, 157])
@every_variant
@one_order
def test_fill_stands_everywhere_above_the_diagonal(
    backend: Backend, variant: str, T: int, fill: float
) -> None:
    qkv = random(1, T, 3, 20)
    got = backend(variant, qkv, fill)
    np.testing.assert_array_equal(above(got), np.float32(fill))
    np.testing.assert_array_equal(below(got), below(backend(variant, qkv)))


@every_variant
@one_order
def test_an_output_depends_on_its_two_rows_alone(backend: Backend, variant: str) -> None:
    T, i, j = 13, 6, 3
    qkv = random(2, T, 3, 20)
    qkv[1, i, 0, 2] = np.nan  # a row of Q, and below a row of K: of one head
    qkv[1, j, 1, 2] = np.nan
    qkv[:, :, 2] = np.nan  # V is not read
    wrong = np.zeros((2, 3, T, T), bool)
    wrong[1, 2, i, :] = wrong[1, 2, :, j] = True
    np.testing.assert_array_equal(below(np.isnan(backend(variant, qkv))), below(wrong))


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("variant", ["naive", "registers", "tri3"])
@one_order
def test_block_sizes(backend: Backend, variant: str, block: int) -> None:
    for T in (12, 71):
        qkv = random(1, T, 3, 20)
        assert_right(backend(variant, qkv, block=block), qkv)


@pytest.mark.parametrize(("variant", "barriers"), [("tri4", 2), ("tri5", 1)])
def test_a_missing_barrier_shows(variant: str, barriers: int) -> None:
    if loader.missing():
        pytest.skip(str(loader.missing()))
    chosen = OPERATION.variant(variant)
    source = loader.Source.shipped(chosen.file)
    parts = source.text.split("__syncthreads();")
    assert len(parts) == barriers + 1
    qkv, shape = random(1, 40, 1, 64), geometry(chosen, 1, 40, 1, 64, 256)
    for n in range(barriers):
        edited = "__syncthreads();".join([*parts[:n], parts[n] + parts[n + 1], *parts[n + 2 :]])
        results = []
        for order in loader.ORDERS:
            out = untouched(1, 40, 1)
            racing = loader.Source(chosen.file, edited)
            where, args = (shape.kernel, shape.grid, shape.block), [qkv, out, 40]
            loader.run(racing, *where, args, defines=shape.defines, order=order)
            results.append(below(out))
        right = below(OnShim("forward")(variant, qkv))
        assert any(not np.array_equal(result, right) for result in results)


# --- on a GPU alone


@pytest.fixture(scope="module")
def cp() -> ModuleType:
    import cupy  # noqa: PLC0415

    module: ModuleType = cupy
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 1024, 12, 64), (2, 1023, 3, 64), (1, 2052, 1, 80)])
@every_variant
def test_large_sizes(cp: ModuleType, variant: str, shape: tuple[int, ...]) -> None:
    from gpt2block import ops  # noqa: PLC0415

    qkv = cp.asarray(random(*shape))
    got = ops.trimat(qkv, variant=variant)
    for b, h in ((0, 0), (shape[0] - 1, shape[2] - 1)):
        one = qkv[b : b + 1, :, :, h : h + 1].get()
        assert_right(got[b : b + 1, h : h + 1].get(), one)
    filled = ops.trimat(qkv, fill=-math.inf, variant=variant)
    here = cp.tri(shape[1], dtype=bool)
    assert bool((filled == cp.where(here, got, cp.float32(-math.inf))).all())


@pytest.mark.gpu
def test_all_variants_give_the_same_bits(cp: ModuleType) -> None:
    """Each adds the products in order: what differs is how they come to the registers."""
    from gpt2block import ops  # noqa: PLC0415

    qkv = cp.asarray(random(2, 300, 3, 64))
    first, *others = (ops.trimat(qkv, fill=0.0, variant=variant) for variant in VARIANTS)
    for other in others:
        assert bool((first == other).all())


@pytest.mark.gpu
def test_a_grid_of_thousands_of_tiles(cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    qkv = cp.asarray(random(1, 20001, 1, 4))
    expected, got = (ops.trimat(qkv, fill=0.0, variant=variant) for variant in ("tri4", "tri5"))
    assert bool((got == expected).all())


@pytest.mark.gpu
def test_views_are_copied(cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    qkv = random(1, 9, 3, 20)
    expected = ops.trimat(cp.asarray(qkv), fill=0.0)
    strided = cp.asarray(np.repeat(qkv, 2, axis=1))[:, ::2]
    flat = cp.zeros(qkv.size + 1, cp.float32)
    flat[1:] = cp.asarray(qkv).ravel()
    for view in (strided, flat[1:].reshape(qkv.shape)):
        assert bool((ops.trimat(view, fill=0.0) == expected).all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "attrs", "message"),
    [
        ((2, 5, 3, 20), {}, r"qkv: expected \(B, T, 3, NH, HS\), got \(2, 5, 3, 20\)"),
        ((2, 5, 2, 1, 20), {}, r"qkv: expected \(B, T, 3, NH, HS\)"),
        ((2, 5, 3, 1, 6), {}, "head size 6: expected a multiple of 4"),
        ((2, 0, 3, 1, 8), {}, "expected at least one element"),
        ((256, 1, 3, 256, 4), {}, r"B · NH 65,536: expected at most 65,535"),
        ((1, 5, 3, 1, 8), {"variant": "tri6"}, "unknown variant 'tri6': expected one of naive"),
        ((1, 5, 3, 1, 8), {"variant": "tri3", "block": 48}, "block size 48: expected one of 32"),
        ((1, 5, 3, 1, 8), {"fill": "inf"}, "fill: expected None or a float32 number .* 'inf'"),
        ((1, 5, 3, 1, 8), {"fill": 1e39}, "fill: expected None or a float32 number"),
        ((1, 5, 3, 1, 8), {"fill": 10**400}, "fill: expected None or a float32 number"),
        ((1, 5, 3, 1, 8), {"fill": True}, "fill: expected None or a float32 number"),
    ],
)
def test_bad_input(
    cp: ModuleType, shape: tuple[int, ...], attrs: dict[str, Any], message: str
) -> None:
    from gpt2block import ops  # noqa: PLC0415

    with pytest.raises(InputError, match=message):
        ops.trimat(cp.zeros(shape, cp.float32), **attrs)


@pytest.mark.gpu
def test_bad_arrays(cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415
    from gpt2block.ops import _trimat  # noqa: PLC0415

    qkv = cp.zeros((1, 5, 3, 2, 8), cp.float32)
    with pytest.raises(InputError, match="qkv: expected a CuPy array, got ndarray"):
        ops.trimat(qkv.get())
    with pytest.raises(InputError, match="qkv: expected float32, got float64"):
        ops.trimat(qkv.astype(cp.float64))
    with pytest.raises(InputError, match=r"out: expected shape \(1, 2, 5, 5\)"):
        _trimat.bind((qkv,), cp.zeros((1, 2, 5, 4), cp.float32))
    shifted = cp.zeros(51, cp.float32)[1:].reshape(1, 2, 5, 5)
    with pytest.raises(InputError, match="out: expected data aligned to 16 bytes"):
        _trimat.bind((qkv,), shifted)
