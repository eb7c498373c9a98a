"""Prefill on tensor cores: activations of 16 bits between kernels, the residual stream in float32.

The rule is that of the fused block: the error against float64, on the same rounded weights, is at
most twice that of the NumPy meaning, whose steps are float32 with each result but the stream's
rounded to 16 bits, plus the rounding term of the kernels' tests.

Without a GPU the launches of a whole model are run by the kernels' own source.
"""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import GPT2, GPT2Config, emulator, reference
from gpt2block.architectures.gpt2_weights import GPT2Weights
from gpt2block.array_checks import FLOATS
from gpt2block.cuda import kernels, overlap
from gpt2block.emulator import loader, stand_in
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.run.cuda_caches import CudaCache
from gpt2block.run.cuda_model import CudaModel
from gpt2block.run.model import kv_cache_dtype, padded, start_all
from gpt2block.sampling import Sampling
from tests.gpus import cupy_with
from tests.plain import rounding

Array = NDArray[Any]
TINY = GPT2Config(n_layer=2, n_head=2, n_embd=128, n_ctx=40, vocab_size=53)
SMALL = GPT2Config(n_layer=3, n_head=4, n_embd=256, n_ctx=300, vocab_size=501)
UNTIED = replace(SMALL, n_layer=1, vocab_size=504, tie_word_embeddings=False)
DTYPES = ("bfloat16", "float16")
in_16_bits = pytest.mark.parametrize("dtype", DTYPES)


@cache
def weights(config: GPT2Config) -> GPT2Weights:
    """Larger than they are to begin with, so that attention looks at some tokens more."""
    w = GPT2Weights.random(3, config)
    return replace(w, blocks=tuple(replace(b, w_qkv=4 * b.w_qkv) for b in w.blocks))


@cache
def rounded(config: GPT2Config, dtype: str) -> GPT2Weights:
    """The weights as they are computed with."""
    w = weights(config)
    names = ("w_qkv", "w_attn", "w_fc", "w_proj")

    def stored(array: Array) -> Any:
        return array.astype(FLOATS[dtype]).astype(np.float32)

    blocks = tuple(replace(b, **{n: stored(getattr(b, n)) for n in names}) for b in w.blocks)
    wte = stored(w.wte)
    lm_head = wte if config.tie_word_embeddings else stored(w.lm_head)
    return replace(w, blocks=blocks, wte=wte, lm_head=lm_head)


class Found(NamedTuple):
    """Of a sequence: logits of each token by `logits`, by "last"; keys and values; the stream."""

    logits: Array  # (T, V)
    last: Array  # (T, V), from the final LayerNorm as it is
    kv: Array  # (n_layer, 2, T, C)
    stream: Array  # (n_layer + 1, T, C)
    hidden: Array  # (T, C)


def computed(w: GPT2Weights, ids: Array, step: Any, float_type: Any) -> Found:
    """All of it in `float_type`; `step` makes of a result what the next step is given."""

    def wide(array: Array) -> Array:
        return np.asarray(array, float_type)

    x = wide(reference.encoder(ids, w.wte, w.wpe))
    stream, kv = [x], []
    for b in w.blocks:
        qkv = step(step(reference.layernorm(x, b.gamma1, b.beta1, b.eps)) @ wide(b.w_qkv) + b.b_qkv)
        attn = step(reference.attention(qkv, b.n_head, causal=True))
        x = x + (attn @ wide(b.w_attn) + b.b_attn)
        ln2 = step(reference.layernorm(x, b.gamma2, b.beta2, b.eps))
        ff = step(reference.gelu(ln2 @ wide(b.w_fc) + b.b_fc))
        x = x + (ff @ wide(b.w_proj) + b.b_proj)
        stream.append(x)
        kv.append(np.split(qkv, 3, axis=1)[1:])
    hidden = reference.layernorm(x, w.gamma_f, w.beta_f, w.config.eps)
    head = wide(w.lm_head).T
    return Found(step(hidden) @ head, hidden @ head, np.array(kv), np.array(stream), hidden)


@cache
def truth_and_meaning(
    config: GPT2Config, dtype: str, seed: int, length: int
) -> tuple[Array, Found, Found]:
    """Tokens, what they give in float64, and what in float32 with rounded steps."""
    ids = random_ids(config, length, seed)

    def step(result: Array) -> Array:
        return np.asarray(result.astype(FLOATS[dtype]).astype(np.float32))

    w = rounded(config, dtype)
    exact = computed(w, ids, np.asarray, np.float64)
    return ids, exact, computed(w, ids, step, np.float32)


