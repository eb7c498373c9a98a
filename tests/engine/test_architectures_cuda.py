"""Each architecture on a GPU and on the emulator, compared with NumPy step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_recorder import recording

from gpt2block import GPT2Config, Model, RopeScaling, Sampling, cuda, from_pretrained
from gpt2block.engine.generation import batching
from gpt2block.engine.inspect.compare import exact_tensors
from gpt2block.engine.model import start_all
from gpt2block.engine.passes import decoding_rules, prefill_rules
from gpt2block.engine.passes.bounds import bounds_of
from gpt2block.engine.passes.prefill_rules import Prefill
from gpt2block.errors import InputError
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures import llama
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.gemma4 import Gemma4Config
from gpt2block.models.architectures.granite import GraniteConfig
from gpt2block.models.architectures.granitemoehybrid import GraniteHybridConfig
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.architectures.lfm2_moe import Lfm2MoeConfig
from gpt2block.models.architectures.ministral3 import Ministral3Config
from gpt2block.models.architectures.mistral import MistralConfig
from gpt2block.models.architectures.nanochat import NanoChatConfig
from gpt2block.models.architectures.olmo2 import Olmo2Config
from gpt2block.models.architectures.olmo3 import Olmo3Config
from gpt2block.models.architectures.olmoe import OlmoeConfig
from gpt2block.models.architectures.phi3 import Phi3Config
from gpt2block.models.architectures.qwen2 import Qwen2Config
from gpt2block.models.architectures.qwen3 import Qwen3Config
from gpt2block.models.architectures.qwen3_5 import Qwen35Config
from gpt2block.models.architectures.qwen3_moe import Qwen3MoeConfig
from gpt2block.models.architectures.smollm3 import SmolLM3Config
from gpt2block.models.config import ModelConfig
from gpt2block.models.config.llama import LlamaConfig
from gpt2block.ops.operands import Operand
from gpt2block.ops.workload import tolerance
from tests import outlines
from tests.devices import GPU, running_on, slow

# Heads of 64 channels, whose prompts tensor cores compute.
SIZES: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_kv_head": 1, "head_size": 64, "n_embd": 64, "n_ff": 128,
    "n_ctx": 40, "vocab_size": 53,
}  # fmt: skip
SCALARS: dict[str, Any] = {
    "embedding_multiplier": 12, "attention_multiplier": 0.05, "residual_multiplier": 0.3,
    "logits_scaling": 0.05,
}  # fmt: skip
LONG = RopeScaling(
    "longrope", 1.0, original_context=8, factors=(1.0,) * 24, attention_factor=1.3,
    long_factors=tuple(1.0 + n for n in range(24)),
)  # fmt: skip


YARN = RopeScaling("yarn", 4.0, original_context=8, beta_fast=2.0, beta_slow=0.05)


# The second sliding layer and the last layer read keys and values of the first two layers.
GEMMA4: dict[str, Any] = {
    "n_layer": 4, "sliding_layers": (True, False, True, False), "window": 5, "shared_layers": 2,
    "global_head_size": 128, "use_double_wide_mlp": True, "n_layer_embd": 16, "logits_cap": 2.0,
}  # fmt: skip


class Geglu(MistralConfig):
    """A Mistral with GELU instead of SiLU."""

    GATE = "gelu"


EXPERTS = {"n_expert": 6, "n_expert_used": 3}
LFM2_MOE: dict[str, Any] = {
    "n_layer": 3, "conv_layers": (False, True, False), "n_dense": 1, "n_ff_expert": 32,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
# Numbers and sizes of the heads of gated delta nets
DELTA_HEADS = {"n_k_head": 2, "n_v_head": 4, "k_size": 16, "v_size": 16}
OWN: dict[str, tuple[type[ModelConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3-bias": (Qwen3Config, {"attention_bias": True}),
    "granite": (GraniteConfig, SCALARS),
    "smollm3": (SmolLM3Config, {"rope_layers": (False, True)}),
    "phi3": (Phi3Config, {"rotary": 48, "scaling": LONG}),
    "geglu": (Geglu, {}),
    "olmo2": (Olmo2Config, {}),
    "nanochat": (NanoChatConfig, {"logits_cap": 0.5}),
    "gemma3": (
        Gemma3Config,
        {"window": 5, "sliding_layers": (True, False), "logits_cap": 2.0, "attention_bias": True},
    ),
    "gemma3-256": (
        Gemma3Config,
        {
            "window": 9,
            "sliding_layers": (True, False),
            "head_size": 256,
            "embedding_dtype": "bfloat16",
        },
    ),
    "gemma4": (Gemma4Config, GEMMA4),
    "gemma4-512": (
        Gemma4Config,
        {**GEMMA4, "head_size": 256, "global_head_size": 512, "attention_bias": True},
    ),
    "mistral": (MistralConfig, {"window": 5}),
    "ministral3": (Ministral3Config, {"scaling": YARN, "beta": 0.4}),
    "olmo3": (Olmo3Config, {"scaling": YARN, "window": 5, "sliding_layers": (True, False)}),
    "granite-4": (GraniteHybridConfig, {**SCALARS, "position_embedding_type": "nope"}),
    "lfm2": (Lfm2Config, {"conv_layers": (True, False)}),
    "lfm2-bias": (Lfm2Config, {"conv_layers": (False, True), "conv_bias": True}),
    "qwen3_5": (Qwen35Config, {"delta_layers": (True, False), "rotary": 16, **DELTA_HEADS}),
    "qwen3_moe": (Qwen3MoeConfig, {**EXPERTS, "n_ff_expert": 32, "expert_layers": (False, True)}),
    "olmoe": (OlmoeConfig, EXPERTS),
    "lfm2_moe": (Lfm2MoeConfig, {**EXPERTS, **LFM2_MOE}),
    "yarn": (MistralConfig, {"scaling": YARN}),
    "yarn-qk-norm": (Qwen3Config, {"scaling": YARN}),
}
WINDOW = 70  # window of a wide model, if the architecture has windows
WIDE: dict[str, Any] = {
    "head_size": 128,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 512,
    "n_ff": 688,
    "n_ctx": 200,
}
FORMATS: dict[str, str | None] = dict.fromkeys(
    ("float32", "bfloat16", "float16", "float8_e4m3fn")
) | {"float8_e5m2": "float8_e5m2"}
GPT2 = GPT2Config(n_layer=2, n_head=2, n_embd=128, n_ctx=40, vocab_size=53)
Case = tuple[str, str, bool]


def cases() -> list[Any]:
    """Return some cases for the emulator, where each is many programs, and all for a GPU."""
    everywhere = product(("gpt2", *OWN), FORMATS, (False, True))
    found: list[Any] = [("emulator", ("gpt2", "bfloat16", False))]
    for case in (
        ("llama", "float32"), ("phi3", "bfloat16"), ("qwen3", "float16"),
        ("gemma4", "float8_e4m3fn"), ("lfm2", "float8_e4m3fn"), ("qwen3_moe", "bfloat16"),
    ):  # fmt: skip
        found.append(slow("emulator", (*case, False)))
    return found + [pytest.param("gpu", case, marks=GPU.marks) for case in everywhere]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_on("forward" if request.param == "emulator" else "gpu"):
        yield "cuda"


def made(case: Case, device: str) -> Model[Any]:
    """Return a model of random weights; wide cases have heads of 128 channels."""
    name, dtype, wide = case
    if name == "gpt2":
        return model_of(GPT2Config(2, 4, 512, 200, 53) if wide else GPT2, device, dtype)
    kind, own = OWN[name]
    own = {name: WINDOW if wide and name == "window" else value for name, value in own.items()}
    return model_of(kind(**{**SIZES, **(WIDE if wide else {}), **own}), device, dtype)


def model_of(config: ModelConfig, device: str, dtype: str) -> Model[Any]:
    """Return a model of random weights; a Gemma 4 scales its scores by the norms of q alone."""
    tensors = random_model(3, config)
    if isinstance(config, Gemma4Config):
        tensors = (
            (name, array / np.sqrt(array.size) if name.endswith("gamma_q") else array, layout)
            for name, array, layout in tensors
        )
    return Model.from_tensors(config, tensors, device, dtype, FORMATS[dtype])


@pytest.mark.parametrize("name", OWN)
def test_no_activation_is_above_its_bound(name: str) -> None:
    """Operands of products and the residual stream are checked, with very different weights."""
    model = made((name, "float32", False), "cpu")
    config = model.config
    tensors = {
        name: array.T if layout == "NK" else array for name, array, layout in model.tensors()
    }
    largest = {name: float(np.abs(array).max()) for name, array in tensors.items()}

    def norms(w: str, gamma: str) -> Any:
        return np.linalg.norm(tensors[w].T * (tensors[gamma] if gamma else 1), axis=1)

    found = exact_tensors(model.engine, np.arange(40, dtype=np.int32))
    streams = [found["embedding"], *(found[f"h.{n}.output"] for n in range(config.n_layer))]
    for n, stream in enumerate(streams[:-1]):
        found |= {f"h.{n}.attn_in": stream, f"h.{n}.ff_in": found[f"h.{n}.x1"]}
        found[f"h.{n}.ff2_in"] = found.get(f"h.{n}.relu2", stream)
        found[f"h.{n}.layer_in"] = found.get(f"h.{n}.x2", stream)
        found[f"h.{n}.layer_ff_in"] = found.get(f"h.{n}.layer_ff", stream)
    _, bounds = bounds_of(config, largest, norms)
    assert bounds.keys() <= found.keys()
    for each, bound in bounds.items():
        assert np.abs(found[each]).max() <= bound, each
    for stream, bound in zip(streams, bounds_of(config, largest)[0], strict=True):
        assert np.abs(stream).max() <= bound


@pytest.mark.parametrize(
    ("where", "dtype"),
    [("numpy", "float32"), slow("forward", "bfloat16")]
    + [
        pytest.param("gpu", dtype, marks=GPU.marks)
        for dtype in ("float32", "bfloat16", "float8_e5m2")
    ],
)
def test_each_sequence_has_the_short_or_the_long_factors(
    where: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence's maximum length decides; results equal a model with only these factors.

    On a GPU they are equal bit for bit. If a prompt is computed in pieces, the first piece already
    uses these factors.
    """
    monkeypatch.setattr(batching, "PIECE", 2)
    scaling = replace(LONG, factors=tuple(1.5 + n for n in range(24)))
    config = Phi3Config(**{**SIZES, "n_layer": 1}, rotary=48, scaling=scaling)
    assert (config.short_context, replace(config, n_ctx=8).short_context) == (8, 0)
    alike = (
        replace(scaling, factors=f, long_factors=()) for f in (scaling.factors, LONG.long_factors)
    )
    configs = config, *(replace(config, scaling=each) for each in alike)
    limit = 1e-6 if where == "numpy" else 0  # BLAS rounds by the number of rows
    device = "cpu" if where == "numpy" else "cuda"
    rng = np.random.default_rng(0)
    rows = [rng.integers(53, size=n).astype(np.int32) for n in (8, 9, 5, 12)]
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "stop_ids": ()}
    with nullcontext() if where == "numpy" else running_on(where):
        model, *others = [model_of(each, device, dtype) for each in configs]
        found, scores, embedded = model(rows), model.score(rows), model.embed(rows)
        prompts = [rows[1], rows[2], rows[2][:4]]
        texts = model.generate(prompts, **options)
        again = model.generate(prompts[::-1], **options)[::-1]  # the slots had other factors before
        for row, logits, score, vector in zip(rows, found, scores, embedded, strict=True):
            own, other = others if len(row) <= 8 else others[::-1]
            np.testing.assert_allclose(logits, own(row), rtol=0, atol=limit)
            assert np.abs(logits - other(row)).max() > 1e-3
            likely = own.score(row).log_likelihood
            assert score.log_likelihood == pytest.approx(likely, rel=limit, abs=0)
            np.testing.assert_allclose(vector, own.embed(row), rtol=0, atol=limit)
        for *both, row, of in zip(texts, again, prompts, (1, 1, 0), strict=True):
            expected = others[of].generate(row, **options)
            for text in both:
                assert text.tokens == expected.tokens
                np.testing.assert_allclose(text.logprobs, expected.logprobs, rtol=0, atol=limit)


