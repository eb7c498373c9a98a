"""Products of decoding by wgmma: results as terms, two matrices, RoPE, and the kv_cache.

They give the bits of the other kernels; test_product_laws.py tests plain products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import GPT2Config, LlamaConfig, Model
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import FP8, cache_dtype
from gpt2block.files.parameters.arrays import random_model
from gpt2block.ops.linear import OPERATION as LINEAR
from gpt2block.ops.registry import STEPS
from tests import gpus, plain
from tests.devices import assert_same_bits, on_gpu
from tests.ops.test_operands import matrix
from tests.products import DTYPES, KERNELS, Case, Kernel

# Kernels for weights of each dtype, some with x rounded to float16.
KINDS = [kernel for name, kernel in KERNELS.items() if name.startswith("linear-wgmma")]
pytestmark = pytest.mark.usefixtures("possible")
every_kind = pytest.mark.parametrize("kernel", KINDS, ids=lambda kernel: kernel.name)


@pytest.fixture
def possible(device: Any) -> None:
    gpus.cupy_with(gpus.HOPPER_CAPABILITY)


def drawn(kernel: Kernel, M: int, K: int) -> tuple[Any, Any]:
    """Return random rows of x on the device, and their terms."""
    x = kernel.made(Case(M, K, 1))["x"]
    return cupy.asarray(x), kernel.uploaded(cupy, "x", x)


def on_device(seed: int, *shape: int) -> Any:
    return cupy.asarray(plain.normal(seed, *shape))


@every_kind
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 128), (3, 3, 192)], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, *FP8])
@on_gpu
def test_rope_has_the_bits_of_the_step_alone(
    device: Any, kv_dtype: str | None, heads: tuple[int, int, int], kernel: Kernel
) -> None:
    """Cases have one or more heads of q per head of k, biases, and rows outside the cache."""
    n_head, n_kv_head, D = heads
    N, K, B, n_ctx = (n_head + 2 * n_kv_head) * D, 192, 130, 3
    w, bias = matrix(N, K, kernel.weights), on_device(1, N)
    frequencies = cupy.asarray(10000.0 ** (-np.arange(0, D, 2) / D))
    kept = np.uint8 if kv_dtype else DTYPES[cache_dtype(kernel.weights)]
    grown: dict[str, Any] = {"growth": (0.5, 1)} if kv_dtype else {}
    for M in (1, 9, 64, 130):
        x, handed = drawn(kernel, M, K)
        row = cupy.asarray(np.arange(M, dtype=np.int32) - (M > 9))
        position = cupy.asarray(np.arange(M, dtype=np.int32) % (n_ctx + 1))
        found = []
        for fused in (False, True):
            shape = (B, n_ctx, n_kv_head * D)
            k, v = (cupy.asarray(np.zeros(shape, kept)) for _ in range(2))
            cache = (k, v, row, position)
            if fused:
                by = STEPS["rotations"].bind((position, frequencies)).run()
                inputs = (handed, w, bias, by, *cache)
                options: Any = {"operand": kernel.operand, "kv_dtype": kv_dtype, **grown}
                bound = STEPS["linear_rope"].bind(inputs, n_head=n_head, **options)
                assert [launch.name for launch in bound.launches] == ["decode_wgmma"]
                q = bound.run()
            else:
                qkv = LINEAR.bind((x, w, bias), variant="mma_tiles").run()
                apart = (qkv, frequencies, *cache)
                options = {"half_split": True, "kv_dtype": kv_dtype, **grown}
                q = STEPS["rope_append"].bind(apart, n_head=n_head, **options).run()
            found.append([q.get(), k.get(), v.get()])
        for ours, theirs in zip(*found, strict=True):
            assert_same_bits(ours, theirs)
        assert all(array.any() for array in found[0])


LLAMA = LlamaConfig(
    n_layer=2, n_head=32, n_kv_head=8, n_embd=2048, n_ff=4096, vocab_size=512, n_ctx=64
)
GPT = GPT2Config(n_layer=2, n_head=12, n_embd=768, n_ctx=64, vocab_size=512)


@pytest.mark.parametrize(
    ("config", "dtype", "batches"),
    [
        *((LLAMA, dtype, (4, 17, 70)) for dtype in ("bfloat16", "float8_e5m2", "float16")),
        *((GPT, dtype, (33, 64, 130)) for dtype in ("bfloat16", "float8_e4m3fn")),
    ],
)
@on_gpu
def test_tokens_have_the_same_bits_alone_and_in_any_batch(
    device: Any, config: Any, dtype: str, batches: tuple[int, ...]
) -> None:
    """Products use wgmma in these batches, but not for one row."""
    model: Model[Any] = Model.from_tensors(config, random_model(0, config), "cuda:0", dtype)
    prompts = [[n, 3 * n + 1, 7] for n in range(max(batches))]
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0, "stop_ids": ()}
    alone = [model.generate([prompt], **options)[0] for prompt in prompts[:3]]
    for rows in batches:
        for one, among in zip(alone, model.generate(prompts[:rows], **options), strict=False):
            assert one.tokens == among.tokens
            assert_same_bits(np.array(one.logprobs), np.array(among.logprobs))
