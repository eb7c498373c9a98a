"""llm.c's .bin files: both versions, the padded vocabulary, and wrong or damaged headers."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fuzzing import gpt2 as plain

from gpt2block import GPT2Config, GPT2Weights
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from tests.refusals import assert_same_tensors, cases, refused

SIZES = plain.Sizes(n_layer=2, n_head=3, n_embd=24, n_ctx=7, vocab_size=5)
SMALL = GPT2Config(n_layer=2, n_head=3, n_embd=24, n_ctx=7, vocab_size=5)
PADDED = 8
DTYPES = {3: np.float32, 5: ml_dtypes.bfloat16}
FIELDS = ("magic", "version", "n_ctx", "vocab_size", "n_layer", "n_head", "n_embd", "padded")
WEIGHTS = GPT2Weights.random(3, SMALL)
TENSORS = {plain.label_of(name): array for name, array, _ in WEIGHTS.tensors()}
FILES = {version: plain.to_llm_c(SIZES, TENSORS, version == 5, PADDED) for version in DTYPES}
GOOD = FILES[3]


def changed_header(**changed: int) -> bytes:
    """Return the header of 256 int32 with these fields changed."""
    fields = dict(zip(FIELDS, struct.unpack("<8i", GOOD[:32]), strict=True)) | changed
    return struct.pack("<8i", *fields.values()) + GOOD[32:1024]


def saved(folder: Path, content: bytes, name: str = "gpt2_124M.bin") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize("name", ["gpt2_124M.bin", "model", "weights.safetensors"])
def test_all_tensors(tmp_path: Path, version: int, name: str) -> None:
    """A file is recognized by its magic number, with any name."""
    checkpoint = Checkpoint.open(saved(tmp_path, FILES[version], name))
    assert checkpoint.config == SMALL
    assert_same_tensors(checkpoint, WEIGHTS, DTYPES[version])
    for tensor, _, layout in checkpoint.tensors():
        assert layout == ("NK" if tensor == "wte" or ".w_" in tensor else None)


def test_a_model_and_its_conversion(tmp_path: Path) -> None:
    loaded = GPT2Weights.from_pretrained(saved(tmp_path, GOOD))
    half = Checkpoint.open(saved(tmp_path, FILES[5], "half.bin"))
    again = Checkpoint.open(save_pretrained(tmp_path / "hf", half))
    assert again.config == SMALL
    assert_same_tensors(again, half)
    assert_same_tensors(loaded, WEIGHTS)
    assert all(array.flags.c_contiguous for _, array, _ in loaded.tensors())
    assert loaded.lm_head is loaded.wte


@pytest.mark.parametrize(("changed", "words"), cases("header of llm.c"))
def test_a_wrong_header(tmp_path: Path, changed: dict[str, int], words: str) -> None:
    file = saved(tmp_path, changed_header(**changed) + GOOD[1024:])
    refused(file, str(file), words)


def test_files_that_are_not_models(tmp_path: Path) -> None:
    for content, words in (
        (GOOD[:1023], "expected a header of 1024 bytes, got 1023"),
        (GOOD[:3], "or a model of llm.c"),
        (b"", "an empty file: expected a Hugging Face directory, "),
        (GOOD[:-1], "truncated"),
        (GOOD + b"\0", "too long"),
    ):
        file = saved(tmp_path, content)
        refused(file, str(file), words)
    refused(tmp_path, "give the path of the file: ", "gpt2_124M.bin")
