"""`gpt2block convert`: what it writes opens as the same model, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpt2block import GPT2, CheckpointError, cli
from gpt2block.checkpoints import Checkpoint

FIXTURES = Path(__file__).parent / "data" / "pytorch"
GOLDEN = Path(__file__).parent / "golden" / "tiny"


def convert(*arguments: object) -> int:
    try:
        cli.main(["convert", *map(str, arguments)])
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def test_a_checkpoint_of_nanogpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert convert(FIXTURES / "nanogpt.pt", out) == 0
    size = (out / "model.safetensors").stat().st_size
    assert capsys.readouterr().out == (
        f"wrote 1 layers of width 8 in float32 to {out}: {size / 1e6:,.1f} MB\n"
    )
    ids = np.array([[1, 2, 3]])
    expected = GPT2.from_pretrained(FIXTURES / "expected-float32.safetensors", device="cpu")(ids)
    np.testing.assert_array_equal(GPT2.from_pretrained(out, device="cpu")(ids), expected)


def test_the_dtype_and_a_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "sharded", source)
    (source / "tokenizer.json").write_text("{}")
    assert convert(source, tmp_path / "out", "--dtype", "bfloat16") == 0
    stored = Checkpoint.open(tmp_path / "out").stored.values()
    assert {tensor.dtype for tensor in stored} == {"bfloat16"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(("largest", "code"), [(3e38, 0), (4e38, 2), (-1e300, 2)])
def test_float64_is_written_as_float32_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], largest: float, code: int
) -> None:
    """Before, numbers out of the range of float32 were written as infinity."""
    source = shutil.copytree(GOLDEN, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    wide = {name: array.astype(np.float64) for name, array in tensors.items()}
    wide["transformer.wpe.weight"][3, 4] = largest
    save_file(wide, source / "model.safetensors")
    assert convert(source, tmp_path / "out") == code
    printed = capsys.readouterr()
    if code:
        assert "wpe.weight: 1 weights are out of the range of float32" in printed.err
        assert not (tmp_path / "out").exists()
    else:
        assert "wrote 3 layers of width 48 in float32 to " in printed.out
        stored = Checkpoint.open(tmp_path / "out").stored.values()
        assert {tensor.dtype for tensor in stored} == {"float32"}


def test_float64_out_of_range_is_not_loaded(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDEN, tmp_path / "source")
    wide = load_file(source / "model.safetensors")
    wide["transformer.h.1.mlp.c_fc.weight"] = np.full((48, 192), 1e200)
    save_file(wide, source / "model.safetensors")
    message = r"h\.1\.mlp\.c_fc\.weight: 9,216 weights are out of the range of float32, as which"
    with pytest.raises(CheckpointError, match=message):
        GPT2.from_pretrained(source, device="cpu")


def test_what_is_there_is_replaced_only_with_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert convert(FIXTURES / "nanogpt.pt", tmp_path) == 2
    error = capsys.readouterr().err
    assert error == f"error: {tmp_path}: already exists: give another directory or --overwrite\n"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert convert(FIXTURES / "nanogpt.pt", tmp_path, "--overwrite") == 0
    assert Checkpoint.open(tmp_path).config.n_embd == 8
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_checkpoint_itself_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "sharded", source)
    before = sorted(path.name for path in source.iterdir())
    assert convert(source, f"{source}/.", "--overwrite") == 2
    assert "the checkpoint is in this directory: give another one as OUT" in capsys.readouterr().err
    assert sorted(path.name for path in source.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nanogpt.pt", ""], "OUT: expected a directory, got an empty string"),
        (["nanogpt.pt", "out", "--dtype", "int8"], "--dtype: expected one of float32, float16"),
        (["scattered.bin", "out"], "1 tensors not contiguous"),
        (["none.pt", "out"], "none.pt: no such file or directory"),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert convert(FIXTURES / arguments[0], *arguments[1:]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert list(tmp_path.iterdir()) == []
