"""The bundled models agree with their model cards and docs/dtypes.md."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import dtype_table
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import GPT2Weights, LlamaWeights, from_pretrained, reference
from gpt2block.apps.cli.generate import DEFAULT_PROMPT
from gpt2block.cuda.formats import DTYPES
from gpt2block.cuda.kernels import FP8
from gpt2block.files.checkpoints import BUNDLED, BUNDLED_NAMES, Checkpoint
from gpt2block.files.tokenizers import tokenizer
from gpt2block.model import Model

ROOT = Path(__file__).parents[2]
N_CTX, STRIDE = 256, 64
LLAMA = "shakespeare-llama"
PROMPTS = {
    "the default": DEFAULT_PROMPT,
    "the first lines": "First Citizen:\nBefore we proceed any further, hear me",
    "a line that is not in it": "Shall I compare thee to a summer's day?\n",
    "a name": "MENENIUS:\nI tell you, friends,",
    "one byte": "\n",
}
Nats = NDArray[np.float64]


@cache
def model(name: str, device: str) -> Model[Any]:
    return from_pretrained(name, device=device)


def held_out(data: Path) -> str:
    """Return the last 10 % of tinyshakespeare."""
    text = (data / "tinyshakespeare" / "input.txt").read_bytes()
    return text[len(text) * 9 // 10 :].decode()


def card(name: str) -> dict[str, float]:
    loaded: dict[str, float] = json.loads(
        (Checkpoint.open(name).directory / "loss.json").read_text()
    )
    return loaded


def gpt2_logits(ids: NDArray[np.int64], w: GPT2Weights, dtype: Any) -> NDArray[Any]:
    x = reference.encoder(ids, w.wte.astype(dtype), w.wpe.astype(dtype))
    for block in w.blocks:
        x = reference.block_forward(x, block, causal=True)
    gamma, beta = w.gamma_f.astype(dtype), w.beta_f.astype(dtype)
    x = reference.layernorm(x, gamma, beta, w.config.eps)
    logits: NDArray[Any] = x @ w.lm_head.astype(dtype).T
    return logits


def llama_logits(ids: NDArray[np.int64], w: LlamaWeights, dtype: Any) -> NDArray[Any]:
    x = w.wte.astype(dtype)[ids]
    for block in w.blocks:
        x = reference.llama_block_forward(x, block, np.arange(len(ids)))
    x = reference.rmsnorm(x, w.gamma_f.astype(dtype), w.config.eps)
    logits: NDArray[Any] = x @ w.lm_head.astype(dtype).T
    return logits


def nats_by_hand(name: str, text: bytes, dtype: Any) -> Nats:
    """Return nats of each byte after the first, window by window as the card states, in `dtype`.

    It uses only the reference's blocks: no cache, no engine, and nothing of `scoring`.
    """
    loaded = LlamaWeights if name == LLAMA else GPT2Weights
    by_hand: Any = llama_logits if name == LLAMA else gpt2_logits
    w = loaded.from_pretrained(name)
    ids = np.frombuffer(text, np.uint8).astype(np.int64)
    nats: list[float] = []
    first, end = 0, 0
    while end < len(ids):
        end = min(first + N_CTX, len(ids))
        window = ids[first:end]
        logits = by_hand(window, w, dtype)
        p = reference.softmax(logits.astype(np.float64))[np.arange(len(window) - 1), window[1:]]
        nats += (-np.log(p)).tolist()[len(nats) - first :]  # earlier bytes were scored before
        first += STRIDE
    return np.array(nats)


def assert_scored_as_by_hand(name: str, device: str, text: bytes) -> None:
    """Assert that scores err per byte at most twice as much as `nats_by_hand` in float32.

    Errors are against float64; the float32 error is of the text's first 2,048 bytes.
    """
    exact = nats_by_hand(name, text, np.float64)
    plain = nats_by_hand(name, text[:2048], np.float32)
    error = np.abs(plain - exact[: len(plain)]).mean()
    found = model(name, device).score(text.decode(), stride=STRIDE)
    assert found.n_tokens == found.bytes == len(text) - 1 == len(exact)
    assert abs(found.nats_per_token - exact.mean()) <= 2 * error


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("name", BUNDLED_NAMES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_score_of_the_passage_in_the_package(name: str, device: str) -> None:
    text = (Checkpoint.open(name).directory / "passage.txt").read_bytes()
    assert len(text) == N_CTX
    assert_scored_as_by_hand(name, device, text)


@pytest.mark.parametrize(
    ("name", "device", "length"),
    [
        (BUNDLED, "cpu", 512),  # one model is enough: the windows do not depend on it
        *(pytest.param(name, "cuda", 4096, marks=pytest.mark.gpu) for name in BUNDLED_NAMES),
    ],
)
def test_the_score_of_the_first_bytes_that_were_held_out(
    data: Path, name: str, device: str, length: int
) -> None:
    assert_scored_as_by_hand(name, device, held_out(data)[:length].encode())


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_validation_loss_of_the_whole_held_out_text(data: Path, name: str) -> None:
    """The result equals the card's figure in all printed digits."""
    found = model(name, "cuda").score(held_out(data), stride=STRIDE)
    print(f"validation loss {found.nats_per_token:.6f} nats a byte over {found.bytes:,} bytes")
    assert (found.n_tokens, found.n_ctx) == (card(name)["bytes_scored"], card(name)["window"])
    assert f"{found.nats_per_token:.4f}" == f"{card(name)['validation_loss']:.4f}"


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_validation_loss_of_windows_all_over_the_held_out_text(data: Path, name: str) -> None:
    """The mean of sampled windows is within three standard errors of the card's figure."""
    ids = np.frombuffer(held_out(data).encode(), np.uint8).astype(np.int32)
    starts = np.linspace(0, len(ids) - N_CTX, 12).astype(int)
    windows = [ids[start : start + N_CTX] for start in starts]
    found = model(name, "cpu").engine.log_likelihood(windows)
    means = np.array([-nats[-STRIDE:].mean() for nats in found])
    error = means.std(ddof=1) / np.sqrt(len(means))
    print(f"{means.mean():.3f}, standard error {error:.3f}")
    assert abs(means.mean() - card(name)["validation_loss"]) <= 3 * error


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUNDLED_NAMES)
@pytest.mark.parametrize("which", PROMPTS)
def test_greedy_tokens_are_those_of_numpy(name: str, which: str) -> None:
    options: Any = {"temperature": 0, "max_new_tokens": 200}
    found, expected = (
        model(name, device).generate(PROMPTS[which], **options).tokens for device in ("cuda", "cpu")
    )
    assert len(found) == 200
    assert found == expected


