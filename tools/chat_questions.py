"""Count how many of 24 easy questions a chat model answers, for several sampling options.

    python -m tools.chat_questions --model smollm2 --seeds 4

tools/chat_questions.json has the questions, and words of which a correct answer contains at least
one (any case, whole words). The tool prints a line for each setting: mean, minimum and maximum of
the correct answers over the seeds.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import gpt2block

QUESTIONS: dict[str, list[str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
SETTINGS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 0.0},
]


def is_right(question: str, answer: str) -> bool:
    words = "|".join(map(re.escape, QUESTIONS[question]))
    return re.search(rf"(?<!\w)({words})(?!\w)", answer, re.IGNORECASE) is not None


def right_answers(model: Any, seed: int, tokens: int, options: dict[str, float]) -> int:
    """Count correct answers within the first `tokens` tokens of each answer."""
    count = 0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        answer = model.chat(messages, max_new_tokens=tokens, seed=seed, **options)
        count += is_right(question, answer.text)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40)
    given = parser.parse_args()
    model = gpt2block.from_pretrained(given.model, device=given.device)
    for options in SETTINGS:
        seeds = range(given.seeds if options["temperature"] else 1)
        right = [right_answers(model, seed, given.tokens, options) for seed in seeds]
        mean = sum(right) / len(right)
        print(
            f"{options}: {mean:.1f} of {len(QUESTIONS)} ({min(right)} to {max(right)})", flush=True
        )


if __name__ == "__main__":
    main()
