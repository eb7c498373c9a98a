"""Block on the CPU, and all its behavior that needs no GPU."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from gpt2block import (
    Block,
    BlockWeights,
    GPT2Config,
    InputError,
    LlamaBlock,
    LlamaBlockWeights,
    LlamaConfig,
    random_input,
    reference,
)
from gpt2block.checks import FLOATS, host_array
from gpt2block.engine.inspect.compare import errors
from tests.devices import running_on

SMALL = GPT2Config(n_head=3, n_embd=48)


@pytest.fixture
def weights() -> BlockWeights:
    return BlockWeights.random(0, SMALL)


@pytest.fixture
def block(weights: BlockWeights) -> Block:
    return Block(weights, causal=True, device="cpu")


@pytest.mark.parametrize("shape", [(1, 48), (11, 48), (2, 5, 48)])
@pytest.mark.parametrize("options", [{"causal": False}, {"causal": True}, {}])
def test_forward_is_the_reference(
    weights: BlockWeights, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """A block is causal by default. Later calls do not change a result, even one in `out`."""
    x = random_input(0, shape)
    block = Block(weights, device="cpu", **options)
    expected = reference.block_forward(x, weights, options.get("causal", True))
    y, out = block(x), np.full(shape, np.nan, np.float32)
    assert block(x, out=out) is out
    block(random_input(1, shape))
    for found in (y, out):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_compare_sees_a_step_that_is_wrong(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = reference.add

    def wrong(a: Any, b: Any) -> Any:
        return honest(a, b) if a.dtype == np.float64 else a

    monkeypatch.setattr(reference, "add", wrong)
    rows = {row.name: row for row in block.compare(random_input(0, (5, 48)))}
    assert rows["x1"].max_rel > 1e-3
    assert rows["ln2"].max_rel < 1e-6
    assert rows["ln2"].total_rel > 1e-3


def test_nan_stays_in_the_rows_that_see_it(block: Block) -> None:
    x = random_input(0, (2, 6, 48))
    clean = block(x)
    x[1, 4] = np.nan
    got = block(x)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_allclose(got[1, :4], clean[1, :4], rtol=1e-5)
    assert np.isnan(got[1, 4:]).all()


class HostTensor:
    """An array of another library, in host memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_a_host_tensor_of_another_library(block: Block) -> None:
    x = random_input(0, (5, 48))
    np.testing.assert_array_equal(block(HostTensor(x)), block(x))


class Unshared:
    """A host tensor that its library will not share, such as one that needs gradients."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("requires grad")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class PinnedTensor(HostTensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (3, 0)


def test_pinned_memory_is_host_memory() -> None:
    x = random_input(0, (5, 48))
    shared = host_array(PinnedTensor(x))
    assert shared is not None
    np.testing.assert_array_equal(shared, x)


class Bfloat16:
    """A substitute for a torch tensor of bfloat16 in host memory."""

    dtype, shape, ndim = "torch.bfloat16", (3,), 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("Unsupported dtype in DLTensor.")

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")


class CudaTensor:
    """A substitute for a CUDA array, for a Block without a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def both(*options: Any) -> tuple[Any, Any]:
    """Return a Block and a LlamaBlock of 48 channels, with these arguments after the weights."""
    config = LlamaConfig(n_head=3, n_kv_head=1, n_embd=48, n_ff=64)
    of_llama = LlamaBlock(LlamaBlockWeights.random(0, config), *options)
    return Block(BlockWeights.random(0, SMALL), *options), of_llama


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "float32"), ("cpu", "float16"), ("cuda", "float32")]
)
def test_x_can_have_any_byte_order(device: str, dtype: str) -> None:
    """x is about 500: computed in float16, its norm would be a quarter of the right value."""
    x = (500 * random_input(0, (5, 48))).astype(dtype)
    swapped = x.astype(x.dtype.newbyteorder())
    with nullcontext() if device == "cpu" else running_on("forward"):
        for block, plain in zip(both(True, device, dtype), both(True, "cpu"), strict=True):
            same, exact = block.trace(x), plain.trace(x.astype("float32"))
            for name, found in block.trace(swapped).items():
                np.testing.assert_array_equal(found, same[name])
                assert errors(found, exact[name])[1] < 0.01
                assert found.dtype.isnative
            with pytest.raises(InputError, match=f"out: .*got {swapped.dtype.str} "):
                block(x, out=np.empty_like(swapped))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda b: pickle.loads(pickle.dumps(b))]
)
@pytest.mark.parametrize(("where", "dtype"), [("cpu", "bfloat16"), ("cuda", "float32")])
def test_a_copied_or_unpickled_block_is_the_same(where: str, dtype: str, copied: Any) -> None:
    x = random_input(0, (5, 48)).astype(FLOATS[dtype])
    with nullcontext() if where == "cpu" else running_on("forward"):
        for block in both(False, where, dtype, "auto", False):
            again = copied(block)
            assert repr(again) == repr(block)
            np.testing.assert_array_equal(again(x), block(x))


def test_import_touches_no_gpu_and_is_quick() -> None:
    code = (
        "import numpy, sys, time; start = time.perf_counter(); import gpt2block\n"
        "slow = {'cupy', 'typer', 'rich', 'huggingface_hub', 'tiktoken'} & set(sys.modules)\n"
        "print(time.perf_counter() - start, *slow)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    seconds, *modules = min(run.stdout for run in runs).split()
    assert modules == []
    assert float(seconds) < 0.3
