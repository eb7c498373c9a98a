"""What `gpt2block bench --llama` times: a Llama with random weights in device memory.

A step of decoding for several numbers of rows, and a prompt, with 16-bit and with FP8 weights.
Steps are also timed with fewer fusions: one kernel for each operation, launched from Python, then
each fusion in addition, and last a CUDA graph: the table of kernl's Llama optimisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.array_checks import FLOATS
from gpt2block.bench.staged_pass import StagedPass
from gpt2block.bench.token_works import DecodeWork, PromptWork, RandomModel, parse_rows
from gpt2block.bench.works import Work
from gpt2block.checks import check_choice
from gpt2block.config import ModelConfig, model_shapes
from gpt2block.config_llama import LlamaConfig
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.model import Llama
from gpt2block.ops.attention import SIXTEEN_BITS
from gpt2block.passes import architecture_of
from gpt2block.passes.blocks import Settings
from gpt2block.passes.forward import forward
from gpt2block.passes.machine import Machine, Value
from gpt2block.passes.prefill import Products
from gpt2block.run.cuda_model import CudaModel
from gpt2block.run.model import DTYPES, Ids, Tensors
from gpt2block.weights.matrix import WeightMatrix

SHAPES: Mapping[str, LlamaConfig] = {
    "7b": LlamaConfig(),
    "1b": LlamaConfig(
        n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, n_ff=8192, vocab_size=128256,
        theta=500000.0, tie_word_embeddings=True,
    ),
    "small": LlamaConfig(
        n_layer=4, n_head=4, n_kv_head=2, n_embd=256, n_ff=768, vocab_size=4096, n_ctx=1024,
    ),
}  # fmt: skip
ROWS = (1, 4, 16, 64)
NARROW = "float8_e5m2"  # the dtype after the 16-bit one, if none is given
UNFUSED = "unfused"  # the name of the first stage
BFLOAT16 = ("1b",)  # sizes whose checkpoints have bfloat16 weights; the others have float16
NUMBERS = 2**22 - 3  # different random weights; a prime, so that rows of a matrix differ
DEVIATION = 0.02
GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples modulo 1 are far from each other


@dataclass(frozen=True)
class Stage:
    """A step of decoding with some of the fusions: `fusions` are options of StagedPass.

    graph: whether it is a CUDA graph; overlapping: whether its launches overlap.
    """

    name: str
    fusions: Mapping[str, bool]
    graph: bool = False
    overlapping: bool = False

    def run(self, do: Machine, config: ModelConfig) -> Value:
        """The step, to logits."""
        step = StagedPass(do, Settings.of(config), **self.fusions)
        return forward(step, architecture_of(config), config, "logits")


def stages_of(dtype: str) -> tuple[Stage, ...]:
    """The stages with weights of a dtype, each with one thing more than the one before it.

    Residuals are fused together with RMSNorm; RoPE, with the append of K and V to the kv_cache.
    Kernels with a fused RMSNorm take float32 activations with float32 and FP8 weights only. They do
    not overlap.
    """
    residuals = {"adds": True}
    norms = {"adds": True, "norms": True}
    if dtype in SIXTEEN_BITS:
        into_cache = {**residuals, "into_cache": True}
        return (
            Stage(UNFUSED, {}),
            Stage("+ residuals", residuals),
            Stage("+ RoPE", into_cache),
            Stage("+ graph", into_cache, graph=True),
            Stage("+ overlap", into_cache, graph=True, overlapping=True),
        )
    into_cache = {**norms, "into_cache": True}
    gates = {**into_cache, "gates": True}
    return (
        Stage(UNFUSED, {}),
        Stage("+ RMSNorm", norms),
        Stage("+ RoPE", into_cache),
        Stage("+ feed-forward", gates),
        Stage("+ graph", gates, graph=True),
    )


class RandomLlama(RandomModel):
    """Llama with weights that are made in device memory, in their dtype.

    Results are compared with those of a prompt, for which 16-bit weights are multiplied with
    float32 activations by other kernels.
    """

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, dtype: str, kv_dtype: str | None = None) -> None:
        super().__init__(config, dtype, kv_dtype)
        self._on: dict[int, Llama] = {}
        self._device = 0  # that of the last call of `on`
        self._exact: CudaModel | None = None

    def on(self, device: int) -> Llama:
        self._device = device
        if device not in self._on:
            with cupy.cuda.Device(device):
                tensors = random_tensors(self.config, self.dtype)
                name = f"cuda:{device}"
                made = Llama.from_tensors(self.config, tensors, name, self.dtype, self.kv_dtype)
                self._on[device] = made
        return self._on[device]

    def stored(self) -> Tensors:
        """The tensors as they are in the memory of the GPU, with layout "NK" for matrices."""
        given = self.on(self._device).engine.given()  # type: ignore[attr-defined]  # a CudaModel
        for name in model_shapes(self.config):
            value = given[name]
            if isinstance(value, WeightMatrix):
                yield name, value.data, value.layout
            else:
                yield name, value, None

    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        if self._exact is None:
            engine: Any = self.on(self._device).engine
            if engine.on_tensor_cores:  # FP8 weights, which have scales, are made again
                fp8 = self.dtype in FP8
                tensors = random_tensors(self.config, self.dtype) if fp8 else self.stored()
                engine = _Float32Activations(
                    self.config, tensors, self.dtype, self._device, kv_dtype=self.kv_dtype
                )
            self._exact = engine
        return self._exact.forward([ids], "last")[0]


class _Float32Activations(CudaModel):
    """A model whose prompts are computed without tensor cores."""

    def _choose_products(self, largest: Mapping[str, float]) -> tuple[Products, dict[str, float]]:
        return "float32", {}


def random_tensors(config: LlamaConfig, dtype: str) -> Tensors:
    """Name, array in device memory and layout of every tensor; one at a time.

    Matrices are in the dtype, or in float16 for FP8, of N(0, 0.02), which repeat after NUMBERS
    weights; gammas are of U(0.8, 1.2) in float32.
    """
    stored = FLOATS["float16" if dtype in FP8 else dtype]
    rng = np.random.default_rng(0)
    count = min(NUMBERS, max(int(np.prod(shape)) for shape in model_shapes(config).values()))
    numbers = rng.standard_normal(count, dtype=np.float32) * np.float32(DEVIATION)
    block = cupy.asarray(numbers.astype(stored))
    for n, (name, shape) in enumerate(model_shapes(config).items()):
        if len(shape) == 1:
            yield name, cupy.asarray(rng.uniform(0.8, 1.2, shape).astype(np.float32)), None
            continue
        made = cupy.empty(shape if name in ("wte", "lm_head") else shape[::-1], stored)
        _fill(made, block, int(n * GOLDEN_RATIO * count))
        yield name, made, "NK"


def _fill(array: CudaArray, block: CudaArray, start: int) -> None:
    """Fill an array with copies of a block, from one of its elements on."""
    bits = np.dtype(f"u{array.dtype.itemsize}")  # which every CuPy can copy
    to, of = array.reshape(-1).view(bits), block.view(bits)
    at, start = 0, start % of.size
    while at < to.size:
        part = of[start : start + to.size - at]
        to[at : at + part.size] = part
        at, start = at + part.size, 0


class LlamaDecodeWork(DecodeWork):
    """A step of decoding of a Llama."""

    model: RandomLlama

    @property
    def sizes(self) -> dict[str, int]:
        return super().sizes | {"n_kv_head": self.model.config.n_kv_head}


class LlamaPromptWork(PromptWork):
    """A prompt of a Llama."""

    model: RandomLlama

    @property
    def sizes(self) -> dict[str, int]:
        return super().sizes | {"n_kv_head": self.model.config.n_kv_head}


def llama_works(
    dtype: str | None = None,
    rows: str | None = None,
    name: str | None = None,
    kv_dtype: str | None = None,
) -> list[Work]:
    """The works in the order they are timed. Raises InputError.

    dtype: of the weights; by default those of the checkpoints of this size, then NARROW, and then
    NARROW with a kv_cache of NARROW, too. rows: as `parse_rows` takes them; by default ROWS. name:
    one of SHAPES, by default "7b". kv_dtype: as in `kv_cache_dtype`, of all works.
    """
    name = name or "7b"
    if name not in SHAPES:
        raise InputError(f"--size: expected one of {', '.join(SHAPES)} with --llama, got {name!r}")
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    counts = ROWS if rows is None else parse_rows(rows)
    stored = "bfloat16" if name in BFLOAT16 else "float16"
    dtypes = [(each, kv_dtype) for each in ((dtype,) if dtype else (stored, NARROW))]
    if dtype is None and kv_dtype is None:
        dtypes.append((NARROW, NARROW))
    return [work for each in dtypes for work in _works(*each, counts, name)]


def _works(dtype: str, kv_dtype: str | None, rows: tuple[int, ...], name: str) -> Iterator[Work]:
    model = RandomLlama(SHAPES[name], dtype, kv_dtype)
    for count in rows:
        yield LlamaDecodeWork(dtype, model, count)
    if dtype in SIXTEEN_BITS:  # else the exact logits would be those that are timed
        yield LlamaPromptWork(dtype, model, T=512)
