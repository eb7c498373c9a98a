"""GPT-2 models: caches, batches and dtypes, with NumPy and on the GPU."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import GPT2, GPT2Config, InputError, reference
from gpt2block.apps.cli.model import TextOptions
from gpt2block.cuda.formats import DTYPES, own_cache_dtype
from gpt2block.cuda.kernels import FP8
from gpt2block.engine.generation.options import Options
from gpt2block.engine.model import start_all
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.sampling import DEFAULT_TEMPERATURE, SAMPLING_OPTIONS, Sampling, penalized
from tests.devices import running_on, slow
from tests.plain import rounding

Array = NDArray[Any]
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
everywhere = pytest.mark.parametrize("device", ["cpu", GPU])
TINY = GPT2Config(n_layer=2, n_head=3, n_embd=24, n_ctx=20, vocab_size=37)
ODD = GPT2Config(n_layer=1, n_head=1, n_embd=7, n_ctx=9, vocab_size=5, tie_word_embeddings=False)
SMALL = GPT2Config(n_layer=3, n_head=4, n_embd=256, n_ctx=300, vocab_size=501)


@cache
def weights(config: GPT2Config) -> GPT2Weights:
    return GPT2Weights.random(3, config)


@cache
def model(config: GPT2Config, device: str, dtype: str = "float32") -> GPT2:
    return GPT2(weights(config), device=device, dtype=dtype)


def random_ids(config: GPT2Config, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(config.vocab_size, size=shape, dtype=np.int32)


def truth(w: GPT2Weights, ids: Array) -> Array:
    """Compute logits in float64 from the reference's ten-step blocks alone: (T,) → (T, V)."""
    x: Array = reference.encoder(ids, w.wte, w.wpe).astype(np.float64)
    for block in w.blocks:
        x = reference.block_forward(x, block, causal=True)
    hidden = reference.layernorm(x, w.gamma_f, w.beta_f, w.config.eps)
    return np.asarray(hidden @ w.lm_head.T.astype(np.float64))


