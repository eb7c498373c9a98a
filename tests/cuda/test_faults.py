"""Failures on a GPU: of memory at every allocation, of a compiler, and of CuPy's cached files.

Each failure is a clear error, and the affected object gives right results afterwards.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy", reason="these tests need CuPy and a GPU")
import cupy as cp

from gpt2block import GPT2, Block, BlockWeights, GPT2Config, GPT2Weights, KernelError, random_input
from gpt2block.checks import FLOATS
from gpt2block.cuda import kernels, requests
from tests.command_line import python

pytestmark = pytest.mark.gpu
CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=128, n_ctx=64, vocab_size=96)
ROOT = Path(__file__).parents[2]


@contextmanager
def one_failing_allocation(number: int) -> Iterator[SimpleNamespace]:
    """Let the allocation of device memory with this number, from 0, fail."""
    pool = cp.get_default_memory_pool()
    seen = SimpleNamespace(count=0, failed=False)

    def allocate(size: int) -> Any:
        seen.count += 1
        if seen.count == number + 1:
            seen.failed = True
            raise cp.cuda.memory.OutOfMemoryError(size, 0)
        return pool.malloc(size)

    with cp.cuda.using_allocator(allocate):
        yield seen


def fail_each_allocation(
    make: Callable[[], Any],
    use: Callable[[Any], Any],
    check: Callable[[Any], None],
) -> int:
    """Let each allocation of `use(make())` fail in turn; return the number of failures.

    After each failure, `use` of the same object has to work.
    """
    for number in itertools.count():
        made, failure = make(), ""
        with one_failing_allocation(number) as seen:
            try:
                check(use(made))
            except MemoryError as error:
                failure = str(error)
        if not seen.failed:
            return number
        assert not failure or "Out of memory" in failure
        check(use(made))
    raise AssertionError


def same_as(expected: Any) -> Callable[[Any], None]:
    return lambda got: np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("dtype", "plan"), [("float32", "skeleton"), ("float32", "fused"), ("bfloat16", "fused")]
)
def test_memory_ends_in_a_block(dtype: str, plan: str) -> None:
    weights = BlockWeights.random(0, CONFIG)
    x = random_input(0, (17, 128)).astype(FLOATS[dtype])

    def make() -> Block:
        return Block(weights, device="cuda", dtype=dtype, kernels=plan)

    def call(block: Block) -> Any:
        return [block(x) for _ in range(3)][-1]  # launched, captured, replayed

    expected = call(make())
    assert fail_each_allocation(make, call, same_as(expected)) > 2
    made = fail_each_allocation(lambda: None, lambda _: call(make()), same_as(expected))
    assert made > 5
    steps = make().trace(x)
    assert fail_each_allocation(make, lambda block: block.trace(x)["x1"], same_as(steps["x1"]))


CALLS: dict[str, Callable[[GPT2], Any]] = {
    "logits": lambda model: model([range(1, 12), range(2, 9)])[1],
    "states": lambda model: model.hidden_states([[5, 6, 7]]),
    "embed": lambda model: model.embed([[1, 2, 3], [4] * 10]),
    "score": lambda model: model.score(list(range(90)), stride=16).log_likelihood,
    "generate": lambda model: [
        row.tokens
        for row in model.generate([[1, 2, 3], [9] * 9], max_new_tokens=6, temperature=0.7, seed=1)
    ],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", CALLS)
def test_memory_ends_in_a_model(dtype: str, name: str) -> None:
    weights = GPT2Weights.random(0, CONFIG)

    def make() -> GPT2:
        return GPT2(weights, device="cuda", dtype=dtype)

    expected = CALLS[name](make())
    failed = fail_each_allocation(make, CALLS[name], same_as(expected))
    assert failed >= 2  # at least the arena and an array of the call


def test_memory_ends_while_a_model_is_made() -> None:
    weights = GPT2Weights.random(0, CONFIG)

    def run(_: None) -> Any:
        return GPT2(weights, device="cuda")([[1, 2, 3, 4]])

    assert fail_each_allocation(lambda: None, run, same_as(run(None))) > 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_memory_ends_with_a_cache(dtype: str) -> None:
    """A failed call does not change the cache, so repeating the call is right."""
    model = GPT2(GPT2Weights.random(0, CONFIG), device="cuda", dtype=dtype)

    def make() -> Any:
        cache = model.new_cache()
        model([[1, 2, 3]], cache=cache)
        return cache

    def go_on(cache: Any) -> Any:
        assert list(cache.lengths) == [3]
        return model([[4, 5]], cache=cache, last=True)

    fail_each_allocation(make, go_on, same_as(go_on(make())))


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = BlockWeights.random(0, CONFIG), random_input(0, (5, 128))
    expected = Block(weights, device="cuda", kernels="skeleton")(x)
    block = Block(weights, device="cuda", kernels="skeleton")
    kernels._function.cache_clear()
    requests._kernels.clear()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "program", lambda *args: f"no CUDA, {args}")
        for _ in range(2):
            with pytest.raises(KernelError, match="does not compile"):
                block(x)
    np.testing.assert_array_equal(block(x), expected)


PROGRAM = """
from gpt2block import Block, BlockWeights, GPT2Config, random_input
block = Block(BlockWeights.random(0, GPT2Config(n_head=2, n_embd=128)), device="cuda")
print(block(random_input(0, (5, 128))).tobytes().hex())
"""


DAMAGES: tuple[Callable[[Path], Any], ...] = (
    lambda file: file.unlink(),
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"),
    lambda file: file.write_bytes(os.urandom(5000)),
)


def test_a_damaged_cache_of_compiled_kernels(tmp_path: Path) -> None:
    """Kernels are compiled again, whatever happened to the files."""
    folder = tmp_path / "kernels"

    def run() -> str:
        environment = {**os.environ, "CUPY_CACHE_DIR": str(folder)}
        done = python(PROGRAM, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = run()
    for damage in DAMAGES:
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert files
        for file in files:
            damage(file)
        assert run() == expected
