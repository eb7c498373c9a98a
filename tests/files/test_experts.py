"""Mixtures of experts in files: both forms of `transformers`, and tensors that are wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import gguf_writer
from numpy.typing import NDArray

import gpt2block
from gpt2block import CheckpointError, InputError
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.adapters import Adapter
from gpt2block.models.architectures.lfm2_moe import Lfm2MoeConfig
from gpt2block.models.architectures.olmoe import OlmoeConfig
from gpt2block.models.architectures.qwen3_moe import Qwen3MoeConfig
from gpt2block.models.config import EXPERTS
from gpt2block.models.weights.gguf import random_blocks
from tests.adapters import USUAL, save_adapter
from tests.command_line import gpt2block as command
from tests.files.test_save_gguf import OF_LLAMA, Random
from tests.files.test_transformers_folders import GOLDEN, folder
from tests.refusals import assert_same_tensors

Tensors = dict[str, NDArray[Any]]
FIRST, ROUTER = "model.layers.0.mlp.experts.", "model.layers.2.mlp.gate.weight"
UP_3, UP_7 = f"{FIRST}3.up_proj.weight", f"{FIRST}7.up_proj.weight"
UP, DOWN = np.ones((12, 36), np.float16), np.ones((7, 36, 12), np.float16)


def packed(tensors: Tensors) -> Tensors:
    """Return tensors as `transformers` 5 keeps them in memory."""
    w = any(name.endswith(".w1.weight") for name in tensors)
    parts = ("w1", "w3", "w2") if w else ("gate_proj", "up_proj", "down_proj")
    kept = {name: array for name, array in tensors.items() if ".experts." not in name}
    for h in {name.partition("experts.")[0] + "experts." for name in {*tensors} - {*kept}}:
        numbers = range(sum(name.startswith(h) for name in tensors) // 3)
        gate, up, down = (
            np.stack([tensors[f"{h}{n}.{part}.weight"] for n in numbers]) for part in parts
        )
        kept |= {f"{h}gate_up_proj": np.concatenate([gate, up], 1), f"{h}down_proj": down}
    return kept


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "lfm2_moe"])
def test_packed_experts_are_those_of_the_hub(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", name, packed)
    assert_same_tensors(Checkpoint.open(path), Checkpoint.open(GOLDEN / name))


@pytest.mark.parametrize(
    ("packs", "changes", "message"),
    [
        (False, {UP_3: None}, r"1 tensors missing: layers\.0\.mlp\.experts\.3\.up_proj"),
        (False, {UP_7: UP}, r"unexpected: layers\.0\.mlp\.experts\.7\.up_proj"),
        (True, {UP_7: UP}, r"unexpected: layers\.0\.mlp\.experts\.7\.up_proj"),
        (True, {UP_3: UP}, r"gate_up_proj and .*3\.up_proj.*: expected one of"),
        (True, {f"{FIRST}down_proj": DOWN[:6]}, r"shape \(7, 36, 12\) of .*, got \(6, 36, 12\)"),
        (True, {f"{FIRST}down_proj": DOWN.astype(np.int8)}, r"down_proj: .* of float64, .* of I8"),
        (True, {ROUTER: None}, r"1 tensors missing: layers\.2\.mlp\.gate\.weight"),
    ],
)  # fmt: skip
def test_wrong_experts(packs: bool, changes: Tensors, message: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        made = (packed(tensors) if packs else tensors) | changes
        return {name: array for name, array in made.items() if array is not None}

    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder(tmp_path / "model", "qwen3_moe", change))


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_shared_experts", 1), ("shared_expert_intermediate_size", 64), ("topk_group", 2),
     ("scoring_func", "sigmoid"), ("routed_scaling_factor", 2.5)],
)  # fmt: skip
def test_settings_of_other_mixtures(key: str, value: object, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "olmoe", lambda tensors: tensors, **{key: value})
    with pytest.raises(CheckpointError, match=f"config.json: {key}: expected null or .*, got "):
        Checkpoint.open(path)


def test_settings_of_lfm2() -> None:
    """LFM2's mixtures have a factor of weights, and the settings that LFM2 refuses."""
    config = Checkpoint.open(GOLDEN / "lfm2_moe").config.to_hugging_face()
    found = Lfm2MoeConfig.from_hugging_face({**config, "routed_scaling_factor": 2.5})
    assert found.routed_scaling_factor == 2.5
    with pytest.raises(CheckpointError, match="block_use_swiglu: expected true, got false"):
        Lfm2MoeConfig.from_hugging_face({**config, "block_use_swiglu": False})


