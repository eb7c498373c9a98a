"""GGUF files: compared with the checkpoints that they were made from, and damaged files."""

from __future__ import annotations

import math
import struct
import sys
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fuzzing.gguf_writer import metadata_of, save, tensors_of, write
from gguf.quants import dequantize, quantize

import gpt2block
from gpt2block import GPT2, GPT2Config, GPT2Weights, Llama, LlamaConfig, LlamaWeights, Model
from gpt2block.files.checkpoints import Checkpoint, save_gguf, save_pretrained
from gpt2block.files.checkpoints.gguf_header import read_header
from gpt2block.files.parameters.arrays import random_model
from gpt2block.files.tokenizers import tokenizer
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.phi3 import Phi3Config
from gpt2block.models.architectures.smollm3 import SmolLM3Config
from gpt2block.models.config.llama import RopeScaling
from tests.command_line import gpt2block as command
from tests.command_line import printed
from tests.devices import running_on
from tests.refusals import assert_same_tensors, cases, refused

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMAS = ("plain", "grouped", "scaled", "tied", "shards")
LARGE = LlamaConfig(  # rows have 256 values, the longest block of a quantized type
    n_layer=1, n_head=4, n_embd=256, n_ctx=8, vocab_size=16, n_kv_head=2, n_ff=256
)
ids = np.array([[1, 5, 3, 2, 7], [0, 8, 8, 4, 6]])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("large")
    return Checkpoint.open(save_pretrained(folder, LlamaWeights.random(1, LARGE)))


