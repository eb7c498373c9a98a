"""Models with random weights for benchmarks, and the minimum bytes and FLOPs of a forward pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures.mistral import MistralConfig
from gpt2block.architectures.qwen3 import Qwen3Config
from gpt2block.checks import FLOATS
from gpt2block.config import GPT2Config, ModelConfig, model_shapes
from gpt2block.config.formats import FILE, GGUF, Formats, itemsize
from gpt2block.config.llama import LlamaConfig
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.kernels import FP8
from gpt2block.model import GPT2, Model
from gpt2block.ops.attention import SIXTEEN_BITS
from gpt2block.parameters.gpt2 import GPT2Weights
from gpt2block.passes.prefill import Products
from gpt2block.run.cuda_model import CudaModel
from gpt2block.run.model import Ids, Tensors
from gpt2block.weights.gguf import TYPES, GgufMatrix, range_bytes
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
    "small": LlamaConfig(
        n_layer=4, n_head=4, n_kv_head=2, n_embd=256, n_ff=768, vocab_size=4096, n_ctx=1024,
    ),
}  # fmt: skip
NUMBERS = 2**22 - 3  # count of different random weights; a prime, so that rows of a matrix differ
DEVIATION = 0.02  # standard deviation of random weights
BLOCK_ROWS = 4096  # different rows of random GGUF blocks of a type; larger matrices repeat them
Ranges = tuple[tuple[str, int], ...]  # pairs (GGUF type, number of outputs)
GOLDEN_RATIO = (5**0.5 - 1) / 2  # multiples of the golden ratio modulo 1 are spread evenly
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

    @property
    def _matrix_bytes(self) -> int:
        if self.dtype != FILE:
            return super()._matrix_bytes
        shapes = model_shapes(self.config)
        read = [name for name, shape in shapes.items() if len(shape) == 2]
        if "lm_head" in shapes:
            read.remove("wte")
        inputs = {name: shapes[name][name in ("wte", "lm_head")] for name in read}
        return sum(
            sum(range_bytes(gguf_ranges(self.config, name), K)) for name, K in inputs.items()
        )

    @property
    def checks_prompts(self) -> bool:
        return self.dtype in SIXTEEN_BITS

    def _made(self, device: str) -> Model[Any]:
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


def random_tensors(config: LlamaConfig, dtype: str, library: Any = cupy) -> Tensors:
    """Yield (name, array, layout) of each tensor of a random Llama.

    Matrices are drawn from N(0, 0.02²), in the dtype, or in float16 for FP8; the numbers repeat
    after NUMBERS weights. For dtype "file", matrices have random blocks of `gguf_ranges`. Gammas
    are drawn from U(0.8, 1.2), in float32. library: CuPy or NumPy, whose arrays are yielded.
    """
    stored = FLOATS["float16" if dtype in (*FP8, FILE) else dtype]
    rng = np.random.default_rng(0)
    count = min(NUMBERS, max(int(np.prod(shape)) for shape in model_shapes(config).values()))
    numbers = rng.standard_normal(count, dtype=np.float32) * np.float32(DEVIATION)
    block = library.asarray(numbers.astype(stored))
    for n, (name, shape) in enumerate(model_shapes(config).items()):
        if len(shape) == 1:
            yield name, library.asarray(rng.uniform(0.8, 1.2, shape).astype(np.float32)), None
            continue
        of_outputs = shape if name in ("wte", "lm_head") else shape[::-1]
        if dtype == FILE:
            ranges = gguf_ranges(config, name)
            yield name, _random_blocks(ranges, of_outputs[1], n, library), "NK"
            continue
        made = library.empty(of_outputs, stored)
        _fill(made, block, int(n * GOLDEN_RATIO * count))
        yield name, made, "NK"


def gguf_ranges(config: ModelConfig, name: str) -> Ranges:
    """Return the GGUF types of the outputs of a matrix, as in llama.cpp's mixture Q4_K_M.

    Matrices have type Q4_K. lm_head, and w_down and the outputs v of w_qkv in half of the layers,
    have type Q6_K.
    """
    of_layer = name.split(".")
    outputs = model_shapes(config)[name][name not in ("wte", "lm_head")]
    if len(of_layer) == 1:
        tied = config.tie_word_embeddings
        return (("Q6_K" if tied or name == "lm_head" else "Q4_K", outputs),)
    n, last = int(of_layer[1]), config.n_layer
    precise = n < last // 8 or n >= 7 * last // 8 or (n - last // 8) % 3 == 2
    if not precise or of_layer[2] not in ("w_qkv", "w_down"):
        return (("Q4_K", outputs),)
    if of_layer[2] == "w_down":
        return (("Q6_K", outputs),)
    return ("Q4_K", outputs - config.kv_width), ("Q6_K", config.kv_width)


def _random_blocks(ranges: Ranges, K: int, start: int, library: Any) -> GgufMatrix:
    """Return a matrix of random blocks, in memory of `library`. `start` selects the first row."""
    sizes, at, largest = range_bytes(ranges, K), 0, 0.0
    data = library.empty(sum(sizes), "uint8")
    for (name, _), size in zip(ranges, sizes, strict=True):
        block = _different_rows(name, K)
        own = library.asarray(block.data)
        _fill(data[at : at + size], own, start * TYPES[name].row_bytes(K))
        at, largest = at + size, max(largest, block.largest)
    return GgufMatrix(data, GGUF, None, "NK", largest, ranges, K)


@lru_cache
def _different_rows(name: str, K: int) -> GgufMatrix:
    return GgufMatrix.random([(name, BLOCK_ROWS)], K, size=DEVIATION)


def _fill(array: CudaArray, block: CudaArray, start: int) -> None:
    """Fill `array` with repetitions of `block`, beginning with the element `start` of `block`."""
    bits = np.dtype(f"u{array.dtype.itemsize}")  # not every CuPy can copy bfloat16 and FP8
    to, of = array.reshape(-1).view(bits), block.view(bits)
    at, start = 0, start % of.size
    while at < to.size:
        part = of[start : start + to.size - at]
        to[at : at + part.size] = part
        at, start = at + part.size, 0
