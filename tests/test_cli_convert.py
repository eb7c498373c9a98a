"""`gpt2block convert`: its output opens as the same model, and wrong calls are refused."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpt2block import GPT2, CheckpointError
from gpt2block.checkpoints import Checkpoint
from gpt2block.files import temporary_folder
from tests.command_line import gpt2block, printed

FIXTURES = Path(__file__).parent / "data" / "pytorch"
GOLDEN = Path(__file__).parent / "golden" / "tiny"


def test_a_checkpoint_of_nanogpt(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = printed("convert", FIXTURES / "nanogpt.pt", out)
    size = (out / "model.safetensors").stat().st_size
    assert said == f"wrote 1 layers of width 8 in float32 to {out}: {size / 1e6:,.1f} MB\n"
    ids = np.array([[1, 2, 3]])
    expected = GPT2.from_pretrained(FIXTURES / "expected-float32.safetensors", device="cpu")(ids)
    np.testing.assert_array_equal(GPT2.from_pretrained(out, device="cpu")(ids), expected)


def test_the_dtype_and_a_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "sharded", source)
    (source / "tokenizer.json").write_text("{}")
    printed("convert", source, tmp_path / "out", "--dtype", "bfloat16")
    stored = Checkpoint.open(tmp_path / "out").stored.values()
    assert {tensor.dtype for tensor in stored} == {"bfloat16"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


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


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes on stderr state what the file lacks; an existing file is not replaced."""
    out = tmp_path / "m.gguf"
    arguments = "convert", FIXTURES / "nanogpt.pt", out, "--type", "q8_0"
    ended = gpt2block(*arguments)
    assert f"note: {out}: 4 matrices are F16, as their rows are no multiples of 32" in ended.err
    assert f"note: {out} has no tokenizer: its source has none: give one with --tok" in ended.err
    size = f"{out.stat().st_size / 1e6:,.1f} MB"
    assert ended.out == f"wrote 1 layers of width 8 in F16, F32, Q8_0 to {out}: {size}\n"
    said = gpt2block(*arguments).error
    assert said == f"{out}: already exists: give another file or --overwrite"
    assert gpt2block(*arguments[:-1], "f32", "--overwrite").code == 0
    ids, models = np.array([[1, 2, 3]]), (FIXTURES / "expected-float32.safetensors", out)
    logits, found = (GPT2.from_pretrained(each, device="cpu")(ids) for each in models)
    np.testing.assert_array_equal(found, logits)
    said = gpt2block("convert", out, out, "--type", "f16", "--overwrite").error
    assert said == f"{out}: it is the checkpoint: give another file as OUT"
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "a GGUF file needs gguf, of the extra" in gpt2block(*arguments, "--overwrite").error


def test_what_is_there_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    said = gpt2block("convert", FIXTURES / "nanogpt.pt", tmp_path).error
    assert said == f"{tmp_path}: already exists: give another directory or --overwrite"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    printed("convert", FIXTURES / "nanogpt.pt", tmp_path, "--overwrite")
    assert Checkpoint.open(tmp_path).config.n_embd == 8
    assert (tmp_path / "notes.txt").read_text() == "mine"


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


def test_the_checkpoint_itself_is_not_replaced(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "sharded", source)
    before = sorted(path.name for path in source.iterdir())
    said = gpt2block("convert", source, f"{source}/.", "--overwrite").error
    assert "the checkpoint is in this directory: give another one as OUT" in said
    assert sorted(path.name for path in source.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nanogpt.pt", ""], "OUT: expected a directory or a .gguf, got an empty string"),
        (["nanogpt.pt", "m.gguf"], "--type: expected one of f32, f16, bf16, q8_0, q5_1, q5_0, q4_"),
        (["nanogpt.pt", "m.gguf", "--type", "q4_k"], "--type: expected one of f32, f16, bf16, "),
        (["nanogpt.pt", "out", "--type", "q4_0"], "--type: expected an OUT that ends in .gguf"),
        (
            ["nanogpt.pt", "m.gguf", "--type", "f16", "--dtype", "float16"],
            "--dtype: expected none for a .gguf, got 'float16': give --type only",
        ),
        (["nanogpt.pt", "no/m.gguf", "--type", "f16"], "no: create it first"),
        (["nanogpt.pt", "out", "--dtype", "int8"], "--dtype: expected one of float32, float16"),
        (["scattered.bin", "out"], "1 tensors not contiguous"),
        (["none.pt", "out"], "none.pt: no such file or directory"),
    ],
)
def test_a_refusal_writes_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in gpt2block("convert", FIXTURES / arguments[0], *arguments[1:]).error
    assert list(tmp_path.iterdir()) == []