def changed(
    folder: Path, source: str, metadata: dict[str, Any], tensors: dict[str, Any] | None = None
) -> Path:
    """Write a golden model as GGUF with changed metadata (None removes a key) and tensors."""
    checkpoint = Checkpoint.open(GOLDEN / source)
    both = metadata_of(checkpoint) | metadata
    kept = {key: value for key, value in both.items() if value is not None}
    return write(folder / "m.gguf", kept, tensors_of(checkpoint) | (tensors or {}))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Write a small GPT-2 as GGUF."""
    return save(tmp_path / "tiny.gguf", GOLDEN / "tiny")


@pytest.mark.parametrize(
    "name",
    ["tiny", "qwen2", "qwen3", "mistral", "granite", "granitemoehybrid", "olmo2", "olmo3",
     "ministral3", "gemma4", "lfm2", "olmoe", "lfm2_moe", *(f"llama-{name}" for name in LLAMAS)],
)  # fmt: skip
def test_a_file_is_the_checkpoint_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    source = GOLDEN / name
    found, expected = Checkpoint.open(save(tmp_path / "m.gguf", source)), Checkpoint.open(source)
    assert_same_tensors(found, expected, np.float32)
    sizes = ("n_layer", "n_head", "n_embd", "n_ctx", "vocab_size", "eps", "tie_word_embeddings")
    for size in (*sizes, "n_kv_head", "head_size", "n_ff", "theta", "attention_bias", "mlp_bias"):
        assert getattr(found.config, size, None) == getattr(expected.config, size, None), size
    model, theirs = (gpt2block.from_pretrained(each, device="cpu") for each in (found, expected))
    largest = np.abs(theirs(ids)).max()
    np.testing.assert_allclose(model(ids), theirs(ids), rtol=0, atol=2e-6 * largest)


def test_heads_of_gated_delta_nets_in_the_order_of_a_file(tmp_path: Path) -> None:
    """The model of a GGUF file has the logits of its source, and is saved as its source."""
    source = gpt2block.from_pretrained(GOLDEN / "qwen3_5", device="cpu")
    found: Any = gpt2block.from_pretrained(save(tmp_path / "m.gguf", GOLDEN / "qwen3_5"), "cpu")
    assert found.config.tiled
    np.testing.assert_allclose(found(ids), source(ids), rtol=0, atol=2e-6 * source(ids).max())
    again = Checkpoint.open(found.save_pretrained(tmp_path / "again"))
    assert again.config == source.config
    for (name, array, _), (_, expected, _) in zip(again.tensors(), source.tensors(), strict=True):
        truth = expected if array.shape == expected.shape else expected.T
        np.testing.assert_allclose(array, truth, rtol=0, atol=1e-6 * ("a_log" in name))


def test_every_fourth_layer_of_smollm3_has_no_positions(tmp_path: Path) -> None:
    """GGUF files have no key for these layers, so the architecture implies them."""
    config = SmolLM3Config(n_layer=5, n_head=2, n_embd=8, n_ctx=16, vocab_size=11, n_ff=8)
    tensors = random_model(0, config)
    model: Model[Any] = Model.from_tensors(config, tensors, "cpu", "float32")
    path = write(tmp_path / "m.gguf", metadata_of(model), tensors_of(model))
    found = gpt2block.from_pretrained(path, device="cpu")
    assert found.config == config
    assert config.rope_layers == (True, True, True, False, True)
    ids = np.arange(9)
    np.testing.assert_allclose(found(ids), model(ids), rtol=0, atol=1e-9)


def test_scores_of_granite_without_a_scale_have_that_of_the_heads(tmp_path: Path) -> None:
    """The head size need not be stated; inconsistent heads are refused as in a Llama."""
    source = gpt2block.from_pretrained(GOLDEN / "granite", device="cpu")
    metadata, tensors = metadata_of(source), tensors_of(source)
    for absent in ("granite.attention.scale", "granite.attention.key_length"):
        del metadata[absent]
    config: Any = Checkpoint.open(write(tmp_path / "m.gguf", metadata, tensors)).config
    assert config.attention_multiplier == source.config.head_size**-0.5
    metadata["granite.attention.head_count"] = 0
    refused(write(tmp_path / "none.gguf", metadata, tensors), "n_head: expected a positive integer")


GRANITE4 = {"granite.ssm.conv_kernel": 4, "granite.expert_shared_feed_forward_length": 56}
LOG = {"mistral3.rope.scaling.attn_factor": None, "mistral3.rope.scaling.yarn_log_multiplier": 1.0}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("granite", GRANITE4 | {"granite.rope.scaling.finetuned": True}),
        ("ministral3", LOG),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": 2}),  # a period
        ("lfm2", {"lfm2.rope.dimension_count": 14, "lfm2.attention.head_count_kv": [0, 2, 0]}),
    ],
)
def test_keys_of_converters(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Keys of llama.cpp's converter that `save_gguf` does not write describe the same model."""
    found: Any = Checkpoint.open(changed(tmp_path, name, keys)).config
    expected: Any = Checkpoint.open(GOLDEN / name).config
    assert found.frequencies_of_layers == expected.frequencies_of_layers
    assert found.scales.attention == pytest.approx(expected.scales.attention)
    assert found.scales.growth == pytest.approx(expected.scales.growth)


