"""Checkpoints of GPTQ, AWQ and compressed-tensors with matrices of 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpt2block import LlamaConfig, from_pretrained
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.gguf_types import InBlocks
from tests.command_line import printed
from tests.devices import GPU, running_on
from tests.four_bit import LAYOUTS, write
from tests.ops.test_gguf_blocks import assert_same_blocks
from tests.refusals import assert_same_tensors, refused

SMALL = LlamaConfig(n_layer=2, n_head=8, n_kv_head=1, head_size=12, n_embd=64, n_ff=96, n_ctx=32,
                    vocab_size=29)  # fmt: skip
EVEN = LlamaConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=64, n_ff=96, n_ctx=32, vocab_size=29)
ids = np.arange(20) * 7 % 29


def written(name: str, folder: Path) -> tuple[Path, Path]:
    """Write a Llama in a layout, and in float32. Outputs of k and v are no multiple of 8."""
    return write(folder, EVEN if LAYOUTS[name].method == "awq" else SMALL, LAYOUTS[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_exact(name: str, tmp_path: Path) -> None:
    """Weights equal scale * (q - zero) in float64, as floats and in blocks."""
    found, exact = written(name, tmp_path)
    assert_same_tensors(Checkpoint.open(found), Checkpoint.open(exact))
    kept, wide = from_pretrained(found, "cpu", "file"), from_pretrained(exact, "cpu")
    for (_, array, _), (_, truth, _) in zip(kept.tensors(), wide.tensors(), strict=True):
        np.testing.assert_array_equal(array, truth)
    assert kept.engine.nbytes < 0.5 * wide.engine.nbytes
    np.testing.assert_array_equal(from_pretrained(found, "cpu", "float32")(ids), wide(ids))
    np.testing.assert_allclose(kept(ids), wide(ids), rtol=0, atol=2e-3 * np.abs(wide(ids)).max())


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_packs_the_matrices(
    where: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are computed in pieces that end within a row; shards are rows of the whole matrix."""
    monkeypatch.setattr("gpt2block.cuda.arrays.READ_BYTES", 1000)
    tensors = Checkpoint.open(written(name, tmp_path)[0]).tensors(in_blocks=True)
    matrices = [array for _, array, _ in tensors if isinstance(array, InBlocks)]
    assert len(matrices) >= 5
    with running_on(where):
        for matrix in matrices:
            whole = matrix.on_host()
            assert_same_blocks(matrix.on_device(), whole)
            part = matrix.of_spans([(16, whole.N)]).on_host()
            np.testing.assert_array_equal(part.dequantized(), whole.dequantized()[:, 16:])


def test_info_names_the_scheme(tmp_path: Path) -> None:
    named = "compressed-tensors of 4 bits in groups of 32 in activation order"
    assert named in printed("info", written("activation order", tmp_path)[0])


def changed(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """Write a checkpoint with changed settings; "weights.", "group." begin those of a group."""
    found, _ = written(name, folder)
    config = json.loads((found / "config.json").read_text())
    own = config["quantization_config"]
    group = own.get("config_groups", {}).get("group_0", {})
    for key, value in settings.items():
        part, _, last = key.rpartition(".")
        {"": own, "group": group, "weights": group.get("weights")}[part][last] = value
    (found / "config.json").write_text(json.dumps(config))
    return found


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("gptq", {"bits": 3}, "bits: expected 4, got 3"),
        ("gptq", {"bits": 8}, "bits: expected 4, got 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "expected gptq or gptq_v2, got 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format: expected False, got True"),
        ("gptq", {"quant_method": "mxfp4"}, "awq or compressed-tensors, got 'mxfp4'"),
        ("awq", {"version": "gemv"}, "version: expected gemm, got 'gemv'"),
        ("awq", {"version": "marlin"}, "version: expected gemm, got 'marlin'"),
        ("symmetric", {"format": "nvfp4-pack-quantized"}, "got 'nvfp4-pack-quantized'"),
        ("symmetric", {"format": "marlin-24"}, "expected pack-quantized, got 'marlin-24'"),
        ("symmetric", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: expected None"),
        ("symmetric", {"transform_config": {"r": 1}}, "transform_config: expected None or {}"),
        ("symmetric", {"weights.num_bits": 8}, "num_bits: expected 4, got 8"),
        ("symmetric", {"weights.type": "float"}, "type: expected int, got 'float'"),
        ("symmetric", {"weights.strategy": "tensor"}, "expected group or channel, got 'tensor'"),
        ("symmetric", {"group.input_activations": {"num_bits": 8}}, "input_activations: expected"),
        ("symmetric", {"group.weights": None}, "weights: expected an object, got None"),
        ("symmetric", {"config_groups": [1]}, "config_groups: expected an object, got [1]"),
    ],
)
def test_schemes_are_refused_by_name(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    refused(changed(tmp_path, name, settings), words, "convert the model to GGUF")


@pytest.mark.parametrize(
    ("name", "tensor", "array", "words"),
    [
        ("gptq", "qweight", np.zeros((12, 12), np.float32), "expected I32 (12, 12), got float32"),
        ("gptq", "qzeros", np.zeros((2, 1), np.int32), "qzeros: expected I32 (3, 8), got I32"),
        ("gptq", "scales", np.zeros((3, 64), np.float32), "expected float16 or bfloat16 (3, 64)"),
        ("gptq", "scales", np.zeros((6, 64), np.float16), "96 inputs in 6 groups: expected groups"),
        ("gptq", "g_idx", np.zeros(8, np.int32), "g_idx: expected I32 (96,), got I32 (8,)"),
        ("gptq", "g_idx", np.zeros(96, np.int32), "expected 32 inputs in each of 3 groups"),
        ("awq", "qweight", np.zeros(3, np.int32), "3 inputs in 3 groups"),
        ("awq", "qzeros", None, "1 tensors missing: model.layers.0.mlp.down_proj.qzeros"),
        ("symmetric", "weight_scale", None, "tensors missing: model.layers.0.mlp.down_proj.weight"),
        ("symmetric", "weight_packed", np.zeros((64, 8), np.int32), "64 inputs in 3 groups"),
    ],
)
def test_tensors_that_do_not_match(
    name: str, tensor: str, array: Any, words: str, tmp_path: Path
) -> None:
    found, _ = written(name, tmp_path)
    tensors = load_file(found / "model.safetensors")
    place = f"model.layers.0.mlp.down_proj.{tensor}"
    del tensors[place]
    save_file(tensors | ({} if array is None else {place: array}), found / "model.safetensors")
    refused(found, words, read=lambda path: Checkpoint.open(path).nbytes_in_blocks)
