"""Llamas and similar models with random weights, in the sizes of `SHAPES`."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.decoding import RandomModel
from benchmarks.random_weights import bytes_in_blocks, random_tensors
from gpt2block.cuda import cupy
from gpt2block.cuda.devices import reads_blocks
from gpt2block.cuda.formats import FILE
from gpt2block.cuda.kernels import FP8
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.model import Ids, Tensors
from gpt2block.engine.passes.prefill_rules import Products
from gpt2block.errors import InputError
from gpt2block.model import Model
from gpt2block.models.architectures.gemma4 import Gemma4Config
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.architectures.mistral import MistralConfig
from gpt2block.models.architectures.qwen3 import Qwen3Config
from gpt2block.models.architectures.qwen3_5 import Qwen35Config
from gpt2block.models.config import model_shapes
from gpt2block.models.config.llama import LlamaConfig
from gpt2block.models.weights.matrix import WeightMatrix

SHAPES: Mapping[str, LlamaConfig] = {
    "7b": LlamaConfig(),
    "1b": LlamaConfig(
        n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, n_ff=8192, vocab_size=128256,
        theta=500000.0, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": Qwen3Config(
        n_layer=28, n_head=16, n_kv_head=8, head_size=128, n_embd=1024, n_ff=3072, n_ctx=40960,
        vocab_size=151936, eps=1e-6, theta=1e6, tie_word_embeddings=True,
    ),
    "qwen3-4b": Qwen3Config(
        n_layer=36, n_head=32, n_kv_head=8, head_size=128, n_embd=2560, n_ff=9728, n_ctx=40960,
        vocab_size=151936, eps=1e-6, theta=1e6, tie_word_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(
        n_layer=30, n_head=9, n_kv_head=3, n_embd=576, n_ff=1536, n_ctx=8192, vocab_size=49152,
        theta=100000.0, tie_word_embeddings=True,
    ),
    "mistral-7b": MistralConfig(
        n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, n_ff=14336, n_ctx=32768,
        vocab_size=32768, theta=1e6,
    ),
    "lfm2-350m": Lfm2Config(
        n_layer=16, n_head=16, n_kv_head=8, n_embd=1024, n_ff=4608, n_ctx=128_000,
        vocab_size=65536, theta=1e6, tie_word_embeddings=True,
        conv_layers=tuple(n not in (2, 5, 8, 10, 12, 14) for n in range(16)),
    ),
    "gemma4-e2b": Gemma4Config(
        n_layer=35, n_head=8, n_kv_head=1, n_embd=1536, n_ff=6144, n_ctx=131072, head_size=256,
        vocab_size=262144, eps=1e-6, theta=1e6, tie_word_embeddings=True, window=512,
        sliding_layers=(True, True, True, True, False) * 7, shared_layers=20, logits_cap=30.0,
        use_double_wide_mlp=True, embedding_dtype="bfloat16",
    ),
    "qwen3.5-0.8b": Qwen35Config(
        n_layer=24, n_head=8, n_kv_head=2, n_embd=1024, n_ff=3584, n_ctx=262144, head_size=256,
        vocab_size=248320, eps=1e-6, theta=1e7, tie_word_embeddings=True, n_v_head=16,
    ),
    "qwen3.5-9b": Qwen35Config(
        n_layer=32, n_head=16, n_kv_head=4, n_embd=4096, n_ff=12288, n_ctx=262144, head_size=256,
        vocab_size=248320, eps=1e-6, theta=1e7,
    ),
    "70b": LlamaConfig(
        n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, n_ff=28672, n_ctx=8192, vocab_size=128256,
        theta=500000.0,
    ),
    "small": LlamaConfig(
        n_layer=4, n_head=4, n_kv_head=2, n_embd=256, n_ff=768, vocab_size=4096, n_ctx=1024,
    ),
}  # fmt: skip


class RandomLlama(RandomModel):
    """A Llama or similar architecture, with random weights.

    They are generated in device memory, or in host memory for several GPUs. several: a device such
    as "cuda:0,1" if the model is divided among GPUs, else None.

    Results are compared with the logits of a prompt that runs other kernels: they multiply 16-bit
    weights with float32 activations.
    """

    config: LlamaConfig
    _exact: CudaModel | None = None

    def __init__(
        self,
        config: LlamaConfig,
        dtype: str,
        cache: str | None = None,
        several: str | None = None,
    ) -> None:
        super().__init__(config, dtype, cache)
        self._several, self.gpus = several, 1 + (several or "").count(",")
        self.device = 0  # index of the GPU in the last call of `on`

    def on(self, device: int | None) -> Model[Any]:
        self.device = device or 0
        return super().on(device)

    def release(self) -> None:
        """Free the device memory of the model. The next call of `on` creates the model again."""
        self._exact = None
        self._on.clear()
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()

    @property
    def _matrix_bytes(self) -> int:
        if self.dtype != FILE:
            return super()._matrix_bytes
        unread = "" if self.config.tie_word_embeddings else "wte"
        return bytes_in_blocks(self.config, unread)

    def _create(self, device: str) -> Model[Any]:
        if self.dtype == FILE and not reads_blocks(self._several or device):
            raise InputError("GGUF blocks: expected a GPU of compute capability 7.5 or newer")
        with cupy.cuda.Device(self.device):
            library = cupy if self.gpus == 1 else np
            tensors = random_tensors(self.config, self.dtype, library)
            stored = self.dtype, self.cache_dtype
            return Model.from_tensors(self.config, tensors, self._several or device, *stored)

    def stored(self) -> Tensors:
        """Yield (name, array in device memory, layout) of each tensor; a matrix has layout "NK"."""
        tensors = self.on(self.device).engine.given()  # type: ignore[attr-defined]  # a CudaModel
        for name in model_shapes(self.config):
            value = tensors[name]
            if isinstance(value, WeightMatrix):
                yield name, value.data, value.layout
            else:
                yield name, value, None

    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        if self._exact is None:
            engine: Any = self.on(self.device).engine
            if self.gpus > 1 or engine.on_tensor_cores:
                # Generate the weights again if `stored` lacks scales (FP8) or has only shards.
                again = self.gpus > 1 or self.dtype in (*FP8, FILE)
                tensors = random_tensors(self.config, self.dtype) if again else self.stored()
                engine = _Float32Activations(self.config, tensors, self.formats, self.device)
            self._exact = engine
        return self._exact.forward([ids], "last")[0]


class _Float32Activations(CudaModel):
    """A model whose prompts are computed without tensor cores."""

    def _choose_products(self, largest: Mapping[str, float]) -> tuple[Products, dict[str, float]]:
        return "float32", {}