@pytest.mark.parametrize(("name", "keys", "message"), cases("keys of a GGUF file"))
def test_keys_that_are_not_supported(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(changed(tmp_path, name, keys), message)


def test_fused_and_quantized_matrices_of_phi3(tmp_path: Path) -> None:
    """Each part of the fused matrices is read; RoPE leaves the last 14 channels of a head."""
    config = Phi3Config(n_layer=1, n_head=2, n_embd=64, n_ctx=16, vocab_size=11, n_ff=32, rotary=18)
    model: Model[Any] = Model.from_tensors(config, random_model(0, config), "cpu", "float32")
    metadata, tensors = metadata_of(model), tensors_of(model)
    path = write(tmp_path / "m.gguf", metadata, tensors, lambda _: "Q8_0")
    found = Checkpoint.open(path)
    assert found.config == config
    for (name, array, layout), (ours, exact, its) in zip(
        found.tensors(), model.tensors(), strict=True
    ):
        assert name == ours
        exact = exact.T if layout == "NK" != its else exact  # noqa: PLW2901
        assert np.abs(array - exact).max() <= np.abs(exact).max() / 127, name
    metadata["phi3.rope.scaling.attn_factor"] = 1.5
    message = "attn_factor: 1.5 is not supported without rope_factors_short.weight and rope_factors"
    refused(write(tmp_path / "scaled.gguf", metadata, tensors), message)
    tensors["rope_factors_long.weight"] = np.ones(9, np.float32)
    message = "and rope_factors_long.weight, got rope_factors_long.weight"
    refused(write(tmp_path / "long.gguf", metadata, tensors), message)


def test_norms_windows_and_scale_of_gemma3(tmp_path: Path) -> None:
    """Files store norms as 1 + w and the window of five of six layers, but no scale of scores.

    The 27B model has its own scale.
    """
    sizes: Any = {"n_embd": 16, "n_ctx": 24, "vocab_size": 11, "n_ff": 12, "head_size": 8}
    rope: Any = {"theta": 1e6, "local_theta": 100.0, "scaling": RopeScaling("linear", 8.0)}
    for n_layer, scale in ((7, 8**-0.5), (62, 4**-0.5)):
        config = Gemma3Config(n_layer=n_layer, n_head=4, **sizes, **rope, window=5)
        model: Model[Any] = Model.from_tensors(config, random_model(0, config), "cpu", "float32")
        path = write(tmp_path / f"{n_layer}.gguf", metadata_of(model), tensors_of(model))
        found = Checkpoint.open(path).config
        assert found == config
        assert found.scales.attention == scale
        assert found.windows == tuple(None if n % 6 == 5 else 5 for n in range(n_layer))
        expected = model(ids)
        logits = gpt2block.from_pretrained(path, device="cpu")(ids)
        np.testing.assert_allclose(logits, expected, atol=4e-6 * np.abs(expected).max())


def test_a_folder_with_one_gguf_says_how_to_open_it(tiny: Path) -> None:
    refused(tiny.parent, "expected model.safetensors", "give the path of the file", "tiny.gguf")
    refused("no_such_model.gguf", "no such file or directory")


def test_the_scaling_of_llama_3_is_its_factors(tmp_path: Path) -> None:
    expected = Checkpoint.open(GOLDEN / "llama-scaled").config
    found = Checkpoint.open(save(tmp_path / "m.gguf", GOLDEN / "llama-scaled")).config
    assert isinstance(expected, LlamaConfig)
    assert isinstance(found, LlamaConfig)
    assert found.scaling is not None
    assert found.scaling.kind == "longrope"
    np.testing.assert_allclose(found.frequencies(), expected.frequencies(), rtol=1e-7)
    assert np.ptp(found.frequencies() / LlamaConfig(theta=500.0, head_size=12).frequencies()) > 0.5
    hugging_face = found.to_hugging_face()
    assert LlamaConfig.from_hugging_face(hugging_face).scaling == found.scaling
    equal = "longrope is supported with equal"
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"attention_factor": 1.2}, equal), ({"attention_factor": None, "factor": 2}, equal),
        ({"short_factor": [1.0] * 6}, equal), ({"long_factor": None}, "long_factors: expected a"),
        ({"original_max_position_embeddings": 1}, "expected an integer of at least 2, got 1"),
    )  # fmt: skip
    for change, match in changes:
        scaling = hugging_face["rope_scaling"] | change
        with pytest.raises(gpt2block.InputError, match=match):
            LlamaConfig.from_hugging_face(hugging_face | {"rope_scaling": scaling})
    with pytest.raises(gpt2block.InputError, match="a factor for each of 64 frequencies, got 6"):
        LlamaConfig(scaling=found.scaling)


OTHER_BETAS = {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "original_context_length": 64}


