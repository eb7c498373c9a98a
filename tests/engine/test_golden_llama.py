"""Tiny models of GPT-2, Llama and other architectures, against stored results of `transformers`.

tools/make_golden.py writes the models and results. Results are computed in float64 and stored as
float32, so NumPy in float64 may differ by that rounding: half a unit in the last place of the
largest value.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import gpt2block
from gpt2block import (
    GPT2,
    CheckpointError,
    GPT2Weights,
    InputError,
    Llama,
    LlamaConfig,
    LlamaWeights,
    Model,
)
from gpt2block.engine.inspect.compare import exact_tensors
from gpt2block.engine.model import check_stream, state_bytes, token_bytes
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.hugging_face import parse_config
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.config import OF_OTHERS
from tests.devices import GPU, running_on

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMAS = ("llama-plain", "llama-grouped", "llama-scaled", "llama-tied", "llama-shards")
NAMES = (
    "tiny", *LLAMAS, "qwen2", "qwen3", "mistral", "ministral3", "granite", "granitemoehybrid",
    "smollm3", "phi3", "lfm2", "olmo2", "olmo3", "nanochat", "gemma3", "gemma4", "qwen3_5",
    "qwen3_moe", "olmoe", "lfm2_moe",
)  # fmt: skip
PUBLISHED = json.loads((GOLDEN / "published_configs.json").read_text())
Array = NDArray[Any]
everyone = pytest.mark.parametrize("name", NAMES)


def load(name: str, **options: Any) -> Model[Any]:
    return gpt2block.from_pretrained(GOLDEN / name, device="cpu", **options)


def expected_of(name: str) -> dict[str, Array]:
    return load_file(GOLDEN / name / "expected.safetensors")


def error(found: Any, expected: Array) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@everyone
def test_float64_is_what_transformers_computes(name: str) -> None:
    """For Granite, passes store the residual stream and the last norm divided by its scalars."""
    expected, engine = expected_of(name), load(name).engine
    half, divided = 2.0**-24, getattr(engine.config, "logits_scaling", 1.0)
    norm, layers = "ln_f" if name == "tiny" else "rms_f", engine.config.n_layer
    for row, ids in enumerate(expected["ids"]):
        exact = exact_tensors(engine, ids)
        assert error(exact["logits"], expected["logits"][row]) <= 2 * half
        assert error(divided * exact[norm], expected["hidden"][row]) <= 2 * half
        for layer, name_of in enumerate(("embedding", *(f"h.{n}.output" for n in range(layers)))):
            stream = engine.config.scales.stream * exact[name_of]
            assert error(stream, expected["stream"][layer, row]) <= 2 * half


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *(("cpu", name) for name in NAMES),
        ("forward", "llama-grouped"),
        *(pytest.param("gpu", name, marks=GPU.marks) for name in NAMES),
    ],
)
def test_float32_every_position_from_a_cache_and_a_greedy_text(device: str, name: str) -> None:
    """On the emulator fewer tokens are computed one at a time."""
    expected, on_cpu = expected_of(name), device == "cpu"
    ids, limit = expected["ids"], 2e-6 if on_cpu else 1e-5
    rows, T = ids.shape
    cuts: list[Any] = [(0, 3, *range(21 if device == "forward" else 9, T + 1))]
    if on_cpu:
        cuts = [range(T + 1), (0, 9, T)]
    with nullcontext() if on_cpu else running_on(device):
        model = gpt2block.from_pretrained(GOLDEN / name, device="cpu" if on_cpu else "cuda")
        if device != "forward":
            assert error(model(ids), expected["logits"]) <= limit
        assert error(model(ids, last=True), expected["logits"][:, -1]) <= limit
        states = model.hidden_states(ids)
        assert error(states[:-1], expected["stream"]) <= limit
        assert error(states[-1], expected["hidden"]) <= limit
        for chunks in cuts:
            cache = model.new_cache(rows)
            of_token = token_bytes(model.config.layer_caches, model.formats)
            assert cache.nbytes == rows * (
                model.config.n_ctx * of_token + state_bytes(model.config)
            )
            spans = itertools.pairwise(chunks)
            parts = [model(ids[:, first:end], cache=cache) for first, end in spans]
            assert error(np.concatenate(parts, 1), expected["logits"]) <= limit
        count = 2 if device == "forward" else len(expected.get("greedy", ()))
        if not count:
            return
        found = model.generate(ids[0, :8], temperature=0, max_new_tokens=count)
        assert list(found.tokens) == expected["greedy"].tolist()[:count]


def test_ragged_batches_sampling_streams_scores_and_embeddings() -> None:
    model, ids = load("llama-grouped"), expected_of("llama-grouped")["ids"]
    rows = [ids[0, :3], ids[1], ids[0, 5:6]]
    for row, together in zip(rows, model(rows), strict=True):
        np.testing.assert_allclose(together, model(row), rtol=0, atol=1e-5)
    both = model.generate([r.tolist() for r in rows], seed=3, max_new_tokens=20, top_k=40)
    alone = [model.generate(row, seed=3, max_new_tokens=20, top_k=40) for row in rows]
    assert [g.tokens for g in both] == [g.tokens for g in alone]
    score = model.score(ids[0], stride=128)
    logits = expected_of("llama-grouped")["logits"][0].astype(np.float64)
    shifted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = shifted[np.arange(22), ids[0, 1:]].sum()
    assert score.log_likelihood == pytest.approx(nats, rel=1e-5)
    mean = expected_of("llama-grouped")["hidden"].mean(axis=1)
    assert error(model.embed(ids.tolist()), mean) <= 2e-6


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "kv_unit"),
    [
        ("llama-grouped", "float32", 0), ("llama-grouped", "bfloat16", 2.0**-8),
        ("llama-grouped", "float16", 2.0**-11), ("llama-grouped", "float8_e4m3fn", 2.0**-8),
        ("qwen3_moe", "float32", 0), ("olmoe", "float8_e4m3fn", 2.0**-8),
    ],
)  # fmt: skip
def test_every_step_errs_by_rounding(name: str, dtype: str, kv_unit: float, cached: bool) -> None:
    """Steps err by float32's rounding; only attention also by the rounding of the kv_cache."""
    model, ids = load(name, dtype=dtype), expected_of(name)["ids"]
    rows = model.compare(ids[0], cached)
    steps = [row.name for row in rows]
    assert steps[0] == "embedding"
    assert steps[-2:] == ["rms_f", "logits"]
    assert {name.rpartition(".")[2] for name in steps} >= {"rope", "ff", "down", "attn"}
    for row in rows:
        assert row.max_rel <= 16 * 2.0**-24 + kv_unit * row.name.endswith("attn"), row
    assert set(model.trace(ids[0], cached)) == set(steps)


