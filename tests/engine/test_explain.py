"""The data of an `explain` page: equal to NumPy's, escaped, of bounded size, reproducible."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import (
    GPT2,
    GPT2Config,
    GPT2Weights,
    InputError,
    Llama,
    LlamaWeights,
    Model,
    from_pretrained,
    reference,
)
from gpt2block.cuda import kernels
from gpt2block.engine import inputs
from gpt2block.engine.explain import Page, collect, grids
from gpt2block.engine.explain.page import _part
from gpt2block.engine.passes import model_steps
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.gemma4 import Gemma4Config
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.architectures.ministral3 import Ministral3Config
from gpt2block.models.architectures.nanochat import NanoChatConfig
from gpt2block.models.architectures.olmo2 import Olmo2Config
from gpt2block.models.architectures.qwen3 import Qwen3Config
from gpt2block.models.architectures.qwen3_5 import Qwen35Config
from gpt2block.models.architectures.qwen3_moe import Qwen3MoeConfig
from gpt2block.models.config.llama import LlamaConfig, RopeScaling
from tests.engine.test_architectures_cuda import GEMMA4
from tests.engine.test_compare import CONFIG, IDS, SEVEN, TEN, device  # noqa: F401
from tests.markov import byte_encoding

LLAMA = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_ctx=16, vocab_size=61, n_ff=40)
TEXT = "To be, or not to be"
EVIL = "</script><script>alert(1)</script><!-- <b>&amp;\u2028\u202e"


def tokens_of(model: Any, text: Any) -> Any:
    return inputs.tokens(model.engine, model.lookup, text)


def model() -> GPT2:
    return GPT2.from_pretrained(device="cpu")


def values(grid: dict[str, Any]) -> NDArray[np.float64]:
    """Decode the numbers of a grid or a list as the page does."""
    if "scale" not in grid:
        return np.frombuffer(b64decode(grid["values"]), "<f4").astype(np.float64)
    halves = np.frombuffer(b64decode(grid["values"]), "<f2").astype(np.float64)
    return halves * (grid["scale"] or 1)


def test_tensors_are_those_of_the_trace_with_its_errors(device: str) -> None:  # noqa: F811
    made = GPT2(GPT2Weights.random(0, CONFIG), device)
    data = made.explain(IDS, layer=np.int64(1)).data
    assert type(data["layer"]) is int  # json cannot write integers of NumPy
    trace = made.trace(IDS)
    compared = {row.name: row for row in made.compare(IDS)} if device == "cpu" else {}
    stored = {name for name, tensor in data["tensors"].items() if tensor["stored"]}
    names = TEN if device == "cpu" else SEVEN
    assert stored == {
        "embedding", "ln_f", "logits", *(f"h.{n}.{step}" for n in range(2) for step in names)
    }  # fmt: skip
    first = data["steps"]["ff1"]["kernels"][0]  # on a GPU it computed ff1 and gelu
    assert (first["plan"] == "ran here") == (device != "cpu")
    assert first["file"] in data["files"]
    for name, tensor in data["tensors"].items():
        assert tensor["shape"] == [11, {"qkv": 192, "ff1": 256, "gelu": 256, "logits": 53}.get(
            name.rpartition(".")[2], 64)]  # fmt: skip
        if not tensor["stored"]:
            assert "ms" not in tensor
            continue
        truth = trace[name if name in trace else f"{name}.0"].astype(np.float64)
        assert tensor["min"] == pytest.approx(truth.min(), rel=1e-3)
        assert tensor["max"] == pytest.approx(truth.max(), rel=1e-3)
        assert tensor["mean"] == pytest.approx(truth.mean(), rel=1e-3, abs=1e-7)
        grid = tensor["grid"]
        assert (grid["rows"], grid["columns"]) == truth.shape  # too small to be downsampled
        limit = np.abs(truth).max() * 2**-25
        np.testing.assert_allclose(values(grid).reshape(truth.shape), truth, 2**-11, limit)
        assert tensor["ms"] > 0
        assert tensor["max_rel"] < 1e-5
        assert tensor["total_rel"] < 1e-5
        if device == "cpu":
            row = compared[name]
            assert tensor["kernel"] == row.kernel
            assert tensor["max_rel"] == pytest.approx(row.max_rel, rel=1e-3)
            assert tensor["total_rel"] == pytest.approx(row.total_rel, rel=1e-3)


def test_kernels_of_steps_are_in_their_lines() -> None:
    steps = GPT2(GPT2Weights.random(0, CONFIG), "cpu").explain(IDS).data["steps"]
    for step in steps.values():
        for kernel in step["kernels"]:
            line = kernels.read_source(kernel["file"]).splitlines()[kernel["line"] - 1]
            assert kernel["names"][0] in line
            assert set(kernel["names"]) <= kernels.signatures(kernel["file"]).keys()


def test_references_are_those_of_the_module() -> None:
    data = GPT2(GPT2Weights.random(0, CONFIG), "cpu").explain(IDS).data
    text = Path(reference.__file__).read_text(encoding="utf-8")
    assert {"layernorm", "matmul_bias", "attention", "add", "gelu"} <= set(data["functions"])
    for name, found in data["functions"].items():
        line = text.splitlines()[found["line"] - 1]
        assert line.startswith(f"def {name}(")
        assert found["text"].startswith(line)
        assert found["text"] in text


def test_attention_lens_surprisal_and_logits_are_the_models() -> None:
    made = model()
    ids = tokens_of(made, TEXT)
    data = made.explain(TEXT).data
    T = len(ids)
    assert [token["text"] for token in data["tokens"]] == list(TEXT)
    assert [token["bytes"] for token in data["tokens"]] == [f"{ord(c):02x}" for c in TEXT]
    bits = [token["bits"] for token in data["tokens"]]
    assert bits[0] is None
    surprisals = [token.surprisal for token in made.score(TEXT).tokens]
    np.testing.assert_allclose(bits[1:], surprisals, rtol=1e-3, atol=1e-6)
    weights = made.attention(TEXT)
    assert data["attention"]["side"] == T
    for layer, heads in enumerate(data["attention"]["heads"]):
        for head, found in enumerate(heads):
            expected = weights[layer, head][np.tril_indices(T)]
            np.testing.assert_allclose(values(found), expected, rtol=2**-11, atol=2**-25)
    lens = made.logit_lens(TEXT, top=5)
    np.testing.assert_array_equal(np.reshape(data["lens"]["ids"], lens.ids.shape), lens.ids)
    probabilities = values(data["lens"]).reshape(lens.ids.shape)
    np.testing.assert_allclose(probabilities, lens.probabilities, rtol=1e-3, atol=1e-6)
    logits = np.frombuffer(b64decode(data["next"]["logits"]), "<f4")
    np.testing.assert_array_equal(logits, made(ids)[-1])
    np.testing.assert_array_equal(data["next"]["shown"], np.argsort(-logits, kind="stable")[:24])


def products_agree(made: Any, data: Mapping[str, Any], ids: Any, layer: int) -> None:
    """Assert that the page's rows and columns equal trace and weights, and give its products."""
    config = made.config
    trace = made.trace(ids)
    stored = {name: a.T if kind == "NK" else a for name, a, kind in made.engine.tensors()}
    stored.setdefault("lm_head", stored["wte"])
    inputs = {step.name: step.inputs for step in model_steps(config) if step.op == "matmul_bias"}
    names = [name for name in inputs if name.startswith(f"h.{layer}.") or name == "logits"]
    products = data["opened"]["products"]
    assert [name.rpartition(".")[2] for name in names] == list(products)
    for name in names:
        product = products[name.rpartition(".")[2]]
        rows, columns = product["rows"], product["columns"]
        x_name, w_name, b_name = inputs[name]
        x = values(product["x"]).reshape(len(rows), -1)
        w = values(product["w"]).reshape(len(columns), -1)
        y = values(product["y"]).reshape(len(rows), len(columns))
        assert rows[-1] == len(ids) - 1
        np.testing.assert_array_equal(x, trace[x_name][rows])
        np.testing.assert_array_equal(y, trace[name][np.ix_(rows, columns)])
        np.testing.assert_allclose(w, stored[w_name][:, columns].T, 2**-11, 1e-9)
        sums = x @ w.T
        assert (product["b"] is None) == (b_name == "")
        if b_name:
            np.testing.assert_array_equal(values(product["b"]), stored[b_name][columns])
            sums += values(product["b"])
        np.testing.assert_allclose(sums, y, 1e-3, 2**-10 * np.abs(y).max())


