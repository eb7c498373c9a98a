"""Mutation testing: apply small wrong changes to the package, one at a time, and run its tests.

    pip install cosmic-ray coverage
    python tools/mutants.py --seed 1 --count 60 --trees ../before . \\
        --tests tests/files/test_gguf.py --modules gpt2block/files/checkpoints/*.py

The mutants are a seeded sample of changes in the modules of the last tree. Each is tried with tests
of every tree: the test functions that cover the changed line, or its module if the line runs only
on import or in fixtures. The first failure, or a run that takes too long, ends a trial. The trees
have the same modules; nothing is written to them. A path of --tests that a tree lacks is skipped.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

COPIED = ("gpt2block", "tests", "tools", "kernels_cu", "docs", "examples", "pyproject.toml",
          "README.md", "CHANGELOG.md", "CONTRIBUTING.md")  # fmt: skip
COVERAGE = "[run]\ndynamic_context = test_function\nsource = gpt2block\n"


class Mutant(NamedTuple):
    module: str
    line: int
    operator: str
    text: str  # text of the whole module


def meaning(text: str) -> str:
    """Return the syntax tree without docstrings and annotations, which are never evaluated."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if hasattr(node, name):
                setattr(node, name, None)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def places_of(text: str) -> dict[int, list[tuple[str, int]]]:
    """Return the operators and their occurrences by line."""
    found, nodes = defaultdict(list), list(ast_nodes(get_ast(text)))
    for name in sorted(operator_names()):
        if not get_operator(name).arguments():
            places = [at for node in nodes for at in get_operator(name)().mutation_positions(node)]
            for n, ((line, _), _) in enumerate(places):
                found[line].append((name, n))
    return found


def made(module: str, text: str, line: int, operator: str, occurrence: int) -> Mutant | None:
    """Return the mutant, or None if it is equivalent or no valid Python."""
    changed = mutate_code(text, get_operator(operator)(), occurrence)
    try:
        same = changed is None or meaning(changed) == meaning(text)
    except SyntaxError:
        return None
    return None if same else Mutant(module, line, operator.removeprefix("core/"), changed)


def chosen(root: Path, modules: Sequence[str], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants, spread evenly over the modules and over their lines."""
    rng = random.Random(seed)
    texts = {module: (root / module).read_text(encoding="utf-8") for module in sorted(modules)}
    places = {module: places_of(text) for module, text in texts.items()}
    taken: list[Mutant] = []
    while len(taken) < count and (left := [module for module in places if places[module]]):
        for module in rng.sample(left, len(left)):
            line = rng.choice(sorted(places[module]))
            tried = places[module].pop(line)
            for place in rng.sample(tried, len(tried)):
                if mutant := made(module, texts[module], line, *place):
                    taken.append(mutant)
                    break
    return taken[:count]


class Tree:
    """A copy of a checkout in which mutants are tried."""

    def __init__(self, source: Path, folder: Path, tests: Sequence[str]) -> None:
        self.folder = folder
        for name in COPIED:
            if (source / name).is_dir():
                shutil.copytree(source / name, folder / name)
            elif (source / name).exists():
                shutil.copy(source / name, folder / name)
        self.tests = [name for name in tests if (folder / name).exists()]
        (folder / "coveragerc").write_text(COVERAGE)
        began = perf_counter()
        watched = ["-m", "coverage", "run", "--rcfile=coveragerc", "-m", "pytest"]
        done = self._run([*watched, *self.tests])
        if done.returncode:
            raise SystemExit(f"{source}: the tests fail without a mutant:\n{done.stdout[-3000:]}")
        took_s = perf_counter() - began
        print(f"{source}: {len(self.tests)} files of tests, {took_s:.0f} s", flush=True)
        report = ["json", "--rcfile=coveragerc", "--show-contexts", "-q", "-o", "lines.json"]
        self._run(["-m", "coverage", *report])
        self.files = json.loads((folder / "lines.json").read_text())["files"]

    def _run(self, arguments: Sequence[str], timeout: float | None = None) -> Any:
        command = [sys.executable, *arguments]
        if "pytest" in arguments:
            command += ["-q", "-x", "-p", "no:cacheprovider"]
        paths = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            command, cwd=self.folder, env=environment, timeout=timeout, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return tests that cover the line; if it runs on import or in fixtures, the module."""
        lines: dict[str, list[str]] = self.files.get(mutant.module, {}).get("contexts", {})
        names = {name for name in lines.get(str(mutant.line), []) if name}
        if not names:
            names = {name for line in lines.values() for name in line if name}
        tests = []
        for name in sorted(names):
            module, _, function = name.rpartition(".")
            file = module.replace(".", "/") + ".py"
            if file in self.tests:
                tests.append(f"{file}::{function}")
        return tests or self.tests

    def finds(self, mutant: Mutant, limit_s: float) -> str:
        """Return the first test that fails, "time" if a run takes too long, or ""."""
        path = self.folder / mutant.module
        right = path.read_text(encoding="utf-8")
        path.write_text(mutant.text, encoding="utf-8")
        try:
            done = self._run(["-m", "pytest", *self.tests_of(mutant)], timeout=limit_s)
        except subprocess.TimeoutExpired:
            return "time"
        finally:
            path.write_text(right, encoding="utf-8")
        if not done.returncode:
            return ""
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"exit code {done.returncode}"


def shown(right: str, mutant: Mutant) -> str:
    """Return the lines that differ."""
    lines = difflib.unified_diff(right.splitlines(), mutant.text.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Try mutants with the tests of checkouts.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--trees", type=Path, nargs="+", required=True)
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--modules", nargs="+", required=True)
    parser.add_argument("--limit-s", type=float, default=300, help="time limit of a mutant's tests")
    arguments = parser.parse_args()
    root: Path = arguments.trees[-1]
    mutants = chosen(root, arguments.modules, arguments.seed, arguments.count)
    missed = [0] * len(arguments.trees)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = []
        for n, source in enumerate(arguments.trees):
            (folder := Path(scratch, str(n))).mkdir()
            trees.append(Tree(source, folder, arguments.tests))
        for n, mutant in enumerate(mutants, 1):
            outcomes = [tree.finds(mutant, arguments.limit_s) for tree in trees]
            missed = [count + (not test) for count, test in zip(missed, outcomes, strict=True)]
            print(f"{n}. {mutant.module}:{mutant.line} {mutant.operator}")
            print(shown((root / mutant.module).read_text(encoding="utf-8"), mutant))
            for source, test in zip(arguments.trees, outcomes, strict=True):
                print(f"    {source}: {test or 'NOT FOUND'}", flush=True)
    for source, count in zip(arguments.trees, missed, strict=True):
        print(f"{source}: {len(mutants) - count} of {len(mutants)} found")


if __name__ == "__main__":
    main()
