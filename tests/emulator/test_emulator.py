"""The substitute of CuPy on the PTX engine, and mistakes in kernels of the course that it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.emulator import Order, emulated, missing, run, stand_in
from gpt2block.emulator.ptx.engine import CHECKED, LaunchError
from gpt2block.emulator.stand_in import USUAL, EmulatorError
from gpt2block.errors import KernelError
from tests.devices import assert_barriers_show, edited, with_source
from tests.plain import normal

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

Launch = Callable[[Order], NDArray[np.float32]]
ATTENTION, LAYERNORM = "learn/attention/skeleton.cu", "learn/layernorm/skeleton.cu"
MATMUL, ADD = "learn/matmul/skeleton.cu", "learn/elementwise/residual.cu"
PROBES = str(Path(__file__).parents[1] / "corpus" / "kernels" / "probes.cu")


def layernorm(order: Order) -> NDArray[np.float32]:
    out = np.empty((3, 300), np.float32)
    args = [normal(0, 3, 300), out, normal(1, 300), normal(2, 300), 3, 300]
    run(LAYERNORM, "layernorm_kernel", (3,), (256,), args, order=order)
    return out


def matmul(order: Order) -> NDArray[np.float32]:
    out = np.empty((17, 35), np.float32)
    args = [normal(0, 17, 50), normal(1, 50, 35), normal(2, 35), out, 17, 50, 35]
    run(MATMUL, "matmul_bias_tiled", (3, 2), (16, 16), args, order=order)
    return out


def attention(order: Order) -> NDArray[np.float32]:
    out = np.empty((2, 33, 48), np.float32)
    args, heads = [normal(0, 2, 33, 144), out, 33], (("NH", 3), ("HS", 16))
    options: dict[str, Any] = {"shared": 132, "defines": heads, "order": order}
    run(ATTENTION, "mha_causal_kernel", (33, 3, 2), (256,), args, **options)
    return out


def add(order: Order) -> NDArray[np.float32]:
    x: NDArray[np.float32] = normal(0, 300)
    run(ADD, "add_kernel", (2,), (256,), [x, x, x, 300], order=order)
    return x


@pytest.mark.parametrize(
    ("file", "launch", "barriers"),
    [(MATMUL, matmul, 2), (ATTENTION, attention, 2), ("lib/common.cuh", layernorm, 4)],
)
def test_a_missing_barrier_is_a_race(file: str, launch: Launch, barriers: int) -> None:
    assert_barriers_show(file, launch, barriers)


@pytest.mark.parametrize(
    ("file", "launch", "old", "new", "said"),
    [
        (ADD, add, "i < n", "i <= n", r"out of bounds: .* 4 bytes at byte 1200 of \w$"),
        (MATMUL, matmul, "a_next = row_inside && k0", "a_next = k0", "reads 4 bytes at .* of A"),
        (ATTENTION, attention, "HS + tid] =", "HS + tid - 1] =",
         "writes 4 bytes at byte -4 of attn_out"),
        (ATTENTION, attention, "j < n_keys; j += G", "j <= n_keys; j += G",
         "out of bounds: .* reads 4 bytes at byte .* of scores"),
        ("lib/common.cuh", layernorm, "threadIdx.x < stride", "threadIdx.x <= stride", "race|out"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_kernel_of_the_course(
    file: str, launch: Launch, old: str, new: str, said: str
) -> None:
    launch("forward")
    with with_source(file, edited(file, old, new)), pytest.raises(EmulatorError, match=said):
        launch("forward")


def test_an_array_that_is_passed_twice_is_one_array() -> None:
    np.testing.assert_array_equal(add("shuffled"), 2 * normal(0, 300))


def test_threads_and_blocks_come_in_an_order() -> None:
    def turns(order: Order) -> list[int]:
        out = np.zeros(1024, np.int32)
        options: Any = {"order": order, "checks": USUAL}
        run(PROBES, "turns", (4,), (256,), [out, np.zeros(1, np.int32)], **options)
        return [int(n) for n in np.argsort(out, kind="stable") // 32]

    assert turns("forward") == sorted(turns("forward"))
    assert turns("reverse") == sorted(turns("forward"))[::-1]
    assert turns("shuffled") not in (turns("forward"), turns("reverse"))


def test_arguments_arrive_or_are_refused() -> None:
    def launch(*args: Any, threads: int = 1) -> None:
        run(PROBES, "numbers", (1,), (threads,), args)

    out = np.zeros(3, np.int64)
    launch(None, out, 2**40, -5, 2.25)
    assert out.tolist() == [2**40, -5, 9]
    for wrong, said in (
        ((None, out, 0, 2**31, 0.0), "int i: 2147483648 does not fit"),
        ((None, out, 0), "got 3 arguments"),
        ((np.zeros(1), out, 0, 0, 0.0), "float\\* none: got float64"),
    ):
        with pytest.raises(KernelError, match=said):
            launch(*wrong)
    with pytest.raises(LaunchError, match="1 to 1024 threads"):
        launch(None, out, 0, 0, 0.0, threads=1025)


def test_a_kernel_that_does_not_compile_names_its_line() -> None:
    text = edited(ADD, "y[i] = a[i]", "y[i] = wrong[i]")
    with with_source(ADD, text), pytest.raises(KernelError, match=r'residual\.cu:\d+.*"wrong"'):
        add("forward")


def test_a_kernel_that_does_not_end() -> None:
    text = edited(ADD, "if (i < n)", "while (n)")
    checks = CHECKED._replace(errors=False, budget=10_000)
    with with_source(ADD, text), pytest.raises(EmulatorError, match=r"endless: .*budget"):
        run(ADD, "add_kernel", (1,), (1,), [np.ones(2, np.float32)] * 3 + [2], checks=checks)


def test_the_emulated_device() -> None:
    seen = []
    for capability, multiprocessors in (("80", 4), ("90", 7)):
        with emulated("forward", multiprocessors, capability=capability) as cupy:
            device = cupy.cuda.Device()
            count = device.attributes["MultiProcessorCount"]
            seen.append((device.compute_capability, count, device.id))
    assert [each[:2] for each in seen] == [("80", 4), ("90", 7)]
    assert seen[0][2] != seen[1][2]  # caches of one device are not used for the other


def test_memory_with_two_owners_is_allocated_as_long_as_one_lives() -> None:
    memory = bytearray(1200)
    kept, dropped = (np.frombuffer(memory, np.float32) for _ in range(2))
    x = stand_in.adopt(kept)
    address = x.data.ptr
    stand_in.adopt(dropped)
    del dropped
    assert stand_in._allocation(address) == (address, kept.nbytes)
    del x, kept
    assert stand_in._allocation(address) is None
