"""Decoding few rows of a Llama with four kernels per layer: same bits as the ten they replace."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from launch_recorder import recording
from numpy.typing import NDArray

from gpt2block import LlamaConfig, Model, WeightMatrix, cuda, reference
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import cache_dtype
from gpt2block.engine.cuda import choice as cuda_choice
from gpt2block.errors import InputError
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.qwen3 import Qwen3Config
from gpt2block.models.weights.gguf import TYPES, GgufMatrix
from gpt2block.ops import gated_sums
from gpt2block.ops.engines.linear_mma import splits
from gpt2block.ops.gated_sums import Fusions, GpuLimits, splits_of
from gpt2block.ops.registry import bind
from tests import gpus, outlines, plain
from tests.devices import GPU, assert_same_bits, on_hopper, slow
from tests.ops.test_operands import step_of

Array = NDArray[Any]
DTYPES = gated_sums.DTYPES
EPS = 1e-5
SMOLLM2 = LlamaConfig(
    n_layer=2, n_head=9, n_kv_head=3, n_embd=576, n_ff=1536, vocab_size=515, n_ctx=64,
    theta=10000.0, tie_word_embeddings=True,
)  # fmt: skip
NARROW = LlamaConfig(
    n_layer=3, n_head=4, n_kv_head=1, n_embd=96, n_ff=384, vocab_size=101, n_ctx=64, head_size=32
)
NORMED = Qwen3Config(**{**vars(NARROW), "n_layer": 2})  # heads have norms
DOWN = {"Q4_K": "Q6_K", "Q6_K": "Q5_K"}  # type of the other matrices -> type of w_down
SIZES = ((128, 256), (96, 384), (576, 1536), (1024, 3072), (1024, 2048), (16, 128))


@pytest.fixture
def possible(device: Any) -> None:
    gpus.cupy_with(90)


def matrix(seed: int, N: int, K: int, dtype: str) -> WeightMatrix:
    if dtype in TYPES:
        return GgufMatrix.random([(dtype, N)], K, seed).mapped(cupy.asarray)
    w = (plain.normal(seed, N, K) - np.float32(0.5)) / np.float32(K**0.5)
    return WeightMatrix.quantize(w, dtype, "NK").mapped(cupy.asarray)


def run(op: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
    return bind(op, inputs, out, **options).run()


class Half:
    """Inputs and weights of the second half of a layer and of the following q, k, v and o.

    The next layer has two heads of q per head of k and v, with D channels each. normed: q and k
    have norms. gelu: the gate uses GELU. Without either, queries grow with the position.
    """

    def __init__(
        self,
        M: int,
        C: int,
        H: int,
        dtype: str,
        D: int = 8,
        rounded: bool = False,
        normed: bool = False,
        gelu: bool = False,
    ) -> None:
        self.gelu = gelu
        self.grown: dict[str, Any] = {} if gelu or normed else {"growth": (0.5, 1)}
        self.dtype, self.kv, self.heads = GGUF if dtype in TYPES else dtype, 3 * D, 6
        self.rounding: dict[str, Any] = {"x_dtype": "float16"} if rounded else {}
        self.x, self.a = plain.normal(0, M, C), plain.normal(7, M, C)
        self.gammas = [cupy.asarray(plain.normal(seed, C)) for seed in (2, 3, 4)]
        self.gate, self.up = matrix(5, H, C, dtype), matrix(6, H, C, dtype)
        self.down, self.qkv = matrix(8, C, H, DOWN.get(dtype, dtype)), matrix(9, 12 * D, C, dtype)
        self.o = matrix(10, C, C, dtype)
        rng = np.random.default_rng(0)
        self.row, self.position = (rng.permutation(n)[:M].astype(np.int32) for n in (M, 8))
        self.frequencies = 100.0 ** (-np.arange(D // 2) / (D // 2))
        self.of_heads = [cupy.asarray(plain.normal(seed, D)) for seed in (11, 12) if normed]

    def cache(self, dtype: str) -> tuple[Any, ...]:
        """Return empty K and V of M rows and 8 tokens, and rows and positions of new tokens."""
        M, kept = len(self.x), FLOATS[cache_dtype(dtype)]
        k, v = (cupy.asarray(np.zeros((M, 8, self.kv), kept)) for _ in range(2))
        return k, v, cupy.asarray(self.row), cupy.asarray(self.position)

    def apart(self) -> list[Array]:
        """Compute Q, K and V, the stream after o and the final norm by separate kernels."""

        def norm(x: Any, gamma: Any) -> Any:
            return run("rmsnorm", x, gamma, eps=EPS, variant="stream")

        def of(*inputs: Any) -> Any:
            return run("linear", *inputs, decoding=True, **self.rounding)

        x, (gamma, *after) = cupy.asarray(self.x), self.gammas
        n = norm(x, gamma)
        h = run("silu_mul", of(n, self.gate), of(n, self.up), gelu=self.gelu)
        x = of(h, self.down, None, None, None, x)
        o = of(cupy.asarray(self.a), self.o, None, None, None, x)
        cache = self.cache(self.dtype)
        q = self.turned(of(norm(x, after[0]), self.qkv), cache)
        return [each.get() for each in (q, *cache[:2], o, norm(x, after[1]))]

    def turned(self, qkv: Any, cache: tuple[Any, ...], **options: Any) -> Any:
        """Return Q of rows after RoPE, and store K and V in the cache."""
        given = (qkv, cupy.asarray(self.frequencies), *cache)
        if self.of_heads:
            normed = {"n_head": self.heads, "eps": EPS, **options}
            return run("qk_norm_append", *given, *self.of_heads, **normed)
        options |= {"n_head": self.heads, "half_split": True, **self.grown}
        return run("rope_append", *given, **options)

    def together(self) -> list[Array]:
        """Compute the results of `apart` by the kernels for few rows."""
        x, (gamma, *after) = cupy.asarray(self.x), self.gammas
        count = splits(self.gate.N)[0]
        given = (x, gamma, self.gate, self.up, self.down)
        options = {"splits": count, "eps": EPS, "gelu": self.gelu, **self.rounding}
        made = run("gated_sums", *given, **options)
        left = (made, self.down)
        cache = self.cache(self.dtype)
        by = run("rotations", cache[3], cupy.asarray(self.frequencies))
        inputs = (x, after[0], self.qkv, *left, by, *cache, *self.of_heads)
        options = {"n_head": self.heads, "eps": EPS, **self.grown, **self.rounding}
        q = run("rope_sums", *inputs, **options)
        last = run("rmsnorm_sums", x, after[1], *left, eps=EPS)
        a = cupy.asarray(self.a)
        assert run("linear_sums", a, self.o, x, *left, out=x, **self.rounding) is x
        return [each.get() for each in (q, *cache[:2], x, last)]

    def exact(self) -> list[Array]:
        """Compute the results of `apart` by the reference in float64."""
        x, a, gamma, *after = (
            each.astype(np.float64) for each in (self.x, self.a, *(g.get() for g in self.gammas))
        )
        gate, up, down, qkv, o = (self.gate, self.up, self.down, self.qkv, self.o)
        count = splits(gate.N)[0]
        matrices = (on_host(gate), on_host(up), on_host(down))
        sums = reference.gated_sums(x, gamma, *matrices, count, EPS, self.gelu)
        left = (sums, matrices[-1])
        by = reference.rotations(self.position, self.frequencies)
        k, v = (np.zeros((len(x), 8, self.kv)) for _ in range(2))
        places: Any = (by, k, v, self.row, self.position, *(g.get() for g in self.of_heads))
        options: Any = {"n_head": self.heads, "eps": EPS, **self.grown}
        q = reference.rope_sums(x, after[0], on_host(qkv), *left, *places, **options)
        final = reference.rmsnorm_sums(x, after[1], *left, eps=EPS)
        return [q, k, v, reference.linear_sums(a, on_host(o), x, *left), final]


def model_steps(model: Model[Any]) -> list[Any]:
    """Return the steps of the plan for one row."""
    engine: Any = model.engine
    names = outlines.outline(model.config).tensors
    return list(engine.decoding.steps(names, 1, engine.decoding.operands(1)))


def on_host(w: WeightMatrix) -> WeightMatrix:
    return w.mapped(lambda array: array.get())


CASES: list[Any] = [("hopper", *case) for case in (  # with GELU, after a norm, in blocks
    (4, 160, 384, "float16"), (1, 160, 1280, "Q4_1"),
)]  # fmt: skip
CASES += [
    pytest.param("gpu", M, *sizes, dtype, marks=GPU.marks)
    for i, (sizes, dtype) in enumerate(product(SIZES, DTYPES))
    for M in ((1, 4), (2, 3))[i % 2]
]
CASES += [
    pytest.param("gpu", M, *sizes, dtype, marks=GPU.marks)
    for sizes, dtype in (
        *product(((128, 256), (96, 384), (576, 1536)), ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
        *product(((256, 768), (1024, 3072), (1024, 2048)), ("Q4_K", "Q5_K", "Q6_K")),
    )
    for M in (1, 3, 4)
]


@pytest.mark.parametrize(("device", "M", "C", "H", "dtype"), CASES, indirect=["device"])
def test_the_bits_are_those_of_kernels_apart(
    device: Any, possible: None, M: int, C: int, H: int, dtype: str
) -> None:
    in_blocks = dtype in TYPES
    kind: Any = {"normed": M > 2 and not in_blocks, "gelu": M % 2 == 0, "D": 8 + 8 * in_blocks}
    half = Half(M, C, H, dtype, **kind)
    found = half.together()
    for ours, theirs, exact in zip(found, half.apart(), half.exact(), strict=True):
        assert_same_bits(ours, theirs)
        rounding = 1e-2 if dtype == "bfloat16" else 1e-3  # mostly the rounding of K and V
        assert np.abs(ours - exact).max() <= rounding * np.abs(exact).max()
    if dtype == "bfloat16" or (cuda.replaced() and not in_blocks):
        return
    half = Half(M, C, H, dtype, rounded=True, **kind)
    for ours, theirs, unrounded in zip(half.together(), half.apart(), found, strict=True):
        assert_same_bits(ours, theirs)
        assert 0 < np.abs(ours - unrounded).max() <= 2e-3 * np.abs(unrounded).max()


@pytest.mark.parametrize(
    ("D", "kv_dtype", "normed"),
    [(64, None, False), slow(2, "float8_e4m3fn", False), slow(10, None, False),
     slow(16, None, True), (32, "float8_e5m2", True), slow(40, None, True), slow(64, None, True),
     slow(128, None, True), slow(96, "float8_e4m3fn", True), slow(256, None, True)],
)  # fmt: skip
@on_hopper
def test_the_first_layer(
    device: Any, possible: None, D: int, kv_dtype: str | None, normed: bool
) -> None:
    """The first layer adds no sums. Heads have any size; a token is out of range, x may be -0."""
    half = Half(3, 128, 128, "float16", D, normed=normed)
    half.position[1] = 8
    x, gamma, w = cupy.asarray(half.x), half.gammas[0], half.qkv
    n = run("rmsnorm", x, gamma, eps=EPS, variant="stream")
    qkv = run("linear", n, w, decoding=True)
    found = []
    for fused in (True, False):
        k, v, *places = half.cache("float16")
        if kv_dtype:
            k, v = (cupy.asarray(np.zeros(k.shape, np.uint8)) for _ in range(2))
        if fused:
            by = run("rotations", places[1], cupy.asarray(half.frequencies))
            inputs = (x, gamma, w, None, None, by, k, v, *places, *half.of_heads)
            options: Any = {"n_head": half.heads, "kv_dtype": kv_dtype, **half.grown}
            q = run("rope_sums", *inputs, eps=EPS, **options)
        else:
            q = half.turned(qkv, (k, v, *places), kv_dtype=kv_dtype)
        found.append([each.get() for each in (q, k, v)])
    for ours, theirs in zip(*found, strict=True):
        assert theirs.any()
        assert_same_bits(ours, theirs)
    zeros = cupy.asarray(np.full((3, 128), -0.0, np.float32))
    ours = run("linear_sums", zeros, half.o, zeros)
    assert_same_bits(ours.get(), run("linear", zeros, half.o, None, None, None, zeros,
                                     decoding=True).get())  # fmt: skip


@on_hopper
def test_gpus_of_other_limits(device: Any, possible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(2, 128, 256, "bfloat16")
    x, gamma = cupy.asarray(half.x), half.gammas[0]
    with monkeypatch.context() as patch:
        patch.setattr(gated_sums, "limits", lambda: GpuLimits(132, 1000, 8))
        fits = "fit in 1,000 bytes of shared memory per block: use linear and silu_mul"
        with pytest.raises(InputError, match=fits):
            bind("gated_sums", (x, gamma, half.gate, half.up, half.down), splits=2)
    monkeypatch.setattr("gpt2block.cuda.cards.capability_of", lambda _: 70)
    with pytest.raises(InputError, match=r"compute capability 7\.5"):
        bind("linear_sums", (x, half.o, x))
    assert splits_of("bfloat16", 1, SMOLLM2.block_shapes()) == 0


# Two layers suffice on the emulator: they have every pair of consecutive kernels.
PLANS = {"sums": (1, 4), "norms": (3,), "none": ()}  # numbers of rows on the emulator
MODELS: list[Any] = [
    slow("hopper", replace(NARROW, n_layer=2), "float8_e4m3fn", ("sums", "none")),
    slow("hopper", NORMED, "bfloat16", tuple(PLANS)),
]
MODELS += [
    pytest.param("gpu", config, dtype, tuple(PLANS), marks=GPU.marks)
    for config, dtype in product((SMOLLM2, NARROW, NORMED), DTYPES)
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("device", "config", "dtype", "plans"), MODELS, indirect=["device"])
def test_a_model_has_the_same_bits_in_all_plans(
    device: Any,
    possible: None,
    dtype: str,
    config: LlamaConfig,
    plans: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows in batches of one to five have the bits of a row alone in the plan without fused norms.

    Plan "sums" has four kernels a layer, plan "norms" five. The emulator runs steps without a
    prompt, for few numbers of rows, and the plan without fused norms only for single rows.
    """
    tensors = list(random_model(0, config))
    prompts = [[n, 3 * n + 1, 7, *range(n)] for n in range(5)]

    def results(model: Model[Any], rows: slice) -> list[Array]:
        if cuda.replaced():
            return list(step_of(model, rows)[1])
        options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "stop_ids": ()}
        texts = model.generate(prompts[rows], **options)
        return [np.array([*text.tokens, *text.logprobs]) for text in texts]

    found = []
    for plan in plans:
        with monkeypatch.context() as patch:
            if plan != "sums":
                patch.setattr(cuda_choice, "splits_of", lambda *_: 0)
            if plan == "none":
                patch.setattr(cuda_choice, "fusions", lambda *_: Fusions())
            model: Model[Any] = Model.from_tensors(config, iter(tensors), "cuda:0", dtype)
            for rows in PLANS[plan] if cuda.replaced() else (1, 2, 3, 4, 5):
                found.append(results(model, slice(rows)))
            steps = {step.op for step in model_steps(model)}
            assert ("gated_sums" in steps, "rope_sums" in steps) == (plan == "sums", plan != "none")
            if plan == "sums" and not cuda.replaced():
                names = {row.name for row in model.compare(prompts[4], cached=True)}
                assert {"h.0.rms2", "h.0.gate", "h.1.output"} <= names
    for row in range(max(map(len, found))):
        (alone,) = results(model, slice(row, row + 1))
        for among in found:
            if row < len(among):
                assert_same_bits(among[row], alone)


def test_clusters_of_16_blocks_are_allowed() -> None:
    """Clusters of 16 blocks are allowed for kernels that run only on Hopper."""
    allowed: list[Any] = []
    with recording("9.0"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda.cupy.cuda.driver, "funcSetAttribute", lambda *args: allowed.append(args))
        assert kernels.load("learn/elementwise/gelu.cu", "gelu_kernel").found
        assert allowed == []
        function = kernels.load(gated_sums.FILE, "decode_ffn_mma").found
        assert allowed == [(function.kernel.ptr, 14, 1)]