@pytest.mark.parametrize(
    ("keys", "factor", "others"),
    [
        ({"factor": 4.0}, 1 + 0.1 * math.log(4), (4.0, 256, 32.0, 1.0)),
        ({}, 1.0, (1.0, 256, 32.0, 1.0)),
        ({"factor": 4.0, "attn_factor": 1.5}, 1.5 + 0.15 * math.log(4), (4.0, 256, 32.0, 1.0)),
        ({"yarn_attn_factor": 1.25, "yarn_ext_factor": 1.0}, 1.25, (1.0, 256, 32.0, 1.0)),
        ({"factor": 2.0, **OTHER_BETAS}, 1 + 0.1 * math.log(2), (2.0, 64, 8.0, 2.0)),
    ],
)
def test_keys_of_yarn(keys: dict[str, Any], factor: float, others: Any, tmp_path: Path) -> None:
    """llama.cpp multiplies 1 + ln(factor) / 10 by attn_factor; yarn_attn_factor replaces it."""
    named = {f"llama.rope.scaling.{key}": each for key, each in {"type": "yarn", **keys}.items()}
    found: Any = Checkpoint.open(changed(tmp_path, "llama-plain", named)).config
    assert found.scaling.attention_factor == pytest.approx(factor, rel=1e-7)
    assert found.scales.attention == pytest.approx(factor**2 * 12**-0.5, rel=1e-7)
    scaling = found.scaling
    got = scaling.factor, scaling.original_context, scaling.beta_fast, scaling.beta_slow
    assert got == others