def float32_error(w: GPT2Weights, ids: Array) -> float:
    """Return the error of `truth` in float32 NumPy, plus the rounding term of kernel tests."""
    exact = truth(w, ids)
    x = reference.encoder(ids, w.wte, w.wpe)
    for block in w.blocks:
        x = reference.block_forward(x, block, causal=True)
    plain = reference.layernorm(x, w.gamma_f, w.beta_f, w.config.eps) @ w.lm_head.T
    return float(np.abs(plain - exact).max()) + rounding(exact)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_is_the_model_with_its_weights_rounded(device: str, dtype: str) -> None:
    """The kv_cache is rounded too: if not float32, its relative error is permitted."""
    w, ids = weights(SMALL), random_ids(SMALL, 40)

    def rounded(matrix: Array, layout: str = "KN") -> Array:
        values = WeightMatrix.quantize(np.ascontiguousarray(matrix), dtype, layout).dequantized()
        return values if layout == "KN" else np.ascontiguousarray(values.T)

    names = ("w_qkv", "w_attn", "w_fc", "w_proj")
    blocks = []
    for block in w.blocks:
        matrices: dict[str, Any] = {name: rounded(getattr(block, name)) for name in names}
        blocks.append(replace(block, **matrices))
    wte = rounded(w.wte, "NK")
    same = replace(w, blocks=tuple(blocks), wte=wte, lm_head=wte)
    expected = truth(same, ids)
    kept = {"float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7}[own_cache_dtype(dtype)]
    limit = max(2 * float32_error(same, ids), kept * np.abs(expected).max())
    assert np.abs(model(SMALL, device, dtype)(ids) - expected).max() <= limit
    if dtype in FP8:
        assert np.abs(truth(w, ids) - expected).max() > 2 * limit  # rounding has a visible effect


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_converts_weights_once(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy stores and multiplies them as float32, so no step converts weights."""
    m = GPT2(weights(TINY), "cpu", dtype)
    kv_cache = m.new_cache(2, 5)
    assert m.nbytes == model(TINY, "cpu").nbytes
    assert kv_cache.nbytes == 4 * TINY.n_layer * 2 * 2 * 5 * TINY.n_embd

    def refused(*_: Any) -> Any:
        raise AssertionError("converted again")

    monkeypatch.setattr(reference, "from_fp8", refused)
    monkeypatch.setattr(WeightMatrix, "quantize", refused)
    m.generate([1, 2, 3], max_new_tokens=3)
    m(random_ids(TINY, 5), last=True)
    for _, array, layout in m.tensors():  # tensors of a saved model, which has the model's dtype
        kept = "float32" if layout is None or dtype in FP8 else dtype
        assert array.dtype.name == kept


@everywhere
def test_log_likelihoods(device: str) -> None:
    rows = [random_ids(SMALL, n, seed=n) for n in (300, 2, 1, 70)]
    engine = model(SMALL, device).engine
    got, again = engine.log_likelihood(rows), engine.likeliest(rows)
    for ids, likelihoods, (same, likeliest) in zip(rows, got, again, strict=True):
        logits = truth(weights(SMALL), ids)[:-1]
        exact = logits[np.arange(len(ids) - 1), ids[1:]]
        largest = logits.max(axis=-1, initial=-np.inf)
        exact = exact - largest - np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
        assert likelihoods.shape == exact.shape
        np.testing.assert_array_equal(same, likelihoods)
        np.testing.assert_array_equal(likeliest, logits.argmax(axis=-1))
        np.testing.assert_allclose(likelihoods, exact, rtol=1e-5, atol=1e-5)


@everywhere
def test_sampled_sequences_are_the_same_alone_and_in_a_batch(device: str) -> None:
    m = model(SMALL, device)
    prompts = [random_ids(SMALL, n, seed=n) for n in (5, 50, 9)]
    options = [
        Sampling(temperature=1.5, top_k=40, seed=1),
        Sampling(temperature=0.7, top_p=0.9, min_p=0.01, seed=2**40),
        Sampling(repetition_penalty=1.3, seed=1, sample=2),
    ]

    def run(rows: list[int], steps: int = 30) -> list[list[int]]:
        chosen = [prompts[b] for b in rows], [options[b] for b in rows]
        decoding = start_all(m.engine, *chosen, steps)
        drawn: list[list[int]] = np.array([decoding.next().tokens for _ in range(steps)]).T.tolist()
        return drawn

    together = run([0, 1, 2])
    assert together == [run([b])[0] for b in range(3)]
    assert together == run([0, 1, 2])
    assert [row[:7] for row in together] == run([0, 1, 2], steps=7)
    assert len({tuple(row) for row in together}) == 3


@everywhere
def test_a_full_sequence_starts_again_with_its_newer_half(device: str) -> None:
    m = model(TINY, device)
    prompts = [random_ids(TINY, n, seed=n) for n in (15, 4)]
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0, "repetition_penalty": 1.3}
    options |= {"frequency_penalty": 0.1, "presence_penalty": -0.05}
    sampling = Sampling(**{name: options[name] for name in SAMPLING_OPTIONS if name in options})
    together = m.generate(prompts, overflow="truncate", **options)
    for prompt, found in zip(prompts, together, strict=True):
        text, window = list(prompt), list(prompt)
        for token in found.tokens:
            if len(window) > TINY.n_ctx:
                window = window[-(TINY.n_ctx // 2) :]
            logits = m(np.array(window), last=True)
            seen = np.isin(np.arange(TINY.vocab_size), text).astype(np.uint8)
            counts = np.bincount(text[len(prompt) :], minlength=TINY.vocab_size).astype(np.int32)
            assert token == penalized(logits, sampling, seen, counts).argmax()
            text.append(token)
            window.append(token)


@everywhere
def test_a_ragged_batch_at_every_position(device: str) -> None:
    """After prompts of different lengths, each sequence gets a token at a time until full."""
    m, rows = model(TINY, device), [random_ids(TINY, TINY.n_ctx, seed=b) for b in range(3)]
    limit = 2 * max(float32_error(weights(TINY), row) for row in rows)
    full = [m(row) for row in rows]
    kv_cache = m.new_cache(3)
    m([rows[0][:1], rows[1][:7], rows[2][:16]], cache=kv_cache)
    for _ in range(TINY.n_ctx - 1):
        at = list(kv_cache.lengths)
        new = [row[t : t + 1] for row, t in zip(rows, at, strict=True)]
        for got, expected, t in zip(m.engine.forward(new, "last", kv_cache), full, at, strict=True):
            if t < TINY.n_ctx:
                assert np.abs(got - expected[t]).max() <= limit
                assert got.argmax() == expected[t].argmax()
    assert kv_cache.lengths == [TINY.n_ctx] * 3


def test_the_keywords_have_the_same_defaults_everywhere() -> None:
    documented = inspect.signature(GPT2.generate).parameters
    assert documented["temperature"].default == DEFAULT_TEMPERATURE == 0.8
    functions: list[Any] = [GPT2.stream, Options, TextOptions, Sampling]
    for function in functions:
        shared = {*inspect.signature(function).parameters} & {*documented} - {
            "self",
            "seed",
            "stop",
        }
        assert len(shared) > 4
        for name in shared:
            default = inspect.signature(function).parameters[name].default
            assert default == documented[name].default, (function, name)


def test_every_keyword_of_generate_is_documented() -> None:
    """Signatures have no variable keywords, so that help shows all of them."""
    for method in (GPT2.generate, GPT2.stream, GPT2.score):
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    documented = inspect.getdoc(GPT2.generate) or ""
    for name in inspect.signature(GPT2.generate).parameters:
        assert name in ("self", "prompts") or f"\n{name}: " in documented


def test_the_keywords_reach_the_run() -> None:
    """Each keyword of `generate` changes the result, and `stream` gives that result too."""
    m = model(TINY, "cpu")
    options: dict[str, Any] = {"temperature": 1.5, "seed": 3}
    plain = m.generate([1, 2], max_new_tokens=9, **options)
    assert len(plain.tokens) == 9
    assert m.generate([1, 2], max_new_tokens=9, sampling=Sampling(**options)) == plain
    for change in (
        {"temperature": 0.1}, {"seed": 4}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9},
        {"repetition_penalty": 50}, {"stop_ids": plain.tokens[:1]}, {"max_new_tokens": 8},
        {"presence_penalty": 9.0}, {"frequency_penalty": 9.0},
        {"stop_ids": plain.tokens[:1], "min_new_tokens": 1},
    ):  # fmt: skip
        changed: dict[str, Any] = {"max_new_tokens": 9} | options | change
        assert m.generate([1, 2], **changed) != plain, change
        with pytest.raises(StopIteration) as end:
            next(m.stream([1, 2], **changed))  # a model without a tokenizer streams no text
        assert end.value.value == m.generate([1, 2], **changed)
    assert len(m.generate([1, 2], samples=2, rows_at_once=1, max_new_tokens=1)) == 2
    assert len(m.generate([1] * 30, overflow="truncate", max_new_tokens=1).tokens) == 1


def changed(name: str, value: float) -> GPT2Weights:
    """Return TINY's weights with the last value of the named tensor replaced."""
    w = weights(TINY)
    block, _, kind = name.removeprefix("h.").rpartition(".")
    tensor = np.array(getattr(w.blocks[int(block)] if block else w, kind))
    tensor[(-1,) * tensor.ndim] = value
    if block:
        blocks = list(w.blocks)
        parts: dict[str, Any] = {kind: tensor}
        blocks[int(block)] = replace(blocks[int(block)], **parts)
        return replace(w, blocks=tuple(blocks))
    parts = {kind: tensor} | ({"lm_head": tensor} if kind == "wte" else {})
    return replace(w, **parts)


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_that_are_not_finite_can_be_allowed(device: str, dtype: str) -> None:
    for name in ("h.1.b_fc", "h.1.w_fc"):
        m = GPT2(changed(name, np.nan), device, dtype, allow_nonfinite=True)
        assert np.isnan(m([1, 2, 3])).all()
        with pytest.raises(InputError, match="logits are NaN after 0 new tokens"):
            m.generate([1, 2, 3])
        with pytest.raises(InputError, match="logits are NaN"):
            m.score([1, 2, 3])


@pytest.mark.parametrize("name", ["wte", "wpe", "h.0.b_proj", "h.1.w_proj", "h.1.gamma2"])
def test_below_the_limit_no_layernorm_is_wrong(name: str) -> None:
    """With the largest accepted power of two, float32 logits are near float64 logits."""
    ids = np.full(3, TINY.vocab_size - 1, np.int32)  # the token whose embedding is changed
    for exponent in range(127, 0, -1):
        w = changed(name, 2.0**exponent)
        try:
            m = GPT2(w, "cpu")
        except InputError:
            continue
        expected = truth(w, ids)
        # In float32, all other numbers of such a row are lost to rounding.
        with np.errstate(over="ignore"):  # x³ in GELU overflows, but tanh is 1 there
            got = m(ids)
        assert np.abs(got - expected).max() <= 1e-3 * np.abs(expected).max()
        assert exponent > 20
        return
    raise AssertionError("none was accepted")


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [TINY, ODD], ids=["tied", "untied"])
def test_a_saved_model_is_the_same(
    device: str, dtype: str, config: GPT2Config, tmp_path: Path
) -> None:
    ids = random_ids(config, 9)
    ours = GPT2(weights(config), device, dtype)
    again = GPT2.from_pretrained(ours.save_pretrained(tmp_path / "saved"), device)
    assert again.config == config
    names = [name for name, _, _ in ours.tensors()]
    assert names == [name for name, _, _ in again.tensors()]
    for (name, a, layout), (_, b, same) in zip(ours.tensors(), again.tensors(), strict=True):
        assert layout == same
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32), name)
    if dtype == "float32":
        np.testing.assert_array_equal(again(ids), ours(ids))


