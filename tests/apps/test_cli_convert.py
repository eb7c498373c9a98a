"""`gpt2block convert`: its output opens as the same model, and wrong calls are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpt2block import GPT2, CheckpointError
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.writing import temporary_folder
from tests.command_line import gpt2block, printed

FIXTURES = Path(__file__).parents[1] / "data" / "pytorch"
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"


def test_a_checkpoint_of_nanogpt(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = printed("convert", FIXTURES / "nanogpt.pt", out)
    size = (out / "model.safetensors").stat().st_size
    assert said == f"wrote 1 layers of width 8 in float32 to {out}: {size / 1e6:,.1f} MB\n"
    ids = np.array([[1, 2, 3]])
    expected = GPT2.from_pretrained(FIXTURES / "expected-float32.safetensors", device="cpu")(ids)
    np.testing.assert_array_equal(GPT2.from_pretrained(out, device="cpu")(ids), expected)


def float64_checkpoint(folder: Path, name: str, value: float, at: Any = ...) -> Path:
    """Save the tiny model in float64, with `value` in one of its tensors."""
    source = shutil.copytree(GOLDEN, folder / "source")
    tensors = load_file(source / "model.safetensors")
    wide = {name: array.astype(np.float64) for name, array in tensors.items()}
    wide[f"transformer.{name}.weight"][at] = value
    save_file(wide, source / "model.safetensors")
    return source


@pytest.mark.parametrize("largest", [3e38, 4e38, -1e300])
def test_float64_is_written_as_float32_or_refused(tmp_path: Path, largest: float) -> None:
    """A number beyond the range of float32 must not become infinity."""
    source, out = float64_checkpoint(tmp_path, "wpe", largest, (3, 4)), tmp_path / "out"
    if largest == 3e38:
        assert "wrote 3 layers of width 48 in float32 to " in printed("convert", source, out)
        stored = Checkpoint.open(out).stored.values()
        assert {tensor.dtype for tensor in stored} == {"float32"}
    else:
        said = gpt2block("convert", source, out).error
        assert "wpe.weight: 1 weights are out of the range of float32" in said
        assert not out.exists()


def test_float64_out_of_range_is_not_loaded(tmp_path: Path) -> None:
    source = float64_checkpoint(tmp_path, "h.1.mlp.c_fc", 1e200)
    message = r"h\.1\.mlp\.c_fc\.weight: 9,216 weights are out of the range of float32, as which"
    with pytest.raises(CheckpointError, match=message):
        GPT2.from_pretrained(source, device="cpu")


def test_what_a_killed_process_left_is_no_model(tmp_path: Path) -> None:
    """A temporary folder that is still being written, and thus locked, counts."""
    (tmp_path / ".saving-left").mkdir()
    (tmp_path / ".saving-left" / "model.safetensors").write_text("")
    with temporary_folder(tmp_path, "saving") as other:
        (tmp_path / ".saving-left").mkdir()
        said = gpt2block("convert", FIXTURES / "nanogpt.pt", tmp_path).error
        assert said == f"{tmp_path}: already exists: give another directory or --overwrite"
        assert [*tmp_path.iterdir()] == [other]
    (tmp_path / ".saving-left").mkdir()
    printed("convert", FIXTURES / "nanogpt.pt", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