def random_ids(config: GPT2Config, length: int, seed: int = 0) -> Array:
    rng = np.random.default_rng((seed, length))
    return rng.integers(config.vocab_size, size=length, dtype=np.int32)


def assert_close(got: Array, truth: Array, meaning: Array, at: Any = slice(None)) -> None:
    """`got` are rows `at` of what there is; the meaning's error is taken over all rows."""
    assert got.shape == truth[at].shape
    error = float(np.abs(got.astype(np.float64) - truth[at]).max())
    limit = 2 * float(np.abs(meaning - truth).max()) + rounding(truth)
    assert error <= limit, f"error {error:.3g} is over {limit:.3g}"


@in_16_bits
def test_the_meaning_errs_by_rounding(dtype: str) -> None:
    """Beside the largest logit: a wrong step is far beyond the rule."""
    _, truth, meaning = truth_and_meaning(SMALL, dtype, 0, 40)
    off = np.abs(meaning.logits - truth.logits).max() / np.abs(truth.logits).max()
    assert 0 < off < {"bfloat16": 2.0**-6, "float16": 2.0**-9}[dtype]


# --- on the CPU -----------------------------------------------------------------------------------


class Machine:
    """The emulator as a GPU whose launches overlap; it records the kernels that run."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.early: list[str] = []  # those launched to overlap the one before

    def get(self, array: Any) -> Array:
        return np.asarray(array.get())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if problem := loader.missing():
        pytest.skip(problem)
    found = Machine()
    run_kernel = stand_in.Function._run

    def run(self: Any, *args: Any) -> None:
        found.ran.append(self.name)
        run_kernel(self, *args)

    def run_early(launch: kernels.Launch) -> None:
        found.early.append(launch.name)
        launch.run()

    monkeypatch.setattr(stand_in.Function, "_run", run)
    monkeypatch.setattr(overlap, "possible", lambda: True)
    monkeypatch.setattr(overlap, "run", run_early)
    with emulator.emulated():
        yield found


def on(machine: Machine, config: GPT2Config, dtype: str) -> CudaModel:
    return CudaModel(config, weights(config).tensors(), dtype, 0)


def logits_of(machine: Machine, model: Any, prefill: Any) -> Array:
    (logits,) = (machine.get(part).copy() for part in model._logits(prefill.out))
    assert (logits[:, model.config.vocab_size :] == -np.inf).all()
    return np.asarray(logits[:, : model.config.vocab_size])


def test_a_ragged_batch_some_of_which_goes_on(machine: Machine) -> None:
    """A call, a graph of it, then rows that begin and rows that go on."""
    dtype, lengths = "bfloat16", [16, 14, 22, 9]
    model = on(machine, TINY, dtype)
    rows = [truth_and_meaning(TINY, dtype, b, n) for b, n in enumerate(lengths)]
    kv_cache = CudaCache(TINY, 4, 40, kv_cache_dtype(dtype))
    first = [ids[:n] for (ids, _, _), n in zip(rows, (11, 0, 22, 1), strict=True)]
    prefill = model.prefill(first, kv_cache, "last")
    assert kv_cache.lengths == [11, 0, 22, 1]
    got = machine.get(prefill.out).copy()
    for b in (0, 2, 3):
        _, truth, meaning = rows[b]
        at = kv_cache.lengths[b] - 1
        assert_close(got[b], truth.last, meaning.last, at)
        for layer, halves in enumerate(kv_cache.layers):
            for kept, exact, own in zip(halves, truth.kv[layer], meaning.kv[layer], strict=True):
                seen = machine.get(kept)[b].astype(np.float64)
                assert_close(seen[: at + 1], exact, own, slice(at + 1))
                assert (seen[at + 1 :] == 0).all()
    assert "attention_cached_narrow" not in machine.ran
    for name in ("attention_mma", "kv_append_narrow"):
        assert machine.ran.count(name) == TINY.n_layer

    kv_cache.lengths = [0] * 4
    again = model.prefill(first, kv_cache, "last")
    assert again is prefill
    assert next(iter(prefill._recordings.values()))._graph is not None
    np.testing.assert_array_equal(machine.get(prefill.out), got)

    spans = [(11, 16), (0, 0), (22, 22), (1, 9)]
    second = [ids[a:n] for (ids, _, _), (a, n) in zip(rows, spans, strict=True)]
    machine.ran.clear()
    prefill = model.prefill(second, kv_cache, "rows")
    assert kv_cache.lengths == [16, 0, 22, 9]
    found = logits_of(machine, model, prefill)
    for name in ("attention_cached_narrow", "kv_append_narrow"):
        assert machine.ran.count(name) == TINY.n_layer
    for b, got in enumerate(np.split(found, prefill.ends[:-1])):
        _, truth, meaning = rows[b]
        if len(got):
            end = kv_cache.lengths[b]
            assert_close(got, truth.logits, meaning.logits, slice(end - len(got), end))


def test_what_nobody_goes_on_with(machine: Machine) -> None:
    """No cache is kept and none filled; a row alone is the end of the same arrays."""
    model = on(machine, TINY, "bfloat16")
    ids, truth, meaning = truth_and_meaning(TINY, "bfloat16", 0, 33)
    scratch = model._scratch([ids])
    assert scratch.nbytes == 0
    for launched in range(2):  # the second time as a graph
        machine.ran.clear()
        prefill = model.prefill([ids], model._scratch([ids]), "last")
        assert_close(machine.get(prefill.out)[0], truth.last, meaning.last, -1)
        assert machine.early == machine.ran * launched
    names = set(machine.ran)
    assert names == {
        "encoder_rows", "layernorm_narrow_float", "gemm_mma", "attention_mma",
        "linear_decode_mma",
    }  # fmt: skip
    prefill = model.prefill([ids], model._scratch([ids]), "hidden")
    assert_close(machine.get(prefill.out), truth.hidden, meaning.hidden)
    files = [path for path in kernels.sources() if set(kernels.signatures(path)) & names]
    for file in (*files, "attention/cached.cu", "attention/kv_cache.cu", "matmul/hopper.cu"):
        text = kernels.read_source(file)
        headers = [kernels.SOURCE_DIR / h for h in text.split('"') if h.endswith(".cuh")]
        every = text + "".join(h.read_text("ascii") for h in headers if h.is_file())
        assert "let_next_start();" in every
        assert re.search(r"wait_(for_previous|before_copies)\(\);", every), file


def test_likelihoods_of_a_padded_batch(machine: Machine) -> None:
    """One graph from the tokens on, which another batch has, too."""
    model = on(machine, TINY, "bfloat16")
    rows = [truth_and_meaning(TINY, "bfloat16", b, n) for b, n in enumerate((33, 20, 2))]
    for number, several in enumerate((rows, rows, rows[::-1])):
        machine.ran.clear()
        machine.early.clear()
        batch = padded([ids for ids, _, _ in several])
        assert (len(batch), sum(map(len, batch))) == (4, 56)
        cache = model._scratch(batch, repeats=True)
        prefill = model.prefill(batch, cache, "log_likelihood")
        nats = np.split(machine.get(prefill.out).copy(), prefill.ends[:-1])
        for (ids, truth, meaning), got in zip(several, nats[:3], strict=True):
            at = np.arange(len(ids) - 1), ids[1:]
            exact, own = (
                np.log(reference.softmax(logits[:-1].astype(np.float64)))[at][:, None]
                for logits in (truth.logits, meaning.logits)
            )
            assert_close(got[:-1, None], exact, own)
        assert machine.ran[-1] == "log_likelihood_kernel"
        assert machine.early == (machine.ran if number == 1 else [])  # when it was captured
    assert len(cache.prefills) == 1


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=300))
def test_padded_batches(lengths: list[int]) -> None:
    """The sequences are there as they were; what is added is little, and short."""
    group = [np.full(n, 7, np.int32) for n in lengths]
    filled = padded(group)
    assert all(a is b for a, b in zip(group, filled, strict=False))
    added = filled[len(group) :]
    assert sum(map(len, added)) <= sum(lengths) / 16
    assert all(len(ids) <= max(lengths) and not ids.any() for ids in added)
    assert len(added) <= len(group) / 4 + sum(lengths) / 16 / max(lengths) * 1.25 + 2
    again = padded(filled)
    assert sum(map(len, again)) == sum(map(len, filled))


def test_few_shapes_for_batches_of_a_size() -> None:
    """8,000 to 8,192 tokens in 20 to 40 sequences: at most 10 shapes."""
    found = set()
    for tokens, count in itertools.product(range(8000, 8193), range(20, 41)):
        filled = padded(np.array_split(np.zeros(tokens, np.int32), count))
        found.add((sum(map(len, filled)), len(filled)))
    assert len(found) <= 10


def test_the_last_rows_are_those_of_all(machine: Machine) -> None:
    """What is left out behind the last attention changes no bit, nor does a batch."""
    model = on(machine, TINY, "bfloat16")
    rows = [random_ids(TINY, n, n) for n in (9, 20)]
    together = machine.get(model.prefill(rows, model._scratch(rows), "last").out)
    prefill = model.prefill(rows, model._scratch(rows), "hidden")
    hidden = np.split(machine.get(prefill.out), prefill.ends[:-1])
    for b, ids in enumerate(rows):
        alone = model.prefill([ids], model._scratch([ids]), "last")
        np.testing.assert_array_equal(machine.get(alone.out)[0], together[b])
        whole = model.prefill([ids], model._scratch([ids]), "hidden")
        np.testing.assert_array_equal(machine.get(whole.out), hidden[b])


def test_a_model_does_not_live_on_in_its_prefills(machine: Machine) -> None:
    model = on(machine, TINY, "bfloat16")
    ids = random_ids(TINY, 3)
    model.prefill([ids], model._scratch([ids]), "last")
    seen = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


# --- on the GPU -----------------------------------------------------------------------------------


@cache
def model(config: GPT2Config, dtype: str) -> GPT2:
    found = GPT2(weights(config), "cuda", dtype)
    if not found.engine.on_tensor_cores:  # type: ignore[attr-defined]
        pytest.skip("needs tensor cores of compute capability 8.0")
    return found


def three_times(call: Callable[[], Any]) -> Any:
    """Launches, a graph, the graph again: the same bits."""
    first = call()
    for _ in range(2):
        again = call()
        pairs = zip(first, again, strict=True) if isinstance(first, list) else [(first, again)]
        for a, b in pairs:
            np.testing.assert_array_equal(a, b)
    return first


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("config", "dtype"), [(SMALL, "bfloat16"), (SMALL, "float16"), (UNTIED, "bfloat16")]
)
@pytest.mark.parametrize("length", [1, 17, 300])
def test_a_sequence(config: GPT2Config, dtype: str, length: int) -> None:
    m = model(config, dtype)
    ids, truth, meaning = truth_and_meaning(config, dtype, 0, length)
    assert_close(three_times(lambda: m(ids)), truth.logits, meaning.logits)
    assert_close(three_times(lambda: m(ids, last=True)), truth.last, meaning.last, -1)
    states = three_times(lambda: m.hidden_states(ids))
    assert_close(states[-1], truth.hidden, meaning.hidden)
    for got, exact, own in zip(states[:-1], truth.stream, meaning.stream, strict=True):
        assert_close(got, exact, own)
    (hidden,) = three_times(lambda: m.engine.forward([ids], "hidden"))
    np.testing.assert_array_equal(hidden, states[-1])
    if length > 1:
        (nats,) = three_times(lambda: m.engine.log_likelihood([ids]))
        at = np.arange(length - 1), ids[1:]
        exact_nats, own_nats = (
            np.log(reference.softmax(logits[:-1].astype(np.float64)))[at][:, None]
            for logits in (truth.logits, meaning.logits)
        )
        assert_close(nats[:, None], exact_nats, own_nats)


@pytest.mark.gpu
@in_16_bits
def test_the_same_bits_alone_and_in_any_batch(dtype: str) -> None:
    m = model(SMALL, dtype)
    rows = [random_ids(SMALL, n, seed=n) for n in (1, 300, 127, 17, 128, 129, 64, 2)]

    def everything(which: list[Array]) -> list[list[Array]]:
        logits = m.engine.forward(which, "logits")
        last = three_times(lambda: m.engine.forward(which, "last"))
        states = m.engine.forward(which, "states")
        return [logits, last, states, m.engine.log_likelihood(which)]

    alone = [everything([ids]) for ids in rows]
    for size in (2, 5, 8):
        for kind, together in enumerate(everything(rows[-size:])):
            for own, got in zip(alone[-size:], together, strict=True):
                np.testing.assert_array_equal(got, own[kind][0])


@pytest.mark.gpu
@in_16_bits
def test_likelihoods_of_many_groups(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that repeat and shapes that are forgotten; a longer one makes the buffers grow."""
    from gpt2block.run import cuda_model as model_cuda  # noqa: PLC0415

    m = GPT2(weights(SMALL), "cuda", dtype)
    model(SMALL, dtype)  # skips without tensor cores
    for name, value in (("TOKENS_AT_ONCE", 128), ("KEPT_COUNTS", 2), ("KEPT_OF_COUNT", 2)):
        monkeypatch.setattr(model_cuda, name, value)
    lengths = np.random.default_rng(0).integers(2, 100, 60).tolist()
    rows = [random_ids(SMALL, n, seed) for seed, n in enumerate(lengths)]
    rows.insert(30, random_ids(SMALL, 300))
    together = three_times(lambda: m.engine.log_likelihood(rows))
    for ids, got in zip(rows, together, strict=True):
        np.testing.assert_array_equal(got, m.engine.log_likelihood([ids])[0])