def test_a_kv_cache_is_of_the_frequencies_of_its_model() -> None:
    """A cache of an equal model with other frequencies, convolutions or sources is refused."""
    config = Phi3Config(**SIZES, rotary=48, scaling=LONG)
    others = replace(LONG, long_factors=(2.0,) * 24), replace(LONG, long_factors=())
    configs = config, *(replace(config, scaling=each) for each in others)
    convs = [Lfm2Config(**SIZES, conv_layers=each) for each in ((True, False), (False, True))]
    shared = [Gemma4Config(**{**SIZES, **GEMMA4, "shared_layers": n}) for n in (0, 2)]
    models = [model_of(each, "cpu", "float32") for each in (*configs, *convs, *shared)]
    for model, other in permutations(models, 2):
        with pytest.raises(InputError, match=r"cache: expected one from this model's new_cache"):
            model([1, 2], other.new_cache())


def test_a_mixture_too_large_for_kernels_is_refused_before_weights_are_read() -> None:
    for sizes in ({"n_expert": 513}, {"n_expert": 40, "n_expert_used": 33}, {"n_embd": 66}):
        config = OlmoeConfig(**{**SIZES, **sizes})
        with running_on("forward"), pytest.raises(InputError, match=r"router: .* device='cpu'"):
            Model.from_tensors(config, iter(()), "cuda", "bfloat16")