def attention_agrees(made: Any, data: Mapping[str, Any], ids: Any, layer: int) -> None:
    """Assert that the page's Q, K and V give the weights of `attention` and the traced result."""
    config, T, D = made.config, len(ids), made.config.head_size
    held = data["opened"]["attention"]
    n = held["tokens"]
    rows = values(held["rows"]).reshape(n, -1)
    exact = "scale" not in held["rows"]
    q, k, v = np.split(rows, [config.q_width, config.q_width + config.kv_width], axis=1)
    group = config.q_width // config.kv_width
    result = made.trace(ids)[f"h.{layer}.attn"]
    for head in range(config.n_head):
        own, shared = (slice(i * D, (i + 1) * D) for i in (head, head // group))
        weights = reference.softmax(q[:, own] @ k[:, shared].T / np.sqrt(D), causal=True)
        expected = made.attention(ids)[layer, head]
        assert expected.shape == (T, T)
        np.testing.assert_allclose(weights, expected[:n, :n], atol=1e-5 if exact else 0.01)
        largest = np.abs(result).max()
        error = (1e-5 if exact else 0.01) * largest
        np.testing.assert_allclose(weights @ v[:, shared], result[:n, own], atol=error)


@pytest.mark.parametrize("name", ["shakespeare", "shakespeare-llama"])
def test_the_opened_block_has_the_numbers_of_the_trace(name: str) -> None:
    made = from_pretrained(name, device="cpu")
    ids = tokens_of(made, TEXT)
    data = made.explain(TEXT, layer=2).data
    assert data["opened"]["attention"]["tokens"] == len(TEXT)
    assert data["opened"]["products"]["qkv"]["rows"] == list(range(len(TEXT)))
    products_agree(made, data, ids, 2)
    attention_agrees(made, data, ids, 2)
    columns = data["opened"]["products"]["logits"]["columns"]
    logits = made(ids)[-1]
    assert set(columns) == set(np.argsort(-logits, kind="stable")[: len(columns)].tolist())


def test_a_long_text_opens_its_first_tokens_alone() -> None:
    config = GPT2Config(n_layer=1, n_head=3, n_embd=384, n_ctx=256, vocab_size=61)
    made = GPT2(GPT2Weights.random(0, config), "cpu")
    ids = np.arange(200) % 61
    data = made.explain(ids).data
    assert data["opened"]["attention"]["tokens"] == 200_000 // (3 * 384)
    assert 10 < len(data["opened"]["products"]["ff2"]["rows"]) < 50
    products_agree(made, data, ids, 0)
    attention_agrees(made, data, ids, 0)


def test_a_rounded_kv_cache_opens_as_attention_reads_it() -> None:
    made = Llama(LlamaWeights.random(0, LLAMA), "cpu", "bfloat16", kv_dtype="float8_e5m2")
    ids = np.array([3, 1, 4, 1, 5])
    attention_agrees(made, made.explain(ids, layer=1).data, ids, 1)


def of(kind: type[Any], **more: Any) -> Model[Any]:
    """Return a small random model of another architecture."""
    config = kind(**{**vars(LLAMA), **more})
    return Model.from_tensors(config, random_model(0, config), "cpu", "float32", None)


@pytest.mark.parametrize(
    "plan",
    [
        GPT2(GPT2Weights.random(0, CONFIG), "cpu"),
        Llama(LlamaWeights.random(0, LLAMA)),
        of(Olmo2Config),
        of(NanoChatConfig),
        of(Qwen3Config),
        of(Gemma3Config, window=2, logits_cap=3.0),
        of(Gemma4Config, **GEMMA4, rotary_part=0.5),
        of(Lfm2Config, conv_layers=(True, False)),
        of(Qwen35Config, delta_layers=(True, False), n_k_head=1, n_v_head=2, k_size=8, v_size=8),
        of(Qwen3MoeConfig, n_expert=5, n_expert_used=2, n_ff_expert=8),
        of(Ministral3Config, beta=0.5, scaling=RopeScaling("yarn", 2.0, original_context=2)),
    ],
)
def test_the_template_explains_every_step(plan: Any) -> None:
    page = plan.explain([1, 2, 3])
    assert page.data["model"]["growth"] == plan.config.scales.growth
    assert not re.search("GPT-2|Llama|nanochat", _part("steps.html"))  # a page is of one model
    for name, step in page.data["steps"].items():
        assert f'<template id="about-{name.rpartition(".")[2]}">' in page.html
        assert f'<template id="formula-{step["op"]}"><math' in page.html
    for name in {each for block in page.data["plan"]["blocks"] for each in block}:
        assert f"\n  {name}: () =>" in _part("walk.js"), name


def test_downsampling_keeps_what_is_largest() -> None:
    x = np.random.default_rng(0).normal(size=(13, 29)).astype(np.float32)
    found = grids.downsampled(x, 5, 7)
    assert found.shape == (5, 7)
    for r in range(5):
        for c in range(7):
            area = x[r * 13 // 5 : (r + 1) * 13 // 5, c * 29 // 7 : (c + 1) * 29 // 7].ravel()
            assert found[r, c] == area[np.abs(area).argmax()]
    np.testing.assert_array_equal(grids.downsampled(x, 13, 29), x)
    x[4, 4] = np.nan
    assert np.isnan(grids.downsampled(x, 2, 2)).sum() == 1


def test_encoded_numbers_survive() -> None:
    x = np.array([0.0, -3.5e9, 1.25e9, 3.5e5, np.nan, np.inf], np.float32)
    found = values(grids.encoded(x))
    np.testing.assert_allclose(found[:4], x[:4], rtol=2**-11, atol=3.5e9 * 2**-24)
    assert np.isnan(found[4])
    assert found[5] == np.inf
    assert not values(grids.encoded(np.zeros(3, np.float32))).any()
    halves = np.array([1.5, -(2.0**-24), 0.333, 2.0**14, 2.0**-14 + 2.0**-24], np.float16)
    np.testing.assert_array_equal(values(grids.encoded(halves)), halves.astype(np.float64))
    tiny = halves.astype(np.float64) * 2.0**-140
    np.testing.assert_array_equal(values(grids.encoded(tiny)), tiny)


def test_texts_cannot_become_elements() -> None:
    encoding = byte_encoding(EVIL.encode(), end=False)
    made = GPT2(GPT2Weights.random(0, GPT2Config(1, 1, 8, 64, 257)), "cpu")
    ids = tokens_of(made, [256, 60])
    page = Page(collect(made.engine, encoding, f"m{EVIL}", ids, 0))
    assert page.data["tokens"][0]["text"] == EVIL
    html = page.html
    assert html.count("<script") == 2
    assert html.count("</script") == 2
    assert html.count("<!--") == 0
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert json.loads(text) == page.data
    assert not re.search("[<>&]", text)
    (title,) = re.findall("<title>(.*?)</title>", html)
    assert "<" not in title
    assert unescape(title) == page.title
    framed = page._repr_html_()
    assert framed.count("<") == 2
    assert unescape(re.findall('srcdoc="(.*?)"', framed, re.S)[0]) == html


def test_the_page_loads_nothing() -> None:
    html = GPT2(GPT2Weights.random(0, CONFIG), "cpu").explain(IDS).html
    assert "default-src 'none'" in html
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:,)""", html)
    assert not re.findall(r"@import|\burl\(|https?://", re.sub(r"(?s)<script.*", "", html))
    assert not re.findall(r"\bfetch\(|XMLHttpRequest|innerHTML|\beval\(", html)


def test_twelve_layers_fit_too() -> None:
    config = GPT2Config(n_layer=12, n_head=12, n_embd=48, n_ctx=512, vocab_size=300)
    made = GPT2(GPT2Weights.random(0, config), "cpu")
    page = made.explain(np.arange(300), layer=3)
    assert len(page.html) < 5_000_000
    attention, lens = page.data["attention"], page.data["lens"]
    assert attention["side"] < 300
    head = made.attention(np.arange(300))[2, 7]
    shown = np.zeros((attention["side"],) * 2)
    shown[np.tril_indices(attention["side"])] = values(attention["heads"][2][7])
    np.testing.assert_allclose(shown.max(), head.max(), rtol=1e-3)
    assert lens["positions"] == 300
    assert len(lens["ids"]) == 13 * 300 * 5


def test_logits_that_are_not_finite_are_refused() -> None:
    weights = GPT2Weights.random(0, CONFIG)
    weights.gamma_f[3] = np.inf
    with np.errstate(all="ignore"), pytest.raises(InputError, match="NaN or infinity"):
        GPT2(weights, "cpu", allow_nonfinite=True).explain(IDS)