@pytest.mark.parametrize("kind", [OlmoeConfig, Qwen3MoeConfig, Lfm2MoeConfig])
def test_keys_of_other_mixtures(kind: Any, tmp_path: Path) -> None:
    """Keys whose value changes nothing are read; any other value is refused by the key's name."""
    made = Random(kind(**OF_LLAMA, n_expert=4, n_expert_used=2))
    metadata, tensors = gguf_writer.metadata_of(made), gguf_writer.tensors_of(made)
    normed, function = kind is not OlmoeConfig, 1 + (kind is Lfm2MoeConfig)
    for n, (key, neutral, other) in enumerate((
        ("expert_shared_count", 0, 1), ("expert_shared_feed_forward_length", 0, 64),
        ("expert_gating_func", function, 3 - function), ("expert_weights_norm", normed, not normed),
    )):  # fmt: skip
        named = f"{metadata['general.architecture']}.{key}"
        paths = [tmp_path / f"{n}.{value}.gguf" for value in ("neutral", "other")]
        for path, value in zip(paths, (neutral, other), strict=True):
            gguf_writer.write(path, metadata | {named: value}, tensors, lambda _: "F32")
        assert Checkpoint.open(paths[0]).config.experts == made.config.experts
        with pytest.raises(CheckpointError, match=f"{named}: {other} is not supported"):
            Checkpoint.open(paths[1])


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ("qwen3_moe", "mlp.gate.weight", r"h\.2\.router: 252 of 252 weights"),
        ("lfm2_moe", "feed_forward.expert_bias", r"h\.2\.b_router: 6 of 6 weights"),
    ],
)
def test_a_router_is_finite(model: str, name: str, message: str, tmp_path: Path) -> None:
    name = f"model.layers.2.{name}"
    path = folder(tmp_path / "model", model, lambda of: of | {name: of[name] * np.nan})
    with pytest.raises(InputError, match=message):
        gpt2block.from_pretrained(path, device="cpu")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_blocks_of_a_gguf_file_are_kept(kind: str, tmp_path: Path) -> None:
    """The weights and the logits are those of the same file in float16, except for rounding."""
    config = OlmoeConfig(**OF_LLAMA | {"n_embd": 256, "n_ff": 256}, n_expert=3, n_expert_used=2)
    tensors = gguf_writer.tensors_of(Random(config))
    for seed, (name, array) in enumerate(tensors.items()):
        if array.ndim == 3:
            blocks = random_blocks(kind, array.shape[0] * array.shape[1], 256, seed, 0.02)
            tensors[name] = blocks.reshape(*array.shape[:2], -1)
    path = tmp_path / "m.gguf"
    metadata = gguf_writer.metadata_of(Random(config))
    gguf_writer.write(path, metadata, tensors, lambda n: kind if "_exps." in n else "F32")
    found, wide = (gpt2block.from_pretrained(path, "cpu", dtype) for dtype in ("file", "float16"))
    engine: Any = found.engine
    (kept,) = {engine._matrices[f"h.1.{name}"].ranges for name in EXPERTS}
    assert kept == ((kind, 768),)
    for (name, array, _), (_, truth, _) in zip(found.tensors(), wide.tensors(), strict=True):
        limit = 2.0**-11 * np.abs(truth).max() * name.endswith(EXPERTS)
        np.testing.assert_allclose(array, truth, rtol=0, atol=limit)
    ids, logits = np.arange(9), wide(np.arange(9))
    np.testing.assert_allclose(found(ids), logits, rtol=0, atol=2e-3 * np.abs(logits).max())


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    base = GOLDEN / "olmoe"
    config = Checkpoint.open(base).config
    usual = save_adapter(tmp_path / "usual", base, modules=USUAL)
    assert Adapter.read(usual, config).factors.keys() == {"h.0.w_qkv", "h.1.w_qkv"}
    with pytest.raises(CheckpointError, match=r"named q_proj, .*, got .*experts\.0\.down_proj"):
        Adapter.read(save_adapter(tmp_path / "all", base), config)


def test_one_gpu_only() -> None:
    error = command("info", GOLDEN / "olmoe", "--gpus", 2).error
    assert error.startswith("olmoe on 2 GPUs: expected one GPU, as mixtures of experts are not div")


def test_active_parameters() -> None:
    """A token uses three of seven experts in two of three blocks."""
    found = command("info", GOLDEN / "qwen3_moe", "--json").json
    sizes = {each["name"]: math.prod(each["shape"]) for each in found["tensors"]}
    experts = sum(size for name, size in sizes.items() if name.endswith("_experts"))
    assert experts == 2 * 3 * 7 * 36 * 12
    assert found["parameters"] - found["active_parameters"] == experts * 4 // 7
