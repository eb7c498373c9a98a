"""Checkpoints of GPTQ, AWQ and compressed-tensors with matrices of 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpt2block import LlamaConfig, from_pretrained
from gpt2block.cuda import cupy
from gpt2block.engine.cuda.products import MARGIN, row_norms
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.gguf_types import InBlocks
from tests.command_line import printed
from tests.devices import GPU, running_on
from tests.four_bit import LAYOUTS, write
from tests.ops.test_gguf_blocks import assert_same_blocks
from tests.refusals import assert_same_tensors, cases, refused

SMALL = LlamaConfig(n_layer=2, n_head=8, n_kv_head=1, head_size=12, n_embd=64, n_ff=96, n_ctx=32,
                    vocab_size=29)  # fmt: skip
EVEN = LlamaConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=128, n_ff=256, n_ctx=32, vocab_size=29)
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
    rng = np.random.default_rng(0)
    with running_on(where):
        for matrix in matrices:
            whole = matrix.on_host()
            assert_same_blocks(there := matrix.on_device(), whole)
            gamma, weights = rng.standard_normal(whole.K, np.float32), whole.dequantized()
            norms = MARGIN * np.linalg.norm(weights * gamma[:, None], axis=0)
            np.testing.assert_allclose(row_norms(there, cupy.asarray(gamma)), norms, rtol=1e-5)
            part = matrix.of_spans([(16, whole.N)]).on_host()
            np.testing.assert_array_equal(part.dequantized(), weights[:, 16:])


def test_info_names_the_scheme(tmp_path: Path) -> None:
    named = "compressed-tensors of 4 bits in groups of 32 in activation order"
    assert named in printed("info", written("activation order", tmp_path)[0])


@pytest.mark.parametrize(("name", "settings", "words"), cases("schemes of 4 bits"))
def test_schemes_are_refused_by_name(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Settings that begin with "weights." or "group." are those of a group."""
    found, _ = written(name, tmp_path)
    config = json.loads((found / "config.json").read_text())
    own = config["quantization_config"]
    group = own.get("config_groups", {}).get("group_0", {})
    for key, value in settings.items():
        part, _, last = key.rpartition(".")
        {"": own, "group": group, "weights": group.get("weights")}[part][last] = value
    (found / "config.json").write_text(json.dumps(config))
    refused(found, words, "convert the model to GGUF")


@pytest.mark.parametrize(("name", "tensor", "array", "words"), cases("tensors of 4 bits"))
def test_tensors_that_do_not_match(
    name: str, tensor: str, array: list[Any] | None, words: str, tmp_path: Path
) -> None:
    """A tensor has another dtype and shape, or is absent."""
    found, _ = written(name, tmp_path)
    tensors = load_file(found / "model.safetensors")
    place = f"model.layers.0.mlp.down_proj.{tensor}"
    del tensors[place]
    if array is not None:
        tensors[place] = np.zeros(array[1:], array[0])
    save_file(tensors, found / "model.safetensors")
    refused(found, words, read=lambda path: Checkpoint.open(path).nbytes_in_blocks)
