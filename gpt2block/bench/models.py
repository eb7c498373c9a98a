"""Models with random weights for benchmarks, and the minimum bytes and FLOPs of a forward pass."""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures.mistral import MistralConfig
from gpt2block.architectures.qwen3 import Qwen3Config
from gpt2block.bench.random_weights import bytes_in_blocks, random_tensors
from gpt2block.block import reads_blocks
from gpt2block.config import GPT2Config, ModelConfig, model_shapes
from gpt2block.config.formats import FILE, Formats, itemsize
from gpt2block.config.llama import LlamaConfig
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.model import GPT2, Model
from gpt2block.ops.attention import SIXTEEN_BITS
from gpt2block.parameters.gpt2 import GPT2Weights
from gpt2block.passes.prefill import Products
from gpt2block.run.cuda_model import CudaModel
from gpt2block.run.model import Ids, Tensors
from gpt2block.weights.matrix import WeightMatrix

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
    "70b": LlamaConfig(
        n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, n_ff=28672, n_ctx=8192, vocab_size=128256,
        theta=500000.0,
    ),
    "small": LlamaConfig(
        n_layer=4, n_head=4, n_kv_head=2, n_embd=256, n_ff=768, vocab_size=4096, n_ctx=1024,
    ),
}  # fmt: skip
Config = TypeVar("Config", bound=ModelConfig)


class RandomModel(ABC, Generic[Config]):
    """A model with random weights in one dtype, shared by several benchmarks.

    cache: dtype of keys and values, by default the dtype that suits the weights. several: a device
    such as "cuda:0,1" if the model is divided among GPUs, else None.
    """

    def __init__(
        self,
        config: Config,
        dtype: str,
        cache: str | None = None,
        several: str | None = None,
    ) -> None:
        self.config, self.formats = config, Formats(dtype, cache)
        self.dtype, self.cache_dtype = dtype, self.formats.cache_dtype
        self._several, self.gpus = several, 1 + (several or "").count(",")
        self.device = 0  # index of the GPU in the last call of `on`
        self._on: dict[int, Model[Any]] = {}
        self._logits: dict[bytes, NDArray[np.float64]] = {}

    def on(self, device: int) -> Model[Any]:
        """Return the model on this GPU, or on `several`; the first call creates it."""
        self.device = device
        if device not in self._on:
            self._on[device] = self._made(self._several or f"cuda:{device}")
        return self._on[device]

    def release(self) -> None:
        """Free the device memory of the model. The next call of `on` creates the model again."""
        self._on.clear()
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()

    @abstractmethod
    def _made(self, device: str) -> Model[Any]:
        """Create the model on a device."""

    @abstractmethod
    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        """Compute the reference logits (V,) at a sequence's last token."""

    @property
    def checks_prompts(self) -> bool:
        """Whether `_exact_logits` runs other kernels than prefill, so that it can check prefill."""
        return True

    def last_logits(self, ids: Ids) -> NDArray[np.float64]:
        """Return the reference logits (V,) at a sequence's last token, cached for later calls."""
        key = ids.tobytes()
        if key not in self._logits:
            self._logits[key] = self._exact_logits(ids).astype(np.float64)
        return self._logits[key]

    def prompts(self, lengths: Iterable[int]) -> list[Ids]:
        """Return a prompt of random token ids for each of the lengths."""
        rng = np.random.default_rng(0)
        V = self.config.vocab_size
        return [rng.integers(V, size=length).astype(np.int32) for length in lengths]

    @property
    def matrix_elements(self) -> int:
        """Number of elements in all weight matrices of a forward pass, including lm_head."""
        shapes = self.config.block_shapes().values()
        block = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
        return self.config.n_layer * block + self.config.vocab_size * self.config.n_embd

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decoding step reads: matrices in `dtype`, vectors in float32."""
        shapes = model_shapes(self.config).values()
        vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
        return self._matrix_bytes + 4 * vectors

    @property
    def _matrix_bytes(self) -> int:
        return itemsize(self.dtype) * self.matrix_elements

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in the kv_caches of all layers."""
        return 2 * self.config.n_layer * self.config.kv_width * itemsize(self.cache_dtype)

    def prompt_flops(self, T: int) -> int:
        """Return the FLOPs of a prompt of T tokens, including the logits after the last token."""
        head = self.config.vocab_size * self.config.n_embd
        products = 2 * T * (self.matrix_elements - head) + 2 * head
        return products + self.attention_flops(T * (T + 1) // 2)

    def attention_flops(self, keys: int) -> int:
        """Return the FLOPs of all layers' attention, if each head scores `keys` query-key pairs."""
        return 4 * self.config.n_layer * self.config.q_width * keys


class RandomGPT2(RandomModel[GPT2Config]):
    """GPT-2 with random weights, kept in host memory too: NumPy computes the reference logits."""

    @cached_property
    def weights(self) -> GPT2Weights:
        return GPT2Weights.random(0, self.config)

    @cached_property
    def _reference(self) -> GPT2:
        return self._made("cpu")

    def _made(self, device: str) -> GPT2:
        stored = self.dtype, False, self.cache_dtype
        return GPT2(self.weights, device, *stored)

    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._reference(ids, last=True)
        return logits


class RandomLlama(RandomModel[LlamaConfig]):
    """A Llama or similar architecture, with random weights.

    They are generated in device memory, or in host memory for several GPUs.

    Results are compared with the logits of a prompt that runs other kernels: they multiply 16-bit
    weights with float32 activations.
    """

    _exact: CudaModel | None = None

    def release(self) -> None:
        self._exact = None
        super().release()

    @property
    def _matrix_bytes(self) -> int:
        if self.dtype != FILE:
            return super()._matrix_bytes
        unread = "" if self.config.tie_word_embeddings else "wte"
        return bytes_in_blocks(self.config, unread)

    @property
    def checks_prompts(self) -> bool:
        return self.dtype in SIXTEEN_BITS

    def _made(self, device: str) -> Model[Any]:
        if self.dtype == FILE and not reads_blocks(device):
            raise InputError("GGUF blocks: expected a GPU of compute capability 8.0 or newer")
        with cupy.cuda.Device(self.device):
            library = cupy if self.gpus == 1 else np
            tensors = random_tensors(self.config, self.dtype, library)
            stored = self.dtype, self.cache_dtype
            return Model.from_tensors(self.config, tensors, device, *stored)

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
                # Generate the weights again if `stored` lacks scales (FP8) or has only shares.
                again = self.gpus > 1 or self.dtype in (*FP8, FILE)
                tensors = random_tensors(self.config, self.dtype) if again else self.stored()
                engine = _Float32Activations(self.config, tensors, self.formats, self.device)
            self._exact = engine
        return self._exact.forward([ids], "last")[0]


class _Float32Activations(CudaModel):
    """A model whose prompts are computed without tensor cores."""

    def _choose_products(self, largest: Mapping[str, float]) -> tuple[Products, dict[str, float]]:
        return "float32", {}