def kinds() -> list[str]:
    """Return every type that the package gguf dequantizes and whose blocks fit in rows of 256."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        try:
            dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return [*found, "F64"]


@pytest.mark.parametrize("kind", kinds())
def test_each_type_is_read_as_the_package_dequantizes_it(
    kind: str, large: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are random; rows of Q and K are reordered to Hugging Face's order."""
    monkeypatch.setattr("gpt2block.files.checkpoints.gguf_types._DECODED_AT_ONCE", 2000)
    rng, stored = np.random.default_rng(3), gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[stored]
    floats = {"F32": np.float32, "F64": np.float64}.get(kind)
    expected = {}

    tensors = tensors_of(large)
    for name, array in tensors.items():
        if array.ndim == 1:
            continue
        if floats:
            tensors[name] = rng.standard_normal(array.shape).astype(floats)
            expected[name] = tensors[name].astype(np.float32)
        else:
            rows, columns = array.shape
            tensors[name] = rng.integers(0, 256, (rows, columns // block * size)).astype(np.uint8)
            with np.errstate(all="ignore"):  # random bytes may be infinite or NaN
                expected[name] = dequantize(tensors[name], stored)
    file = write(tmp_path / "m.gguf", metadata_of(large), tensors, lambda name: kind)
    found = Checkpoint.open(file)
    assert {name for each in found.stored.values() for name in each.types} == {"F32", kind}
    got = {name: np.asarray(array, np.float32) for name, array, _ in found.tensors()}
    for ours, name in (("wte", "token_embd"), ("lm_head", "output")):
        np.testing.assert_array_equal(got[ours], expected[f"{name}.weight"])
    for ours, name in (("w_o", "attn_output"), ("w_down", "ffn_down")):
        np.testing.assert_array_equal(got[f"h.0.{ours}"], expected[f"blk.0.{name}.weight"])
    q, k = (expected[f"blk.0.attn_{part}.weight"].astype(np.float32) for part in "qk")
    order = np.arange(6 * 64).reshape(6, 32, 2).swapaxes(1, 2).ravel()  # heads of 64 rows
    both = np.concatenate([q, k])[order]
    np.testing.assert_array_equal(got["h.0.w_qkv"][: len(both)], both)
    v = expected["blk.0.attn_v.weight"]
    np.testing.assert_array_equal(got["h.0.w_qkv"][len(both) :], v)


@pytest.mark.parametrize("kind", ["I8", "I32", "Q8_1"])
def test_other_types_are_refused_by_name(kind: str, large: Checkpoint, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    tensors = tensors_of(large)
    rows, columns = tensors["blk.0.ffn_up.weight"].shape
    tensors["blk.0.ffn_up.weight"] = np.zeros((rows, columns // block * size), np.uint8)
    file = write(tmp_path / "m.gguf", metadata_of(large), tensors,
                 lambda name: kind if "ffn_up" in name else "F32")  # fmt: skip
    refused(file, f"blk.0.ffn_up.weight: type {kind} is not supported")


def test_parts_of_w_qkv_of_several_types_become_float32(large: Checkpoint, tmp_path: Path) -> None:
    types = {"attn_q": "Q4_0", "attn_v": "Q8_0", "attn_k": "F16"}

    def kind(name: str) -> str:
        return next((types[part] for part in types if part in name), "F32")

    file = save(tmp_path / "m.gguf", large.directory, kind)
    found = Checkpoint.open(file)
    assert found.stored["h.0.w_qkv"].types == ("Q4_0", "F16", "Q8_0")
    assert found.stored["h.0.w_qkv"].nbytes == 256 * 256 * 18 // 32 + 128 * 256 * (2 + 34 / 32)
    array = found.stored["h.0.w_qkv"].read()
    assert array.dtype == np.float32
    exact = large.stored["h.0.w_qkv"].read()
    np.testing.assert_array_equal(array[256:384], exact[256:384].astype(np.float16))
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(array[384:], dequantize(quantize(exact[384:], q8_0), q8_0))


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=3, n_head=4, n_embd=256, n_ctx=8, vocab_size=4096)
    source = save_pretrained(tmp_path / "source", GPT2Weights.random(1, config))
    file = save(tmp_path / "m.gguf", source, lambda name: "Q8_0")
    checkpoint = Checkpoint.open(file)
    next(iter(checkpoint.tensors()))
    tracemalloc.start()
    largest = max(array.nbytes for _, array, _ in checkpoint.tensors())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pieces = 2**20 * 4 * 3  # numbers that are decoded at once, with temporary arrays
    assert largest == 4096 * 256 * 4
    assert peak < 2 * largest + pieces + 2**20  # 2: the loop still holds the previous tensor


@pytest.mark.parametrize("version", [2, 3])
def test_the_header_is_what_the_package_reads(version: int, tmp_path: Path) -> None:
    values = {
        "x.int": 7, "x.float": 0.1, "x.text": "naïve ▁", "x.true": True,
        "x.texts": ["a", "", "ü"], "x.numbers": [1, -2, 3], "x.floats": [0.5, 1.5],
        "x.bools": [True, False],
    }  # fmt: skip
    file = changed(tmp_path, "tiny", values)
    data = file.read_bytes()
    file.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    found, expected = read_header(file), gguf.GGUFReader(file)
    for key, value in values.items():
        got = found.metadata[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value
    theirs = {key for key in expected.fields if not key.startswith("GGUF.")}
    assert set(found.metadata) == theirs
    for tensor in expected.tensors:
        placed = found.tensors[tensor.name]
        assert placed.shape == tuple(reversed(tensor.shape.tolist()))
        assert (placed.offset, placed.nbytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention.head_count": [3, 3], "attention.head_count_kv": [3, 3]},
        {"feed_forward_length": [56, 56], "attention.layer_norm_rms_epsilon": [1e-4, 1e-4]},
        {"rope.freq_base": [500.0, 500.0], "attention.causal": [True, True]},
    ],
)
def test_equal_values_for_all_blocks_are_one_value(changes: Any, tmp_path: Path) -> None:
    plain = Checkpoint.open(save(tmp_path / "plain.gguf", GOLDEN / "llama-scaled")).config
    file = changed(tmp_path, "llama-scaled", {f"llama.{key}": changes[key] for key in changes})
    assert Checkpoint.open(file).config == plain


@pytest.mark.parametrize("value", [-1, 2**32 - 1])
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "padding", "unknown", "seperator"])
def test_ids_that_stand_for_no_token(name: str, value: int, tmp_path: Path) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    file = changed(tmp_path, "llama-plain", {"tokenizer.ggml.eom_token_id": 4, key: 2**32 - 1})
    data = file.read_bytes()
    kind = gguf.GGUFValueType.INT32 if value < 0 else gguf.GGUFValueType.UINT32
    at = data.index(key.encode()) + len(key)
    file.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
    assert gguf.GGUFReader(file).fields[key].contents() == value
    config: Any = Checkpoint.open(file).config
    assert (config.bos_token_id, config.eos_token_ids) == (None, (4,))


@pytest.mark.filterwarnings("ignore:.* has no tokenizer")
def test_values_that_no_key_has_are_skipped(tmp_path: Path) -> None:
    """Skipped values are text that is not UTF-8, and arrays of arrays, which gguf reads."""
    odd = {
        "general.author": "José", "somebody.names": ["a", "José"],
        "somebody.table": [[1, 2], [3]], "somebody.deep": [[["José"], ["c"]], [["b"]]],
        "general.quantized_by": "after the others",
    }  # fmt: skip
    file = changed(tmp_path, "tiny", odd)
    data = file.read_bytes()
    file.write_bytes(data.replace("é".encode(), b"\xff\xe9"))
    header, theirs = read_header(file), gguf.GGUFReader(file)
    assert header.unusable.keys() == {*odd} - {"general.quantized_by"}
    assert header.metadata["general.quantized_by"] == "after the others"
    assert [*header.tensors] == [tensor.name for tensor in theirs.tensors]
    assert_same_tensors(Checkpoint.open(file), Checkpoint.open(GOLDEN / "tiny"), np.float32)
    file.write_bytes(file.read_bytes().replace(b"somebody.deep", b"somebody.dee\xff"))
    assert "somebody.dee\\xff" in read_header(file).unusable
    again = save_gguf(tmp_path / "again.gguf", Checkpoint.open(file), "f32")
    assert read_header(again).metadata["general.quantized_by"] == "after the others"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("general.architecture", "José", "text that is not UTF-8"),
        ("llama.table", [[1, 2]], "an array of arrays"),
        ("tokenizer.chat_template", "José", "text that is not UTF-8"),
        ("tokenizer.ggml.tokens", ["a", "José"], "text that is not UTF-8"),
    ],
)
def test_such_values_of_keys_that_are_read_are_refused(
    key: str, value: Any, reason: str, tmp_path: Path
) -> None:
    file = changed(tmp_path, "llama-plain", {key: value})
    file.write_bytes(file.read_bytes().replace("é".encode(), b"\xff\xe9"))
    read = tokenizer.from_gguf if key.startswith("tokenizer") else Checkpoint.open
    refused(file, f"{key}: {reason} is not supported", read=read)


