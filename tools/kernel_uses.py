"""Where each kernel runs: formats, GPUs, models and parts of passes, by the lists of launches.

    python tools/kernel_uses.py > tests/golden/kernels.txt

prints each kernel with lines such as

    bfloat16 e5m2 | 8.0 9.0 | llama qwen3 | prompts 1 2 8

These are the formats of weights (after a slash the dtype of the kv_cache), the compute
capabilities, the models of tools/launch_models.py ("all": every model with these formats there) or
the blocks, and the parts of a pass: a number is a decoding step with this number of rows. A line
stands for all combinations of its words. A kernel that has no lines has a reason in `NOT_RUN`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

from launch_lists import lists
from launch_models import CONFIGS, FORMATS, MODELS, ROWS

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "kernels.txt"
CAPABILITIES = "7.5", "8.0", "9.0"
PROGRAMS = re.compile(r"\S+ (generation .*|block (gpt2 (2/2|12/12)x64|llama 4/1x64) .*)")
PROMPTS = "load", "prompts", "copies", "continued", "alternatives", "scores", "logits"
ORDER = (  # order of the words in each field of a line
    (*FORMATS, "float16"),
    CAPABILITIES,
    ("all", *CONFIGS, "gpt2-block", "llama-block"),
    (*PROMPTS, *map(str, ROWS), "lookup", "draft", "trace", "skeleton", "fused"),
)
OF = {each: {model for model, other in MODELS if other == each} for each in ORDER[0]}
NOT_RUN: Mapping[str, str] = {  # files, or a kernel of a file that has others
    **dict.fromkeys(
        ("learn/attention/ladder.cu", "learn/attention/online.cu", "learn/gguf/ladder.cu",
         "learn/layernorm/ladder.cu", "learn/layernorm/warp.cu", "learn/matmul/ladder.cu",
         "learn/matmul/registers.cu", "learn/softmax/ladder.cu"),
        "a step of a ladder, which the course and `gpt2block kernels` show",
    ),
    **dict.fromkeys(
        ("learn/embedding/encoder.cu", "learn/layernorm/gelu.cu", "learn/trimat/ladder.cu",
         "learn/trimat/mma.cu", "learn/trimat/pipelined.cu"),
        "an operation of a source document that no model has",
    ),
    **dict.fromkeys(
        ("matmul/low_rank.cu", "elementwise/activate.cu"), "models with adapters (LoRA)"
    ),
    **dict.fromkeys(
        ("experts/route.cu", "experts/tiles.cu", "matmul/decode/mma_experts.cu",
         "matmul/decode/mma_gguf.cu decode_mma_gguf_experts"), "mixtures of experts"
    ),
    "tokens/drafts.cu taken_rows": "steps of a model with a block that drafts tokens",
    "peers/all_gather.cu": "exchanges columns between GPUs, and the lists have one GPU",
    **dict.fromkeys(
        [f"norms/rmsnorm_stream.cu operand_columns{end}" for end in ("", "_narrow")],
        "products with matrices of 4 bits in activation order",
    ),
    "norms/rmsnorm_stream.cu rmsnorm_gathered": "a gather and a norm of models on several GPUs",
    "positions/qk_norm.cu qk_norm": "the norm alone, which models launch together with RoPE",
    "learn/positions/rope.cu": "RoPE alone, which models launch for q and k together",
    "matmul/prompt/rmsnorm_wgmma.cu rmsnorm_matmul_wgmma": "the operation alone, from 2^28 "
    "multiplications on: models and blocks launch the norm and the product apart",
    "fp8/absmax.cu absmax_kn_kernel": "for matrices (K, N) that a caller gives to "
    "`WeightMatrix.quantize`: models store (N, K)",
}  # fmt: skip


class Use(NamedTuple):
    """A use of a kernel: one part of one program launches it."""

    formats: str
    capability: str
    model: str
    part: str


Uses = Mapping[
    str, set[Use]
]  # by file and name of a kernel: "attention/decode/split.cu attention_split"


def uses_of(programs: Iterable[tuple[str, list[str]]]) -> Uses:
    """Return the uses of kernels in programs (name, lines) of tools/launch_lists.py."""
    uses: dict[str, set[Use]] = defaultdict(set)
    for program, lines in programs:
        capability, kind, model, *words = program.split()
        formats, part = (words[0], "") if kind == "generation" else words[-2:]
        name = model if kind == "generation" else f"{model}-block"
        for call, _, launch in (line.split(" | ")[:3] for line in lines):
            if " grid " in launch:
                kernel, file, _ = launch.split(maxsplit=2)
                uses[f"{file} {kernel}"].add(Use(formats, capability, name, part or call))
    return uses


def text_of(uses: Uses) -> Iterator[str]:
    """Yield the lines of the golden file."""
    for kernel in sorted(uses):
        yield kernel
        models: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        for formats, capability, model, part in uses[kernel]:
            models[formats, capability, part].add(model)
        for (formats, *_), found in models.items():
            if OF[formats] and OF[formats] <= found:
                found.difference_update(OF[formats])
                found.add("all")
        points = {(f, c, model, p) for (f, c, p), found in models.items() for model in found}
        for box in sorted(_boxes({tuple(map(tuple.index, ORDER, point)) for point in points})):
            fields = zip(ORDER, box, strict=True)
            yield "    " + " | ".join(" ".join(words[n] for n in at) for words, at in fields)


def _boxes(points: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Return products of sets whose union is the set of points."""
    after, same = defaultdict(set), defaultdict(list)
    for first, *others in points:
        after[first].add(tuple(others))
    for first in sorted(after):
        same[frozenset(after[first])].append(first)
    return [
        (tuple(firsts), *box)
        for others, firsts in same.items()
        for box in (_boxes(set(others)) if others != {()} else [()])
    ]


def read(text: str) -> Uses:
    """Return the uses in a text that `text_of` wrote."""
    uses: dict[str, set[Use]] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            kernel = uses.setdefault(line, set())
            continue
        for formats, capability, model, part in product(*map(str.split, line.split(" | "))):
            models = OF[formats] if model == "all" else {model}
            kernel |= {Use(formats, capability, each, part) for each in models}
    return uses


if __name__ == "__main__":
    recorded = (lists(each, lambda name: bool(PROGRAMS.fullmatch(name))) for each in CAPABILITIES)
    print(*text_of(uses_of(chain.from_iterable(recorded))), sep="\n")