@pytest.mark.gpu
@in_16_bits
def test_chunks_and_what_the_cache_holds(dtype: str) -> None:
    """Rows that begin and rows that go on, mixed; decoded tokens behind; alone the same bits."""
    m, lengths = model(SMALL, dtype), [300, 41, 129, 200]
    rows = [truth_and_meaning(SMALL, dtype, b, n) for b, n in enumerate(lengths)]
    cuts = [
        (0, 130, 131, 299, 300),
        (0, 0, 4, 5, 41),
        (0, 64, 65, 65, 129),
        (0, 0, 0, 128, 200),
    ]

    def run(which: list[int]) -> tuple[list[Array], Any]:
        kv_cache: Any = m.engine.new_cache(len(which), 300)
        found: list[list[Array]] = [[] for _ in which]
        for i in range(4):
            chunk = [rows[b][0][cuts[b][i] : cuts[b][i + 1]] for b in which]
            want: Any = "last" if i == 2 else "logits"
            for own, got in zip(found, m.engine.forward(chunk, want, kv_cache), strict=True):
                if got.size:
                    own.append(got.reshape(-1, SMALL.vocab_size))
        return [np.concatenate(own) for own in found], kv_cache

    together, kv_cache = run([0, 1, 2, 3])
    assert kv_cache.lengths == lengths
    for b, (_, truth, meaning) in enumerate(rows):
        start, end = cuts[b][2:4]
        dropped = np.arange(start, max(start, end - 1))  # of the chunk that was asked for its last
        at = np.delete(np.arange(lengths[b]), dropped)
        assert_close(together[b], truth.last, meaning.logits, at)
        for layer, halves in enumerate(kv_cache.layers):
            for kept, exact, own in zip(halves, truth.kv[layer], meaning.kv[layer], strict=True):
                got = kept[b, : lengths[b]].get().astype(np.float64)
                assert_close(got, exact, own)
                assert not kept[b, lengths[b] :].any()
        alone, other = run([b])
        np.testing.assert_array_equal(alone[0], together[b])
        for halves, others in zip(kv_cache.layers, other.layers, strict=True):
            for one, same in zip(halves, others, strict=True):
                np.testing.assert_array_equal(one[b].get(), same[0].get())