@everywhere
def test_gpt_nano_sort_sorts(device: str, data: Path) -> None:
    m = GPT2.from_pretrained(data / "gpt-nano-sort", device=device)
    inputs = np.stack(np.meshgrid(*[np.arange(3)] * 6, indexing="ij"), -1).reshape(-1, 6)
    found = m.generate(inputs, max_new_tokens=6, temperature=0, rows_at_once=729)
    out = np.array([row.tokens for row in found])
    assert int((out == np.sort(inputs, axis=1)).all(axis=1).sum()) == 729


@pytest.mark.parametrize("dtype", [slow("int32"), ">u2"])
@pytest.mark.parametrize(
    "of",
    [
        lambda model, ids: model.score(ids).tokens,
        lambda model, ids: model.score([ids, ids])[1].tokens,
        lambda model, ids: model.stream(ids, max_new_tokens=3, seed=0),
        lambda model, ids: [model.generate(ids, max_new_tokens=3, seed=0)],
        lambda model, ids: [model.logit_lens(ids)],
        lambda model, ids: model.embed(ids),
        lambda model, ids: model(ids),
    ],
)
def test_a_result_stays_when_the_array_of_ids_changes(of: Any, dtype: str) -> None:
    model = GPT2.from_pretrained(device="cpu")
    expected = list(of(model, list(range(40, 60))))
    ids = np.arange(40, 60).astype(dtype)
    found = of(model, ids)
    ids[:] = 7
    assert repr(list(found)) == repr(expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_model_on_the_cpu_is_copied_and_one_on_a_gpu_says_why_not(copied: Any) -> None:
    ids = random_ids(TINY, 9)
    of_cpu = model(TINY, "cpu")
    cache = of_cpu.new_cache()
    of_cpu(ids[:4], cache)
    again = copied(of_cpu)
    np.testing.assert_array_equal(again(ids), of_cpu(ids))
    np.testing.assert_array_equal(again(ids[4:], copied(cache)), of_cpu(ids[4:], cache))
    with running_on("forward"):
        of_gpu = GPT2(weights(TINY), device="cuda")
        with pytest.raises(InputError, match=r"cannot be copied or pickled: load it again with fr"):
            copied(of_gpu)
        with pytest.raises(InputError, match=r"a kv_cache on a GPU cannot .*: make one with new_c"):
            copied(of_gpu.new_cache())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_tensors_cannot_be_written(dtype: str) -> None:
    for _, array, _ in GPT2.from_pretrained(device="cpu", dtype=dtype).tensors():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
