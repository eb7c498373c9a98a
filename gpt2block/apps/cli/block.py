"""`gpt2block block`: run a GPT-2 block, and compare every step with float64."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.apps.cli import complete
from gpt2block.apps.cli.display import console, new_table, print_json, print_table, shown, tracked
from gpt2block.apps.cli.model import device_option, note_on_cpu, revision_option
from gpt2block.apps.cli.options import json_option, option
from gpt2block.block import Block
from gpt2block.checks import FLOATS, check_choice
from gpt2block.cuda import doctor
from gpt2block.engine.inspect.compare import Comparison, errors
from gpt2block.engine.inspect.lens import most_likely
from gpt2block.errors import InputError
from gpt2block.files.checkpoints import BUNDLED, Checkpoint
from gpt2block.files.parameters.gpt2 import BlockWeights, GPT2Weights, random_input
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import bytes_of_id

DEFAULT_SEQ_LEN = 128
MAX_TOKENS = 2**17  # maximum of batch x tokens; GPT-2 small then needs about 10 GB
EXCERPT = 24  # number of first and of last characters of a long text that are printed


@dataclass(frozen=True)
class BlockOptions:
    weights: str = option(
        "A Hugging Face directory, .safetensors file or hub id.", BUNDLED, complete=complete.models
    )
    revision: str | None = revision_option()
    size: str | None = option(
        "Random weights of gpt2, gpt2-medium, gpt2-large or gpt2-xl.", complete=complete.sizes
    )
    layer: int = option("Index of the block whose steps are shown.", 0)
    text: str | None = option("Input text; by default a passage of Shakespeare.")
    seq_len: int | None = option("Tokens per sequence; by default the whole text.")
    batch: int = option("Sequences; sequence b is the text rotated by b tokens.", 1)
    causal: bool = option("Attend only to earlier tokens.", True)
    dtype: str = option(
        "float32, bfloat16 or float16.", "float32", complete=complete.one_of(*FLOATS)
    )
    kernels: str = option("skeleton (ten steps), fused (seven steps) or auto.", "auto")
    device: str | None = device_option()
    as_json: bool = json_option()

    def block(self, weights: BlockWeights) -> Block:
        return Block(weights, self.causal, self.device, self.dtype, self.kernels)


@dataclass(frozen=True)
class BlockReport:
    """Results to print: errors of one block's steps; for trained weights, also of all blocks."""

    device: str
    dtype: str
    kernels: str  # "skeleton" or "fused"
    weights: str
    mask: str  # "causal" or "none"
    input: str  # description of x
    steps: list[Comparison]
    # Only for trained weights: `stream` has the largest relative error of the residual stream
    # after each block; `next_tokens` has the first sequence's most likely next tokens with
    # probability.
    stream: list[float] = field(default_factory=list)
    next_tokens: list[tuple[str, float]] = field(default_factory=list)


def block(options: BlockOptions) -> None:
    """Run a GPT-2 block and compare every step with float64 NumPy."""
    trained = options.weights, options.revision, options.layer, options.text
    if options.size is None:
        report = _of_trained_weights(options)
    elif trained != (BUNDLED, None, 0, None):
        raise InputError(
            "--size uses random weights: leave out --weights, --revision, --layer and --text"
        )
    else:
        report = _of_random_weights(options, options.size)
    if options.kernels != "auto" and report.device.startswith("CPU"):
        note_on_cpu(f"--kernels {options.kernels}")
    if options.as_json:
        print_json(asdict(report))
    else:
        _print_report(report)


def _of_random_weights(options: BlockOptions, size: str) -> BlockReport:
    """Compare the steps of a block of random weights with float64. Input: U(-1, 1), (B, T, C)."""
    block = options.block(BlockWeights.random(0, size))
    T = DEFAULT_SEQ_LEN if options.seq_len is None else options.seq_len
    x = random_input(1, _shape(options.batch, T, block.weights.n_embd))
    return BlockReport(
        **_facts(options, block),
        weights=f"random, the shape of {size}",
        input="x ~ U(-1, 1)",
        steps=block.compare(x.astype(FLOATS[block.dtype])),
    )


