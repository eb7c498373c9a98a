"""`save_gguf`: gpt2block and the package gguf read its files, which have llama.cpp's names."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fuzzing.gguf_writer import metadata_of, tensors_of
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

import gpt2block
from gpt2block import GPT2Config, GPT2Weights, InputError, LlamaConfig
from gpt2block.files.checkpoints import Checkpoint, gguf_tokenizer, save_gguf
from gpt2block.files.checkpoints.gguf_saving import TYPES
from gpt2block.files.checkpoints.gguf_tokenizer_keys import keys_of
from gpt2block.files.parameters.arrays import random_model
from gpt2block.files.tokenizers import tokenizer
from gpt2block.models.architectures import ARCHITECTURES, GGUF_ARCHITECTURES, architecture_of
from gpt2block.models.config import ModelConfig, is_matrix
from gpt2block.models.config.llama import RopeScaling
from tests.refusals import cases

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_ctx": 32, "vocab_size": 11}
OF_LLAMA = {**SIZES, "n_kv_head": 2, "n_ff": 96, "head_size": 12, "eos_token_ids": (3, 2)}
LONG = RopeScaling("longrope", 1.0, original_context=16, factors=(1.5, 2.0, 2.5),
                   long_factors=(2.0, 3.0, 4.0), attention_factor=1.25)  # fmt: skip
YARN = RopeScaling("yarn", 4.0, original_context=8)
# Names of other architectures in GGUF files, and settings that the files lack
NAMESAKES: dict[str, dict[str, Any]] = {
    "mistral": {"window": None},
    "granitemoehybrid": {"position_embedding_type": "rope"},
}
OTHERS: dict[str, dict[str, Any]] = {  # settings that are not defaults
    "gpt2": {"eps": 2e-5},
    "llama": {"scaling": RopeScaling("linear", 4.0), "attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True, "bos_token_id": 5, "theta": 1e6},
    "qwen3": {"attention_bias": True, "scaling": YARN},
    "granite": {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
                "residual_multiplier": 0.25, "logits_scaling": 8.0},
    "ministral3": {"beta": 0.25, "scaling": YARN},
    "olmo3": {"window": 5, "local_theta": 100.0, "scaling": YARN, "sliding_layers": (True, False)},
    "phi3": {"rotary": 6, "scaling": LONG, "n_ff": 40, "window": 8},
    "gemma3_text": {"window": 5, "local_theta": 100.0, "n_layer": 7},
    "gemma4_text": {"window": 5, "local_theta": 100.0, "sliding_layers": (True, False) * 2,
                    "n_layer": 4, "shared_layers": 2, "use_double_wide_mlp": True,
                    "n_layer_embd": 8, "global_head_size": 16, "rotary_part": 0.5,
                    "logits_cap": 30.0},
    "lfm2": {"conv_layers": (True, False), "conv_length": 5},
    "qwen3_5_text": {"delta_layers": (False, True), "rotary": 4, "n_k_head": 2, "n_v_head": 4,
                     "k_size": 16, "v_size": 8, "tiled": True},
    "qwen3_moe": {"n_expert": 6, "n_expert_used": 3, "n_ff_expert": 32},
    "olmoe": {"n_expert": 5, "n_expert_used": 2, "n_ff": 32},
    "lfm2_moe": {"conv_layers": (False, True), "n_dense": 1, "n_expert": 6, "n_ff_expert": 32},
}  # fmt: skip
QUIET = "ignore:.*(has no tokenizer|matrices are F16)"


def config_of(kind: str) -> ModelConfig:
    sizes = SIZES if kind == "gpt2" else OF_LLAMA
    return ARCHITECTURES[kind].CONFIG(**{**sizes, **OTHERS.get(kind, {})})


class Random:
    """A TensorSource of random tensors."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def tensors(self) -> Iterator[tuple[str, NDArray[Any], str | None]]:
        yield from random_model(1, self.config)