@pytest.mark.parametrize("window", [False, True])
def test_settings_that_change_nothing_are_ignored(window: bool, tmp_path: Path) -> None:
    neutral = {
        "llama.attention.sliding_window": 0, "llama.expert_count": 0, "general.name": "x",
        "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 8.0,
        "somebody.note": ["a"], "llama.attention.causal": True,
        "llama.logit_scale": 1.0, "llama.embedding_scale": 1.0, "llama.residual_scale": 1.0,
    }  # fmt: skip
    if window:
        neutral["llama.attention.sliding_window"] = 4096
    file = changed(tmp_path, "llama-plain", neutral)
    assert Checkpoint.open(file).config == Checkpoint.open(GOLDEN / "llama-plain").config


def test_an_output_matrix_of_its_own_unties_gpt2(tmp_path: Path) -> None:
    wte = Checkpoint.open(GOLDEN / "tiny").stored["wte"].read()
    file = changed(tmp_path, "tiny", {}, {"output.weight": wte[::-1]})
    model = GPT2.from_pretrained(file, device="cpu")
    assert not model.config.tie_word_embeddings
    tied = GPT2.from_pretrained(GOLDEN / "tiny", device="cpu")
    np.testing.assert_allclose(model(ids)[..., ::-1], tied(ids), rtol=0, atol=1e-4)
    assert np.abs(model(ids) - tied(ids)).max() > 1


