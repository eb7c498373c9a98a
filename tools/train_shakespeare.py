"""Train a bundled model, a small GPT-2 or Llama, on tinyshakespeare.

The model has the architecture of ``--architecture`` and reads bytes: a token's id is the byte's
value.  It is trained on the first 90 % of the text; the last 10 % is the validation text, which is
used neither for training nor for choosing settings.

``--mode choose`` holds out every 20th block of 4096 bytes of the first 90 %, trains on the rest
and writes the loss on those blocks to ``--dev-log``.  ``--mode final`` trains on the whole first
90 %, stores the weights in fp16, reads them back and scores them once on the validation text.

The loss is the mean number of nats per byte over every byte of a text after its first.  A window
of ``n_ctx`` bytes slides over the text by ``stride`` bytes; the first window scores all its bytes
but the first, every later one only its last ``stride`` bytes (the last window, the rest of
the text).  So each byte is predicted exactly once, from at least ``n_ctx - stride`` (where the
text has that many) and at most ``n_ctx - 1`` preceding bytes, in fp32 arithmetic.

The package itself does not need PyTorch. `shakespeare_card.py` writes the files that are stored
next to the weights.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from shakespeare_card import byte_tokenizer, draw_curves, model_card, model_config
from shakespeare_models import GPT2, Llama
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

Span = tuple[int, int]
Curve = list[tuple[int, float]]

DEVELOPMENT_BLOCK = 4096
DEVELOPMENT_EVERY = 20
EVALUATION_BATCH = 128
MAX_WEIGHT_FILE = 10_000_000
PASSAGE_SIZE = 256
Model = GPT2 | Llama
MODELS: dict[str, type[Model]] = {"gpt2": GPT2, "llama": Llama}


def flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """The settings that determine the trained weights; every field is also a command-line flag."""

    architecture: str = flag("gpt2", "gpt2 or llama")
    n_layer: int = flag(6, "transformer blocks")
    n_head: int = flag(4, "attention heads")
    n_kv_head: int = flag(2, "heads of keys and values (llama)")
    n_ff: int = flag(768, "channels of the feed-forward (llama)")
    n_embd: int = flag(256, "width")
    n_ctx: int = flag(256, "context length in bytes")
    vocab_size: int = flag(256, "one id for every byte value")
    dropout: float = flag(0.25, "for embeddings, attention and residual branches")
    batch: int = flag(64, "windows per step")
    steps: int = flag(4000, "optimizer steps")
    warmup: int = flag(100, "steps of linear warm-up")
    lr: float = flag(1e-3, "peak learning rate")
    min_lr: float = flag(1e-4, "learning rate at the end of the cosine")
    beta1: float = flag(0.9, "AdamW's first beta")
    beta2: float = flag(0.99, "AdamW's second beta")
    weight_decay: float = flag(0.1, "on matrices, embeddings included")
    clip: float = flag(1.0, "largest gradient norm")
    ema: float = flag(0.999, "decay of the averaged weights that are stored; 0 turns it off")
    seed: int = flag(1337, "random seed")


# --- The text ----------------------------------------------------------------------------------


def split_offset(text_size: int) -> int:
    """Return the offset at which the validation text starts."""
    return text_size * 9 // 10


def development_spans(train_size: int) -> list[Span]:
    """Return blocks spread over the training text, so that they resemble the rest of it."""
    stride = DEVELOPMENT_BLOCK * DEVELOPMENT_EVERY
    starts = range(stride // 2, train_size - DEVELOPMENT_BLOCK + 1, stride)
    spans = [(start, start + DEVELOPMENT_BLOCK) for start in starts]
    if not spans:
        raise SystemExit("the text is too short to hold out a development block")
    return spans


def spans_between(held_out: list[Span], size: int) -> list[Span]:
    edges = [0, *(edge for span in held_out for edge in span), size]
    return list(zip(edges[::2], edges[1::2], strict=True))


def random_batches(
    text: Tensor, spans: list[Span], settings: Settings
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) without end; no window crosses the edge of a span."""
    device = text.device
    starts = torch.cat([torch.arange(a, b - settings.n_ctx) for a, b in spans]).to(device)
    window = torch.arange(settings.n_ctx + 1, device=device)
    generator = torch.Generator(device).manual_seed(settings.seed)
    while True:
        drawn = torch.randint(len(starts), (settings.batch,), generator=generator, device=device)
        rows = text[starts[drawn, None] + window].long()
        # Strided inputs would make torch.compile compile a second time.
        yield rows[:, :-1].contiguous(), rows[:, 1:]