def assert_chunks_have(model: Any, rows: list[Any], near: Any, limit: float) -> None:
    """Assert that prompts that continue in chunks have nearly the given logits."""
    cache = model.new_cache(2)
    cuts = ((0, 5, 6, len(rows[0])), (0, 0, 3, 7))
    chunks = (
        [row[cut[n] : cut[n + 1]] for row, cut in zip(rows, cuts, strict=True)] for n in range(3)
    )
    parts = [model.engine.forward(chunk, "logits", cache) for chunk in chunks]
    for n, expected in enumerate(near):
        logits = np.concatenate([part[n] for part in parts])
        assert np.abs(logits - expected).max() <= limit


@pytest.mark.parametrize(("device", "case"), cases(), indirect=["device"])
def test_steps_and_logits(device: str, case: Case) -> None:
    """Steps of prompts and decoding err only by rounding; a row has the same bits in any batch.

    A prompt that continues in chunks, one of them empty, has nearly the same logits; the first
    chunk of Phi-3 has other frequencies than the whole prompt.
    """
    model, on_cpu = made(case, device), made(case, "cpu")
    rng, narrow = np.random.default_rng(0), case[1] != "float32"
    long = 150 if case[2] else 19
    rows = [rng.integers(53, size=n).astype(np.int32) for n in (long, 1, 7)]
    for cached in (False, True) if FORMATS[case[1]] is None else ():  # FP8 keys are not exact
        for step in model.compare(rows[0][-17:], cached):
            assert step.max_rel <= tolerance("bfloat16" if narrow else "float32"), step
            assert step.total_rel < 0.03, step
    together, near = model(rows), on_cpu(rows)
    limit = 0.03 if narrow else 1e-5
    if FORMATS[case[1]]:  # keys near a tie are rounded to either side
        limit = 0.1
    largest = max(np.abs(logits).max() for logits in near)
    for row, logits, expected in zip(rows, together, near, strict=True):
        np.testing.assert_array_equal(logits, model(row))
        assert np.abs(logits - expected).max() <= limit * largest
    if case[0] != "phi3":
        assert_chunks_have(model, rows[::2], near[::2], limit * largest)
    likely, expected = model.score(rows[0]), on_cpu.score(rows[0])
    assert likely.log_likelihood == pytest.approx(
        expected.log_likelihood, rel=0.01 if narrow else 1e-5
    )