def stored(name: str, array: NDArray[Any], config: ModelConfig, type: str) -> Any:
    """Return a tensor (outputs, inputs) as a file stores it, as float32 by the package gguf."""
    if not is_matrix(name, array.shape):
        if name.endswith("a_log"):  # files have -exp of it
            return np.log(np.exp(array))
        added = np.float32(config.ADDED_TO_NORMS if "gamma" in name else 0)
        return (array + added) - added
    kind = gguf.GGMLQuantizationType[type.upper()]
    if type.startswith("q") and array.shape[1] % 32:
        kind = gguf.GGMLQuantizationType.F16
    rows = np.ascontiguousarray(array, np.float32)
    return dequantize(quantize(rows, kind), kind)


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "nanochat"])
def test_a_file_is_the_model_in_its_types(kind: str, type: str, tmp_path: Path) -> None:
    config = config_of(kind)
    found = Checkpoint.open(save_gguf(tmp_path / "m.gguf", Random(config), type))
    if kind in NAMESAKES:
        assert {**vars(found.config), **NAMESAKES[kind]} == vars(config)
    else:
        assert found.config == config
    for ours, theirs in zip(found.tensors(), Random(config).tensors(), strict=True):
        (name, array, layout), (same, exact, other) = ours, theirs
        assert name == same
        rows = exact if layout == other or layout is None else exact.T
        np.testing.assert_array_equal(array.astype(np.float32), stored(name, rows, config, type))


