"""Print the table of docs/llama.md: SmolLM2 in each dtype on a GPU, next to `transformers`.

    python tools/smollm2_table.py input.txt

input.txt is tinyshakespeare. A row has the perplexity of its first 4,096 tokens in one window; the
time per greedy step for 1 and for 64 rows, measured as time of `generate` per token after the
first; the time of a prompt of 512 tokens until its last logits are on the host; and the tokens per
second of `score` for 64 rows of 1,024 tokens. All times are measured in one Python process; the
best of several turns counts. `transformers` runs the same weights with its default attention.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from gpt2block import Llama
from gpt2block.cuda.formats import DTYPES, FILE
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from gpt2block.files.tokenizers import tokenizer

WINDOW, PROMPT, ROW, ROWS = 4096, 512, 1024, 64  # tokens (three times); rows computed together
NEW, TURNS = 64, 3
Row = tuple[str, float, float, float, float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    text = parser.parse_args().text.read_text(encoding="utf-8")
    checkpoint = Checkpoint.open("smollm2")
    encoding = tokenizer.load(checkpoint.tokenizer_source(), checkpoint.config.vocab_size)
    ids = np.array(tokenizer.encode(encoding, text)[: ROWS * ROW], np.int32)
    print("| by | perplexity | step of 1 row, µs | of 64 rows | prompt, ms | score, tokens/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(folder, checkpoint, overwrite=True)
        for name, perplexity, one, many, prompt, rate in chain(
            ours(ids), theirs(Path(folder), ids)
        ):
            print(
                f"| {name} | {perplexity:.4f} | {1e6 * one:.0f} | {1e6 * many:,.0f} | "
                f"{1e3 * prompt:.2f} | {rate:,.0f} |",
                flush=True,
            )


def best(call: Callable[[], Any]) -> float:
    """Return the minimum seconds of several calls, after a warm-up call."""
    times = []
    for _ in range(1 + TURNS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def step(generate: Callable[[int], Any]) -> float:
    """Return seconds per step: time of NEW + 1 tokens minus time of one token, per token."""
    return (best(lambda: generate(NEW + 1)) - best(lambda: generate(1))) / NEW


def ours(ids: Any) -> Iterator[Row]:
    """Yield a row for each dtype of weights, and one with an FP8 kv_cache."""
    rows = [row.tolist() for row in ids.reshape(-1, ROW)]
    starts = [row[:16] for row in rows]
    for dtype, kv_dtype in (
        *((dtype, None) for dtype in (*DTYPES, FILE)),
        ("float16", "float8_e4m3fn"),
    ):
        model = Llama.from_pretrained("smollm2", "cuda", dtype, kv_dtype=kv_dtype)

        def generate(count: int, new: int, model: Llama = model) -> Any:
            return model.generate(
                starts[:count], max_new_tokens=new, temperature=0, stop_ids=(), rows_at_once=count
            )

        yield (
            dtype + (f", kv_cache {kv_dtype}" if kv_dtype else ""),
            model.score(ids[:WINDOW]).perplexity,
            step(partial(generate, 1)),
            step(partial(generate, len(starts))),
            best(partial(model, ids[:PROMPT], last=True)),
            ids.size / best(partial(model.score, rows)),
        )


def theirs(folder: Path, ids: Any) -> Iterator[Row]:
    """Yield a row for each dtype of `transformers`."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    tokens = torch.from_numpy(ids.astype(np.int64)).cuda()
    rows = tokens.view(-1, ROW)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()

        def nats(part: Any, model: Any = model) -> Any:
            found = model(part).logits[:, :-1].float().log_softmax(-1)
            return -found.gather(-1, part[:, 1:, None]).double()

        def generate(count: int, new: int, model: Any = model) -> Any:
            part = rows[:count, :16]
            return model.generate(
                part, attention_mask=torch.ones_like(part), max_new_tokens=new, min_new_tokens=new,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            ).cpu()  # fmt: skip

        def prompt(model: Any = model) -> Any:
            return model(tokens[None, :PROMPT], logits_to_keep=1).logits.cpu()

        with torch.no_grad():
            yield (
                f"transformers, {str(dtype).removeprefix('torch.')}",
                float(nats(tokens[None, :WINDOW]).mean().exp()),
                step(partial(generate, 1)),
                step(partial(generate, len(rows))),
                best(prompt),
                ids.size / best(lambda: [nats(part).sum().cpu() for part in rows.split(8)]),
            )


if __name__ == "__main__":
    main()