@pytest.mark.parametrize(("device", "case"), cases(), indirect=["device"])
def test_a_text_is_the_same_in_any_batch(device: str, case: Case) -> None:
    model, rng = made(case, device), np.random.default_rng(0)
    tokens, many = (2, (7,)) if cuda.replaced() else (3, (1, 2, 7))
    options: dict[str, Any] = {"max_new_tokens": tokens, "seed": 1, "stop_ids": ()}
    prompts = [rng.integers(53, size=n).astype(np.int32) for n in (9, 1, 7)]
    alone = [model.generate(prompt, **options) for prompt in prompts]
    for times in many:  # 3, 6 and 21 rows use different kernels
        assert model.generate(prompts * times, **options)[:3] == alone


def without_up(o: Any, h: str, x: Any, y: Any) -> Any:
    """Compute the feed-forward of a Llama wrongly, without w_up."""
    x = o.product(f"{h}proj", y, f"{h}w_o", f"{h}b_o", add=(f"{h}x1", x))
    y = o.norm(f"{h}rms2", x, f"{h}gamma2")
    y = o.product(f"{h}gate", y, f"{h}w_gate")
    return o.product(f"{h}down", y, f"{h}w_down", add=(f"{h}output", x))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_matrix_that_an_architecture_forgets_is_an_error(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "feed_forward", without_up)
    expected = rf"h\.0\.w_up, h\.1\.w_up: no step .*attention, {__name__}\.without_up, .*final\)"
    with recording("9.0"), pytest.raises(RuntimeError, match=expected):
        model_of(LlamaConfig(**SIZES), device, "float32")