@everyone
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_saved_and_loaded_again(name: str, dtype: str | None, tmp_path: Path) -> None:
    source = Checkpoint.open(GOLDEN / name)
    gpt2block.files.checkpoints.save_pretrained(tmp_path / "again", source, dtype)
    again = Checkpoint.open(tmp_path / "again")
    assert again.config == source.config
    assert again.names == source.names
    for (ours, array, layout), (theirs, kept, its) in zip(
        again.tensors(), source.tensors(), strict=True
    ):
        assert (ours, layout) == (theirs, its)
        assert array.dtype == (np.float32 if dtype else np.float16)
        np.testing.assert_array_equal(array, kept)
    if name == "tiny":
        return
    written = load_file(tmp_path / "again" / "model.safetensors")
    out = "out_proj" if name.startswith("lfm2") else "o_proj"
    assert {"model.embed_tokens.weight", f"model.layers.1.self_attn.{out}.weight"} <= set(written)


def test_arrays_are_saved_as_the_checkpoint_they_come_from(tmp_path: Path) -> None:
    weights = LlamaWeights.from_pretrained(GOLDEN / "llama-grouped")
    model = Llama(weights, device="cpu")
    model.save_pretrained(tmp_path / "again", dtype="float16")
    found = load_file(tmp_path / "again" / "model.safetensors")
    source = load_file(GOLDEN / "llama-grouped" / "model.safetensors")
    assert set(found) == set(source)
    for name, array in source.items():
        np.testing.assert_array_equal(found[name], array)


