"""Checkpoints in every layout that is read, and every way one can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from gpt2block import BlockWeights, CheckpointError, GPT2Config, GPT2Weights
from gpt2block.checkpoints import Checkpoint

SMALL = GPT2Config(n_layer=2, n_head=3, n_embd=48, n_ctx=11, vocab_size=5)
CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 3,
    "n_embd": 48,
    "n_positions": 11,
    "vocab_size": 5,
}
NAMES = {
    "gamma1": "ln_1.weight",
    "beta1": "ln_1.bias",
    "w_qkv": "attn.c_attn.weight",
    "b_qkv": "attn.c_attn.bias",
    "w_attn": "attn.c_proj.weight",
    "b_attn": "attn.c_proj.bias",
    "gamma2": "ln_2.weight",
    "beta2": "ln_2.bias",
    "w_fc": "mlp.c_fc.weight",
    "b_fc": "mlp.c_fc.bias",
    "w_proj": "mlp.c_proj.weight",
    "b_proj": "mlp.c_proj.bias",
}


def hugging_face_tensors(config: GPT2Config, prefix: str = "") -> dict[str, np.ndarray]:
    """A model's tensors as the original files name them, with the mask buffers."""
    rng = np.random.default_rng(1)
    out: dict[str, Any] = {
        "wte.weight": rng.standard_normal((config.vocab_size, config.n_embd)),
        "wpe.weight": rng.standard_normal((config.n_ctx, config.n_embd)),
        "ln_f.weight": np.ones(config.n_embd),
        "ln_f.bias": np.zeros(config.n_embd),
    }
    mask = np.tril(np.ones((1, 1, config.n_ctx, config.n_ctx)))
    for layer in range(config.n_layer):
        block = BlockWeights.random(layer, config).tensors()
        out |= {f"h.{layer}.{NAMES[name]}": array for name, array in block.items()}
        out[f"h.{layer}.attn.bias"] = mask
    return {prefix + name: array.astype(np.float32) for name, array in out.items()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file(hugging_face_tensors(SMALL), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_block_is_read_from_a_directory_and_from_its_file(directory: Path) -> None:
    expected = BlockWeights.random(1, SMALL)
    for path in (directory, directory / "model.safetensors"):
        got = BlockWeights.from_pretrained(str(path), layer=1)
        assert got.n_head == 3
        for name, array in expected.tensors().items():
            np.testing.assert_array_equal(getattr(got, name), array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_prefix_and_storage_dtypes(tmp_path: Path, dtype: Any) -> None:
    tensors = hugging_face_tensors(SMALL, "transformer.")
    save_file({n: a.astype(dtype) for n, a in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    got = BlockWeights.from_pretrained(str(tmp_path), layer=0)
    assert got.w_fc.dtype == np.float32
    np.testing.assert_array_equal(
        got.w_fc, BlockWeights.random(0, SMALL).w_fc.astype(dtype).astype(np.float32)
    )


def test_a_whole_model(directory: Path) -> None:
    model = GPT2Weights.from_pretrained(str(directory))
    assert model.config == SMALL
    assert len(model.blocks) == 2
    assert model.lm_head is model.wte
    assert model.wpe.shape == (11, 48)


def test_an_untied_lm_head(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"1 tensors missing: lm_head\.weight"):
        GPT2Weights.from_pretrained(str(directory))
    head = np.full((5, 48), 2, np.float32)
    save_file(
        {**hugging_face_tensors(SMALL), "lm_head.weight": head}, directory / "model.safetensors"
    )
    np.testing.assert_array_equal(GPT2Weights.from_pretrained(str(directory)).lm_head, head)


def test_the_model_on_board() -> None:
    model = GPT2Weights.from_pretrained("shakespeare")
    assert model.config == GPT2Config(
        n_layer=6, n_head=4, n_embd=256, n_ctx=256, vocab_size=256, eps=1e-5
    )
    assert all(np.isfinite(a).all() for block in model.blocks for a in block.tensors().values())


def test_the_trained_sorting_model(data: Path) -> None:
    model = GPT2Weights.from_pretrained(str(data / "gpt-nano-sort"))
    assert (model.config.n_layer, model.config.n_head, model.config.n_embd) == (3, 3, 48)
    assert model.lm_head is not model.wte


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline Hugging Face cache that holds "gpt2": 124M shapes, the original file's quirks."""
    home = tmp_path / "hf"
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repo = home / "hub" / "models--gpt2"
    snapshot = repo / "snapshots" / "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    return snapshot


def run_offline(cache: Path, code: str) -> str:
    """Run Python with the cache's environment: huggingface_hub reads it when it is imported."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hub_id_from_an_offline_cache(cache: Path) -> None:
    config = GPT2Config(n_layer=12)
    rng = np.random.default_rng(0)
    tensors = hugging_face_tensors(GPT2Config(n_layer=2, vocab_size=7))
    for layer in range(2, 12):  # the same arrays again: twelve layers' names, little memory
        tensors |= {
            name.replace("h.1.", f"h.{layer}."): array
            for name, array in tensors.items()
            if name.startswith("h.1.")
        }
    tensors["wte.weight"] = rng.standard_normal((50257, 768), dtype=np.float32)
    save_file(tensors, cache / "model.safetensors")
    hf_config = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024}
    (cache / "config.json").write_text(json.dumps({**hf_config, "n_positions": 1024}))
    printed = run_offline(
        cache,
        "from gpt2block import *; from gpt2block.checkpoints import Checkpoint\n"
        "c = Checkpoint.open('gpt2'); m = GPT2Weights.from_pretrained(c, layers=())\n"
        "w = BlockWeights.from_pretrained('gpt2', layer=11)\n"
        "print(c.config, m.lm_head.shape, float(w.w_fc[3, 5]).hex())",
    )
    expected = BlockWeights.random(1, GPT2Config()).w_fc[3, 5]
    assert printed == f"{config} (50257, 768) {float(expected).hex()}"


def test_hub_id_that_is_not_in_the_offline_cache(cache: Path) -> None:
    printed = run_offline(
        cache,
        "from gpt2block import *\n"
        "try: BlockWeights.from_pretrained('gpt2-xl')\n"
        "except CheckpointError as e: print(e)",
    )
    assert printed.startswith("gpt2-xl: neither in the Hugging Face cache nor to be had")
    assert "\n" not in printed


def test_a_file_alone_takes_the_size_of_its_width(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_head=16, n_embd=1024, n_ctx=3, vocab_size=4)
    save_file(hugging_face_tensors(config), tmp_path / "weights.safetensors")
    assert Checkpoint.open(tmp_path / "weights.safetensors").config == config


def refused(path: Path | str, *words: str, layer: int = 0) -> None:
    with pytest.raises(CheckpointError) as caught:
        BlockWeights.from_pretrained(str(path), layer=layer)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_missing(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such file or directory", "hub id")
    refused(tmp_path / "nowhere.safetensors", "no such file or directory")
    refused(tmp_path, "expected model.safetensors", "found nothing")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "gpt2.ckpt"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02.")
    refused(tmp_path / name, "a pickle", "runs code", "expected .safetensors")
    refused(tmp_path, f"only {name}, a pickle", "runs code")


def test_git_lfs_pointer(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 548105171\n"
    (directory / "model.safetensors").write_text(pointer)
    refused(directory, "a Git-LFS pointer of", "git lfs pull")


@given(cut=st.floats(0, 0.999))
def test_truncated_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    folder = tmp_path_factory.mktemp("cut")
    file = folder / "model.safetensors"
    save_file(hugging_face_tensors(SMALL), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(cut * len(whole))])
    refused(folder, "truncated or not a safetensors file", "download it again")


def test_a_misshapen_tensor(directory: Path) -> None:
    tensors = hugging_face_tensors(SMALL)
    tensors["h.0.mlp.c_fc.weight"] = np.ascontiguousarray(tensors["h.0.mlp.c_fc.weight"].T)
    save_file(tensors, directory / "model.safetensors")
    refused(directory, "h.0.mlp.c_fc.weight: expected shape (48, 192), got (192, 48)")


def test_a_missing_tensor(directory: Path) -> None:
    tensors = hugging_face_tensors(SMALL)
    del tensors["h.1.ln_2.bias"]
    save_file(tensors, directory / "model.safetensors")
    refused(directory, "1 tensors missing: h.1.ln_2.bias", layer=1)


def test_a_tensor_of_integers(directory: Path) -> None:
    tensors = hugging_face_tensors(SMALL)
    tensors["h.0.ln_1.bias"] = np.zeros(48, np.int32)
    save_file(tensors, directory / "model.safetensors")
    refused(directory, "h.0.ln_1.bias: expected one of F64, F32, F16, BF16, got I32")


def test_a_file_with_other_layers_than_the_config_says(directory: Path) -> None:
    for n_layer in (1, 3):
        (directory / "config.json").write_text(json.dumps({**CONFIG, "n_layer": n_layer}))
        refused(directory, f"config.json says n_layer {n_layer}, the file has blocks for 2")


def test_a_layer_that_is_no_integer(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="layer: expected an integer, got '0'"):
        BlockWeights.from_pretrained(directory, layer="0")  # type: ignore[arg-type]


def test_names_that_cannot_be_read() -> None:
    refused("", "expected a name or a path, got an empty string")
    refused("x" * 400 + "/y", "cannot be read")
    refused("~nosuchuser/gpt2", "nosuchuser")
    refused("/proc/1/mem", "/proc/1/mem")


def test_the_model_on_board_is_found_beside_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shakespeare").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.open("shakespeare").config.n_layer == 6
    refused("./shakespeare", "expected model.safetensors in this directory")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors in this directory"):
        Checkpoint.open(Path("shakespeare"))


@pytest.mark.parametrize("layer", [-1, 2, 100])
def test_a_layer_out_of_range(directory: Path, layer: int) -> None:
    refused(directory, f"layer {layer} is out of range", "2 layers", layer=layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "expected model_type 'gpt2', got 'llama'"),
        ({"activation_function": "relu"}, "expected the tanh GELU"),
        ({"n_inner": 100}, "expected n_inner 192, got 100"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"n_head": 5}, "not a multiple of n_head 5"),
        ({"n_layer": "two"}, "n_layer: expected a positive integer, got 'two'"),
        ({"n_embd": "48"}, "n_embd: expected a positive integer, got '48'"),
        ({"n_embd": None}, "n_embd: expected a positive integer, got None"),
        ({"n_head": True}, "n_head: expected a positive integer, got True"),
        ({"n_inner": "192"}, "expected n_inner 192, got '192'"),
        ({"layer_norm_epsilon": None}, "eps: expected a finite number"),
        ({"layer_norm_epsilon": -1}, "eps: expected a finite number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: expected true or false"),
    ],
)
def test_a_config_of_something_else(directory: Path, change: dict[str, Any], message: str) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **change}))
    refused(directory, "config.json", message)


@pytest.mark.parametrize("text", ["{", "[]", "null", "3", '"x"', ""])
def test_a_config_that_is_no_object(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    refused(directory, "config.json")


def test_an_odd_width_needs_its_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    refused(directory, "expected config.json beside it", "width 48 is no GPT-2 size")
