"""Asynchronous copies, mbarriers, clusters and wgmma of the PTX engine: right and wrong kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from gpt2block.cuda.kernels import SOURCE_DIR
from gpt2block.emulator.ptx import nvrtc, parse
from gpt2block.emulator.ptx.engine import CHECKED, ORDERS, Result, launch
from gpt2block.emulator.ptx.tensor_maps import TensorMap

Array = npt.NDArray[Any]
FILE = Path(__file__).parents[1] / "corpus" / "kernels" / "asynchronous.cu"
KERNELS = {
    found[1]: found[0]
    for found in re.finditer(
        r'(?ms)^extern "C" __global__ void (?:__cluster_dims__\(.*?\) )?(\w+).*?^}$',
        FILE.read_text("ascii"),
    )
}  # name of a kernel: its text
every_order = pytest.mark.parametrize("order", ORDERS)


@cache
def _module(text: str) -> parse.Module:
    compiled = nvrtc.compile(
        f'#include "lib/sm90_wgmma.cuh"\n{text}',
        name="kernel.cu",
        arch="sm_90a",
        options=(f"-I{SOURCE_DIR}",),
    )
    assert isinstance(compiled, nvrtc.Compiled), compiled
    return parse.Module(compiled.ptx)


class Case(NamedTuple):
    """A launch of a kernel. args: its arguments with an array `to`. wanted: `to` afterwards."""

    args: Callable[[Array], list[Any]]
    wanted: Array
    block: int = 128
    grid: int = 1
    shared: int = 0

    def run(self, text: str, order: Any = "forward") -> tuple[Result, Array]:
        """Launch the only kernel of a source; return the result, and `to`."""
        module, to = _module(text), np.zeros(self.wanted.shape, np.float32)
        (kernel,) = (name for name, (entry, _) in module.functions.items() if entry)
        sizes = (self.grid,), (self.block,)
        checks = CHECKED._replace(budget=10**6)
        args, shared = self.args(to), self.shared
        return launch(module, kernel, *sizes, args, shared=shared, order=order, checks=checks), to


def _map(array: Array, swizzle: int) -> TensorMap:
    item, sizes = array.itemsize, tuple(reversed(array.shape))
    strides = tuple(reversed(array.strides[:-1]))
    return TensorMap(array.reshape(-1), 0, item, sizes, strides, (128 // item, 8, 1), swizzle)


def _boxes(given: Array, x: int, y: int, swizzle: int) -> Case:
    """Return a launch that copies the box at (x, y) of given[1] to (x + 1, y + 1) of `to`."""
    box = np.pad(given[1], 40)[40 + y : 48 + y, 40 + x : 72 + x]  # zero outside of the tensor
    wanted = np.zeros((14 + 80, 40 + 80), np.float32)
    wanted[41 + y : 49 + y, 41 + x : 73 + x] = box

    def args(to: Array) -> list[Any]:
        return [_map(given, swizzle), _map(to, swizzle), x, y]

    return Case(args, wanted[None, 40:-40, 40:-40], 32, shared=2048)


def _product(across: bool) -> Case:
    right = B.astype(np.float32)
    wanted = 1 + A.astype(np.float32) @ (right if across else right.T)
    return Case(lambda to: [A.view(np.uint16), B.view(np.uint16), to], wanted)


X, LANES = np.arange(64 * 7, dtype=np.float32), np.arange(31, -1, -1)
RANDOM = np.random.default_rng(1).standard_normal((2, 12, 36)).astype(np.float32)
A, B = np.random.default_rng(5).integers(-8, 9, (2, 64, 64)).astype(np.float16)
ODD = np.where(np.arange(128) % 2, X[128:256], 0)
CASES = {
    "copy": Case(lambda to: [X[:256].copy(), to], np.concatenate([X[127::-1], ODD[::-1]])),
    "pipeline": Case(lambda to: [X, to, 7], X.reshape(7, 64).sum(0)[::-1]),
    "boxes": _boxes(RANDOM, 0, 0, 128),
    "ring": Case(lambda to: [to], np.array([3, 0, 1, 2, 7, 4, 5, 6])[:, None] * 100 + LANES, 32, 8),
    "late": Case(lambda to: [to], np.array([[100], [0]]) + LANES, 96, 2),
    "everywhere": Case(lambda to: [X[:128].copy(), to], np.tile(X[:128], (4, 1)), 32, 4),
    "product": _product(False),
}


@every_order
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_right_kernel(kernel: str, order: str) -> None:
    result, to = CASES[kernel].run(KERNELS[kernel].replace("ACROSS", "false"), order)
    assert result.findings == ()
    np.testing.assert_array_equal(to, CASES[kernel].wanted)


@every_order
def test_a_product_with_a_transposed_matrix(order: str) -> None:
    case = _product(True)
    result, to = case.run(KERNELS["product"].replace("ACROSS", "true"), order)
    assert result.findings == ()
    np.testing.assert_array_equal(to, case.wanted)


@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (8, 3), (-4, -2), (28, 9)])
def test_boxes_are_zero_outside_of_the_tensor(x: int, y: int, swizzle: int) -> None:
    case = _boxes(RANDOM, x, y, swizzle)
    result, to = case.run(KERNELS["boxes"])
    assert result.findings == ()
    np.testing.assert_array_equal(to, case.wanted)


SYNC, WAIT = "    __syncthreads();\n", "wait_for_products<0>();"


@pytest.mark.parametrize(
    ("kernel", "old", "new", "found"),
    [
        ("copy", "wait_group 1", "wait_group 2", "race"),
        ("copy", 'asm volatile("cp.async.wait_all;" ::: "memory");', "", "unwritten"),
        ("copy", "__syncthreads();  // first", "", "race"),
        ("copy", "__syncthreads();  // second", "", "race"),
        ("copy", "from + threadIdx.x", "from + 2 * threadIdx.x", "out of bounds"),
        ("copy", '"r"(next)', '"r"(next + 2)', "misaligned"),
        ("pipeline", 'if (k > 1) wait(empty[k % 2], k / 2 - 1 & 1, "empty");', "",
         "race or barrier"),
        ("pipeline", 'wait(full[k % 2], k / 2 & 1, "full");', "", "race"),
        ("pipeline", "__syncwarp();\n", "", "race"),
        ("pipeline", "init(empty[i], 2)", "init(empty[i], 1)", "barrier"),  # too many arrivals
        ("pipeline", "init(empty[i], 2)", "init(empty[i], 3)", "endless or barrier"),
        ("pipeline", "arrive_and_expect(full[k % 2], 256)", "arrive(full[k % 2])",
         "unwritten or race"),
        ("pipeline", "from + 64 * k, 256", "from + 64 * k + 2, 256", "misaligned"),
        ("pipeline", "from + 64 * k, 256", "from + 64 * (k + 1), 256", "out of bounds"),
        ("pipeline", "init(full[i], 1), ", "", "barrier"),
        ("pipeline", SYNC, "", "barrier or race"),
        ("boxes", "wait_for_reads<0>();", "", "async"),
        ("boxes", 'wait(full, 0, "full");', "", "unwritten"),
        ("boxes", "load_box(s, ", "load_box(s + 16, ", "misaligned"),
        ("ring", "release_to_cluster();\n    acquire_from_cluster();", SYNC, "race"),
        ("ring", "release_to_cluster();", "arrive_in_cluster();", "race"),
        ("ring", "(rank + 1) % 4", "rank + 1", "out of bounds"),
        ("product", WAIT, "", "async"),
        ("product", WAIT, "wait_for_products<1>();", "async"),
        ("product", WAIT, f"s[1][64 * threadIdx.x] = 0; {WAIT}", "race"),
        ("product", SYNC, "", "race"),
    ],
)  # fmt: skip
def test_a_mistake_is_found(kernel: str, old: str, new: str, found: str) -> None:
    text = KERNELS[kernel].replace("ACROSS", "false")
    assert old in text
    result, _ = CASES[kernel].run(text.replace(old, new))
    assert result.findings
    assert result.findings[0].kind in found


def test_every_lane_knows_that_its_warp_has_read() -> None:
    begin = "__shared__ Barrier read; if (threadIdx.x == 0) init(read, 4); show_writes();"
    text = KERNELS["product"].replace("ACROSS", "false").replace("show_writes();", begin)
    arrives = "if (threadIdx.x % 32 == 1) arrive(read);"
    writes = 'if (threadIdx.x == 0) { wait(read, 0, "read"); s[0][0] = s[1][640] = 1; }'
    case = CASES["product"]
    assert not case.run(text.replace("// here", arrives + writes))[0].findings
    early = writes.replace('wait(read, 0, "read");', "")
    assert case.run(text.replace("// here", early))[0].findings