def _of_trained_weights(options: BlockOptions) -> BlockReport:
    """Run a text through every block of a checkpoint, and compare each step of one block.

    After every block, the residual stream of the device is compared with that of float64 NumPy with
    the same matrices. Sequence b of a batch is the text rotated by b tokens.
    """
    checkpoint = Checkpoint.open(options.weights, options.revision)
    config = checkpoint.config
    ends = GPT2Weights.from_pretrained(checkpoint, layers=())
    encoding = tokenizer.load(checkpoint.tokenizer_source(), config.vocab_size)
    text = options.text
    if text is None:
        text = (Checkpoint.open(BUNDLED).directory / "passage.txt").read_text(encoding="utf-8")
    ids = _sequences(tokenizer.encode(encoding, text), options.seq_len, options.batch)
    length = ids.shape[-1]
    if length > config.n_ctx:
        raise InputError(
            f"{length} tokens: {options.weights} has positions for n_ctx = {config.n_ctx}: "
            "give --seq-len or a shorter text"
        )
    checkpoint.check_layer(options.layer)  # raises an error before any block is computed
    check_choice("dtype", options.dtype, FLOATS)
    x = reference.encoder(ids, ends.wte, ends.wpe).astype(FLOATS[options.dtype])
    truth: NDArray[np.floating] = x.astype(np.float64)
    facts: dict[str, Any] = {}
    steps: list[Comparison] = []
    stream = []
    for index in tracked(range(config.n_layer), "blocks"):
        block = options.block(BlockWeights.from_pretrained(checkpoint, index))
        facts = facts or _facts(options, block)
        if index == options.layer:
            steps = block.compare(x)
        x = block(x)
        truth = reference.block_forward(truth, block.weights, options.causal)
        stream.append(errors(x, truth)[1])
    last = reference.layernorm(x.astype(np.float32), ends.gamma_f, ends.beta_f, config.eps)
    logits = last.reshape(-1, *last.shape[-2:])[0, -1] @ ends.lm_head.T
    return BlockReport(
        **facts,
        weights=f"{options.weights}, block {options.layer} of {config.n_layer}",
        input=f"{length} tokens of {_excerpt(text)}",
        steps=steps,
        stream=stream,
        next_tokens=[
            (bytes_of_id(encoding, token).decode(errors="replace"), p)
            for token, p in most_likely(logits)
        ],
    )


def _facts(options: BlockOptions, block: Block) -> dict[str, Any]:
    """Return a block's fields of BlockReport; `device` says why the CPU is the default, if so."""
    problem = doctor.cuda_problem() if options.device is None else None
    why = f", because {problem}: {doctor.ADVICE}" if problem else ""
    return {
        "device": f"{block.device}{why}",
        "dtype": block.dtype,
        "kernels": block.kernels,
        "mask": "causal" if options.causal else "none",
    }


def _sequences(tokens: list[int], seq_len: int | None, batch: int) -> NDArray[np.int64]:
    """Return token ids (batch, T), or (T,) for batch 1; sequence b begins at token b."""
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


def _excerpt(text: str) -> str:
    """Return the repr of a text, or of a long text's first and last EXCERPT characters."""
    if len(text) <= 2 * EXCERPT:
        return repr(text)
    return f"{text[:EXCERPT]!r} … {text[-EXCERPT:]!r}"


def _print_report(report: BlockReport) -> None:
    out = console()
    out.print(f"device   {shown(report.device)}")
    out.print(f"weights  {shown(report.weights)}, mask: {report.mask}")
    out.print(f"input    {shown(report.input)}")
    if report.device.startswith("CPU"):
        out.print(f"kernels  none run: {report.dtype} NumPy compared with float64")
    elif report.dtype != "float32":
        out.print(f"kernels  {report.kernels}, {report.dtype}")
    figures = ("ms", "max abs", "max rel", "total abs", "total rel")
    table = new_table(("step", "kernel", "shape"), figures)
    for row in report.steps:
        values = (row.max_abs, row.max_rel, row.total_abs, row.total_rel)
        table.add_row(
            row.name,
            row.kernel,
            "x".join(map(str, row.shape)),
            f"{row.ms:.4f}",
            *(f"{value:.1e}" for value in values),
        )
    print_table(out, table)
    lines = (
        "Errors against float64; rel: relative to the tensor's largest value. max: of the step",
        "alone, fed exact inputs; total: accumulated from x on.",
    )
    out.print(("\n" if out.width >= len(lines[0]) else " ").join(lines))
    if report.stream:
        marks = ", ".join(f"{error:.1e}" for error in report.stream)
        out.print(f"Residual stream after each block, rel: {marks}")
        words = ", ".join(f"{token!r} {p:.1%}" for token, p in report.next_tokens)
        out.print(f"Most likely next tokens: {shown(words)}")