def bytes_as_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


# --- Evaluation --------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: Model, data: Tensor, n_ctx: int, stride: int) -> float:
    """Return the loss defined in the module's docstring: mean nats per byte over ``data``."""
    if not 0 < stride < n_ctx:
        raise ValueError("the stride must be positive and smaller than the context")
    torch.set_float32_matmul_precision("highest")
    model.eval()
    count = max(0, math.ceil((len(data) - n_ctx) / stride)) + 1
    # Attention is causal, so the padding of the last window cannot change a scored byte.
    padding = (count - 1) * stride + n_ctx - len(data)
    windows = F.pad(data, (0, padding)).unfold(0, n_ctx, stride)
    total, scored = 0.0, 0
    for first in range(0, count, EVALUATION_BATCH):
        rows = windows[first : first + EVALUATION_BATCH].long()
        keep = scored_targets(first, len(rows), len(data), n_ctx, stride).to(data.device)
        # The fused attention kernels may round fp32 inputs to shorter mantissas.
        with sdpa_kernel(SDPBackend.MATH):
            logits = model(rows[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
        total += float(losses[keep].double().sum())
        scored += int(keep.sum())
    assert scored == len(data) - 1
    return total / scored


def scored_targets(first: int, count: int, size: int, n_ctx: int, stride: int) -> Tensor:
    """Return the mask of the targets scored in windows ``first`` .. ``first + count - 1``."""
    window = torch.arange(first, first + count)[:, None]
    column = torch.arange(1, n_ctx)[None, :]
    is_new = (window == 0) | (column >= n_ctx - stride)
    return is_new & (window * stride + column < size)


# --- Training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    model: Model
    curve: Curve
    seconds: float
    compiled: bool


def learning_rate(step: int, settings: Settings) -> float:
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * cosine


def make_optimizer(model: Model, settings: Settings) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, fused=matrices[0].is_cuda)


def batch_loss(forward: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        logits = forward(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def try_to_compile(model: Model, settings: Settings) -> Callable[[Tensor], Tensor]:
    """Return the compiled model or, where the compiler fails, the model itself."""
    device = next(model.parameters()).device
    ids = torch.zeros(settings.batch, settings.n_ctx, dtype=torch.long, device=device)
    compiled: Callable[[Tensor], Tensor] = torch.compile(model)
    try:
        # Compilation happens at the first call, and fails there.
        torch.autograd.backward(batch_loss(compiled, ids, ids))
    except Exception as error:
        print(f"training without torch.compile: {type(error).__name__}: {error}")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return compiled


@torch.no_grad()
def update_average(average: Model, model: Model, decay: float, step: int) -> None:
    """Update an exponential moving average, with a correction for the bias of its start."""
    weight = (1.0 - decay) / (1.0 - decay**step)
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, weight)


def optimize(
    model: Model, optimizer: torch.optim.AdamW, loss: Tensor, rate: float, clip: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def train(
    settings: Settings,
    text: Tensor,
    spans: list[Span],
    args: argparse.Namespace,
    observe: Callable[[int, Model, float], None],
) -> Trained:
    """Train on ``spans`` of ``text``; ``observe`` receives each step's averaged model."""
    started = time.perf_counter()
    torch.manual_seed(settings.seed)
    model = MODELS[settings.architecture](settings).to(text.device).train()
    average = copy.deepcopy(model).requires_grad_(False).eval()
    forward = model if args.no_compile else try_to_compile(model, settings)
    torch.manual_seed(settings.seed)  # so that dropout does not depend on the compiler's trial
    optimizer = make_optimizer(model, settings)
    batches = random_batches(text, spans, settings)
    curve: Curve = []
    recent = torch.zeros((), device=text.device)
    for step in range(1, settings.steps + 1):
        loss = batch_loss(forward, *next(batches))
        optimize(model, optimizer, loss, learning_rate(step, settings), settings.clip)
        update_average(average, model, settings.ema, step)
        recent += loss.detach()
        if step % args.log_every == 0:
            curve.append((step, round(recent.item() / args.log_every, 5)))
            recent.zero_()
            assert math.isfinite(curve[-1][1])
        observe(step, average, curve[-1][1] if curve else math.nan)
    return Trained(average, curve, time.perf_counter() - started, forward is not model)


def is_due(step: int, every: int, settings: Settings) -> bool:
    return step % every == 0 or step == settings.steps


# --- Choosing settings -------------------------------------------------------------------------


def choose(settings: Settings, text: bytes, args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    data = bytes_as_tensor(text[: split_offset(len(text))], device)
    held_out = development_spans(len(data))
    curve: Curve = []

    def observe(step: int, model: Model, train_loss: float) -> None:
        if is_due(step, args.eval_every, settings):
            parts = (data[a:b] for a, b in held_out)  # of equal length, each a text of its own
            losses = [evaluate(model, part, settings.n_ctx, args.stride) for part in parts]
            loss = sum(losses) / len(losses)
            curve.append((step, round(loss, 5)))
            print(f"step {step:5d}  train {train_loss:.4f}  development {loss:.4f}", flush=True)

    trained = train(settings, data, spans_between(held_out, len(data)), args, observe)
    best_step, best = min(curve, key=lambda point: point[1])
    print(f"development loss {curve[-1][1]:.4f} at the end, {best:.4f} at step {best_step}")
    print(f"{trained.seconds:.1f} s of training and evaluation")
    log = {
        "settings": asdict(settings),
        "development_curve": curve,
        "train_curve": trained.curve,
        "development_blocks": held_out,
        "stride": args.stride,
        "seconds": round(trained.seconds, 1),
    }
    write_json(args.dev_log[0], log)


# --- Storing the model -------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def store_weights(model: Model, path: Path) -> None:
    weights = {name: w.half().cpu().contiguous() for name, w in model.state_dict().items()}
    assert all(bool(w.isfinite().all()) for w in weights.values())
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates a private file, and a wheel would keep the mode
    assert path.stat().st_size <= MAX_WEIGHT_FILE


def load_weights(path: Path, settings: Settings, device: torch.device) -> Model:
    model = MODELS[settings.architecture](settings)
    model.load_state_dict({name: weight.float() for name, weight in load_file(path).items()})
    model.to(device)
    return model


def opening_passage(validation: bytes) -> bytes:
    """Return the first bytes of the validation text that begin with a speaker's line."""
    start = validation.index(b"\n\n") + 2
    return validation[start : start + PASSAGE_SIZE]


# --- The final run -----------------------------------------------------------------------------


def read_dev_logs(args: argparse.Namespace, settings: Settings) -> list[dict[str, Any]]:
    """Return the logs of the runs that chose settings; the one with these settings first."""
    logs = [json.loads(path.read_text(encoding="utf-8")) for path in args.dev_log]
    logs.sort(key=lambda log: bool(log["settings"] != asdict(settings)))
    if logs and logs[0]["settings"] != asdict(settings):
        raise SystemExit("no development log was made with these settings")
    return logs


def final(settings: Settings, text: bytes, args: argparse.Namespace) -> None:
    logs = read_dev_logs(args, settings)
    split = split_offset(len(text))
    device = torch.device(args.device)

    def observe(step: int, _: Model, train_loss: float) -> None:
        if is_due(step, args.eval_every, settings):
            print(f"step {step:5d}  train {train_loss:.4f}", flush=True)

    train_data = bytes_as_tensor(text[:split], device)
    trained = train(settings, train_data, [(0, split)], args, observe)

    output: Path = args.output
    output.mkdir(parents=True, exist_ok=True)
    store_weights(trained.model, output / "model.safetensors")
    stored = load_weights(output / "model.safetensors", settings, device)
    loss = evaluate(stored, bytes_as_tensor(text[split:], device), settings.n_ctx, args.stride)
    print(f"validation loss of the stored weights: {loss:.4f} nats per byte")
    print(f"{trained.seconds:.1f} s of training")

    report = make_report(settings, text, trained, loss, args)
    write_json(output / "config.json", model_config(settings))
    write_json(output / "tokenizer.json", byte_tokenizer())
    (output / "passage.txt").write_bytes(opening_passage(text[split:]))
    write_json(output / "loss.json", report)
    draw_curves(report, logs, output / "loss.png")
    (output / "README.md").write_text(model_card(settings, report, logs, args), encoding="utf-8")


def make_report(
    settings: Settings, text: bytes, trained: Trained, loss: float, args: argparse.Namespace
) -> dict[str, Any]:
    split = split_offset(len(text))
    on_gpu = torch.device(args.device).type == "cuda"
    return {
        "validation_loss": loss,
        "unit": "nats per byte",
        "bytes_scored": len(text) - split - 1,
        "window": settings.n_ctx,
        "stride": args.stride,
        "seed": settings.seed,
        "settings": asdict(settings),
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "text_bytes": len(text),
        "train_offsets": [0, split],
        "validation_offsets": [split, len(text)],
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(args.device) if on_gpu else "none (CPU)",
        "compiled": trained.compiled,
        "seconds": round(trained.seconds, 1),
        "train_curve": trained.curve,
    }


# --- The command line --------------------------------------------------------------------------


def parse_arguments() -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level GPT-2 or Llama on tinyshakespeare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--mode", choices=("choose", "final"), required=True)
    parser.add_argument("--text", type=Path, required=True, help="the text, one file")
    parser.add_argument("--output", type=Path, help="folder for the model (final)")
    parser.add_argument(
        "--dev-log",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="file for the curve (choose); files of the curves to report (final)",
    )
    parser.add_argument("--device", default="cuda", help="PyTorch device")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--stride", type=int, default=64, help="stride of the evaluation's window")
    parser.add_argument("--eval-every", type=int, default=250, help="steps between reports")
    parser.add_argument("--log-every", type=int, default=50, help="steps per curve point")
    for entry in fields(Settings):
        name = "--" + entry.name.replace("_", "-")
        kind, text = type(entry.default), entry.metadata["help"]
        parser.add_argument(name, type=kind, default=entry.default, help=text)
    args = parser.parse_args()
    check_arguments(parser, args)
    return Settings(**{entry.name: getattr(args, entry.name) for entry in fields(Settings)}), args


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.mode == "choose" and len(args.dev_log) != 1:
        parser.error("--mode choose needs one --dev-log")
    if args.mode == "final" and args.output is None:
        parser.error("--mode final needs --output")
    if args.architecture not in MODELS:
        parser.error(f"--architecture must be one of {', '.join(MODELS)}")
    if args.n_embd % args.n_head:
        parser.error("--n-embd must be a multiple of --n-head")
    if args.architecture == "llama":
        if args.n_kv_head < 1 or args.n_head % args.n_kv_head:
            parser.error("--n-kv-head must divide --n-head")
        if args.n_embd // args.n_head % 2:
            parser.error(
                "RoPE turns pairs of channels: --n-embd must be an even multiple of --n-head"
            )
    if args.vocab_size < 256:
        parser.error("--vocab-size must hold every byte")
    if args.steps < args.log_every:
        parser.error("--log-every must not exceed --steps")
    if not 0 < args.stride < args.n_ctx:
        parser.error("--stride must be positive and smaller than --n-ctx")


def main() -> None:
    settings, args = parse_arguments()
    run = choose if args.mode == "choose" else final
    run(settings, args.text.read_bytes(), args)


if __name__ == "__main__":
    main()
