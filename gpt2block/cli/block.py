"""`gpt2block block`: a GPT-2 block, every step compared with float64."""

from __future__ import annotations

from dataclasses import asdict

from gpt2block import walkthrough
from gpt2block.checkpoints import BUNDLED
from gpt2block.checks import FLOATS
from gpt2block.cli import complete
from gpt2block.cli.display import console, new_table, print_json, print_table, shown, tracked
from gpt2block.cli.model import device_option, json_option, revision_option
from gpt2block.cli.options import option
from gpt2block.errors import InputError

DEFAULT_SEQ_LEN = 128


def block(
    weights: str = option(
        "A Hugging Face directory, .safetensors file or hub id.", BUNDLED, complete=complete.models
    ),
    revision: str | None = revision_option(),
    size: str | None = option(
        "Random weights of gpt2, gpt2-medium, gpt2-large or gpt2-xl.", complete=complete.sizes
    ),
    layer: int = option("Index of the block whose steps are shown.", 0),
    text: str | None = option("Input text; by default a passage of Shakespeare."),
    seq_len: int | None = option("Tokens per row; by default the whole text."),
    batch: int = option("Rows; row b is the text rotated by b tokens.", 1),
    causal: bool = option("Attend only to earlier tokens.", True),
    dtype: str = option(
        "float32, bfloat16 or float16.", "float32", complete=complete.one_of(*FLOATS)
    ),
    kernels: str = option("skeleton (ten steps), fused (seven steps) or auto.", "auto"),
    device: str | None = device_option(),
    as_json: bool = json_option(),
) -> None:
    """Run a GPT-2 block and compare every step with float64 NumPy."""
    if size is None:
        result = walkthrough.with_trained_weights(
            weights, layer, text, seq_len, batch, causal, device,
            lambda indices: tracked(list(indices), "blocks"), dtype, kernels, revision,
        )  # fmt: skip
    elif (text, weights, revision, layer) != (None, BUNDLED, None, 0):
        raise InputError(
            "--size uses random weights: leave out --weights, --revision, --layer and --text"
        )
    else:
        length = DEFAULT_SEQ_LEN if seq_len is None else seq_len
        result = walkthrough.with_random_weights(
            size, length, batch, causal, device, dtype, kernels
        )
    if as_json:
        print_json(asdict(result))
    else:
        _print_walkthrough(result)


def _print_walkthrough(result: walkthrough.Walkthrough) -> None:
    out = console()
    out.print(f"device   {shown(result.device)}")
    out.print(f"weights  {shown(result.weights)}, mask: {result.mask}")
    out.print(f"input    {shown(result.input)}")
    if result.device.startswith("CPU"):
        out.print(f"kernels  none run: {result.dtype} NumPy compared with float64")
    elif result.dtype != "float32":
        out.print(f"kernels  {result.kernels}, {result.dtype}")
    table = new_table(
        ("step", "kernel", "shape"), ("ms", "max abs", "max rel", "total abs", "total rel")
    )
    for row in result.steps:
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
    if result.stream:
        marks = ", ".join(f"{error:.1e}" for error in result.stream)
        out.print(f"Residual stream after each block, rel: {marks}")
        words = ", ".join(f"{token!r} {p:.1%}" for token, p in result.next_tokens)
        out.print(f"Most likely next tokens: {shown(words)}")
