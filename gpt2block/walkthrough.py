"""The comparisons of `gpt2block block`: text or random input, each step against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import doctor, reference
from gpt2block.architectures.gpt2_weights import BlockWeights, GPT2Weights, random_input
from gpt2block.block import Block
from gpt2block.checkpoints import BUNDLED, Checkpoint
from gpt2block.checks import FLOATS
from gpt2block.config import size
from gpt2block.errors import InputError
from gpt2block.inspect.compare import Comparison, errors
from gpt2block.inspect.lens import most_likely
from gpt2block.tokenizers import tokenizer
from gpt2block.tokenizers.encoding import bytes_of_id

MAX_TOKENS = 2**17  # all steps in float32 and float64 take about 10 GB for GPT-2 small
Array = NDArray[np.floating[Any]]
Progress = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True)
class Walkthrough:
    """The steps of one block; for a trained model also the residual stream and next tokens."""

    device: str
    dtype: str
    kernels: str  # "skeleton" or "fused"
    weights: str
    mask: str  # "causal" or "none"
    input: str  # description of x
    steps: list[Comparison]
    stream: list[float]  # largest relative error of the residual stream after each block
    next_tokens: list[tuple[str, float]]  # the most likely continuations of the first row


def with_random_weights(
    size_name: str,
    seq_len: int,
    batch: int,
    causal: bool,
    device: str | None,
    dtype: str = "float32",
    kernels: str = "auto",
) -> Walkthrough:
    """Compare a block of a GPT-2 size with random weights, on x ~ U(-1, 1) of (B, T, C)."""
    config = size(size_name)
    weights = BlockWeights.random(0, config)
    block = Block(weights, causal=causal, device=device, dtype=dtype, kernels=kernels)
    x = random_input(1, _shape(batch, seq_len, config.n_embd))
    return Walkthrough(
        _describe_device(block, device),
        block.dtype,
        block.kernels,
        f"random, the shape of {size_name}",
        "causal" if causal else "none",
        "x ~ U(-1, 1)",
        block.compare(x.astype(FLOATS[dtype])),
        [],
        [],
    )


def with_trained_weights(
    name: str,
    layer: int,
    text: str | None,
    seq_len: int | None,
    batch: int,
    causal: bool,
    device: str | None,
    progress: Progress = iter,
    dtype: str = "float32",
    kernels: str = "auto",
    revision: str | None = None,
) -> Walkthrough:
    """Run a text through every block of a checkpoint, and compare each step of block `layer`.

    After every block, the residual stream of the device is compared with that of float64 NumPy with
    the same matrices. Row b of a batch is the text rotated by b tokens.
    """
    checkpoint = Checkpoint.open(name, revision)
    ends = GPT2Weights.from_pretrained(checkpoint, layers=())
    encoding = tokenizer.load(checkpoint.tokenizer_source(), checkpoint.config.vocab_size)
    if text is None:
        text = (Checkpoint.open(BUNDLED).directory / "passage.txt").read_text(encoding="utf-8")
    ids = _rows(tokenizer.encode(encoding, text), seq_len, batch)
    if ids.shape[-1] > checkpoint.config.n_ctx:
        raise InputError(
            f"{ids.shape[-1]} tokens: {name} has positions for n_ctx = {checkpoint.config.n_ctx}: "
            "give --seq-len or a shorter text"
        )
    checkpoint.check_layer(layer)  # before the first block is computed
    x = reference.encoder(ids, ends.wte, ends.wpe)
    truth: Array = x.astype(np.float64)
    steps: list[Comparison] = []
    stream, description, plan = [], "", ""
    for index in progress(range(checkpoint.config.n_layer)):
        weights = BlockWeights.from_pretrained(checkpoint, index)
        block = Block(weights, causal=causal, device=device, dtype=dtype, kernels=kernels)
        if not description:
            description, plan = _describe_device(block, device), block.kernels
            x = x.astype(FLOATS[dtype])
            truth = x.astype(np.float64)
        if index == layer:
            steps = block.compare(x)
        x = block(x)
        truth = reference.block_forward(truth, block.weights, causal)
        stream.append(errors(x, truth)[1])
    last = reference.layernorm(
        x.astype(np.float32), ends.gamma_f, ends.beta_f, checkpoint.config.eps
    )
    logits = last.reshape(-1, *last.shape[-2:])[0, -1] @ ends.lm_head.T
    return Walkthrough(
        description,
        dtype,
        plan,
        f"{name}, block {layer} of {checkpoint.config.n_layer}",
        "causal" if causal else "none",
        f"{ids.shape[-1]} tokens of {_excerpt(text)}",
        steps,
        stream,
        [
            (bytes_of_id(encoding, token).decode(errors="replace"), p)
            for token, p in most_likely(logits)
        ],
    )


def _excerpt(text: str, ends: int = 24) -> str:
    """The repr of a text, or of its first and last `ends` characters."""
    return repr(text) if len(text) <= 2 * ends else f"{text[:ends]!r} … {text[-ends:]!r}"


def _rows(tokens: list[int], seq_len: int | None, batch: int) -> NDArray[np.int64]:
    """Token ids (T,) for one row, (B, T) for more: row b starts at token b."""
    T = len(tokens) if seq_len is None else seq_len
    _shape(batch, T, 1)
    if len(tokens) < T:
        raise InputError(f"--seq-len {T}: the text has {len(tokens)} tokens")
    start, column = np.arange(batch)[:, None], np.arange(T)
    rows: NDArray[np.int64] = np.array(tokens)[(start + column) % len(tokens)]
    return rows[0] if batch == 1 else rows


def _shape(batch: int, seq_len: int, n_embd: int) -> tuple[int, ...]:
    if batch < 1 or seq_len < 1:
        raise InputError(f"expected --batch and --seq-len of at least 1, got {batch}, {seq_len}")
    if batch * seq_len > MAX_TOKENS:
        raise InputError(
            f"{batch * seq_len:,} tokens: at most {MAX_TOKENS:,} are compared with float64 at once"
        )
    return (seq_len, n_embd) if batch == 1 else (batch, seq_len, n_embd)


def _describe_device(block: Block, requested: str | None) -> str:
    """A description of the device; if none was requested, with the reason why it is the CPU."""
    problem = doctor.cuda_problem() if requested is None else None
    return f"{block.device}, because {problem}: {doctor.ADVICE}" if problem else block.device
