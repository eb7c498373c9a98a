"""Write the files next to a bundled model's weights: config, tokenizer, loss curves, model card."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzzing.vocabularies import BYTES, byte_level, spec_of
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_shakespeare import Settings

LAYER_NORM_EPSILON = 1e-5
RMS_NORM_EPSILON = 1e-5
ROPE_THETA = 10000.0
INITIAL_DEVIATION = 0.02
NAMES = {"gpt2": "GPT-2", "llama": "Llama"}


def model_config(settings: Settings) -> dict[str, Any]:
    return gpt2_config(settings) if settings.architecture == "gpt2" else llama_config(settings)


def llama_config(settings: Settings) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": settings.n_layer,
        "num_attention_heads": settings.n_head,
        "num_key_value_heads": settings.n_kv_head,
        "hidden_size": settings.n_embd,
        "intermediate_size": settings.n_ff,
        "head_dim": settings.n_embd // settings.n_head,
        "max_position_embeddings": settings.n_ctx,
        "vocab_size": settings.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": RMS_NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": INITIAL_DEVIATION,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float16",
    }


def gpt2_config(settings: Settings) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": settings.n_layer,
        "n_head": settings.n_head,
        "n_embd": settings.n_embd,
        "n_inner": None,
        "n_positions": settings.n_ctx,
        "n_ctx": settings.n_ctx,
        "vocab_size": settings.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "initializer_range": INITIAL_DEVIATION,
        "tie_word_embeddings": True,
        "attn_pdrop": settings.dropout,
        "embd_pdrop": settings.dropout,
        "resid_pdrop": settings.dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float16",
    }


def byte_tokenizer() -> dict[str, Any]:
    """Return a byte-level BPE without merges, which maps every byte to its value."""
    level = byte_level(use_regex=False)
    return spec_of(BYTES.ids, []) | {"pre_tokenizer": level, "decoder": level}


def draw_curves(report: dict[str, Any], logs: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*report["train_curve"], strict=True), label="training (with dropout)")
    if logs:
        label = "development (run that held it out)"
        axes.plot(*zip(*logs[0]["development_curve"], strict=True), "o-", ms=3, label=label)
    loss = report["validation_loss"]
    label = f"validation, stored weights: {loss:.3f}"
    axes.axhline(loss, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def model_card(
    settings: Settings,
    report: dict[str, Any],
    logs: list[dict[str, Any]],
    args: argparse.Namespace,
) -> str:
    sections = (
        card_opening(settings, report),
        card_architecture(settings, report),
        card_data(report),
        card_training(settings, report, args),
        card_choice(logs),
        card_loss(settings, report),
        card_licence(),
    )
    paragraphs = "\n\n".join(section.strip() for section in sections).split("\n\n")
    return "\n\n".join(map(rewrapped, paragraphs)) + "\n"


def rewrapped(paragraph: str) -> str:
    """Wrap a paragraph of prose after its figures are inserted; leave tables and code unchanged."""
    if paragraph.startswith(("#", "|", "`", "!")):
        return paragraph
    return textwrap.fill(paragraph, 100, break_long_words=False, break_on_hyphens=False)


def card_opening(settings: Settings, report: dict[str, Any]) -> str:
    name = NAMES[settings.architecture]
    return f"""
# A small byte-level {name} trained on tinyshakespeare

A language model with {name}'s architecture and {report["parameters"]:,} parameters that reads and
writes bytes. It reaches {report["validation_loss"]:.3f} nats per byte on the last 10 % of its
text, which it was not trained on.

**Intended use:** a demonstration and a small fixture for tests. The model learns the spelling and
the layout of the plays; it knows no facts and follows no instructions.

| file | content |
| --- | --- |
| `model.safetensors` | weights in fp16, under the names of Hugging Face {name} checkpoints |
| `config.json` | architecture, as a Hugging Face `{"GPT2" if name == "GPT-2" else name}Config` |
| `tokenizer.json` | byte-level tokenizer without merges: a token's id is the byte's value |
| `passage.txt` | 256 bytes from the start of the validation text |
| `loss.json`, `loss.png` | training curve, settings and validation loss |
"""


def card_architecture(settings: Settings, report: dict[str, Any]) -> str:
    where = "before each branch and after the last block, epsilon"
    if settings.architecture == "gpt2":
        positions = "learned positions"
        particular = f"""| activation | GELU, tanh approximation |
| layer norm | {where} {LAYER_NORM_EPSILON:g} |"""
    else:
        positions = f"RoPE with base {ROPE_THETA:g}"
        particular = f"""| heads of keys and values | {settings.n_kv_head}, shared by groups |
| feed-forward | {settings.n_ff} channels, SiLU gate |
| RMSNorm | {where} {RMS_NORM_EPSILON:g} |"""
    return f"""
## Architecture