def as_llama_cpp(config: ModelConfig, name: str, array: Any) -> Any:
    """Convert a tensor of a Hugging Face file as llama.cpp's converter does."""
    if config.MODEL_TYPE == "gpt2" and name.endswith(
        (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    ):
        return array.T
    adds_1 = config.MODEL_TYPE in ("gemma3_text", "qwen3_5_text") and ".linear_" not in name
    if adds_1 and name.endswith("norm.weight"):
        return array.astype(np.float32) + 1
    if ".linear_attn." in name:
        return delta_as_llama_cpp(config, name, array)
    if name.endswith(".conv.weight"):
        return array.squeeze(1)
    if config.MODEL_TYPE in ("llama", "mistral", "ministral3", "granite", "smollm3"):
        for part, n_head in (("q", config.n_head), ("k", config.kv_width // config.head_size)):
            if f".{part}_proj." in name:
                halves = array.reshape(n_head, 2, len(array) // n_head // 2, *array.shape[1:])
                return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def delta_as_llama_cpp(config: Any, name: str, array: Any) -> Any:
    """Convert a tensor of a gated delta net: -exp(A_log), and heads of v in another order."""
    K, heads = 2 * config.n_k_head * config.k_size, (config.n_k_head, -1)
    kind, wide = name.split(".linear_attn.")[1], array.astype(np.float32)
    wide = -np.exp(wide) if kind == "A_log" else wide.squeeze(1) if "conv1d" in kind else wide
    if kind == "norm.weight":
        return wide
    axis, first = int("out_proj" in kind), K if "qkv" in kind or "conv1d" in kind else 0
    rows = np.moveaxis(wide, axis, 0)
    size = config.v_size if len(rows) - first > config.n_v_head else 1
    of_k = rows[first:].reshape(*heads, size, *rows.shape[1:])
    tiled = of_k.swapaxes(0, 1).reshape(-1, *rows.shape[1:])
    return np.moveaxis(np.concatenate([rows[:first], tiled]), 0, axis)


@pytest.mark.parametrize(
    "source",
    ["tiny", "qwen2", "qwen3", "mistral", "granite", "smollm3", "phi3", "olmo2", "olmo3",
     "ministral3", "gemma3", "lfm2", "qwen3_5", "llama-plain", "llama-grouped", "llama-tied"],
)  # fmt: skip
def test_names_and_rows_are_those_of_llama_cpp(source: str) -> None:
    """The package gguf's table gives the names, for files that `transformers` wrote."""
    checkpoint = Checkpoint.open(GOLDEN / source)
    found, config = tensors_of(checkpoint), checkpoint.config
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[
        architecture_of(config).GGUF
    ]
    names = gguf.get_tensor_name_map(arch, config.n_layer)
    expected = load_file(GOLDEN / source / "model.safetensors")
    expected = {name: each for name, each in expected.items() if not name.endswith(".attn.bias")}
    factors = {name for name in found if name.startswith("rope_")}
    assert len(found) == len(expected) + len(factors)
    for name, array in expected.items():
        renamed = name.replace("dt_bias", "dt_proj.bias")  # by the converter, too
        theirs = str(names.get_name(renamed, try_suffixes=(".weight", ".bias")))
        np.testing.assert_array_equal(found[theirs], as_llama_cpp(config, name, array), name)


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "nanochat"])
def test_keys_are_those_of_llama_cpp(kind: str) -> None:
    """The package gguf's constants give the keys."""
    llm, attention, rope = gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope
    c: Any = config_of(kind)
    expected = {
        llm.BLOCK_COUNT: c.n_layer, llm.CONTEXT_LENGTH: c.n_ctx, llm.VOCAB_SIZE: c.vocab_size,
        llm.EMBEDDING_LENGTH: c.n_embd, attention.HEAD_COUNT: c.n_head,
    }  # fmt: skip
    if kind == "gpt2":
        expected |= {llm.FEED_FORWARD_LENGTH: 4 * c.n_embd, attention.HEAD_COUNT_KV: c.n_head,
                     attention.LAYERNORM_EPS: c.eps}  # fmt: skip
    else:
        expected |= {
            llm.FEED_FORWARD_LENGTH: c.n_ff, attention.HEAD_COUNT_KV: c.n_kv_head,
            attention.KEY_LENGTH: c.head_size, attention.VALUE_LENGTH: c.head_size,
            attention.LAYERNORM_RMS_EPS: c.eps, rope.FREQ_BASE: c.theta,
            rope.DIMENSION_COUNT: c.head_size,
        }  # fmt: skip
    yarn = {
        rope.SCALING_TYPE: "yarn", rope.SCALING_FACTOR: 4.0, rope.SCALING_ORIG_CTX_LEN: 8,
        rope.SCALING_ATTN_FACTOR: 1.0, rope.SCALING_YARN_BETA_FAST: 32.0,
        rope.SCALING_YARN_BETA_SLOW: 1.0,
    }  # fmt: skip
    others: dict[str, dict[str, Any]] = {
        "llama": {rope.SCALING_TYPE: "linear", rope.SCALING_FACTOR: 4.0},
        "granitemoehybrid": {llm.EMBEDDING_SCALE: 1.0, attention.SCALE: 1.0,
                             llm.RESIDUAL_SCALE: 1.0, llm.LOGIT_SCALE: 1.0},
        "granite": {llm.EMBEDDING_SCALE: 12.0, attention.SCALE: 0.015625,
                    llm.RESIDUAL_SCALE: 0.25, llm.LOGIT_SCALE: 8.0},
        "phi3": {rope.DIMENSION_COUNT: 6, attention.SLIDING_WINDOW: 8,
                 rope.SCALING_ATTN_FACTOR: 1.25, rope.SCALING_ORIG_CTX_LEN: 16},
        "gemma3_text": {attention.SLIDING_WINDOW: 5, "{arch}.rope.freq_base_swa": 100.0,
                        "{arch}.embedding_dtype": "float32"},  # llama.cpp does not read this key
        "qwen3_5_text": {
            rope.DIMENSION_COUNT: 4, rope.DIMENSION_SECTIONS: [2, 0, 0, 0],
            gguf.Keys.SSM.CONV_KERNEL: 4, gguf.Keys.SSM.STATE_SIZE: 16,
            gguf.Keys.SSM.GROUP_COUNT: 2, gguf.Keys.SSM.TIME_STEP_RANK: 4,
            gguf.Keys.SSM.INNER_SIZE: 32, "{arch}.attention.recurrent_layers": (False, True),
        },
        "lfm2": {attention.HEAD_COUNT_KV: (0, 2), gguf.Keys.ShortConv.L_CACHE: 5},
        "qwen3": yarn,
        "qwen3_moe": {llm.EXPERT_COUNT: 6, llm.EXPERT_USED_COUNT: 3,
                      llm.EXPERT_FEED_FORWARD_LENGTH: 32},
        "olmoe": {llm.EXPERT_COUNT: 5, llm.EXPERT_USED_COUNT: 2},
        "lfm2_moe": {attention.HEAD_COUNT_KV: (2, 0), gguf.Keys.ShortConv.L_CACHE: 3,
                     llm.EXPERT_COUNT: 6, llm.EXPERT_USED_COUNT: 4, llm.EXPERT_GATING_FUNC: 2,
                     llm.EXPERT_FEED_FORWARD_LENGTH: 32, llm.LEADING_DENSE_BLOCK_COUNT: 1},
        "ministral3": yarn | {attention.TEMPERATURE_SCALE: 0.25},
        "gemma4_text": {
            llm.FEED_FORWARD_LENGTH: (96, 96, 192, 192), attention.SLIDING_WINDOW: 5,
            attention.SLIDING_WINDOW_PATTERN: (True, False, True, False),
            attention.SHARED_KV_LAYERS: 2, attention.KEY_LENGTH: 16, attention.VALUE_LENGTH: 16,
            rope.DIMENSION_COUNT: 16, llm.EMBD_LENGTH_PER_LAYER_INP: 8,
            "{arch}.embedding_dtype": "float32",
            "{arch}.attention.key_length_swa": 12, "{arch}.attention.value_length_swa": 12,
            "{arch}.rope.dimension_count_swa": 12, "{arch}.rope.freq_base_swa": 100.0,
            llm.FINAL_LOGIT_SOFTCAPPING: 30.0,
        },
        "olmo3": yarn | {attention.SLIDING_WINDOW: 5, "{arch}.rope.freq_base_swa": 100.0,
                         attention.SLIDING_WINDOW_PATTERN: (True, False)},
    }  # fmt: skip
    named = {"mistral": "llama", "ministral3": "mistral3", "granitemoehybrid": "granite"}
    named |= {"olmo3": "olmo2", "gemma3_text": "gemma3", "gemma4_text": "gemma4"}
    named |= {"qwen3_5_text": "qwen35", "qwen3_moe": "qwen3moe", "lfm2_moe": "lfm2moe"}
    name = named.get(kind, kind)
    keys = {key.format(arch=name): each for key, each in (expected | others.get(kind, {})).items()}
    assert metadata_of(Random(c)) == {"general.architecture": name, **keys}


def test_biases_of_convolutions_are_refused(tmp_path: Path) -> None:
    config = replace(config_of("lfm2"), conv_bias=True)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="lfm2: GGUF has no key for conv_bias True"):
        save_gguf(tmp_path / "m.gguf", Random(config), "f16")


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_files")
def test_the_model_of_smollm2_in_another_type(tmp_path: Path) -> None:
    source = Checkpoint.open("smollm2")
    path = save_gguf(tmp_path / "m.gguf", source, "q8_0")
    found, original = Checkpoint.open(path), gguf.GGUFReader(source.file)
    assert found.config == source.config
    reader, written = gguf.GGUFReader(path), {tensor.name: tensor for tensor in original.tensors}
    assert {*original.fields} <= {*reader.fields}
    for key, field in original.fields.items():
        if key not in ("GGUF.kv_count", "general.file_type"):
            assert reader.fields[key].contents() == field.contents(), key
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType.Q8_0 if len(tensor.shape) > 1 else tensor.tensor_type
        assert tensor.tensor_type == kind
        assert tensor.shape.tolist() == written[tensor.name].shape.tolist()
    theirs = dequantize(written["blk.3.attn_k.weight"].data, gguf.GGMLQuantizationType.Q4_1)
    (again,) = (tensor.data for tensor in reader.tensors if tensor.name == "blk.3.attn_k.weight")
    np.testing.assert_array_equal(again, quantize(theirs, gguf.GGMLQuantizationType.Q8_0))
    both = [tokenizer.from_gguf(each) for each in (path, source.file)]
    for text in ("Hello, 1234 worlds!", "<|im_start|>user\n ünï", "   x\n\n"):
        ours, exact = (tokenizer.encode(each, text, special=True) for each in both)
        assert ours == exact
    keys = keys_of(gguf_tokenizer.as_files(source.file), source.config.vocab_size)
    for key, value in keys.items():  # llama.cpp's converter writes these for Hugging Face's files
        written_as = value.tolist() if isinstance(value, np.ndarray) else value
        assert original.fields[key].contents() == written_as, key


def test_a_model_with_blocks_and_its_tokenizer(tmp_path: Path) -> None:
    """A model in memory is saved; a file without a tokenizer states this for llama.cpp."""
    source = gpt2block.from_pretrained("shakespeare-llama", device="cpu")
    with pytest.warns(UserWarning, match=r"m.gguf has no tokenizer: tokenizer.json: llama.cpp has"):
        path = source.save_gguf(tmp_path / "m.gguf", "q8_0")
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.model"].contents() == "none"
    model = gpt2block.from_pretrained(path, device="cpu", dtype="file")
    with pytest.warns(UserWarning, match="its source has none"):
        again = model.save_gguf(tmp_path / "again.gguf", "f32")
    exact = [array for _, array, _ in Checkpoint.open(path).tensors()]
    for (name, array, _), expected in zip(Checkpoint.open(again).tensors(), exact, strict=True):
        np.testing.assert_array_equal(array, expected, name)


def test_what_a_file_lacks_is_said(tmp_path: Path) -> None:
    config = LlamaConfig(**{**OF_LLAMA, "n_ff": 40, "eos_token_ids": (2, 3, 10**6, 4, 5)})
    odd = "4 matrices are F16, as their rows are no multiples of 32 numbers: blk.0.attn_output"
    ends = "m.gguf has 3 of 4 end tokens, as GGUF has no keys for more: 2, 3, 4, 5"
    with pytest.warns(match=odd), pytest.warns(match=ends), pytest.warns(match="has no tokenizer"):
        path = save_gguf(tmp_path / "m.gguf", Random(config), "q4_0")
    assert Checkpoint.open(path).config.eos_token_ids == (2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *cases("arguments of save_gguf"),
        ({"path": __file__}, "already exists: give another file or "),
    ],
)
def test_other_arguments_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"path": "m.gguf", "weights": "tiny", "type": "f16", **changes}
    if isinstance(given["weights"], str):
        given["weights"] = Checkpoint.open(GOLDEN / given["weights"])
    with pytest.raises(InputError, match=message):
        save_gguf(**given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize(("type", "value"), [("q4_0", 1e5), ("f16", 7e4), ("q5_1", np.nan)])
def test_weights_out_of_range_leave_the_old_file(type: str, value: float, tmp_path: Path) -> None:
    weights, path = GPT2Weights.random(1, GPT2Config(**SIZES)), tmp_path / "m.gguf"
    old = save_gguf(path, weights, "f32").read_bytes()
    weights.blocks[1].w_fc[2, 3] = value
    with pytest.raises(InputError, match=r"blk.1.ffn_up.weight: 1 weights are out of the range"):
        save_gguf(path, weights, type, overwrite=True)
    assert path.read_bytes() == old
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.filterwarnings(QUIET)
def test_memory_is_that_of_some_tensors(tmp_path: Path) -> None:
    config = LlamaConfig(n_layer=24, n_head=4, n_embd=256, n_ctx=8, vocab_size=256, n_ff=512)
    exact = save_gguf(tmp_path / "f32.gguf", Random(config), "f32")
    tracemalloc.start()
    save_gguf(tmp_path / "m.gguf", Checkpoint.open(exact), "q8_0")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < exact.stat().st_size / 8


def test_every_architecture_of_gguf_is_written() -> None:
    assert {architecture_of(config_of(kind)).GGUF for kind in ARCHITECTURES} == {
        *GGUF_ARCHITECTURES, ""
    }  # fmt: skip
