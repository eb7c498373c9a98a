"""Plant the bugs of tests/planted_bugs.toml, one at a time, to measure how many the tests find.

    python -m tools.planted_bugs [--only TEXT] [--check]

Each bug is a plausible mistake in one place, and names a test that finds it. The tests run in a
copy of the tree. --only: bugs whose id contains this text. --check: only search for the text that
each bug replaces. The exit code is 1 unless every bug is found, or skipped: its test needs what is
not installed, such as the extra eval. Needs Python 3.11.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BUGS = ROOT / "tests" / "planted_bugs.toml"
LIMIT_S = 300  # seconds per test at most
# Messages of code that does not run at all, which any test would find
BROKEN = re.compile(
    r"(?m)^E +((Import|ModuleNotFound|Syntax|Indentation|Name|UnboundLocal)Error\b.*|"
    r"\S*(KernelError: \S+ does not compile|LaunchError: g\+\+ cannot compile))"
)
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*cache", "__pycache__")


class Bug(NamedTuple):
    """A bug: `new` replaces the only `old` in `file`. why: its effect. test: a pytest id."""

    id: str
    file: str
    old: str
    new: str
    test: str
    why: str

    def problem(self) -> str:
        """Return the reason why the bug cannot be planted, or ""."""
        path = ROOT / self.file
        places = path.read_text("utf-8").count(self.old) if path.is_file() else 0
        return "" if places == 1 else f"broken: its text is in {places} places of {self.file}"


def read_bugs() -> list[Bug]:
    import tomllib  # type: ignore[import-not-found]  # noqa: PLC0415

    return [Bug(**entry) for entry in tomllib.loads(BUGS.read_text("utf-8"))["bug"]]


def outcome(tree: Path, test: str) -> str:
    """Return "passed", "failed", or the reason why the test has neither result."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    # No .pyc files: Python would reuse one after an edit in the same second with the same length.
    # Programs of the emulator can be reused: their keys contain the texts of kernel and headers.
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    env["GPT2BLOCK_CPU_CUDA_CACHE"] = str(tree / ".programs")
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"still running after {LIMIT_S} s"
    if wrong := BROKEN.search(done.stdout):
        return str(wrong[0])
    if done.returncode == 0 and re.search(r"\b\d+ passed", done.stdout):
        return "passed"
    return "failed" if done.returncode == 1 else done.stdout.strip().rpartition("\n")[2]


def planted(bug: Bug, tree: Path, clean: dict[str, str]) -> str:
    """Return "found", "missed", "skipped: …" or "broken: …". clean: results without a bug."""
    if bug.test not in clean:
        clean[bug.test] = outcome(tree, bug.test)
    if (result := clean[bug.test]) != "passed":
        return f"{'skipped' if ' skipped' in result else 'broken'}: without the bug, {result}"
    file = tree / bug.file
    text = file.read_text("utf-8")
    file.write_text(text.replace(bug.old, bug.new), "utf-8")
    got = outcome(tree, bug.test)
    file.write_text(text, "utf-8")
    return {"failed": "found", "passed": "missed"}.get(got, f"broken: {got}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--check", action="store_true")
    only, check = vars(parser.parse_args()).values()
    verdicts: Counter[str] = Counter()
    clean: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as folder:
        if not check:
            shutil.copytree(ROOT, folder, ignore=NOT_COPIED, dirs_exist_ok=True)
        for bug in (bug for bug in read_bugs() if only in bug.id):
            verdict = bug.problem() or ("ready" if check else planted(bug, Path(folder), clean))
            verdicts[verdict.partition(":")[0]] += 1
            print(f"{bug.id:44} {verdict}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in verdicts.items()))
    return int(not {*verdicts} <= {"found", "ready", "skipped"})


if __name__ == "__main__":
    sys.exit(main())
