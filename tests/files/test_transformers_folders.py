"""Folders that `transformers` opens, and the factor of Gemma's embeddings in every conversion."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import gpt2block
from gpt2block import CheckpointError
from gpt2block.files.checkpoints import Checkpoint, save_gguf, save_pretrained
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.gemma3 import Gemma3Config
from tests.command_line import gpt2block as command

GOLDEN = Path(__file__).parents[1] / "golden"
Tensors = dict[str, NDArray[Any]]
Change = Callable[[Tensors], Tensors]
PLAIN, TIED, GPT2 = "llama-plain", "llama-tied", "tiny"
BUFFERS = (
    "model.rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "model.rotary_emb_local.inv_freq",
    "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.rotary_emb.sin_cached",
)  # fmt: skip


def with_buffers(tensors: Tensors) -> Tensors:
    return tensors | dict.fromkeys(BUFFERS, np.ones(3, np.float32))


def only_the_head(tensors: Tensors) -> Tensors:
    wte = next(name for name in tensors if name.endswith(("wte.weight", "embed_tokens.weight")))
    return tensors | {"lm_head.weight": tensors.pop(wte)}


def wider(part: str, dtype: type) -> Change:
    return lambda tensors: {k: v.astype(dtype) if part in k else v for k, v in tensors.items()}


def folder(path: Path, name: str, change: Change, **config: Any) -> Path:
    """Copy a golden model with changed tensors and settings."""
    shutil.copytree(GOLDEN / name, path)
    settings, file = json.loads((path / "config.json").read_text()), path / "model.safetensors"
    (path / "config.json").write_text(json.dumps(settings | config))
    save_file(change(load_file(file)), file, {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("name", "change", "config"),
    [
        (PLAIN, with_buffers, {}),
        (TIED, only_the_head, {}),
        (GPT2, only_the_head, {}),
        (PLAIN, wider("q_proj", np.float32), {"torch_dtype": "float32"}),
        (PLAIN, wider("v_proj", np.float64), {"dtype": "float32"}),
        (PLAIN, wider("", np.float64), {"dtype": "float64"}),
        ("gemma3", wider("", np.float32), {"torch_dtype": "float64"}),
        ("gemma3", wider("", np.float32), {"dtype": None, "torch_dtype": "float32"}),
    ],
)
def test_a_folder_that_transformers_opens(
    name: str, change: Change, config: dict[str, Any], tmp_path: Path
) -> None:
    """The logits agree, also after the model is saved in each dtype."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = folder(tmp_path / "model", name, change, **config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path).float()
    ids = np.arange(12)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids[None])).logits[0].numpy()
    ours = gpt2block.from_pretrained(path, device="cpu")
    np.testing.assert_allclose(ours(ids), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    again = save_pretrained(tmp_path / "again", Checkpoint.open(path))
    np.testing.assert_array_equal(gpt2block.from_pretrained(again, device="cpu")(ids), ours(ids))


def test_names_of_dtypes_and_their_keys(tmp_path: Path) -> None:
    """Some programs write "torch.bfloat16"; errors name the key as it is in the file."""
    for key in ("dtype", "torch_dtype"):
        path = folder(tmp_path / key, "gemma3", lambda tensors: tensors, **{key: "torch.bfloat16"})
        config: Any = Checkpoint.open(path).config
        assert config.embedding_dtype == "bfloat16"
        settings = json.loads((path / "config.json").read_text()) | {key: "int8"}
        (path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(CheckpointError, match=rf"json: {key}: expected one of .*, got 'int8'"):
            Checkpoint.open(path)
    config = Checkpoint.open(GOLDEN / "gemma3").config  # without a key, the tensors' dtype counts
    assert config.embedding_dtype == "float16"


FACTORS = {"float32": np.float32(24**0.5), "float16": 4.8984375, "bfloat16": 4.90625}  # sqrt(24)
SIZES: dict[str, Any] = {
    "n_layer": 1, "n_head": 2, "n_embd": 24, "n_ctx": 16, "vocab_size": 11, "n_ff": 32,
    "head_size": 8,
}  # fmt: skip


def gemma(path: Path, dtype: str) -> Path:
    """Save a random Gemma 3 in a dtype, to which the factor of its embeddings is rounded."""
    config = Gemma3Config(**SIZES, embedding_dtype=dtype)
    source: Any = SimpleNamespace(config=config, tensors=lambda: random_model(0, config))
    return save_pretrained(path, source, dtype)


@pytest.mark.parametrize(("rounded", "saved"), [*product(FACTORS, FACTORS)])
def test_the_factor_of_embeddings_is_kept(rounded: str, saved: str, tmp_path: Path) -> None:
    """The factor is kept in a folder of another dtype, in GGUF, back and again, and in a pickle.

    A warning tells if other programs would compute another factor for the saved file.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    path, factor = gemma(tmp_path / "source", rounded), FACTORS[rounded]
    kinds = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    for n, dtype in enumerate((saved, saved, saved, rounded, rounded)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if n in (1, 3):
                path = save_gguf(tmp_path / f"{n}.gguf", Checkpoint.open(path), kinds[dtype])
                reader, theirs = "llama.cpp", FACTORS["float32"]
            else:
                path = save_pretrained(tmp_path / f"{n}", Checkpoint.open(path), dtype)
                loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
                assert loaded.dtype == getattr(torch, dtype)
                scale = loaded.model.embed_tokens.embed_scale
                reader, theirs = "transformers", float(scale.to(loaded.dtype))
        noted = any(f"{reader} multiplies" in str(each.message) for each in caught)
        assert noted == (theirs != factor)
        model: Any = gpt2block.from_pretrained(path, device="cpu", dtype=saved)
        for config in (model.config, pickle.loads(pickle.dumps(model.config))):
            assert config.scales.embedding == factor
        if reader == "transformers":
            kept = "embedding_dtype" in (path / "config.json").read_text()
            assert kept == (rounded != dtype)


def test_convert_notes_the_factor(tmp_path: Path) -> None:
    source = gemma(tmp_path / "m", "bfloat16")
    done = command("convert", source, tmp_path / "out", "--dtype", "float32")
    assert "transformers multiplies embeddings by 4.89898" in done.err
    assert "this model has 4.90625, which gpt2block keeps" in done.err
