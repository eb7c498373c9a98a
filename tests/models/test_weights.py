"""BlockWeights and GPT2Weights: the packed buffer, the random distribution, wrong arguments."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpt2block import (
    SIZES,
    BlockWeights,
    CheckpointError,
    GPT2Config,
    GPT2Weights,
    InputError,
    random_input,
)
from gpt2block.files.parameters.gpt2 import unpack
from gpt2block.models.config import model_shapes, size

SMALL = GPT2Config(n_head=3, n_embd=48)


def test_the_twelve_offsets_of_the_challenge() -> None:
    assert [array.flat[0] for array in unpack(np.arange(7_087_872)).values()] == [
        0, 768, 1536, 1771008, 1773312, 2363136, 2363904, 2364672, 2365440, 4724736, 4727808,
        7087104,
    ]  # fmt: skip


def test_packed_round_trip() -> None:
    packed = np.arange(7_087_872, dtype=np.float32)
    w = BlockWeights.from_packed(packed)
    assert w.w_qkv.shape == (768, 2304)
    assert w.w_qkv[1, 2] == 1536 + 2304 + 2
    assert w.b_proj[-1] == 7_087_871
    assert np.shares_memory(w.w_fc, packed)
    np.testing.assert_array_equal(w.to_packed(), packed)
    small = BlockWeights.random(0, SMALL)
    again = BlockWeights.from_packed(small.to_packed(), n_embd=48, n_head=3)
    for name, array in small.tensors().items():
        np.testing.assert_array_equal(getattr(again, name), array)


def test_random_has_the_challenge_distribution_and_biases() -> None:
    w = BlockWeights.random(5)
    assert w.gamma1.min() >= 0.8
    assert w.gamma1.max() <= 1.2
    assert np.abs(w.beta2).max() <= 0.1
    assert np.std(w.w_fc) == pytest.approx(0.02, rel=0.01)
    assert all(np.count_nonzero(b) == b.size for b in (w.b_qkv, w.b_attn, w.b_fc, w.b_proj))
    assert all(a.dtype == np.float32 for a in w.tensors().values())
    np.testing.assert_array_equal(BlockWeights.random(5).w_qkv, w.w_qkv)
    assert (BlockWeights.random(6).w_qkv != w.w_qkv).any()


def tensors() -> dict[str, Any]:
    return BlockWeights.random(0, SMALL).tensors()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("w_qkv", np.zeros((144, 48), np.float32), r"w_qkv: expected shape \(48, 144\)"),
        ("b_fc", np.zeros(193, np.float32), r"b_fc: expected shape \(192,\), got \(193,\)"),
        ("gamma1", np.float32(1), r"gamma1: expected shape \(C,\)"),
        ("beta1", np.zeros(48, np.float16), "beta1: expected float32 or float64"),
        ("beta1", np.zeros(48, np.float64), "the same for all tensors, got float64"),
        ("beta1", [0.0] * 48, "beta1: expected a NumPy array, got list"),
    ],
)
def test_wrong_tensors_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BlockWeights(**{**tensors(), name: value}, n_head=3)


WRONG_HEADS = (0, 5, -3, 3.0, "3", None, True)
WRONG_EPS = (-1e-5, float("nan"), float("inf"), "1e-5", None, True, 10**400, np.True_, 1j)
WRONG_SIZES = (0, -768, 2.0, True, 10**400, np.True_, 1j, np.array([1]), 2**31)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(("n_head", n, "does not divide n_embd 48|expected a positive integer")
          for n in WRONG_HEADS),
        *(("eps", eps, "eps: expected a finite number of at least 0") for eps in WRONG_EPS),
    ],
)  # fmt: skip
def test_wrong_settings_of_a_block(field: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BlockWeights(**tensors(), **{"n_head": 3, field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_embd", 100, "n_embd 100 is not a multiple of n_head 12"),
        *((name, size, f"{name}: expected ")
          for name in ("n_layer", "n_head", "n_embd", "n_ctx", "vocab_size")
          for size in WRONG_SIZES),
        *(("eps", eps, "eps: expected a finite number") for eps in (*WRONG_EPS, np.array([1]))),
    ],
)  # fmt: skip
def test_wrong_settings_of_a_config(field: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        GPT2Config(**{field: value})


def test_the_sizes_have_two_names() -> None:
    numbers = ("124M", "355M", "774M", "1558M")
    for name, number in zip(SIZES, numbers, strict=True):
        config = SIZES[name]
        assert size(number) is size(name) is config
        assert config.head_size == 64
        parameters = sum(math.prod(shape) for shape in model_shapes(config).values())
        assert number == f"{parameters / 1e6:.0f}M"
    assert BlockWeights.random(0, "gpt2-medium").n_head == 16
    with pytest.raises(InputError, match=r"unknown size '125M': expected one of gpt2, .*, 1558M"):
        BlockWeights.random(0, "125M")


@pytest.mark.parametrize("tied", [True, False])
def test_a_random_model(tied: bool) -> None:
    config = GPT2Config(3, 2, 16, 9, 30, tie_word_embeddings=tied)
    w = GPT2Weights.random(7, config)
    found = list(w.tensors())
    assert {name: array.shape for name, array, _ in found} == model_shapes(config)
    assert (w.lm_head is w.wte) == tied
    for (name, array, layout), (_, again, _) in zip(
        found, GPT2Weights.random(7, config).tensors(), strict=True
    ):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, again)
        kind = name.rpartition(".")[2]
        layouts = {"wte": "NK", "lm_head": "NK"}
        assert layout == ("KN" if kind[:2] == "w_" else layouts.get(kind))
        low, high = {"g": (0.8, 1.2), "b": (-0.1, 0.1)}.get(kind[0], (-0.12, 0.12))
        assert low <= array.min() < array.max() <= high
    assert len({array.ravel()[0] for _, array, _ in found}) == len(found)


def test_random_input() -> None:
    x = random_input(0, (2, 3, 768))
    assert x.dtype == np.float32
    assert -1 <= x.min() < -0.9 < 0.9 < x.max() <= 1


def test_weights_that_do_not_fit_the_config() -> None:
    config = GPT2Config(n_layer=2, n_head=3, n_embd=24, n_ctx=20, vocab_size=37)
    good = GPT2Weights.random(0, config)
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"wpe": good.wpe[1:]}, r"wpe: expected shape \(20, 24\), got \(19, 24\)"),
        ({"gamma_f": good.gamma_f[:1]}, r"gamma_f: expected shape \(24,\), got \(1,\)"),
        ({"lm_head": good.wte.copy()}, "lm_head: expected the same object as wte"),
        ({"config": replace(config, n_head=4)}, "block 0: expected n_embd 24, n_head 4, .* got"),
        ({"config": 3}, "config: expected"),
        ({"wpe": good.wpe.astype(int)}, "wpe: expected"),
        ({"gamma_f": np.ma.masked_array(good.gamma_f)}, "gamma_f: expected"),
        ({"beta_f": good.beta_f.tolist()}, "beta_f: expected"),
        ({"blocks": list(good.blocks)}, "blocks: expected"),
        ({"blocks": (3,)}, "block 0: expected BlockWeights, got int"),
    )
    for change, message in changes:
        with pytest.raises(InputError, match=message):
            replace(good, **change)
    assert repr(good) == (
        "GPT2Weights(n_layer=2, n_head=3, n_embd=24, n_ctx=20, vocab_size=37, 2 blocks, float32)"
    )


@pytest.mark.parametrize("packed", [None, 3, "abc", [[1], [2, 3]], [10**400], {}, np.array("x")])
def test_wrong_packed_buffers(packed: Any) -> None:
    with pytest.raises(InputError, match="packed weights: expected"):
        BlockWeights.from_packed(packed)
    with pytest.raises(InputError, match="packed weights: expected a 1-D array"):
        unpack(packed)


def test_packed_buffers_of_another_size() -> None:
    for shape in ((7_087_871,), (7_087_873,), (1, 7_087_872), ()):
        with pytest.raises(InputError, match="expected a 1-D array of 7,087,872 floats"):
            BlockWeights.from_packed(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"seed": True}, "seed: expected an integer"),
        ({"seed": "7"}, "seed: expected an integer"),
        ({"config": None}, "unknown size None"),
        ({"config": ["gpt2"]}, "unknown size"),
    ],
)
def test_random_weights_of_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    for random in (BlockWeights.random, GPT2Weights.random):
        with pytest.raises(InputError, match=message):
            random(**arguments)


def test_random_weights_beyond_any_memory() -> None:
    largest = GPT2Config(n_layer=10_000, n_head=1, n_embd=2**16)
    with pytest.raises(InputError, match="expected sizes of at most"):
        GPT2Weights.random(config=largest)


@pytest.mark.parametrize(
    "shape", [3, (), (0, 4), (2.0, 4), "ab", (True, 4), None, (10**12, 10**12)]
)
def test_random_input_of_wrong_shapes(shape: Any) -> None:
    with pytest.raises(InputError, match=r"shape: expected|expected sizes of at most"):
        random_input(0, shape)


def test_numpy_integers_are_accepted_as_sizes() -> None:
    """Sizes are converted to int, because `save_pretrained` writes them to JSON."""
    sizes: dict[str, Any] = {"n_layer": np.int64(1), "n_head": np.int32(2), "n_embd": np.uint8(4)}
    config = GPT2Config(**sizes, eps=np.float32(0.5))
    assert json.loads(json.dumps(config.to_hugging_face()))["n_embd"] == 4
    assert config == GPT2Config(1, 2, 4, eps=0.5)


@pytest.mark.parametrize("layer", [True, np.True_, 1.0, "0", None])
def test_wrong_layers(layer: Any) -> None:
    with pytest.raises(CheckpointError, match="layer: expected an integer"):
        BlockWeights.from_pretrained("shakespeare", layer)
    with pytest.raises(CheckpointError, match="layer: expected an integer"):
        GPT2Weights.from_pretrained("shakespeare", [layer])
    with pytest.raises(InputError, match="checkpoint: expected a name or a path, got 3"):
        BlockWeights.from_pretrained(3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="layer 9 is out of range"):
        GPT2Weights.from_pretrained("shakespeare", 9)  # type: ignore[arg-type]
