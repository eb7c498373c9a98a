"""Blocks with weights from every constructor, in every dtype, with the fewest and many rows.

Packed matrices of a Llama are transposed views, and a caller may pass such views too. The block
must compute the same bits as from C-contiguous copies, with NumPy, on the emulator and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import (
    GPT2,
    Block,
    BlockWeights,
    GPT2Config,
    GPT2Weights,
    Llama,
    LlamaBlock,
    LlamaBlockWeights,
    LlamaConfig,
    LlamaWeights,
    random_input,
)
from gpt2block.checks import FLOATS
from gpt2block.cuda.formats import DTYPES
from gpt2block.ops.workload import tolerance
from tests.devices import assert_same_bits, running_on, slow

SMALL = {
    "gpt2": GPT2Config(n_head=2, n_embd=128, n_layer=1, vocab_size=40, n_ctx=8),
    "llama": LlamaConfig(
        n_head=2, n_kv_head=1, n_embd=128, n_ff=176, n_layer=1, vocab_size=40, n_ctx=8
    ),
}
LARGE = {
    "gpt2": GPT2Config(n_head=8, n_embd=512),
    "llama": LlamaConfig(n_head=8, n_kv_head=2, n_embd=512, n_ff=1376),
}
BUNDLED = {"gpt2": "shakespeare", "llama": "shakespeare-llama"}
MADE: dict[str, Any] = {"gpt2": Block, "llama": LlamaBlock}
WEIGHTS: dict[str, Any] = {"gpt2": BlockWeights, "llama": LlamaBlockWeights}
SOURCES = (
    "random", "from_packed", "from_packed float64", "from_pretrained", "transposed", "strided"
)  # fmt: skip
kinds = pytest.mark.parametrize("kind", ["gpt2", "llama"])


def everywhere(name: str, values: Iterable[str], emulated: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize `where` and another parameter; the slow emulator runs only some values."""
    cases = [("cpu", value) for value in values] + [slow("emulator", value) for value in emulated]
    on_gpu = [pytest.param("gpu", value, marks=pytest.mark.gpu) for value in values]
    return pytest.mark.parametrize(("where", name), [*cases, *on_gpu], indirect=["where"])


@pytest.fixture
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    with running_on("forward") if name == "emulator" else nullcontext():
        yield name


def changed(weights: Any, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Any:
    """Return the weights with a function applied to each matrix."""
    tensors = weights.tensors()
    return replace(weights, **{n: function(a) for n, a in tensors.items() if a.ndim == 2})


def weights_by(source: str, kind: str, config: Any) -> Any:
    of = WEIGHTS[kind]
    if source == "from_pretrained":
        return of.from_pretrained(BUNDLED[kind], layer=1)
    weights = of.random(0, config)
    if source == "transposed":
        return changed(weights, np.asfortranarray)
    if source == "strided":
        return changed(weights, lambda a: np.repeat(a, 2, axis=1)[:, ::2])
    if source.startswith("from_packed"):
        packed = weights.to_packed().astype(source.partition(" ")[2] or "float32")
        sizes = (config,) if kind == "llama" else (config.n_embd, config.n_head)
        return of.from_packed(packed, *sizes)
    return weights


def inputs(where: str, width: int, dtype: str) -> Iterator[NDArray[Any]]:
    """Yield x with the fewest and with many rows, alone and as a batch of 3."""
    many = 2048 if where == "gpu" else 5
    shapes = [(3, many)] if where == "emulator" else [(1,), (many,), (3, 1), (3, many)]
    for shape in shapes:
        yield random_input(0, (*shape, width)).astype(FLOATS[dtype])


@kinds
@everywhere("source", SOURCES, emulated=["transposed"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_constructor(where: str, kind: str, source: str, dtype: str) -> None:
    config = (LARGE if where == "gpu" else SMALL)[kind]
    weights = weights_by(source, kind, config)
    device = "cpu" if where == "cpu" else "cuda"
    block = MADE[kind](weights, device=device, dtype=dtype)
    copied = changed(weights, np.ascontiguousarray)
    expected = MADE[kind](copied, device=device, dtype=dtype)
    for x in inputs(where, weights.n_embd, dtype):
        found = block(x)
        assert found.dtype == x.dtype
        if where == "cpu":  # BLAS may add in another order
            assert_close(found, expected(x), dtype)
        else:
            assert_same_bits(found, expected(x))


def assert_close(found: NDArray[Any], expected: NDArray[Any], dtype: str) -> None:
    wide = expected.astype(np.float64)
    assert np.abs(found - wide).max() <= 4 * tolerance(dtype) * np.abs(wide).max()


@kinds
@everywhere("dtype", FLOATS, emulated=[])
def test_transposed_weights_against_float64(where: str, kind: str, dtype: str) -> None:
    """Each step of a trace is compared; with float32 on the CPU, also those of fused kernels."""
    weights = weights_by("transposed", kind, (LARGE if where == "gpu" else SMALL)[kind])
    both = where == "cpu" and dtype == "float32"
    for kernels in ("skeleton", "fused") if both else ("auto",):
        device = "cpu" if where == "cpu" else "cuda"
        block = MADE[kind](weights, device=device, dtype=dtype, kernels=kernels)
        for x in inputs(where, weights.n_embd, dtype):
            rows, trace = block.compare(x), block.trace(x)
            assert [row.name for row in rows] == [*trace] == [step.name for step in block.steps]
            np.testing.assert_array_equal(trace["output"], block(x))
            for row in rows:
                assert row.max_rel <= 2 * tolerance(dtype), row
                assert row.total_rel <= 4 * tolerance(dtype), row
                assert row.ms > 0


@kinds
@everywhere("dtype", DTYPES, emulated=[])
def test_a_model_of_transposed_weights(where: str, kind: str, dtype: str) -> None:
    """Matrices of both layouts are transposed, and wpe, which is stored without conversion."""
    model: Any = {"gpt2": GPT2, "llama": Llama}[kind]
    of: Any = {"gpt2": GPT2Weights, "llama": LlamaWeights}[kind]
    plain = of.random(0, SMALL[kind])
    outer = {"wte": np.asfortranarray(plain.wte)}
    outer["lm_head"] = outer["wte"] if plain.lm_head is plain.wte else plain.lm_head
    if kind == "gpt2":
        outer["wpe"] = np.asfortranarray(plain.wpe)
    blocks = tuple(changed(block, np.asfortranarray) for block in plain.blocks)
    turned = replace(plain, **outer, blocks=blocks)
    device, ids = "cpu" if where == "cpu" else "cuda", [3, 39, 0, 7]
    found, expected = (
        model(weights, device=device, dtype=dtype)(ids) for weights in (turned, plain)
    )
    if where == "cpu":
        assert_close(found, expected, dtype)
    else:
        assert_same_bits(found, expected)
