"""Folders that `transformers` opens, and the factor of Gemma's embeddings in every conversion."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import gpt2block
from gpt2block import CheckpointError
from gpt2block.architectures.gemma3 import Gemma3Config
from gpt2block.checkpoints import Checkpoint, save_gguf, save_pretrained
from gpt2block.parameters.arrays import random_model
from tests.command_line import gpt2block as command

GOLDEN = Path(__file__).parent / "golden"
Tensors = dict[str, NDArray[Any]]
PLAIN, TIED, GPT2 = "llama-plain", "llama-tied", "tiny"
LAYER = "model.layers.0.self_attn"


def buffers(tensors: Tensors) -> Tensors:
    """Buffers of RoPE, of the model and of its layers, as several versions wrote them."""
    names = (
        "model.rotary_emb.inv_freq", "rotary_emb.original_inv_freq",
        "model.layers.1.rotary_emb.sin_cached", f"{LAYER}.rotary_emb.inv_freq",
        "model.rotary_emb_local.inv_freq",
    )  # fmt: skip
    return tensors | {name: np.ones(3, np.float32) for name in names}


def only_the_head(tensors: Tensors) -> Tensors:
    wte = next(name for name in tensors if name.endswith(("wte.weight", "embed_tokens.weight")))
    return {name: array for name, array in tensors.items() if name != wte} | {
        "lm_head.weight": tensors[wte]
    }


def wider(name: str, dtype: type) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        key: array.astype(dtype) if name in key else array for key, array in tensors.items()
    }


def folder(path: Path, name: str, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """A golden model in a shard, where `change` makes other tensors of its own."""
    shutil.copytree(GOLDEN / name, path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | config))
    save_file(
        change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"}
    )
    return path


@pytest.mark.parametrize(
    ("name", "change", "config"),
    [
        (PLAIN, buffers, {}),
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
    name: str, change: Callable[[Tensors], Tensors], config: dict[str, Any], tmp_path: Path
) -> None:
    """The logits agree, also after the model is saved in its dtypes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = folder(tmp_path / "model", name, change, **config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path).float()
    ids = np.arange(12)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids[None])).logits[0].numpy()
    ours = gpt2block.from_pretrained(path, device="cpu")
    limit = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(ours(ids), expected, rtol=0, atol=limit)
    again = save_pretrained(tmp_path / "again", Checkpoint.open(path))
    np.testing.assert_array_equal(gpt2block.from_pretrained(again, device="cpu")(ids), ours(ids))


def test_names_of_dtypes_and_their_keys(tmp_path: Path) -> None:
    """Some programs write the name of torch's object; an error names the key of the file."""
    for key in ("dtype", "torch_dtype"):
        path = folder(tmp_path / key, "gemma3", lambda tensors: tensors, **{key: "torch.bfloat16"})
        config: Any = Checkpoint.open(path).config
        assert config.embedding_dtype == "bfloat16"
        settings = json.loads((path / "config.json").read_text()) | {key: "int8"}
        (path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(CheckpointError, match=rf"json: {key}: expected one of .*, got 'int8'"):
            Checkpoint.open(path)
    config = Checkpoint.open(GOLDEN / "gemma3").config  # without a key: the dtype of the tensors
    assert config.embedding_dtype == "float16"


# --- the factor of Gemma's embeddings


@dataclass
class Gemma:
    """A TensorSource of a Gemma with sqrt(24), which differs between dtypes, in a dtype."""

    config: Gemma3Config
    dtype: str

    def tensors(self) -> Iterable[tuple[str, NDArray[Any], str | None]]:
        for name, array, layout in random_model(0, self.config):
            yield name, array.astype(gpt2block.checks.FLOATS[self.dtype]), layout


FACTORS = {"float32": np.float32(24**0.5), "float16": 4.8984375, "bfloat16": 4.90625}
SIZES: dict[str, Any] = {
    "n_layer": 1, "n_head": 2, "n_embd": 24, "n_ctx": 16, "vocab_size": 11, "n_ff": 32,
    "head_size": 8,
}  # fmt: skip


@pytest.mark.parametrize(("rounded", "saved"), [*product(FACTORS, FACTORS)])
def test_the_factor_of_embeddings_is_kept(rounded: str, saved: str, tmp_path: Path) -> None:
    """From a folder to one of another dtype, to GGUF, back and to GGUF again, and in a pickle.

    A warning says where the program that loads the result computes another factor.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    source = save_pretrained(
        tmp_path / "source", Gemma(Gemma3Config(**SIZES, embedding_dtype=rounded), rounded)
    )
    paths, factor, noted = [source], FACTORS[rounded], []
    kinds = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    steps: list[tuple[Any, str, Any, str]] = [
        (save_pretrained, "folder", saved, "transformers"),
        (save_gguf, "m.gguf", kinds[saved], "llama.cpp"),
        (save_pretrained, "back", saved, "transformers"),
        (save_gguf, "again.gguf", kinds[rounded], "llama.cpp"),
        (save_pretrained, "source-again", rounded, "transformers"),
    ]
    for save, name, kind, program in steps:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            paths.append(save(tmp_path / name, Checkpoint.open(paths[-1]), kind))
        noted.append([each for each in caught if f"{program} multiplies" in str(each.message)])
    for path in paths:
        model: Any = gpt2block.from_pretrained(path, device="cpu", dtype=saved)
        for config in (model.config, pickle.loads(pickle.dumps(model.config))):
            assert config.scales.embedding == factor
    for path, (_, _, _, program), notes in zip(paths[1:], steps, noted, strict=True):
        theirs = FACTORS["float32"]
        if program == "transformers":
            embed = transformers.AutoModelForCausalLM.from_pretrained(path).model.embed_tokens
            assert embed.weight.dtype == getattr(
                torch, saved if path.name != "source-again" else rounded
            )
            theirs = float(embed.embed_scale.to(embed.weight.dtype))
        assert bool(notes) == (theirs != factor)
    assert ("embedding_dtype" in (paths[1] / "config.json").read_text()) == (rounded != saved)


def test_convert_notes_the_factor(tmp_path: Path) -> None:
    source = save_pretrained(
        tmp_path / "m", Gemma(Gemma3Config(**SIZES, embedding_dtype="bfloat16"), "bfloat16")
    )
    done = command("convert", source, tmp_path / "out", "--dtype", "float32")
    assert "transformers multiplies embeddings by 4.89898" in done.err
    assert "this model has 4.90625, which gpt2block keeps" in done.err
