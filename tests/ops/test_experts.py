"""Mixtures of experts: compared with float64, and with the bits of `linear` for a row alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpt2block import InputError, reference
from gpt2block.cuda.arrays import mapped
from gpt2block.models.weights.gguf import INT4, TYPES, GgufMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops import experts, registry
from gpt2block.ops.engines import linear_gguf
from tests import plain
from tests.devices import assert_same_bits, every_device, on_hopper, one_order, slow
from tests.gpus import cupy_with
from tests.ops.test_overlap import assert_waits

ROUNDING = {"float32": 0, "bfloat16": 2.0**-16, "float16": 2.0**-21, "float8_e4m3fn": 2.0**-21}


def run(device: Any, name: str, *inputs: Any, **options: Any) -> Any:
    """Run an operation on NumPy arrays and matrices, and return its result in NumPy."""
    given = tuple([each if each is None else mapped(device.asarray, each) for each in inputs])
    return registry.bind(name, given, **options).run().get()


# (M, C, E, n_used): one row and many, experts that lanes, warps and blocks divide unequally
ROUTED = [(1, 128, 4, 1), (3, 100, 2, 2), (8, 260, 40, 8), (17, 64, 128, 6), slow(70, 2052, 96, 3)]
SIGMOIDS = {"sigmoid": True, "normed": True, "factor": 2.5, "eps": 0.1}


@one_order
@pytest.mark.parametrize("options", [{}, SIGMOIDS])
@pytest.mark.parametrize(("M", "C", "E", "n_used"), ROUTED)
def test_route(M: int, C: int, E: int, n_used: int, options: Any, device: Any) -> None:
    """A row has the same bits alone; of equal scores, the lower number is first."""
    x, router = plain.normal(0, M, C) / np.float32(C**0.5), plain.normal(1, E, C) / 2
    bias = np.linspace(0, 1, E, dtype="f4") if options else None
    router[0] = router[E // 2] = 8 * x[0]  # two experts that row 0 prefers
    if bias is not None:
        bias[E // 2] = bias[0]
    found = run(device, "route", x, router, bias, n_used=n_used, **options)
    exact = plain.exact("route", x, router, bias, n_used=n_used, **options)
    np.testing.assert_array_equal(found[:, :n_used], exact[:, :n_used])
    np.testing.assert_allclose(found, exact, rtol=3e-6)
    for m in {0, M // 2, M - 1}:
        alone = run(device, "route", x[m : m + 1], router, bias, n_used=n_used, **options)
        assert_same_bits(alone, found[m : m + 1])


@on_hopper
def test_route_by_clusters_and_with_nan(device: Any) -> None:
    """Any number of rows has the bits of one cluster per row. A row with NaN chooses experts."""
    x, router = plain.normal(0, 67, 132), plain.normal(1, 70, 132)
    x[1] = np.nan
    found = run(device, "route", x, router, None, n_used=4)
    np.testing.assert_array_equal(found[1, :4], range(4))
    np.testing.assert_array_equal(found[:, :4], reference.route(x, router, n_used=4)[:, :4])
    for rows in (slice(0, 5), slice(66, 67)):
        assert_same_bits(run(device, "route", x[rows], router, None, n_used=4), found[rows])


def routes_of(chosen: Any) -> Any:
    """Return routes with these numbers of experts, and any weights."""
    numbers = np.asarray(chosen, np.float32)
    return np.concatenate([numbers, plain.normal(9, *numbers.shape)], axis=1)


def draw(M: int, E: int, n_used: int, seed: int = 0) -> Any:
    """Return routes of random experts; the last expert is never chosen if there are others."""
    rng = np.random.default_rng(seed)
    return routes_of([rng.permutation(max(n_used, E - 1))[:n_used] for _ in range(M)])


@every_device
@pytest.mark.parametrize(("routes", "E", "rows"), [
    (draw(1, 4, 2), 4, 8), (draw(70, 128, 8), 128, 8), (draw(17, 5, 3), 5, 4),
    (draw(3, 2, 1), 2, 1), (routes_of(np.full((70, 1), 2)), 4, 16),
    (routes_of(np.arange(4500)[:, None] % 3), 4, 8),
])  # fmt: skip
def test_tiles_and_sums(routes: Any, E: int, rows: int, device: Any) -> None:
    found = run(device, "expert_tiles", routes, n_expert=E, rows=rows)
    np.testing.assert_array_equal(found, reference.expert_tiles(routes, n_expert=E, rows=rows))
    M, n_used = len(routes), routes.shape[1] // 2
    for N in (36, 7):
        y, residual = plain.normal(1, M * n_used, N), plain.normal(2, M, N)
        arrays = tuple(device.asarray(each) for each in (y, routes, residual))
        added = registry.bind("add_experts", arrays, out=arrays[2]).run().get()
        exact = plain.exact("add_experts", y, routes, residual)
        np.testing.assert_allclose(added, exact, rtol=0, atol=4e-7 * n_used * np.abs(exact).max())


def matrix(dtype: str, N: int, K: int, seed: int) -> WeightMatrix:
    """Return a random matrix. dtype: its dtype, or a type of GGUF blocks."""
    if dtype in TYPES:
        return GgufMatrix.random([(dtype, N)], K, seed, 3 / K**0.5)
    return WeightMatrix.quantize((plain.normal(seed, N, K) - 0.5) / K**0.5, dtype, "NK")


# (M, K, N, E, n_used, places, dtype or block type of weights, whether x is rounded)
PRODUCTS = [
    (1, 80, 24, 4, 2, 8, "bfloat16", False), (3, 128, 33, 2, 1, 8, "float16", True),
    (17, 136, 16, 5, 3, 8, "float32", False), (8, 1040, 8, 3, 2, 8, "float8_e4m3fn", True),
    slow((70, 96, 40, 4, 1, 32, "bfloat16", False)), slow((2, 64, 8, 128, 8, 4, "float16", False)),
    (1, 256, 16, 4, 2, 8, "Q4_K", False), (3, 768, 48, 4, 2, 8, "Q6_K", True),
    (9, 160, 32, 3, 2, 8, "Q8_0", True), (9, 288, 16, 3, 1, 3, "MXFP4", False),
    slow((20, 1056, 32, 3, 2, 16, INT4, False)), slow((9, 2048, 80, 40, 8, 8, "Q4_K", True)),
]  # fmt: skip


@one_order
@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice has the bits of `linear` with this row and with the expert's matrix."""
    M, K, N, E, n_used, places, dtype, rounded = case
    cupy_with(80 if dtype == "float32" else 75)
    monkeypatch.setattr(experts, "MOST_BLOCKS", 16 if M == 1 else 1e-3)  # a block loops over tiles
    routes = draw(M, E, n_used) if M < 70 else routes_of(np.full((M, 1), E - 2))
    tiles = reference.expert_tiles(routes, n_expert=E, rows=places)
    x = plain.normal(0, M, K)
    if rounded:
        x = x.astype(np.float16).astype(np.float32)
    gate, up = (matrix(dtype, E * N, K, seed) for seed in (1, 2))
    options: dict[str, Any] = {"x_dtype": "float16"} if rounded else {}
    choices = np.arange(M * n_used)
    chosen, of_row = routes[:, :n_used].astype(int).ravel(), choices // n_used
    for name, rows, matrices, own in (
        ("experts_gated", of_row, (gate, up), {"n_used": n_used, "gelu": M == 3}),
        ("experts_down", choices, (gate,), {}),
    ):
        given = x if name == "experts_gated" else x[of_row]
        found = run(device, name, given, *matrices, tiles, n_expert=E, **own, **options)
        exact = plain.exact(name, given, *matrices, tiles, n_expert=E, **own)
        most = (ROUNDING.get(dtype, 0) + 2e-6) * np.abs(exact).max()
        np.testing.assert_allclose(found, exact, rtol=0, atol=most)
        for c in {0, len(choices) // 2, len(choices) - 1}:
            e, x_row = int(chosen[c]), given[rows[c], None]
            w, *ups = (each.columns(e * N, e * N + N) for each in matrices)
            inputs = x_row, w, None, None, None, None, *ups
            as_linear: dict[str, Any] = {"gelu": own.get("gelu", False), "decoding": True}
            as_linear["variant"] = None if dtype in TYPES else "mma"
            alone = run(device, "linear", *inputs, **as_linear, **options)
            assert_same_bits(found[c : c + 1], alone)


@one_order
def test_tiles_of_a_long_prompt(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than one axis of a grid has blocks are along two axes, with the same bits."""
    routes, x = draw(9, 4, 2), plain.normal(0, 9, 64)
    tiles = reference.expert_tiles(routes, n_expert=4, rows=4)
    given = x, *(matrix("Q8_0", 4 * 16, 64, seed) for seed in (1, 2)), tiles
    expected = run(device, "experts_gated", *given, n_expert=4, n_used=2)
    monkeypatch.setattr(linear_gguf, "MAX_BLOCKS", 4)
    assert len(tiles) > 4
    assert_same_bits(run(device, "experts_gated", *given, n_expert=4, n_used=2), expected)


@on_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "Q8_0"])
def test_kernels_wait_for_the_previous_kernel(dtype: str, device: Any) -> None:
    M, C, H, E, n_used = 5, 64, 32, 4, 2
    x, router = (device.asarray(plain.normal(rows, rows, C)) for rows in (M, E))
    gate, down = (
        matrix(dtype, E * N, K, n).mapped(device.asarray)
        for n, (N, K) in enumerate([(H, C), (C, H)])
    )
    sizes: dict[str, Any] = {"n_expert": E}

    def add(name: str, *inputs: Any, **options: Any) -> Any:
        """Test a step, and return its result."""
        bound = registry.bind(name, inputs, **options)
        late = [each for each in inputs if type(each) is type(x) and each is not router]
        assert_waits(bound.launches, late, [bound.out])
        return bound.out

    routes = add("route", x, router, None, n_used=n_used)
    tiles = add("expert_tiles", routes, **sizes, rows=8)
    y = add("experts_gated", x, gate, gate, tiles, **sizes, n_used=n_used)
    y = add("experts_down", y, down, tiles, **sizes)
    assert np.isfinite(add("add_experts", y, routes, x).get()).all()


@pytest.mark.parametrize("device", ["turing"], indirect=True)
def test_float32_needs_tf32(device: Any) -> None:
    w, tiles = plain.normal(0, 8, 16), reference.expert_tiles(draw(2, 2, 1), n_expert=2, rows=8)
    inputs = (plain.normal(1, 2, 16), WeightMatrix.quantize(w, "float32", "NK"), tiles)
    with pytest.raises(InputError, match=r"or newer: use weights of another dtype, such"):
        run(device, "experts_down", *inputs, n_expert=2)


def test_wrong_arguments() -> None:
    x, routes = plain.normal(0, 2, 16), draw(2, 4, 2)
    w = WeightMatrix.quantize(plain.normal(1, 24, 16).astype(ml_dtypes.bfloat16), "bfloat16", "NK")
    of_blocks = (("Q4_0", 48),), (("Q8_0", 48),), (("Q4_0", 32), ("Q8_0", 32))
    four, eight, mixed = (GgufMatrix.random(ranges, 32) for ranges in of_blocks)
    sizes, two = {"n_expert": 4, "rows": 8}, {"n_expert": 2}
    wide, gated = plain.normal(0, 2, 32), {"n_expert": 3, "n_used": 2}
    tiles = reference.expert_tiles(routes, **sizes)
    for message, name, inputs, options in (
        ("n_used: expected 1 to 3", "route", (x, x[[0, 1, 1]]), {"n_used": 4}),
        ("router: expected, on a GPU, up to 512", "route", (x[:, :6].copy(),) * 2, {"n_used": 1}),
        ("w: 24 outputs: expected a multiple of 5", "experts_down", (x, w, tiles), {"n_expert": 5}),
        ("routes: expected an even number", "expert_tiles", (x[:, :3].copy(),), sizes),
        ("y: expected 4 rows", "add_experts", (x, routes, x), {}),
        ("48 outputs of 2 experts: expected a multiple", "experts_down", (wide, four, tiles), two),
        ("experts with types Q4_0, Q8_0: expected one", "experts_down", (wide, mixed, tiles), two),
        ("up: expected types .*: use weights", "experts_gated", (wide, four, eight, tiles), gated),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            registry.bind(name, inputs, **options)