def test_convert_and_info(tmp_path: Path) -> None:
    file = save(tmp_path / "m.gguf", GOLDEN / "llama-grouped", lambda name: "F16")
    said = command("convert", file, tmp_path / "out").out
    assert said.startswith("wrote 2 layers of width 36 in float16, float32 to")
    assert_same_tensors(Checkpoint.open(tmp_path / "out"), Checkpoint.open(file))
    shown = printed("info", file)
    assert "F16, F32" in shown
    assert "blk.0.attn_q.weight … blk.0.attn_v.weight" in shown
    assert Llama.from_pretrained(file, device="cpu", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("kind", "capability", "given", "dtypes"),
    [
        ("Q8_0", 80, {}, "file"),
        ("Q8_0", 80, {"kv_dtype": "float8_e5m2"}, "file, kv_cache float8_e5m2"),
        ("Q8_0", 80, {"kv_dtype": "float32"}, r"kv_dtype: expected .*, or float16 with weights"),
        ("Q8_0", 90, {"dtype": "float16"}, "float16"),
        ("Q8_0", 75, {}, "file"),
        ("Q8_0", 70, {}, "float32"),
        ("Q8_0", None, {"kv_dtype": "float32"}, "float32"),
        ("Q8_0", None, {"kv_dtype": "float8_e5m2"}, "kv_dtype 'float8_e5m2': expected weights of"),
        ("F16", 90, {}, "float32"),
    ],
)
def test_the_default_dtype(
    kind: str, capability: int | None, given: Any, dtypes: str,
    large: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """capability: of the GPU; None: no GPU. dtypes: the model's dtypes, or an error message."""
    file = save(tmp_path / "m.gguf", large.directory, lambda name: kind)
    indices = (0,) if capability else ()
    monkeypatch.setattr("gpt2block.cuda.devices.resolve_devices", lambda _: indices)
    monkeypatch.setattr("gpt2block.cuda.cards.capability_of", lambda _: capability)
    monkeypatch.setattr(Model, "_set_up", lambda model, *given: setattr(model, "formats", given[3]))
    for load in (gpt2block.from_pretrained, Llama.from_pretrained):
        wrong = pytest.raises(gpt2block.InputError, match=dtypes)
        with wrong if "expected" in dtypes else nullcontext():
            assert load(file, **given).dtypes == dtypes


def test_what_says_the_default_dtype(large: Checkpoint, tmp_path: Path) -> None:
    file = save(tmp_path / "m.gguf", large.directory, lambda name: "Q8_0")
    words = ("generate", "1 2", "--ids", "--model", file, "--max-new-tokens", "1", "--device")
    with running_on("shuffled"):
        found = command(*words, "cuda", "--json").json
        assert (found["dtype"], found["kv_dtype"]) == ("file", "float16")
        assert gpt2block.Predictor("score", file, device="cuda").model.dtype == "file"
    assert "m.gguf, float32, CPU" in command(*words, "cpu").err
    for kv_dtype in ("bfloat16", "float16"):  # float16 is compatible with dtype "file"
        found = command("info", file, "--json", "--kv-dtype", kv_dtype).json
        assert found["default_dtype"] == "file"
        assert ("file" in found["memory"]) == (kv_dtype == "float16")


# --- damaged files


def damaged(file: Path, at: int, change: bytes) -> Path:
    data = bytearray(file.read_bytes())
    data[at : at + len(change)] = change
    other = file.with_name("damaged.gguf")
    other.write_bytes(data)
    return other


def test_lengths_counts_and_offsets_beyond_the_file(tiny: Path) -> None:
    start = tiny.read_bytes()
    name = b"blk.0.attn_qkv.weight"
    shape, kind = start.index(name) + len(name) + 4, start.index(name) + len(name) + 20
    for at in (8, 16, 24, start.index(b"general.architecture") - 8, start.index(name) - 8,
               shape, shape + 8, kind + 4):  # fmt: skip
        for value in (2**64 - 1, 2**63, 2**40, 2**31):
            said = refused(damaged(tiny, at, struct.pack("<Q", value)), "not a GGUF file")
            missing = at < shape or "ends at byte" in said
            assert missing == ("download it again" in said), said


@pytest.mark.parametrize("alignment", [8, 16, 64, 4096])
def test_tensors_begin_where_the_alignment_says(
    alignment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 36 numbers do not end at a multiple of 32 bytes, the default alignment."""
    monkeypatch.setattr("gguf.gguf_writer.GGUF_DEFAULT_ALIGNMENT", alignment)
    file = changed(tmp_path, "llama-plain", {"general.alignment": alignment})
    found, expected = Checkpoint.open(file), Checkpoint.open(GOLDEN / "llama-plain")
    assert_same_tensors(found, expected, np.float32)
    places = [tensor.offset for tensor in read_header(file).tensors.values()]
    assert all(offset is not None and offset % alignment == 0 for offset in places)


@pytest.mark.parametrize("alignment", [0, 4, 7, 24, 33, True, 32.0, "32", [32]])
def test_other_alignments_are_refused(alignment: Any, tmp_path: Path) -> None:
    file = changed(tmp_path, "llama-plain", {"general.alignment": alignment})
    refused(file, "general.alignment: expected a power of two from 8, got ")


def test_other_damage_says_what_is_wrong(tiny: Path) -> None:
    data = tiny.read_bytes()
    key = data.index(b"gpt2.block_count") + len(b"gpt2.block_count")
    tensor = data.index(b"blk.0.attn_qkv.weight") + len(b"blk.0.attn_qkv.weight")
    for at, change, message in (
        (4, struct.pack("<I", 1), "expected version 2 or 3, got 1: write it again with a current"),
        (4, struct.pack(">I", 3), ": a big-endian GGUF file: expected a little-endian one, which"),
        (0, b"GGML", "it starts with b'GGML'"),
        (key, struct.pack("<I", 13), "gpt2.block_count: a value of the unknown"),
        (key - 4, b"\xff", "gpt2.block_c\\xffunt: 3 is not supported"),
        (tensor, struct.pack("<I", 0), "expected 1 to 4 dimensions, got 0"),
        (tensor - 21, b"blk.0.ffn_down.weight", "it has a tensor twice"),
        (tensor - 4, b"\xff", "'utf-8' codec can't decode byte 0xff"),
        (tensor + 20, bytes([99]), "blk.0.attn_qkv.weight: type 99 is not known to the package"),
    ):
        assert "download" not in refused(damaged(tiny, at, change), message)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (struct.pack("<IQQ", 8, 2**22, 2**60),  # strings, the first of which is long
         "it states 1,152,921,504,606,846,976 entries of 1 bytes or more"),
        (struct.pack("<IQ", 12, 2**25), "it states a length of 268,435,456 bytes"),  # float64
    ],
    ids=["strings", "numbers"],
)  # fmt: skip
def test_an_array_that_is_not_long_enough_needs_little_memory(
    array: bytes, message: str, tmp_path: Path
) -> None:
    """The file is sparse and has 100 MB."""
    file = tmp_path / "m.gguf"
    with file.open("wb") as stream:
        stream.write(struct.pack("<4sIQQQcI", b"GGUF", 3, 0, 1, 1, b"x", 9) + array)
        stream.truncate(10**8)
    tracemalloc.start()
    refused(file, message)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_the_package_is_missing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(tiny, "a GGUF file needs gguf, of the extra gguf: run pip install gguf")


def test_a_factor_of_rope_that_is_not_a_number(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.factor": 2.0}
    for factors, metadata, message in (
        (np.full(6, math.nan), {}, "factors: expected a number from 2^-20 to 2^20, got nan"),
        (np.ones(5), {}, "expected a factor for each of 6 frequencies, got 5"),
        (np.ones(6), linear, "llama.rope.scaling.factor: not supported with rope_freqs.weight"),
    ):
        tensor = {"rope_freqs.weight": factors.astype(np.float32)}
        refused(changed(tmp_path, "llama-plain", metadata, tensor), message)
