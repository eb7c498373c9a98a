"""Mixtures of experts in files: both forms of `transformers`, and tensors that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import gguf_writer
from numpy.typing import NDArray

import gpt2block
from gpt2block import CheckpointError, InputError, Model
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.olmoe import OlmoeConfig
from gpt2block.models.config import EXPERTS
from gpt2block.models.weights.gguf import random_blocks
from tests.command_line import gpt2block as command
from tests.files.test_transformers_folders import GOLDEN, folder
from tests.refusals import assert_same_tensors

Tensors = dict[str, NDArray[Any]]
SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 256, "n_ctx": 32, "vocab_size": 11}
FIRST = "model.layers.0.mlp.experts."


def packed(tensors: Tensors) -> Tensors:
    """Return tensors as `transformers` 5 keeps them in memory."""
    w = any(name.endswith(".w1.weight") for name in tensors)
    parts = ("w1", "w3", "w2") if w else ("gate_proj", "up_proj", "down_proj")
    kept = {name: array for name, array in tensors.items() if ".experts." not in name}
    for module in {name.partition(".experts.")[0] + ".experts." for name in {*tensors} - {*kept}}:
        count = sum(name.startswith(module) for name in tensors) // 3
        gate, up, down = (
            np.stack([tensors[f"{module}{n}.{part}.weight"] for n in range(count)])
            for part in parts
        )
        kept[f"{module}gate_up_proj"] = np.concatenate([gate, up], 1)
        kept[f"{module}down_proj"] = down
    return kept


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: array for n, array in tensors.items() if n != name}


def more(name: str, like: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[like]}


def swapped(tensors: Tensors) -> Tensors:
    name = f"{FIRST}down_proj"
    return {**packed(tensors), name: packed(tensors)[name].swapaxes(1, 2).copy()}


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "lfm2_moe"])
def test_packed_experts_are_those_of_the_hub(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", name, packed)
    assert_same_tensors(Checkpoint.open(path), Checkpoint.open(GOLDEN / name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{FIRST}3.up_proj.weight"), "1 tensors missing: .*mlp.experts.3.up_proj"),
        (without("model.layers.2.mlp.gate.weight"), "1 tensors missing: layers.2.mlp.gate.weight"),
        (more(f"{FIRST}7.up_proj.weight", f"{FIRST}0.up_proj.weight"),
         "1 tensors unexpected: layers.0.mlp.experts.7.up_proj"),
        (swapped, r"experts.down_proj: expected shape \(7, 36, 12\) of .*, got \(7, 12, 36\)"),
        (lambda tensors: tensors | packed(tensors), "experts.0.*: expected one of the two"),
        (lambda tensors: packed(tensors) | {f"{FIRST}down_proj": np.ones((7, 36, 12), np.int8)},
         "experts.down_proj: expected shape .* of float64, .*, got .* of I8"),
    ],
)  # fmt: skip
def test_wrong_experts(change: Callable[[Tensors], Tensors], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder(tmp_path / "model", "qwen3_moe", change))


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
    config = OlmoeConfig(**SIZES, n_expert=3, n_expert_used=2, n_ff=256)
    source: Model[Any] = Model.from_tensors(config, random_model(0, config), "cpu", "float32")
    tensors = gguf_writer.tensors_of(source)
    for seed, (name, array) in enumerate(tensors.items()):
        if array.ndim == 3:
            blocks = random_blocks(kind, array.shape[0] * array.shape[1], 256, seed, 0.02)
            tensors[name] = blocks.reshape(*array.shape[:2], -1)
    path = tmp_path / "m.gguf"
    kinds = {True: kind, False: "F32"}
    metadata = gguf_writer.metadata_of(source)
    gguf_writer.write(path, metadata, tensors, lambda name: kinds["_exps." in name])
    found, wide = (gpt2block.from_pretrained(path, "cpu", dtype) for dtype in ("file", "float16"))
    (kept,) = {found.engine._matrices[f"h.1.{name}"].ranges for name in EXPERTS}
    assert kept == ((kind, 768),)
    for (name, array, _), (_, truth, _) in zip(found.tensors(), wide.tensors(), strict=True):
        limit = 2.0**-11 * np.abs(truth).max() * name.endswith(EXPERTS)
        np.testing.assert_allclose(array, truth, rtol=0, atol=limit)
    ids = np.arange(9)
    logits = wide(ids)
    np.testing.assert_allclose(found(ids), logits, rtol=0, atol=2e-3 * np.abs(logits).max())


def test_active_parameters() -> None:
    """A token uses three of seven experts in two of three blocks."""
    found = command("info", GOLDEN / "qwen3_moe", "--json").json
    sizes = {each["name"]: math.prod(each["shape"]) for each in found["tensors"]}
    experts = sum(size for name, size in sizes.items() if name.endswith("_experts"))
    assert experts == 2 * 3 * 7 * 36 * 12
    assert found["parameters"] - found["active_parameters"] == experts * 4 // 7