@pytest.mark.gpu
@in_16_bits
def test_decoding_behind_a_prefill(dtype: str) -> None:
    m = model(SMALL, dtype)
    ids, truth, meaning = truth_and_meaning(SMALL, dtype, 0, 300)
    kv_cache = m.new_cache()
    assert_close(m(ids[:280], cache=kv_cache, last=True), truth.last, meaning.last, 279)
    for t in range(280, 300):
        got = m(ids[t : t + 1], cache=kv_cache, last=True)
        assert_close(got, truth.last, meaning.last, t)
    prompts = [ids[:n] for n in (280, 3, 77)]
    greedy = [Sampling(temperature=0)] * 3
    together = start_all(m.engine, prompts, greedy, 12)
    drawn = np.array([together.next().tokens for _ in range(12)])
    for b, prompt in enumerate(prompts):
        alone = start_all(m.engine, [prompt], greedy[:1], 12)
        assert [alone.next().tokens[0] for _ in range(12)] == drawn[:, b].tolist()


@pytest.mark.gpu
@in_16_bits
@pytest.mark.parametrize("variant", ["mma", "hopper"])
def test_either_tier(dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that this GPU would not take by itself, too."""
    cupy_with(HOPPER_CAPABILITY if variant == "hopper" else MMA_CAPABILITY)
    m = GPT2(weights(SMALL), "cuda", dtype)
    gemm = replace(GEMM, variants=(GEMM.variant(variant),))
    monkeypatch.setattr(import_module("gpt2block.ops.gemm"), "OPERATION", gemm)
    monkeypatch.setattr(import_module("gpt2block.ops.attention"), "TENSOR_CORES", (variant,))
    for b, length in enumerate((63, 257)):
        ids, truth, meaning = truth_and_meaning(SMALL, dtype, b, length)
        assert_close(m(ids), truth.logits, meaning.logits)


@pytest.mark.gpu
def test_what_stays_in_float32() -> None:
    other = replace(SMALL, n_head=8)
    for config, dtype in ((other, "float32"), (other, "float8_e5m2"), (other, "bfloat16")):
        engine: Any = GPT2(weights(config), "cuda", dtype).engine
        assert not engine.on_tensor_cores
