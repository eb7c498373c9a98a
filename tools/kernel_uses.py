"""Where each kernel runs: formats, GPUs, models and parts of passes, by the lists of launches.

    python tools/kernel_uses.py > tests/golden/kernels.txt

prints each kernel with lines such as

    bfloat16 e5m2 | 8.0 9.0 | llama qwen3 | prompts 1 2 8

These are the formats of weights (after a slash the dtype of the kv_cache), the compute
capabilities, the models of tools/launch_models.py ("all": all that have these formats there) or the
blocks, and the parts of a pass: a number is a decoding step of so many rows. A kernel that has no
lines has a reason in `NOT_RUN`.
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

from gpt2block.cuda.kernels import signatures, sources

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "kernels.txt"
CAPABILITIES = "7.5", "8.0", "9.0"
PROGRAMS = re.compile(r"\S+ (generation .*|block (gpt2 (2/2|12/12)x64|llama 4/1x64) .*)")
ALL = "all"
ORDER = (  # of the words of a line's fields
    (*FORMATS, "float16"),
    CAPABILITIES,
    (ALL, *CONFIGS, "gpt2-block", "llama-block"),
    ("load", "prompts", "copies", "continued", "alternatives", "scores", "logits")
    + (*map(str, ROWS), "guesses", "draft", "trace", "skeleton", "fused"),
)
NOT_RUN: Mapping[str, tuple[str, ...]] = {  # reason: files, or a kernel of a file that has others
    "a step of a ladder, which the course and `gpt2block kernels` show": (
        "attention/ladder.cu", "attention/online.cu", "gguf/ladder.cu", "layernorm/ladder.cu",
        "layernorm/warp.cu", "matmul/ladder.cu", "matmul/registers.cu", "softmax/ladder.cu",
    ),
    "an operation of a source document that no model has": (
        "embedding/encoder.cu", "layernorm/gelu.cu", "trimat/ladder.cu", "trimat/mma.cu",
        "trimat/pipelined.cu",
    ),
    "an operation alone, which models launch together with the next one": (
        "llama/qk_norm.cu qk_norm", "llama/rope.cu",
    ),
    "for matrices (K, N) that a caller gives to `WeightMatrix.quantize`: models store (N, K)": (
        "fp8/absmax.cu absmax_kn_kernel",
    ),
    "a variant of an operation that `Block` and models do not call: they launch norm and product": (
        "llama/rmsnorm_matmul_hopper.cu rmsnorm_matmul_hopper",
    ),
}  # fmt: skip


class Use(NamedTuple):
    """A launch in one part of one program."""

    formats: str
    capability: str
    model: str
    part: str


class RunsIn(NamedTuple):
    """All that a kernel runs in, each in the order of `ORDER`, or the reason why in nothing."""

    formats: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    reason: str = ""


Uses = dict[str, set[Use]]  # by file and name of a kernel: "attention/decode.cu attention_split"


def uses_of(programs: Iterable[tuple[str, list[str]]]) -> Uses:
    """The uses of kernels in programs of tools/launch_lists.py, which are names and lines."""
    found: Uses = defaultdict(set)
    for program, lines in programs:
        capability, kind, model, *words = program.split()
        formats, part = words[-1], ""
        if kind == "block":
            model, (formats, part) = f"{model}-block", words[-2:]
        for call, _, launch in (line.split(" | ")[:3] for line in lines):
            if " grid " in launch:
                kernel, file, _ = launch.split(maxsplit=2)
                found[f"{file} {kernel}"].add(Use(formats, capability, model, part or call))
    return dict(found)


def text_of(uses: Uses) -> str:
    """The golden file: each line has all combinations of its words."""
    lines = []
    for kernel in sorted(uses):
        models: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        for formats, capability, model, part in uses[kernel]:
            models[formats, capability, part].add(model)
        points = {
            tuple(map(tuple.index, ORDER, (formats, capability, model, part)))
            for (formats, capability, part), found in models.items()
            for model in _with_all(found, formats)
        }
        lines.append(kernel)
        for box in sorted(_boxes(points)):
            words = [" ".join(names[n] for n in at) for names, at in zip(ORDER, box, strict=True)]
            lines.append(f"    {' | '.join(words)}")
    return "\n".join(lines) + "\n"


def _models_of(formats: str) -> set[str]:
    return {model for model, each in MODELS if each == formats}


def _with_all(models: set[str], formats: str) -> set[str]:
    """The models, with `ALL` in place of all that have these formats."""
    every = _models_of(formats)
    return (models - every) | {ALL} if every and every <= models else models


def _boxes(points: set[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Products of sets, of which the points are the union."""
    if points == {()}:
        yield ()
        return
    after: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for first, *others in points:
        after[first].add(tuple(others))
    same: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    for first in sorted(after):
        same[frozenset(after[first])].append(first)
    for others, firsts in same.items():
        yield from ((tuple(firsts), *box) for box in _boxes(set(others)))


def read(text: str) -> Uses:
    """The uses that `text_of` wrote."""
    found: Uses = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            kernel = found.setdefault(line, set())
            continue
        for formats, capability, model, part in product(*map(str.split, line.split(" | "))):
            models = _models_of(formats) if model == ALL else {model}
            kernel |= {Use(formats, capability, each, part) for each in models}
    return found


def runs_in(uses: Uses) -> dict[str, RunsIn]:
    """All kernels of kernels_cu, and what each runs in."""
    reasons = {name: reason for reason, names in NOT_RUN.items() for name in names}
    found = {}
    for file, kernel in ((file, kernel) for file in sources() for kernel in signatures(file)):
        name = f"{file} {kernel}"
        seen = [set(words) for words in zip(*uses.get(name, ()), strict=True)]
        fields = [
            tuple(word for word in names if word in words)
            for names, words in zip(ORDER, seen, strict=False)
        ]
        reason = "" if seen else reasons.get(name, reasons.get(file, ""))
        found[name] = RunsIn(*fields, reason=reason)
    return found


def main() -> None:
    programs = (lists(each, lambda name: bool(PROGRAMS.fullmatch(name))) for each in CAPABILITIES)
    print(text_of(uses_of(chain.from_iterable(programs))), end="")


if __name__ == "__main__":
    main()
