"""The model that travels in the package is what its card says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import Block, GPT2Weights, reference, tokenizer
from gpt2block.checkpoints import ON_BOARD, Checkpoint

N_CTX, STRIDE = 256, 64


@pytest.fixture
def held_out(data: Path) -> NDArray[np.int64]:
    """The last 10 % of tinyshakespeare, as byte values."""
    text = (data / "tinyshakespeare" / "input.txt").read_bytes()
    return np.frombuffer(text, np.uint8)[len(text) * 9 // 10 :].astype(np.int64)


def losses(windows: NDArray[np.int64], device: str) -> NDArray[np.float64]:
    """Nats of each byte of each window after its first. (n, T) → (n, T - 1)."""
    w = GPT2Weights.from_pretrained(ON_BOARD)
    blocks = [Block(block, causal=True, device=device) for block in w.blocks]
    found = []
    for part in np.array_split(windows, max(1, len(windows) // 64)):
        x = reference.encoder(part, w.wte, w.wpe)
        for block in blocks:
            x = block(x)
        logits = reference.layernorm(x, w.gamma_f, w.beta_f, w.config.eps) @ w.lm_head.T
        p = reference.softmax(logits[:, :-1].astype(np.float64))
        found.append(-np.log(np.take_along_axis(p, part[:, 1:, None], axis=-1))[..., 0])
    return np.concatenate(found)


def card() -> dict[str, float]:
    loaded: dict[str, float] = json.loads(
        (Checkpoint.open(ON_BOARD).directory / "loss.json").read_text()
    )
    return loaded


@pytest.mark.gpu
def test_validation_loss_of_the_whole_held_out_text(held_out: NDArray[np.int64]) -> None:
    """The card's definition: windows of 256 bytes, each scoring its last 64, the first all."""
    count = -(-(len(held_out) - N_CTX) // STRIDE) + 1
    padded = np.pad(held_out, (0, (count - 1) * STRIDE + N_CTX - len(held_out)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, N_CTX)[::STRIDE]
    nats = losses(windows, "cuda")
    scored = np.concatenate([nats[0, :-STRIDE], nats[:, -STRIDE:].ravel()])[: len(held_out) - 1]
    print(f"validation loss {scored.mean():.5f} nats a byte over {len(scored):,} bytes")
    assert scored.mean() == pytest.approx(card()["validation_loss"], abs=1e-4)
    assert scored.mean() <= 1.47


def test_validation_loss_of_windows_all_over_the_held_out_text(
    held_out: NDArray[np.int64],
) -> None:
    starts = np.linspace(0, len(held_out) - N_CTX, 48).astype(int)
    windows = np.stack([held_out[start : start + N_CTX] for start in starts])
    mean = losses(windows, "cpu")[:, -STRIDE:].mean()
    assert mean == pytest.approx(card()["validation_loss"], abs=0.1)


def test_its_tokens_are_bytes() -> None:
    checkpoint = Checkpoint.open(ON_BOARD)
    encoding = tokenizer.load(checkpoint.directory, checkpoint.config.vocab_size)
    text = "Ünïcode, «tabs»\t\r\n\x00 and 🎭 too"
    assert tokenizer.encode(encoding, text) == list(text.encode())
    assert encoding.decode(list(text.encode())) == text


def test_its_file_is_small_and_in_hugging_face_layout() -> None:
    checkpoint = Checkpoint.open(ON_BOARD)
    assert checkpoint.file.stat().st_size <= 10_000_000
    assert "h.5.mlp.c_proj.weight" in checkpoint.names
    assert "lm_head.weight" not in checkpoint.names
    assert checkpoint.config.head_size == 64
