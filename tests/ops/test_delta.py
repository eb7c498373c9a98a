"""Gated delta nets: the same bits in prompts, pieces and steps, and after refused draft tokens."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from gpt2block import InputError, reference
from gpt2block.ops import delta, registry
from tests import plain
from tests.devices import assert_same_bits, moved, one_order, slow

SLOTS = 3


class Sizes(NamedTuple):
    """Heads of k and v, and their channels; tiled: as in `delta_rule`."""

    n_k_head: int
    n_v_head: int
    k_size: int
    v_size: int
    tiled: bool = False


SIZES = [Sizes(1, 2, 8, 4), Sizes(2, 4, 36, 20, True), Sizes(2, 4, 128, 128)]


class Layer:
    """The weights of a layer, and the states of its slots on a device, or in NumPy."""

    def __init__(self, sizes: Sizes, library: Any, seed: int = 0) -> None:
        Hk, H, k, v, tiled = self.sizes = sizes
        self.D, self.V = 2 * Hk * k + H * v, H * v
        self.library, self.heads = library, {"n_k_head": Hk, "k_size": k}
        self.rule: dict[str, Any] = {**self.heads, "tiled": tiled}
        weights = (plain.normal(seed, self.D, 1, 4), plain.normal(1, H), plain.normal(2, H))
        self.weights = [self._array(each) for each in (*weights, plain.normal(3, v))]
        self.weights[1] = self._array(np.exp(weights[1]))
        self.state = self._array(np.full((SLOTS, 2, 3 * self.D + H * v * k), np.nan, np.float32))
        self.recent = self._array(np.full((SLOTS, 16, self.D + 2 * H), np.nan, np.float32))
        self.pool: tuple[Any, ...] = ()
        self.held = library.asarray(np.full((SLOTS, 2), 5, np.int32))

    def _array(self, host: Any) -> Any:
        wide = host.astype(np.float64) if self.library is np else host
        return self.library.asarray(wide)

    def rows(self, count: int, seed: int = 4) -> Any:
        width = self.D + 2 * self.sizes.n_v_head + self.V
        return 2 * plain.normal(seed, count, width) - np.float32(1)

    def run(self, x: Any, row: list[int], positions: list[int], steps: bool = False) -> Any:
        """Compute a pass over rows of slots at positions, with the states."""
        given = [self.library.asarray(np.array(each, np.int32)) for each in (row, positions)]
        conv, rate, dt, gamma = self.weights

        def call(name: str, *inputs: Any, **options: Any) -> Any:
            if self.library is np:
                return getattr(reference, name)(*inputs, **options)
            return registry.bind(name, inputs, **options).run()

        x, ba = (self._array(each) for each in np.split(x, [self.D + self.V], axis=1))
        spans = call("delta_spans", *given, self.held, steps=steps)
        kept = self.state, self.recent
        pool = () if steps else self.pool
        rows = call("delta_inputs", x, ba, conv, rate, dt, given[0], spans, *kept, **self.heads)
        o = call("delta_rule", x, ba, rows, conv, spans, *kept, *pool, **self.rule, steps=steps)
        made = call("gated_rmsnorm", o, x, gamma, eps=1e-6)
        return made if self.library is np else made.get()


@pytest.mark.parametrize("sizes", [*SIZES[:2], slow(SIZES[2])], ids=str)
@one_order
def test_bits_do_not_depend_on_passes(device: Any, sizes: Sizes) -> None:
    """A prompt, its pieces in a batch, single steps, and steps whose drafts are refused.

    A pass that runs again has the same result.
    """
    layer, exact = Layer(sizes, device), Layer(sizes, np)
    count = 19
    x, other = layer.rows(count), layer.rows(count, seed=5)
    whole = layer.run(x, [1] * count, [*range(count)])
    truth = exact.run(x, [1] * count, [*range(count)])
    assert np.abs(whole - truth).max() <= 3e-6 * np.abs(truth).max()
    end = layer.state.get()[1, 0]
    with patch.object(delta, "MANY_HEADS", 1):  # two columns per thread
        wide = Layer(sizes, device)
        assert_same_bits(wide.run(x, [1] * count, [*range(count)]), whole)
    assert_same_bits(wide.state.get()[1, 0], end)
    # Two pieces, with another slot's rows before them and padding after them
    begun = layer.run(np.concatenate([other[:4], x[:5], x[:2]]), [0] * 4 + [2] * 5 + [-1] * 2,
                      [*range(4), *range(5), 0, 0])  # fmt: skip
    assert_same_bits(begun[4:9], whole[:5])
    later = np.concatenate([other[4:], x[5:]])
    for _ in range(2):
        found = layer.run(later, [0] * 15 + [2] * 14, [*range(4, 19), *range(5, 19)])
        assert_same_bits(found[15:], whole[5:])
    assert_same_bits(layer.state.get()[2, 1], end)
    # Steps: the number of rows, and how many of them are right
    at = 0
    for rows, given in ((1, 1), (4, 4), (8, 8), (8, 1), (1, 1), (4, 2), (2, 2)):
        draft = np.concatenate([x[at : at + given], other[: rows - given]])
        for _ in range(2):
            places = [*range(at, at + rows)]
            if rows == 4:  # the last draft token is absent
                places[3] = -1
            made = layer.run(draft, [1] * rows, places, steps=True)
            right = min(given, sum(place >= 0 for place in places))
            assert_same_bits(made[:right], whole[at : at + right])
        at += right
    assert at == count - 1
    # A prompt's piece after a step with accepted draft tokens
    assert_same_bits(layer.run(x[at:], [1], [at]), whole[at:])
    assert_same_bits(layer.state.get()[1, layer.held.get()[1].argmax()], end)


@one_order
def test_a_lost_state_is_no_result(device: Any) -> None:
    """A slot whose states are of other tokens: NaN on a GPU, and an error in NumPy."""
    layer, exact = Layer(SIZES[0], device), Layer(SIZES[0], np)
    x = layer.rows(4)
    for each in (layer, exact):
        each.run(x, [1] * 4, [*range(4)])
    assert np.isnan(layer.run(x[:1], [1], [3])).all()
    assert np.isnan(layer.run(x[:1], [1], [12])).all()
    assert np.isfinite(layer.run(x[:1], [1], [0])).all()
    for position in (3, 12):
        with pytest.raises(InputError, match=r"positions: expected 0, or at most 7 more than"):
            exact.run(x[:1], [1], [position])


@one_order
def test_arrays_that_are_not_aligned_are_an_error(device: Any) -> None:
    layer = Layer(SIZES[0], device)
    layer.recent = moved(layer.recent.get(), 1)
    with pytest.raises(InputError, match="recent: expected data aligned to 16 bytes"):
        layer.run(layer.rows(2), [0, 0], [0, 1])


def test_without_states_sequences_begin() -> None:
    layer = Layer(SIZES[1], np)
    x = layer.rows(6)
    first = layer.run(x, [0] * 2 + [1] * 4, [0, 1, 0, 1, 2, 3])
    layer.state = layer.recent = None
    layer.held[:] = -1
    np.testing.assert_array_equal(layer.run(x, [0] * 2 + [1] * 4, [0, 1, 0, 1, 2, 3]), first)