def table(name: str) -> list[list[str]]:
    """Return the rows of the table in docs/dtypes.md after the comment with this name."""
    page = (ROOT / "docs" / "dtypes.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- table: {name} -->\n(.*?)(?:\n\n|\Z)", page, re.DOTALL)
    assert found, name
    return rows(found[1])


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


@pytest.fixture
def printed(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[str]]]:
    """Return a function that runs tools/dtype_table.py on the held-out text; it returns rows."""

    def run(*options: str) -> list[list[str]]:
        text = str(data / "tinyshakespeare" / "input.txt")
        monkeypatch.setattr(sys, "argv", ["dtype_table.py", text, *options])
        dtype_table.main()
        return rows(capsys.readouterr().out)

    return run


def assert_same_figures(found: list[list[str]], committed: list[list[str]]) -> None:
    """Assert that cells are equal, except that the last digit of a figure may differ by one."""
    assert [len(row) for row in found] == [len(row) for row in committed]
    for new, old in zip(chain(*found), chain(*committed), strict=True):
        if new != old:
            figure, expected = (Decimal(cell.removesuffix(" %")) for cell in (new, old))
            assert figure.as_tuple().exponent == expected.as_tuple().exponent
            last_digit = Decimal((0, (1,), int(expected.as_tuple().exponent)))
            assert "." in old
            assert abs(figure - expected) <= last_digit, (new, old)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_what_the_dtypes_cost_on_a_short_text(printed: Any, name: str) -> None:
    short = ("--bytes", "1024", "--device", "cpu")
    found = printed("--model", name, *short)
    assert [row[0] for row in found[2:]] == list(DTYPES)
    assert_same_figures(found, table(f"{name}, its first 1,024 bytes"))
    found = printed("--model", name, "--kv", *short)
    assert [row[1] for row in found[2:]] == ["bfloat16", *FP8]
    assert_same_figures(found, table(f"{name}, keys and values, its first 1,024 bytes"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_what_the_dtypes_cost_on_the_whole_text(printed: Any, name: str) -> None:
    found = printed("--model", name, "--device", "cuda")
    assert_same_figures(found, table(f"{name}, the whole text"))


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_its_tokens_are_bytes(name: str) -> None:
    checkpoint = Checkpoint.open(name)
    encoding = tokenizer.load(checkpoint.directory, checkpoint.config.vocab_size)
    text = "Ünïcode, «tabs»\t\r\n\x00 and 🎭 too"
    assert tokenizer.encode(encoding, text) == list(text.encode())
    assert encoding.decode(list(text.encode())) == text


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_a_bundled_model_is_small_and_its_loss_is_on_its_card(name: str) -> None:
    checkpoint = Checkpoint.open(name)
    assert checkpoint.file.stat().st_size <= 10_000_000
    loss = json.loads((checkpoint.directory / "loss.json").read_text())["validation_loss"]
    assert loss <= 1.45
    assert f"**{loss:.4f} nats per byte**" in (checkpoint.directory / "README.md").read_text()
    assert len((checkpoint.directory / "passage.txt").read_bytes()) == 256