def test_keys_and_values_that_no_layer_reads(tmp_path: Path) -> None:
    """Files may have matrices of layers that read an earlier layer's keys, not of other layers."""
    caches = parse_config(PUBLISHED["gemma4-e2b"]).layer_caches
    assert [each.layer for each in caches[13:20]] == [13, 14, 13, 13, 13, 13, 14]
    tensors, ids = load_file(GOLDEN / "gemma4" / "model.safetensors"), np.arange(9)
    names = [name for name in tensors if re.search(r"[kv]_(proj|norm)", name)]
    twice = {name.replace("layers.1.", "layers.3."): tensors[name] for name in names}
    assert len(twice.keys() - tensors) == 3
    shutil.copy(GOLDEN / "gemma4" / "config.json", tmp_path)
    save_file(tensors | twice, tmp_path / "model.safetensors")
    found = gpt2block.from_pretrained(tmp_path, device="cpu")
    np.testing.assert_array_equal(found(ids), load("gemma4")(ids))
    del tensors[names[0]]
    tensors["model.layers.3.self_attn.q.weight"] = np.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors missing: .*; 1 tensors unexpected: .*q"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "prefixes"),
    [
        ("ministral3", "mistral3", ("language_model.model.", "language_model.")),
        ("ministral3", "mistral3", ("model.language_model.", "")),
        ("qwen3_5", "qwen3_5", ("model.language_model.", "")),
    ],
)
def test_the_text_model_of_a_multimodal_checkpoint(
    name: str, kind: str, prefixes: Any, tmp_path: Path
) -> None:
    """Other tensors are named in a warning; end tokens and ties may be settings of the whole."""
    text = json.loads((GOLDEN / name / "config.json").read_text())
    whole = {"model_type": kind, "eos_token_id": 7, "tie_word_embeddings": False}
    whole |= {"text_config": text, "vision_config": {"model_type": "pixtral"}}
    tensors = load_file(GOLDEN / name / "model.safetensors")
    tensors = {f"{prefixes[not n.startswith('model.')]}{n.removeprefix('model.')}": array
               for n, array in tensors.items()}  # fmt: skip
    tensors |= {f"vision_tower.{n}.weight": np.zeros(2, np.float16) for n in range(3)}
    tensors["model.multi_modal_projector.norm.weight"] = np.zeros(2, np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(whole))
    left = r"without multi_modal_projector \(1 tensors\), vision_tower \(3 tensors\)"
    with pytest.warns(UserWarning, match=left):
        model = gpt2block.from_pretrained(tmp_path, device="cpu")
    ids = expected_of(name)["ids"]
    assert model.config == replace(load(name).config, eos_token_ids=(7,))
    np.testing.assert_array_equal(model(ids), load(name)(ids))
    (tmp_path / "config.json").write_text(json.dumps(whole | {"quantization_config": {"a": 1}}))
    with pytest.raises(CheckpointError, match="quantized weights are not supported"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["tiny", "llama-plain"])
def test_keys_of_other_architectures_change_nothing_or_are_refused(name: str) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    plain = parse_config(config)
    heads = {
        "query_pre_attn_scalar": plain.head_size,
        "attention_multiplier": plain.head_size**-0.5,
        "scale_depth": plain.n_layer**0.5,
        "dim_model_base": plain.n_embd,
    }
    usual = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 1], **heads}
    usual |= {key: supported[-1] for key, supported, _ in OF_OTHERS if key not in usual}
    assert parse_config(config | usual | {"sliding_window": plain.n_ctx}) == plain
    for key in (*usual, "sliding_window"):
        values: tuple[Any, ...] = ("sliding_attention", 0.5, [1, 0], plain.n_ctx - 1, {})
        for value in values:
            with pytest.raises(CheckpointError, match=f"json: {key}: expected null"):
                parse_config(config | {key: value})


