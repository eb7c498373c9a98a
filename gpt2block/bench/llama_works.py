"""What `gpt2block bench --llama` times: a Llama with random weights in device memory.

A step of decoding for several numbers of rows, and a prompt, with 16-bit and with FP8 weights.
Steps are also timed with fewer fusions: one kernel for each operation, launched from Python, then
each fusion in addition, and last a CUDA graph: the table of kernl's Llama optimisation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from itertools import accumulate
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.bench.race import Run
from gpt2block.bench.token_works import (
    GREEDY,
    NAME,
    UNFUSED,
    Captures,
    RandomModel,
    Steps,
    parse_rows,
    prompt,
)
from gpt2block.bench.works import Work, Written
from gpt2block.checks import FLOATS, check_choice
from gpt2block.config import ModelConfig, model_shapes
from gpt2block.config.formats import DTYPES
from gpt2block.config.llama import LlamaConfig
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.model import Llama
from gpt2block.ops.attention import SIXTEEN_BITS
from gpt2block.passes import architecture_of
from gpt2block.passes.blocks import Settings
from gpt2block.passes.decoding import DecodePass, Rows
from gpt2block.passes.forward import Product, To, forward
from gpt2block.passes.machine import Machine, Value
from gpt2block.passes.prefill import Products
from gpt2block.run.cuda_model import CudaModel
from gpt2block.run.model import Ids, Tensors, cache_tensors
from gpt2block.weights.matrix import WeightMatrix

if TYPE_CHECKING:
    from gpt2block.bench.torch_peers import TorchPeers

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
FP8_CACHE = "+ FP8 kv_cache"  # a step of all stages, and a kv_cache of FP8
BFLOAT16 = ("1b",)  # sizes whose checkpoints have bfloat16 weights; the others have float16
NUMBERS = 2**22 - 3  # different random weights; a prime, so that rows of a matrix differ
DEVIATION = 0.02
GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples modulo 1 are far from each other


Stages = Mapping[str, Collection[str]]  # name → its fusions
SIXTEEN_BIT_STAGES = {  # name → what it has more than the one before it
    UNFUSED: "",
    "+ residuals": "adds",
    "+ RoPE": "into_cache",
    "+ graph": "graph",
    "+ overlap": "overlap",
}
OTHER_STAGES = {
    UNFUSED: "",
    "+ RMSNorm": "adds norms",
    "+ RoPE": "into_cache",
    "+ feed-forward": "gates",
    "+ graph": "graph",
}


def stages_of(dtype: str) -> Stages:
    """The stages with weights of a dtype.

    Residuals are fused together with RMSNorm; RoPE, with the append of K and V to the kv_cache.
    Kernels with a fused RMSNorm take float32 activations with float32 and FP8 weights only. They do
    not overlap.
    """
    stages = SIXTEEN_BIT_STAGES if dtype in SIXTEEN_BITS else OTHER_STAGES
    added = (frozenset(more.split()) for more in stages.values())
    return dict(zip(stages, accumulate(added, or_), strict=True))


def staged(do: Machine, config: ModelConfig, fusions: Collection[str]) -> Value:
    """A step of decoding with some of the fusions, to logits."""
    step = StagedPass(do, Settings.of(config), fusions)
    return forward(step, architecture_of(config), config, "logits")


class StagedPass(DecodePass):
    """Steps of decoding with some of the fusions.

    "adds", "norms", "gates": products have residuals, RMSNorm, and gate and up of the feed-forward.
    "into_cache": RoPE also appends K and V to the kv_cache, which the attention of decoding then
    reads; else they are appended by a kernel of their own, and attention takes rows [Q | K | V].
    """

    def __init__(self, do: Machine, settings: Settings, fusions: Collection[str]) -> None:
        super().__init__(do, settings, norms="norms" in fusions)
        self.adds, self.gates = "adds" in fusions, "gates" in fusions
        self.into_cache = "into_cache" in fusions

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Rows:
        if self.norms and to != ("lm_head",):
            return Rows(x, gamma)
        return super().norm(name, x, gamma, beta, to)

    def _product(self, p: Product) -> Value:
        if p.a.gamma:
            return self.do(p.name, "rmsnorm_matmul", (p.a.x, p.a.gamma, p.w), eps=self.c.eps)
        if not p.add or self.adds:
            return super()._product(p)
        y = super()._product(p._replace(add=None, to=()))
        return self.do(p.result, "add", (p.residual, y), into=p.residual)

    def qkv(self, h: str, x: Rows, rope: bool = False) -> Value:
        y = self.product(f"{h}qkv", x, f"{h}w_qkv", f"{h}b_qkv")
        if self.into_cache:
            options: dict[str, Any] = {"n_head": self.c.n_head, "half_split": True}
            return self.do(f"{h}q", "rope_append", (y, "frequencies", *self._cache(h)), **options)
        inputs = (y, "positions", "frequencies")
        return self.do(f"{h}rope", "rope_qkv", inputs, into=y, **self.c.turn)

    def attend(self, h: str, qkv: Value, to: To = ()) -> Rows:
        if self.into_cache:
            return super().attend(h, qkv, to)
        k, v = f"{h}k", f"{h}v"
        self.do(f"{h}kv", "kv_append", (qkv, k, v, "row", "positions"))
        inputs = (qkv, k, v, "cu_seqlens", "start")
        options: dict[str, Any] = {"n_head": self.c.n_head, "longest": 1}
        return Rows(self.do(f"{h}attn", "attention_packed", inputs, **options))

    def gated(self, h: str, x: Rows, to: To = ()) -> Value:
        if not (self.gates and x.gamma):
            return super().gated(h, x, to)
        inputs = (x.x, x.gamma, f"{h}w_gate", f"{h}w_up")
        return Rows(self.do(f"{h}ff", "rmsnorm_ffn", inputs, eps=self.c.eps))


class RandomLlama(RandomModel[LlamaConfig]):
    """Llama with weights that are made in device memory, in their dtype.

    Results are compared with those of a prompt, for which 16-bit weights are multiplied with
    float32 activations by other kernels.
    """

    _exact: CudaModel | None = None

    def _made(self, device: str) -> Llama:
        with cupy.cuda.Device(self.device):
            tensors = random_tensors(self.config, self.dtype)
            stored = self.dtype, self.kv_dtype
            return Llama.from_tensors(self.config, tensors, device, *stored)

    def stored(self) -> Tensors:
        """The tensors as they are in the memory of the GPU, with layout "NK" for matrices."""
        given = self.on(self.device).engine.given()  # type: ignore[attr-defined]  # a CudaModel
        for name in model_shapes(self.config):
            value = given[name]
            if isinstance(value, WeightMatrix):
                yield name, value.data, value.layout
            else:
                yield name, value, None

    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        if self._exact is None:
            engine: Any = self.on(self.device).engine
            if engine.on_tensor_cores:  # FP8 weights, which have scales, are made again
                fp8 = self.dtype in FP8
                tensors = random_tensors(self.config, self.dtype) if fp8 else self.stored()
                engine = _Float32Activations(self.config, tensors, self.formats, self.device)
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


def llama_decode(model: RandomLlama, rows: int, position: int = 512) -> Work:
    """A step of decoding, and its stages, which have no FP8 kv_cache and round nothing."""
    steps = Steps(model, rows, position)

    def ours(device: int) -> Captures:
        step = partial(steps.decoded, device, GREEDY)
        if model.kv_dtype in FP8:
            return {FP8_CACHE: step}
        shared: list[Any] = []
        stages = stages_of(model.dtype).items()
        captures = {name: partial(_stage, steps, device, of, shared) for name, of in stages}
        return {NAME: step, **captures}

    def theirs(torch: TorchPeers) -> Captures:
        of = torch.of_models
        return {
            "torch": partial(of.steps, steps, "cuda", of.called),
            "torch.compile": partial(of.steps, steps, "cuda", torch.repeated),
            "transformers": partial(of.transformers_steps, steps, "cuda"),
        }

    return steps.work(ours, theirs)


def _stage(
    steps: Steps, device: int, fusions: Collection[str], shared: list[Any], rounds: int
) -> Run:
    """Greedy steps with some of the fusions, as a CUDA graph or not, whose launches overlap or not.

    shared: the kv_cache of all stages, which is large; each one writes it again from the prompts.
    """
    prompts, M = steps.prompts(), steps.rows
    engine: Any = steps.model.on(device).engine
    with engine.running():
        if not shared:
            shared.append(engine.new_cache(M, steps.end))
        cache = shared[0]
        cache.lengths = [0] * M
        first = engine.forward(prompts, "last", cache)
        tokens = cupy.asarray(np.array([logits.argmax() for logits in first], np.int32))
        positions = cupy.asarray(np.full(M, steps.start, np.int32))
        rows = cupy.asarray(np.arange(M + 1, dtype=np.int32))
        batch = {"tokens": tokens, "positions": positions, "row": rows[:M]}
        batch |= {"cu_seqlens": rows, "start": positions}
        caches = cache_tensors(cache.layers, engine.config.n_layer)
        recording = engine.recordings.make(
            lambda do: staged(do, engine.config, fusions),
            {**engine.given(), **caches, **batch},
            overlapping="overlap" in fusions,
        )
    columns = [tokens.get()]

    def replay() -> None:
        with engine.running():
            for _ in range(rounds):
                if "graph" in fusions:
                    recording.repeat(engine.stream)
                else:
                    recording.run()
                tokens[...] = recording.out.argmax(axis=1)
                positions[...] += 1
                columns.append(tokens.get())

    def written() -> Written:
        with engine.running():
            logits = recording.out.get().astype(np.float64)
        largest = logits.max(axis=1, keepdims=True)
        scores = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
        return steps.written(np.stack(columns, axis=1), lambda row, token: scores[row, token])

    return Run(replay, (written,), cache)


def _prompt_peers(model: RandomLlama, torch: TorchPeers, ids: Ids) -> Captures:
    of = torch.of_models
    return {
        "torch": partial(of.prompt, model, ids, "cuda", of.called),
        "torch.compile": partial(of.prompt, model, ids, "cuda", torch.repeated),
        "transformers": partial(of.transformers_prompt, model, ids, "cuda"),
    }


def llama_prompt(model: RandomLlama, T: int = 512) -> Work:
    """A prompt, to the logits after its last token."""
    return prompt(model, T, partial(_prompt_peers, model))


def llama_works(
    dtype: str | None = None,
    rows: str | None = None,
    name: str | None = None,
    kv_dtype: str | None = None,
) -> list[Work]:
    """The works in the order they are timed. Raises InputError.

    dtype: of the weights; by default those of the checkpoints of this size, then NARROW, and then
    NARROW with a kv_cache of NARROW, too. rows: as `parse_rows` takes them; by default ROWS. name:
    one of SHAPES, by default "7b". kv_dtype: as in `RandomModel`, of all works.
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
    works: list[Work] = []
    for stored, kv in dtypes:
        model = RandomLlama(SHAPES[name], stored, kv)
        works += [llama_decode(model, count) for count in counts]
        if stored in SIXTEEN_BITS:  # else the exact logits would be those that are timed
            works.append(llama_prompt(model))
    return works
