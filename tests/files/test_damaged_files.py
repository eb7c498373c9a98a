"""Requirements of every reader for damaged files, whatever their format.

A new format needs a line in `FORMATS`. Wrong statements of a format, such as a size or an offset,
are tested in the format's own test file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fuzzing.gguf_writer import save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2block import CheckpointError, GPT2Config, GPT2Weights
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from tests.refusals import refused

DATA = Path(__file__).parents[1] / "data" / "pytorch"  # from tools/make_pytorch_fixtures.py
SMALL = GPT2Config(n_layer=2, n_head=3, n_embd=24, n_ctx=7, vocab_size=5)
WEIGHTS = GPT2Weights.random(3, SMALL)


class Format(NamedTuple):
    """A format of files. write: write a file of a small model into a folder.

    truncated: words of the error for a file that ends too early. shorter: a pattern of the error
    for a file that has become shorter since it was opened.
    """

    write: Callable[[Path], Path]
    truncated: str = ""
    shorter: str = r"expected \d+ bytes .* got \d+: the file has"


def safetensors(folder: Path) -> Path:
    save_pretrained(folder, WEIGHTS)
    return folder / "model.safetensors"


def gguf(folder: Path) -> Path:
    safetensors(folder / "source")
    return save(folder / "m.gguf", folder / "source")


def of_torch(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        shutil.copy(DATA / "config.json", folder)
        return Path(shutil.copy(DATA / name, folder / "model.pt"))

    return write


NOT_SAFETENSORS = "truncated or not a safetensors file"
NOT_GGUF = "truncated or not a GGUF file"
FORMATS = {
    "safetensors": Format(safetensors, NOT_SAFETENSORS),
    "GGUF": Format(gguf, NOT_GGUF, "the file has become shorter since it was opened"),
    "torch.save": Format(of_torch("zip-float16.bin")),
    "torch.save, legacy": Format(of_torch("legacy-float16.bin")),
    "nanoGPT": Format(of_torch("nanogpt.pt")),
    "nanoGPT, legacy": Format(of_torch("nanogpt-legacy.pt")),
}
every_format = pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)


@pytest.fixture
def file(kind: Format, tmp_path: Path) -> Path:
    """Write a valid file; assert that it can be read."""
    path = kind.write(tmp_path)
    assert len(list(Checkpoint.open(path).tensors())) >= 16
    return path


def read(file: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array, _ in Checkpoint.open(file).tensors()}


@every_format
def test_truncated_anywhere(kind: Format, file: Path) -> None:
    """Files are cut at each of the first bytes, at later places, and before the last byte."""
    content = file.read_bytes()
    step = max(1, len(content) // 40)
    for length in (*range(1, 32), *range(32, len(content), step), len(content) - 1):
        file.write_bytes(content[:length])
        refused(file, str(file), kind.truncated)


@every_format
def test_bytes_after_the_end(kind: Format, file: Path) -> None:
    """A format whose header states the size of the file refuses a longer file, others read it."""
    before, size = read(file), file.stat().st_size
    with file.open("ab") as stream:
        stream.write(bytes(10))
    if file.suffix in (".safetensors", ".bin"):
        words = f"too long: its header expects {size:,} bytes, the file has {size + 10:,}"
        assert "download" not in refused(file, str(file), words)
    else:
        assert read(file) == before


@every_format
def test_another_content(kind: Format, file: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 548105171\n"
    page = b"<!DOCTYPE html><html><head><title>404</title></head></html>"
    for content, words in (
        (pointer, "bytes, not the weights: run `git lfs pull`"), (page, "<!DO"),
        (b"", "an empty file: expected a Hugging Face directory"), (bytes(1 << 16), ""),
    ):  # fmt: skip
        file.write_bytes(content)
        message = refused(file, str(file), words)
        assert "download" not in message


@every_format
def test_a_file_that_changes_after_it_was_opened(kind: Format, file: Path) -> None:
    """The file becomes shorter, or is deleted."""
    checkpoint, content = Checkpoint.open(file), file.read_bytes()
    last = max(t.offset + t.nbytes for t in checkpoint.stored.values() if t.offset is not None)
    file.write_bytes(content[: last - 1])
    with pytest.raises(CheckpointError, match=kind.shorter):
        list(checkpoint.tensors())
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        list(checkpoint.tensors())


@every_format
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), span=st.sampled_from([1, 2, 8]))
def test_bytes_that_are_wrong(kind: Format, file: Path, seed: int, span: int) -> None:
    """Wrong bytes are in the first half, where headers are.

    The result is the same tensors with any numbers, or an error that names the file.
    """
    content = file.read_bytes()
    rng, names = np.random.default_rng(seed), set(read(file))
    changed, at = bytearray(content), int(rng.integers(len(content) // 2))
    changed[at : at + span] = rng.bytes(span)
    file.write_bytes(changed)
    try:
        assert set(read(file)) <= names | {"lm_head"}
    except CheckpointError as error:
        message = str(error)
        assert str(file.parent) in message
    finally:
        file.write_bytes(content)
