"""What `save_pretrained` writes is read again, here and by `transformers`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from gpt2block import CheckpointError, GPT2Config, GPT2Weights, InputError, reference
from gpt2block.checkpoints import Checkpoint, save_pretrained

SMALL = GPT2Config(n_layer=2, n_head=3, n_embd=48, n_ctx=11, vocab_size=5, eps=2e-5)
UNTIED = replace(SMALL, tie_word_embeddings=False)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Tensors:
    """A source of tensors that come from anywhere."""

    def __init__(
        self, config: GPT2Config, tensors: Iterable[tuple[str, NDArray[Any], str | None]]
    ) -> None:
        self.config = config
        self._tensors = tensors

    def tensors(self) -> Iterable[tuple[str, NDArray[Any], str | None]]:
        return self._tensors


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_there_and_back(tmp_path: Path, config: GPT2Config, dtype: str | None) -> None:
    weights = GPT2Weights.random(1, config)
    folder = save_pretrained(tmp_path / "some" / "where", weights, dtype)
    assert folder == tmp_path / "some" / "where"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == config
    kind = DTYPES[dtype or "float32"]
    for found, truth in zip(checkpoint.tensors(), weights.tensors(), strict=True):
        assert found[0::2] == truth[0::2]
        assert found[1].dtype == kind
        np.testing.assert_array_equal(found[1], truth[1].astype(kind))
    with safe_open(checkpoint.file, "np") as reader:
        assert reader.metadata() == {"format": "pt"}
        names = reader.keys()
    assert len(names) == len(list(weights.tensors()))
    assert ("lm_head.weight" in names) == (config == UNTIED)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["torch_dtype"] == (dtype or "float32")


def test_a_checkpoint_with_its_tokenizer(tmp_path: Path) -> None:
    board = Checkpoint.open("shakespeare")
    again = Checkpoint.open(save_pretrained(tmp_path, board))
    assert again.config == board.config
    for found, truth in zip(again.tensors(), board.tensors(), strict=True):
        assert found[1].dtype == np.float16
        np.testing.assert_array_equal(found[1], truth[1])
    tokenizer = (board.directory / "tokenizer.json").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer
    other = tmp_path / "other"
    (tmp_path / "mine.json").write_text("{}")
    save_pretrained(other, board, "float32", tokenizer=tmp_path / "mine.json")
    assert (other / "tokenizer.json").read_text() == "{}"


def test_each_tensor_may_have_its_dtype_and_layout(tmp_path: Path) -> None:
    weights = GPT2Weights.random(1, SMALL)
    kinds = [np.float64, np.float16, ml_dtypes.bfloat16, np.float32]
    tensors = [
        (name, (array if layout != "KN" else array.T).astype(kinds[i % 4]), layout and "NK")
        for i, (name, array, layout) in enumerate(weights.tensors())
    ]
    checkpoint = Checkpoint.open(save_pretrained(tmp_path, Tensors(SMALL, iter(tensors))))
    for i, (found, truth) in enumerate(zip(checkpoint.tensors(), weights.tensors(), strict=True)):
        assert found[0::2] == truth[0::2]
        assert found[1].dtype == (np.float32 if i % 4 == 0 else kinds[i % 4])
        np.testing.assert_array_equal(
            found[1], truth[1].astype(kinds[i % 4]).astype(found[1].dtype)
        )


def test_what_is_there_is_replaced_on_request_only(tmp_path: Path) -> None:
    first, second = (GPT2Weights.random(seed, SMALL) for seed in (1, 2))
    save_pretrained(tmp_path, first)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"config\.json, model\.safetensors already there"):
        save_pretrained(tmp_path, second)
    np.testing.assert_array_equal(GPT2Weights.from_pretrained(tmp_path).wte, first.wte)
    save_pretrained(tmp_path, second, overwrite=True)
    np.testing.assert_array_equal(GPT2Weights.from_pretrained(tmp_path).wte, second.wte)
    save_pretrained(tmp_path, Checkpoint.open(tmp_path), "float16", overwrite=True)  # over itself
    np.testing.assert_array_equal(
        GPT2Weights.from_pretrained(tmp_path).wte, second.wte.astype(np.float16)
    )
    assert len(list(tmp_path.iterdir())) == 3


def changed(index: int, *items: Any) -> Tensors:
    """A model with the tensor at this place replaced by others."""
    tensors = list(GPT2Weights.random(1, SMALL).tensors())
    return Tensors(SMALL, [*tensors[:index], *items, *tensors[index + 1 :]])


@pytest.mark.parametrize(
    ("weights", "dtype", "message"),
    [
        (changed(1), None, "weights: expected wpe at this place, got h.0.gamma1"),
        (changed(27), None, "weights: 1 tensors missing: beta_f"),
        (
            changed(27, ("beta_f", np.ones(48), None), ("more", np.ones(48), None)),
            None,
            "weights: expected no more at this place, got more",
        ),
        (changed(1, ("wpe", np.ones((48, 11)), None)), None, "wpe: expected shape (11, 48), got"),
        (changed(1, ("wpe", np.ones((11, 48), int), None)), None, "wpe: expected a NumPy array of"),
        (changed(1, ("wpe", [[1.0]], None)), None, "got list"),
        (
            changed(1, ("wpe", np.full((11, 48), 1e5), None)),
            "float16",
            "wpe: 528 weights are beyond float16: use float32",
        ),
        (changed(1), "float8_e5m2", "dtype: expected one of float32, float16, bfloat16 or None"),
    ],
)
def test_what_cannot_be_saved(
    tmp_path: Path, weights: Tensors, dtype: str | None, message: str
) -> None:
    """What was there stays, and nothing half done is left."""
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "new", tmp_path / "there"):
        with pytest.raises(InputError) as caught:
            save_pretrained(folder, weights, dtype)
        assert message in str(caught.value)
    assert [p.name for p in tmp_path.rglob("*")] == ["there"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    weights = GPT2Weights.random(1, SMALL)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            save_pretrained(folder, weights)
    with pytest.raises(CheckpointError, match="no_such_tokenizer"):
        save_pretrained(tmp_path / "new", weights, tokenizer=tmp_path / "no_such_tokenizer.json")
    assert [p.name for p in tmp_path.rglob("*")] == ["file"]


@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_transformers_loads_it(tmp_path: Path, config: GPT2Config) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    weights = GPT2Weights.random(1, config)
    save_pretrained(tmp_path, weights)
    model, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.tie_word_embeddings == config.tie_word_embeddings
    model.eval()
    ids = np.array([[3, 1, 4, 1, 0, 2], [2, 4, 4, 0, 1, 3]])
    with torch.no_grad():
        logits = model(torch.tensor(ids)).logits.numpy()
    x = reference.encoder(ids, weights.wte, weights.wpe)
    for block in weights.blocks:
        x = reference.block_forward(x, block, causal=True)
    hidden = reference.layernorm(x, weights.gamma_f, weights.beta_f, config.eps)
    expected = hidden @ weights.lm_head.T
    # Both are float32: a handful of roundings apart, relative to the largest.
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