def test_longrope_in_a_shorter_context() -> None:
    """A shorter context has the short factors, which are all 1, and the same factor of q and k.

    A short text without a kv_cache uses them too, but a text in a cache with room for more does
    not.
    """
    opened = Checkpoint.open(GOLDEN / "phi3")
    config: Any = opened.config
    short = replace(config, n_ctx=4)
    plain = replace(config, scaling=None).frequencies()
    np.testing.assert_array_equal(short.frequencies(), plain)
    np.testing.assert_array_equal(config.frequencies()[:3] * [1, 1.5, 4], plain[:3])
    assert short.scales.rope == config.scales.rope == math.sqrt(1 + math.log(64) / math.log(4))
    ids = expected_of("phi3")["ids"][0, :4]
    model: Model[Any] = Model.from_tensors(short, opened.tensors(), "cpu", "float32")
    both = load("phi3")
    np.testing.assert_array_equal(model(ids), both(ids))
    assert error(model(ids), both(ids, both.new_cache())) > 1e-3


def test_parts_of_a_tensor_in_files_have_one_dtype(tmp_path: Path) -> None:
    class Mixed:
        config = Checkpoint.open(GOLDEN / "phi3").config

        def tensors(self) -> Any:
            for name, array, layout in load("phi3").tensors():
                dtype = np.float16 if name.endswith("w_up") else np.float32
                yield name, array.astype(dtype), layout

    message = "w_up is float16, h.0.w_gate float32: one tensor in the file has both: give a dtype"
    with pytest.raises(InputError, match=message):
        gpt2block.files.checkpoints.save_pretrained(tmp_path / "mixed", Mixed())
    gpt2block.files.checkpoints.save_pretrained(tmp_path / "mixed", Mixed(), "float32")


JSON_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**70, 1.5, math.nan, "", "x", "\ud800", [], ["a"], [[1]], {},
    {"a": 1}, {"rope_type": []}, {"type": {}}, {"rope_theta": [1]}, {"partial_rotary_factor": {}},
    {"sliding_attention": 1}, {"llama_4_scaling_beta": []},
)  # fmt: skip
OPTIONAL = (
    "activation_function", "add_cross_attention", "head_dim", "n_inner", "partial_rotary_factor",
    "quantization_config", "rope_parameters", "rope_scaling", "sliding_window",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "llama-plain",
        "llama-shards",
        "phi3",
        "olmo3",
        "ministral3",
        "granitemoehybrid",
        "lfm2",
        "gemma4",
        "qwen3_5",
    ],
)
def test_values_of_any_type_are_honoured_or_refused(name: str) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    refused = set()
    for key, value in itertools.product({*config, *OPTIONAL}, JSON_VALUES):
        try:
            parse_config(config | {key: value})
        except (CheckpointError, InputError):
            refused.add(key)
    assert {"model_type", "vocab_size", "tie_word_embeddings"} <= refused
    for kind in JSON_VALUES:
        with pytest.raises(CheckpointError, match="model_type: expected one of 'gpt2', 'llama', "):
            parse_config(config | {"model_type": kind})