| | |
| --- | --- |
| blocks | {settings.n_layer} |
| width | {settings.n_embd} |
| attention heads | {settings.n_head} of size {settings.n_embd // settings.n_head} |
| context | {settings.n_ctx} bytes, {positions} |
| vocabulary | {settings.vocab_size}, a token is one byte |
{particular}
| output layer | tied to the token embedding |
| parameters | {report["parameters"]:,} |
"""


def card_data(report: dict[str, Any]) -> str:
    split, size = report["validation_offsets"]
    return f"""
## Data

tinyshakespeare, {size:,} bytes, SHA-256
`{report["text_sha256"]}`.
Training text: bytes 0 to {split - 1:,} (the first 90 %). Validation text: bytes {split:,} to
{size - 1:,} (the last 10 %), used neither for training nor for choosing settings, and scored once,
by the run that made these weights.
"""


def card_training(settings: Settings, report: dict[str, Any], args: argparse.Namespace) -> str:
    compiled = ", compilation included" if report["compiled"] else ""
    averaged = "The stored weights are those of the last step."
    if settings.ema > 0:
        averaged = f"The stored weights are an exponential moving average, decay {settings.ema:g}."
    return f"""
## Training

{settings.steps:,} steps of {settings.batch} random windows of {settings.n_ctx} bytes, with AdamW
(betas {settings.beta1:g} and {settings.beta2:g}, weight decay {settings.weight_decay:g} on
matrices), a learning rate of {settings.lr:g} after {settings.warmup} steps of warm-up and on a
cosine to {settings.min_lr:g}, gradients clipped to a norm of {settings.clip:g}, dropout
{settings.dropout:g} and bf16 autocast. {averaged}

Seed {settings.seed}; PyTorch {report["torch"]}; GPU: {report["gpu"]};
{report["seconds"]:g} seconds{compiled}. The command, with `tinyshakespeare.txt` standing for the
text:

```
{training_command(settings, args)}
```

The seed fixes the initial weights and the windows drawn, but GPU arithmetic is not bit for bit
repeatable, so another run gives slightly different weights.
"""


def training_command(settings: Settings, args: argparse.Namespace) -> str:
    parts = ["python tools/train_shakespeare.py --mode final", "--text tinyshakespeare.txt"]
    parts += [
        f"--{entry.name.replace('_', '-')} {getattr(settings, entry.name)}"
        for entry in fields(settings)
        if getattr(settings, entry.name) != entry.default
    ]
    if args.no_compile:
        parts.append("--no-compile")
    if args.dev_log:
        parts.append("--dev-log " + " ".join(path.name for path in args.dev_log))
    parts.append("--output model")
    return " \\\n    ".join(parts)


def card_choice(logs: list[dict[str, Any]]) -> str:
    heading = "## How the settings were chosen\n\n"
    if not logs:
        return heading + "These are settings given to the script; no choosing run is recorded."
    blocks = logs[0]["development_blocks"]
    size = blocks[0][1] - blocks[0][0]
    rows = "\n".join(choice_row(log, logs[0]["settings"]) for log in logs)
    return f"""{heading}By the loss on a development text of {len(blocks)} scattered blocks of
{size} bytes from the first 90 %, held out of the runs below (each block scored as a
text of its own). The final run then trained on those blocks too, with the first row's settings.

| settings | development loss at the last step | lowest | at step | seconds |
| --- | --- | --- | --- | --- |
{rows}
"""


def choice_row(log: dict[str, Any], chosen: dict[str, Any]) -> str:
    settings = log["settings"].items()
    differences = [f"{name} {value}" for name, value in settings if value != chosen[name]]
    curve = log["development_curve"]
    step, lowest = min(curve, key=lambda point: float(point[1]))
    name = ", ".join(differences) or "as trained"
    return f"| {name} | {curve[-1][1]:.4f} | {lowest:.4f} | {step:,} | {log['seconds']:g} |"


def card_loss(settings: Settings, report: dict[str, Any]) -> str:
    model = " --model shakespeare-llama" if settings.architecture == "llama" else ""
    window, stride = report["window"], report["stride"]
    return f"""
## Validation loss

**{report["validation_loss"]:.4f} nats per byte**, of the stored fp16 weights, read back from the
file and computed with in fp32.

It is the mean over all {report["bytes_scored"]:,} bytes of the validation text after its first. A
window of {window} bytes slides by {stride}: the first window scores all its bytes but the first,
each later one only its last {stride} (the last window what is left). So every byte is predicted
exactly once, from at least {window - stride} (except near the start) and at most {window - 1}
preceding bytes.

With the validation text in a file, `gpt2block score validation.txt{model} --stride {stride}`
repeats it; [docs/dtypes.md](../../../docs/dtypes.md) has the loss with weights in bf16 and FP8.

![Loss in nats per byte over the training steps](loss.png)
"""


def card_licence() -> str:
    return """
## Licence

The weights are under the MIT licence, as the project is. Shakespeare's text is in the public
domain.
"""