@pytest.mark.parametrize("cached", [True, False])
def test_a_bias_that_a_rule_forgets_is_an_error(
    cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = decoding_rules if cached else prefill_rules
    rule = rules.products

    def without_bias(steps: Any, step: Any, plan: Any) -> str:
        return str(rule.apply(steps, step._replace(inputs=(*step.inputs[:2], "")), plan))

    forgets = rule._replace(apply=without_bias)
    monkeypatch.setattr(rules, "RULES", (forgets, *rules.RULES[1:]))
    with recording("9.0"):
        biases = {"attention_bias": True, "mlp_bias": True}
        engine = model_of(LlamaConfig(**SIZES | biases), "cuda", "bfloat16").engine
        ids = np.arange(9, dtype=np.int32)
        with pytest.raises(RuntimeError, match=r"h\.0\.b_\w+, .* more: no step"):
            engine.trace(ids, cached) if cached else engine.forward([ids], "last")


def test_queries_grow_in_every_pass() -> None:
    """Each step that applies RoPE has the factor: four steps of prompts and decoding."""
    config = Ministral3Config(**SIZES, scaling=YARN, beta=0.4)
    known = {"w_qkv": (Operand("float16", 8),)}
    prompt = outlines.prefill(Prefill("16_bits", 9, 1, 9, True), config, "last")
    passes = prompt, outlines.decode(config), outlines.decode(config, known=known)
    found: dict[str, Any] = {}
    for steps in (*passes, outlines.decode_sums(config, 2)):
        found |= {step.op: step.attrs.get("growth") for step in steps if "rope" in step.op}
    assert found == dict.fromkeys(("rope_qkv", "rope_append", "linear_rope", "rope_sums"), (0.4, 8))


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"n_head": 1, "head_size": 20, "global_head_size": 64}, "f16"),
        ({"n_head": 8, "global_head_size": 48, "n_embd": 128, "n_layer_embd": 128}, "q4_1"),
    ],
)
def test_rows_that_layers_with_other_heads_store_can_be_read(
    sizes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """The smaller heads permit no terms of the larger ones, or no sums of the terms."""
    model = model_of(Gemma4Config(**SIZES | GEMMA4 | sizes), "cpu", "float32")
    with pytest.warns(UserWarning, match="no tokenizer"):
        path = model.save_gguf(tmp_path / "m.gguf", kind)
    dtype = "float16" if kind == "f16" else "file"
    with recording("9.0"):
        engine = from_pretrained(path, device="cuda", dtype=dtype).engine
        rows = [np.arange(9, dtype=np.int32)] * 20
        assert start_all(engine, rows, [Sampling()] * 20, 2).next().slots.tolist() == [*range(20)]


def test_fp8_matrices_that_only_some_products_convert() -> None:
    """Memory for converted weights has the size of w_down, whose rows of 136 bytes TMA refuses."""
    config = LlamaConfig(**SIZES | {"n_ff": 136, "n_head": 8})
    with recording("9.0"):
        engine = model_of(config, "cuda", "float8_e4m3fn").engine
        assert engine.forward([np.arange(9, dtype=np.int32)], "logits")[0].shape == (9, 53)


def test_the_recordings_of_each_architecture_read_all_tensors() -> None:
    """Divided, padded and hi/lo weights are read instead of the original tensors."""
    with recording("9.0"):
        for (kind, own), dtype in zip(OWN.values(), cycle(FORMATS)):
            engine = model_of(kind(**SIZES | own), "cuda", dtype).engine
            found = start_all(engine, [np.arange(9, dtype=np.int32)], [Sampling()], 2).next()
            assert found.slots.tolist() == [0]
