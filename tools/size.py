"""Count the project's lines and words, and compare them with the limits in size.toml.

    python tools/size.py            # print counts and limits; exit code 1 if a count is too high
    python tools/size.py --write    # set each limit to its count

Python counts lines that hold a token of code: no docstring, comment or blank line. CUDA and C++
count lines that are not blank and not a comment. Documentation counts words. Test data, golden
files, bundled models and CHANGELOG.md are not counted.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "size.toml"
DATA = (
    "tests/corpus/cheats/",
    "tests/corpus/kernels/",
    "tests/golden/",
    "gpt2block/files/bundled/",
    "CHANGELOG.md",
)
CUDA = ".cu", ".cuh", ".cpp", ".h"
NOT_CODE = frozenset(["COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"])
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_lines(text: str) -> int:
    """Return the number of lines with a token of code, without docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            code.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(code)


def cuda_lines(text: str) -> int:
    """Return the number of lines of CUDA or C++ that are not blank and not a comment."""
    return sum(bool(line.strip()) for line in COMMENT.sub("", text).splitlines())


def words(text: str) -> int:
    """Return the number of words."""
    return len(text.split())


COUNT = {
    ".py": ("python", python_lines),
    **dict.fromkeys(CUDA, ("cuda", cuda_lines)),
    ".md": ("words", words),
}  # suffix of a file: its kind, and the function that counts it


def room(path: Path) -> str:
    """Return the folder whose limit counts a file: a folder of the package, or one at the top."""
    if path.suffix == ".md":
        return "all documents"
    inside = path.parts[0] == "gpt2block" and len(path.parts) > 2
    return "/".join(path.parts[: 2 if inside else 1])


def sizes() -> dict[str, int]:
    """Count all tracked files. Keys: "python gpt2block/apps", and "python all of gpt2block"."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    counts: Counter[str] = Counter()
    for path in map(Path, listed.stdout.splitlines()):
        if path.suffix in COUNT and not path.as_posix().startswith(DATA):
            kind, count_in = COUNT[path.suffix]
            count = count_in((ROOT / path).read_text("utf-8"))
            counts[f"{kind} {room(path)}"] += count
            if kind == "python" and path.parts[0] == "gpt2block":
                counts["python all of gpt2block"] += count
    return dict(sorted(counts.items()))


def limits() -> dict[str, int]:
    """Read size.toml: a line for each limit, as in `"python tests" = 44541`."""
    lines = re.findall(r'^"(.+)" = (\d+)$', LIMITS.read_text("utf-8"), re.MULTILINE)
    return {name: int(limit) for name, limit in lines}


def excesses(counts: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """Return a sentence for each count without a limit or above its limit."""
    return [
        f"{name}: {count} lines or words, but size.toml permits {allowed.get(name, 0)}"
        for name, count in counts.items()
        if count > allowed.get(name, 0)
    ]


def main() -> int:
    """Print the counts, or write them to size.toml."""
    counts = sizes()
    if "--write" in sys.argv[1:]:
        head = LIMITS.read_text("utf-8").split('\n"', 1)[0]
        LIMITS.write_text(
            "\n".join([head, *(f'"{n}" = {c}' for n, c in counts.items())]) + "\n", "utf-8"
        )
    allowed = limits()
    for name, count in counts.items():
        print(f"{count:8,} of {allowed.get(name, 0):8,}  {name}")
    problems = excesses(counts, allowed)
    print(*(problems or ["no limit is exceeded"]), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