def test_parts_of_one_tensor_in_several_files_are_read_into_one(tmp_path: Path) -> None:
    """Matrices of keys are in another file than matrices of queries and values."""
    shutil.copy(GOLDEN / "llama-grouped" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "llama-grouped" / "model.safetensors")
    files: dict[str, dict[str, Array]] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, array in tensors.items():
        files["b.safetensors" if "k_proj" in name else "a.safetensors"][name] = array
    weight_map: dict[str, str] = {}
    for file, some in files.items():
        save_file(some, tmp_path / file)
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found, whole = Checkpoint.open(tmp_path), Checkpoint.open(GOLDEN / "llama-grouped")
    assert len({piece.file for piece in found.stored["h.0.w_qkv"].pieces}) == 2
    for (_, array, _), (_, expected, _) in zip(found.tensors(), whole.tensors(), strict=True):
        np.testing.assert_array_equal(array, expected)
    files["b.safetensors"] = {k: v.astype(np.float32) for k, v in files["b.safetensors"].items()}
    save_file(files["b.safetensors"], tmp_path / "b.safetensors")
    mixed = Checkpoint.open(tmp_path)
    for (_, array, _), (_, expected, _) in zip(mixed.tensors(), whole.tensors(), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert mixed.stored["h.0.w_qkv"].read().dtype == np.float32


def test_a_head_of_its_own(tmp_path: Path) -> None:
    expected, folder = expected_of("tiny"), shutil.copytree(GOLDEN / "tiny", tmp_path / "untied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(GOLDEN / "tiny" / "model.safetensors")
    save_file({**tensors, "lm_head.weight": expected["lm_head"]}, folder / "model.safetensors")
    model = gpt2block.from_pretrained(folder, device="cpu")
    assert error(model(expected["ids"]), expected["untied_logits"]) <= 2e-6
    for ids, logits in zip(expected["ids"], expected["untied_logits"], strict=True):
        assert error(exact_tensors(model.engine, ids)["logits"], logits) <= 2.0**-23


def test_every_part_of_a_block_shows() -> None:
    """Without any part (gamma 1, or others 0), logits differ by far, so every part is tested."""
    expected, weights = expected_of("tiny"), GPT2Weights.from_pretrained(GOLDEN / "tiny")
    for name in ("gamma1", "beta1", "b_qkv", "b_attn", "gamma2", "beta2", "b_fc", "b_proj"):
        for block in weights.blocks:
            tensor = getattr(block, name)
            kept = tensor.copy()
            tensor[:] = name.startswith("gamma")
            assert error(GPT2(weights, "cpu")(expected["ids"]), expected["logits"]) > 1e-2, name
            tensor[:] = kept


@everyone
def test_transformers_loads_what_is_saved(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    load(name).save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").float()
    expected = expected_of(name)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(expected["ids"].astype(np.int64))).logits.numpy()
    assert error(logits, expected["logits"]) <= 1e-5


def test_a_large_weight_that_would_hide_the_others(tmp_path: Path) -> None:
    weights = LlamaWeights.random(0, LlamaConfig(1, 2, 8, 4, 5, n_ff=6))
    weights.blocks[0].w_down[0, 0] = 1e30
    with pytest.raises(gpt2block.InputError, match=r"h.0.w_down: .* RMSNorm's squares overflow"):
        Llama(weights)
    Llama(weights, allow_nonfinite=True)


def test_a_large_weight_of_a_convolution_is_judged_by_the_norm_of_its_row() -> None:
    """By magnitudes alone, a limit would be 8**3 times lower with 64 inputs of a product."""
    config: Any = Lfm2Config(2, 2, 64, 8, 5, n_ff=8, conv_layers=(True, False))
    tensors = {name: (array, layout) for name, array, layout in random_model(0, config)}
    for weight, fits in ((2e4, True), (2e6, False)):
        tensors["h.0.w_in"][0][0, 0] = weight
        given = ((name, *each) for name, each in tensors.items())
        refused = pytest.raises(gpt2block.InputError, match=r"h\.0\.w_in: .* RMSNorm's squares")
        with nullcontext() if fits else refused:
            Model.from_tensors(config, given, "cpu", "float32")
    largest = {name: float(np.abs(array).max()) for name, (array, _) in tensors.items()}
    with pytest.raises(gpt2block.InputError, match="overflow"):
        check_stream(config, largest | {"h.0.w_in": 2e4})


@pytest.mark.parametrize("name", ["llama-plain", "llama-grouped", "qwen2"])
def test_what_a_model_attends_to_and_predicts(name: str) -> None:
    """Attention weights times V give the traced result; the last logit lens is the prediction."""
    model, ids = load(name), expected_of(name)["ids"][0]
    c: Any = model.config
    traced = model.trace(ids)
    weights = model.attention(ids)
    v = traced["h.1.rope"][:, -c.kv_width :].reshape(len(ids), c.n_kv_head, c.head_size)
    v = v.repeat(c.n_head // c.n_kv_head, axis=1)
    expected = np.einsum("htu,uhd->thd", weights[1], v).reshape(len(ids), -1)
    assert error(traced["h.1.attn"], expected) <= 2e-6
    lens = model.logit_lens(ids, top=2)
    np.testing.assert_array_equal(lens.ids[-1, :, 0], model(ids).argmax(-1))
