"""A tiny GPT-2 against stored results of `transformers` (tools/make_golden.py).

Results are computed in float64 and stored as float32, so NumPy in float64 may differ by that
rounding: half a unit in the last place of the largest value. In float32 the rule of the kernels
applies: at most twice the error of the plain evaluation in `tests/plain.py`. For these weights that
is some 3e-7 of the largest value; a wrong mask, bias or GELU is far beyond.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from gpt2block import GPT2, GPT2Config, GPT2Weights, reference
from gpt2block.files.checkpoints import Checkpoint
from tests import plain

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
Array = NDArray[Any]
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def expected() -> dict[str, Array]:
    return load_file(GOLDEN / "expected.safetensors")


def computed(weights: GPT2Weights, ids: NDArray[Any], dtype: Any) -> dict[str, Array]:
    """Compute all results with the reference functions."""
    stream = [reference.encoder(ids, weights.wte.astype(dtype), weights.wpe.astype(dtype))]
    for block in weights.blocks:
        stream.append(reference.block_forward(stream[-1], block, causal=True))
    gamma, beta = weights.gamma_f.astype(dtype), weights.beta_f.astype(dtype)
    hidden = reference.layernorm(stream[-1], gamma, beta, weights.config.eps)
    logits = hidden @ weights.lm_head.astype(dtype).T
    return {"stream": np.stack(stream), "hidden": hidden, "logits": logits}


def plainly(weights: GPT2Weights, ids: NDArray[Any]) -> dict[str, Array]:
    """Compute the results of `computed` with each sum as a chain of float32 additions."""
    w = weights
    stream = [w.wte[ids] + w.wpe[: ids.shape[-1]]]
    for block in w.blocks:
        tensors = block.tensors()
        stream.append(plain.block_forward(stream[-1], tensors, block.n_head, causal=True))
    hidden = plain.layernorm(stream[-1], w.gamma_f, w.beta_f, w.config.eps)
    logits = plain.product(hidden, w.lm_head.T)
    return {"stream": np.stack(stream), "hidden": hidden, "logits": logits}


def differences(found: Array, golden: Array) -> Array:
    """Return the largest difference relative to the largest value, for the stream per block."""
    axes = (-3, -2, -1)
    assert found.shape == golden.shape
    largest: Array = np.abs(found - golden).max(axes) / np.abs(golden).max(axes)
    return largest


@pytest.fixture
def untied(expected: dict[str, Array], tmp_path: Path) -> Path:
    folder = shutil.copytree(GOLDEN, tmp_path / "untied")
    config = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(GOLDEN / "model.safetensors")
    save_file({**tensors, "lm_head.weight": expected["lm_head"]}, folder / "model.safetensors")
    return folder


def test_the_checkpoint() -> None:
    checkpoint = Checkpoint.open(GOLDEN)
    assert checkpoint.config == GPT2Config(3, 4, 48, 40, 101)
    assert {array.dtype.name for _, array, _ in checkpoint.tensors()} == {"float16"}
    assert sum(file.stat().st_size for file in GOLDEN.iterdir()) < 300_000


def test_in_float64(expected: dict[str, Array]) -> None:
    found = computed(GPT2Weights.from_pretrained(GOLDEN), expected["ids"], np.float64)
    for name, array in found.items():
        assert array.dtype == np.float64
        assert (differences(array, expected[name]) <= 2.0**-24).all(), name


def test_in_float32(expected: dict[str, Array]) -> None:
    weights = GPT2Weights.from_pretrained(GOLDEN)
    found = computed(weights, expected["ids"], np.float32)
    for name, array in plainly(weights, expected["ids"]).items():
        plain.assert_as_accurate(found[name], expected[name].astype(np.float64), array)
        print(name, "plain", differences(array, expected[name]))
        print(name, "NumPy", differences(found[name], expected[name]))


def test_a_head_of_its_own(expected: dict[str, Array], untied: Path) -> None:
    weights, golden = GPT2Weights.from_pretrained(untied), expected["untied_logits"]
    exact = computed(weights, expected["ids"], np.float64)["logits"]
    assert differences(exact, golden) <= 2.0**-24
    found = computed(weights, expected["ids"], np.float32)["logits"]
    sequential = plainly(weights, expected["ids"])["logits"]
    plain.assert_as_accurate(found, golden.astype(np.float64), sequential)


@everywhere
def test_the_whole_model(expected: dict[str, Array], device: str) -> None:
    model, ids = GPT2.from_pretrained(GOLDEN, device=device), expected["ids"]
    states = model.hidden_states(ids)
    found = {"stream": states[:-1], "hidden": states[-1], "logits": model(ids)}
    for name, array in plainly(GPT2Weights.from_pretrained(GOLDEN), ids).items():
        plain.assert_as_accurate(found[name], expected[name].astype(np.float64), array)


@everywhere
def test_the_whole_model_token_by_token(expected: dict[str, Array], device: str) -> None:
    model, ids = GPT2.from_pretrained(GOLDEN, device=device), expected["ids"]
    kv_cache = model.new_cache(len(ids))
    steps = [model(ids[:, t : t + 1], cache=kv_cache, last=True) for t in range(ids.shape[-1])]
    sequential = plainly(GPT2Weights.from_pretrained(GOLDEN), ids)["logits"]
    golden = expected["logits"].astype(np.float64)
    plain.assert_as_accurate(np.stack(steps, axis=1), golden, sequential)


@everywhere
def test_the_whole_model_with_a_head_of_its_own(
    expected: dict[str, Array], untied: Path, device: str
) -> None:
    found = GPT2.from_pretrained(untied, device=device)(expected["ids"])
    sequential = plainly(GPT2Weights.from_pretrained(untied), expected["ids"])["logits"]
    golden = expected["untied_logits"].astype(np.float64)
    plain.assert_as_accurate(found, golden, sequential)


def test_every_part_of_a_block_shows(expected: dict[str, Array]) -> None:
    """Without any part (gamma 1, or others 0), logits differ by far, so every part is tested."""
    weights = GPT2Weights.from_pretrained(GOLDEN)
    for name in ("gamma1", "beta1", "b_qkv", "b_attn", "gamma2", "beta2", "b_fc", "b_proj"):
        for block in weights.blocks:
            tensor = getattr(block, name)
            kept = tensor.copy()
            tensor[:] = name.startswith("gamma")
            found = computed(weights, expected["ids"], np.float32)["logits"]
            tensor[:] = kept
            assert differences(found, expected["logits"]) > 1e-2, name
