"""CUDA in a forked process fails if the parent had initialized it; the error names the fix."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpt2block import Block, BlockWeights, GPT2Config, cuda, emulator, random_input
from gpt2block.checks import FLOATS
from gpt2block.cuda import doctor
from tests.command_line import python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
SMALL = GPT2Config(n_head=3, n_embd=48)
REFUSED = f"DeviceError: {cuda.FORKED}: {cuda.FORKED_FIX}"


def in_a_fork(call: Callable[[], Any]) -> str:
    """Call in a forked process; return "fine" or the error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            said = "fine"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode()


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Use the emulator as module cupy. by: id of the process that initialized CUDA, or None."""
    if problem := emulator.missing():
        pytest.skip(problem)
    from gpt2block.emulator import stand_in  # noqa: PLC0415

    state = SimpleNamespace(by=os.getpid())

    def cu_init() -> int:
        return 0 if state.by in (None, os.getpid()) else cuda.NOT_INITIALIZED

    monkeypatch.setattr(cuda, "initialized", cu_init)
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setattr(doctor, "cuda_problem", lambda: None)
    found = dict(vars(cuda.cupy))
    vars(cuda.cupy).clear()
    yield state
    vars(cuda.cupy).clear()
    vars(cuda.cupy).update(found)


def test_a_forked_process_says_what_to_do(initialized: SimpleNamespace) -> None:
    x, weights = random_input(0, (2, 48)), BlockWeights.random(0, SMALL)
    block = Block(weights, device="cuda")
    expected = block(x)

    def again() -> None:
        assert in_a_fork(lambda: block(x)) == REFUSED

    for call in (lambda: block(x), lambda: Block(weights, device="cuda"), lambda: Block(weights)):
        assert in_a_fork(call) == REFUSED
    assert in_a_fork(again) == "fine"
    np.testing.assert_array_equal(block(x), expected)
    initialized.by = None  # CuPy was only imported
    assert in_a_fork(lambda: np.testing.assert_array_equal(block(x), expected)) == "fine"


@pytest.mark.usefixtures("initialized")
def test_numpy_works_in_a_forked_process() -> None:
    x, weights = random_input(0, (2, 48)), BlockWeights.random(0, SMALL)
    Block(weights, device="cuda")
    for dtype in ("float32", "bfloat16"):  # bfloat16 checks whether matrices are CuPy's
        given = x.astype(FLOATS[dtype])
        assert in_a_fork(partial(on_cpu, weights, dtype, given)) == "fine"


def on_cpu(weights: BlockWeights, dtype: str, x: Any) -> None:
    Block(weights, device="cpu", dtype=dtype)(x)


def test_the_emulator_works_in_a_forked_process() -> None:
    if problem := emulator.missing():
        pytest.skip(problem)
    x = random_input(0, (2, 48))
    with emulator.emulated():
        block = Block(BlockWeights.random(0, SMALL), device="cuda")
        expected = block(x)
        assert in_a_fork(lambda: np.testing.assert_array_equal(block(x), expected)) == "fine"


def test_the_driver_of_a_forked_process() -> None:
    """If another library had initialized CUDA, the driver's error code shows it."""
    driver = doctor.Driver("x", cuda=(13, 0), code=cuda.NOT_INITIALIZED, error="cuInit returned 3")
    check = doctor.check_driver(driver, None)
    assert (check.ok, check.detail, check.fix) == (False, cuda.FORKED, cuda.FORKED_FIX)


QUIET = "import warnings; warnings.simplefilter('ignore')\n"
ON_A_GPU = """
import os, sys
import gpt2block
from gpt2block import Block, BlockWeights, GPT2Config, random_input
from tests.cuda.test_fork import in_a_fork
weights = BlockWeights.random(0, GPT2Config(n_head=3, n_embd=48))
x = random_input(0, (2, 48))
print(in_a_fork(lambda: Block(weights, device="cuda")(x)))  # nothing has initialized CUDA
model = gpt2block.from_pretrained("shakespeare", device="cuda")
block = Block(weights, device="cuda")
block(x)
for call in (lambda: block(x), lambda: block.trace(x), lambda: Block(weights, device="cuda"),
             lambda: Block(weights), lambda: model([1, 2]), lambda: model.embed(["A"]),
             lambda: model.generate("A", max_new_tokens=3),
             lambda: gpt2block.from_pretrained("shakespeare")):
    print(in_a_fork(call))
print(in_a_fork(lambda: Block(weights, device="cpu", dtype="bfloat16")))
block(x)
"""


@pytest.mark.gpu
def test_forked_processes_on_a_gpu() -> None:
    done = python(QUIET + ON_A_GPU, timeout=300, check=True)
    assert done.stdout.splitlines() == ["fine", *[REFUSED] * 8, "fine"]


@pytest.mark.gpu
def test_a_fork_after_torch_initialized_cuda() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    code = (
        "import torch; torch.zeros(1, device='cuda')\n"
        "from gpt2block import Block, BlockWeights, GPT2Config\n"
        "from tests.cuda.test_fork import in_a_fork\n"
        "weights = BlockWeights.random(0, GPT2Config(n_head=3, n_embd=48))\n"
        "print(in_a_fork(lambda: Block(weights, device='cuda')))\n"
    )
    done = python(QUIET + code, timeout=300, check=True)
    assert cuda.FORKED in done.stdout
