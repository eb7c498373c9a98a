"""An lm_head that is stored although the config ties it to wte, in every format."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import gpt2block
from gpt2block.files.checkpoints import Checkpoint, stored
from tests.refusals import refused

Tensors = dict[str, NDArray[Any]]
GOLDEN = Path(__file__).parents[1] / "golden"
FIXTURES = Path(__file__).parents[1] / "data" / "pytorch"


def safetensors(folder: Path, tensors: Tensors) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def shards(folder: Path, tensors: Tensors) -> Path:
    """Write lm_head to a separate file."""
    (folder / "model.safetensors").unlink()
    heads = {name for name in tensors if "lm_head" in name}
    for file, names in (("a.safetensors", set(tensors) - heads), ("b.safetensors", heads)):
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: f"{'b' if name in heads else 'a'}.safetensors" for name in tensors}
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def pytorch(folder: Path, tensors: Tensors) -> Path:
    torch = pytest.importorskip("torch")
    (folder / "model.safetensors").unlink()
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def without_config(folder: Path, tensors: Tensors) -> Path:
    (folder / "config.json").unlink()
    return safetensors(folder, tensors)


WRITERS = [safetensors, shards, pytorch]


def tied_model(folder: Path, name: str) -> tuple[Path, Tensors, str]:
    """Return a copy of a model with tied weights, its tensors, and wte's name in the file."""
    shutil.copytree(GOLDEN / name, folder / name)
    tensors = load_file(folder / name / "model.safetensors")
    return folder / name, tensors, next(name for name in tensors if name.endswith(WTE))


WTE = ("wte.weight", "embed_tokens.weight")
MODELS = pytest.mark.parametrize("name", ["tiny", "llama-tied"])


@MODELS
@pytest.mark.parametrize("write", WRITERS)
def test_one_that_differs_is_used(tmp_path: Path, name: str, write: Callable[..., Path]) -> None:
    folder, tensors, wte = tied_model(tmp_path, name)
    head = tensors[wte].copy()
    head[-1, -1] += 1
    opened = Checkpoint.open(write(folder, tensors | {"lm_head.weight": head}))
    assert not opened.config.tie_word_embeddings
    np.testing.assert_array_equal(opened.read_outer()["lm_head"], head)


@MODELS
@pytest.mark.parametrize("write", WRITERS)
def test_an_equal_one_stays_tied(tmp_path: Path, name: str, write: Callable[..., Path]) -> None:
    folder, tensors, wte = tied_model(tmp_path, name)
    opened = Checkpoint.open(write(folder, tensors | {"lm_head.weight": tensors[wte].copy()}))
    assert opened.config.tie_word_embeddings
    assert "lm_head" not in opened.stored
    model = gpt2block.from_pretrained(opened, device="cpu")
    expected = gpt2block.from_pretrained(GOLDEN / name, device="cpu")
    np.testing.assert_array_equal(model([[1, 2]]), expected([[1, 2]]))


@pytest.mark.parametrize("name", ["tiny", "llama-tied"])
def test_the_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    folder, tensors, wte = tied_model(tmp_path, name)
    head = tensors[wte][::-1].copy()
    safetensors(folder, tensors | {"lm_head.weight": head})
    (folder / "model.safetensors").write_bytes(with_format(folder / "model.safetensors"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([[1, 2, 3]])).logits.numpy()
    found = gpt2block.from_pretrained(folder, device="cpu")([[1, 2, 3]])
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def with_format(file: Path) -> bytes:
    """Return the file with the metadata that `transformers` requires."""
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header, data = file.read_bytes()[8 : 8 + length], file.read_bytes()[8 + length :]
    changed = json.dumps({"__metadata__": {"format": "pt"}, **json.loads(header)}).encode()
    return len(changed).to_bytes(8, "little") + changed + data


def nanogpt(folder: Path, change: float) -> Path:
    torch = pytest.importorskip("torch")
    checkpoint = torch.load(FIXTURES / "nanogpt.pt", weights_only=True)
    head = checkpoint["model"]["transformer.wte.weight"].clone()
    head[0, 0] += change
    checkpoint["model"]["lm_head.weight"] = head
    torch.save(checkpoint, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def test_of_nanogpt(tmp_path: Path) -> None:
    assert Checkpoint.open(nanogpt(tmp_path, 0)).config.tie_word_embeddings
    assert not Checkpoint.open(nanogpt(tmp_path, 1)).config.tie_word_embeddings


def test_without_a_config(tmp_path: Path) -> None:
    weights = gpt2block.GPT2Weights.random(0, gpt2block.GPT2Config(1, 12, 768, 4, 9))
    gpt2block.files.checkpoints.save_pretrained(tmp_path, weights)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["transformer.wte.weight"].copy()
    without_config(tmp_path, tensors | {"lm_head.weight": head})
    assert Checkpoint.open(tmp_path).config.tie_word_embeddings
    head[0, 0] += 1
    safetensors(tmp_path, tensors | {"lm_head.weight": head})
    assert not Checkpoint.open(tmp_path).config.tie_word_embeddings


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_of_another_dtype_the_numbers_are_compared(tmp_path: Path, dtype: Any) -> None:
    folder, tensors, wte = tied_model(tmp_path, "tiny")
    rounded = tensors[wte].astype(dtype).astype(np.float32)
    rounded[0, :2] = 0, -0.0
    for array, tied in ((rounded, True), (rounded + 1, False)):
        head = {wte: array, "lm_head.weight": rounded.astype(dtype)}
        assert (
            Checkpoint.open(safetensors(folder, tensors | head)).config.tie_word_embeddings == tied
        )


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder, tensors, wte = tied_model(tmp_path, "tiny")
    safetensors(folder, tensors | {"lm_head.weight": tensors[wte][1:].copy()})
    refused(folder, "1 tensors misshapen: lm_head.weight: expected shape")


def test_large_ones_are_compared_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have NaN, which equals NaN here, and differ in the last number."""
    monkeypatch.setattr(stored, "_COMPARED", 1000)
    wte = np.random.default_rng(0).standard_normal((1001, 99)).astype(np.float32)
    wte[3, 4] = np.nan
    other = wte.copy()
    other[-1, -1] += 1
    save_file({"a": wte, "b": wte.copy(), "c": other}, tmp_path / "file")
    size = int.from_bytes((tmp_path / "file").read_bytes()[:8], "little")
    a, b, c = (
        stored.Stored(
            name, tmp_path / "file", 8 + size + k * wte.nbytes, wte.shape, "float32", "NK"
        )
        for k, name in enumerate("abc")
    )
    tracemalloc.start()
    assert stored.equal(a, b)
    assert not stored.equal(a, c)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < wte.nbytes / 4
