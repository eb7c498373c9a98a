"""RMSNorm with a residual, and of views. test_norm_laws.py has the requirements of all norms."""

from __future__ import annotations

import numpy as np
import pytest

from gpt2block import ops
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import row_stride
from tests.devices import H200, on_every_device, on_one_order, running_on
from tests.norms import KERNELS, Shape
from tests.plain import normal


@on_every_device
@pytest.mark.parametrize(
    ("dtype", "M", "shape"),
    [
        ("float32", 5, Shape(300, 0, apart=4)),
        ("float16", 17, Shape(48, 0, apart=16)),
        ("bfloat16", 2, Shape(70)),
        ("float16", 2, Shape(32_776)),  # too long for registers
    ],
    ids=str,
)
def test_a_residual_is_added_first(where: str, dtype: str, M: int, shape: Shape) -> None:
    """Results have the bits of the norm of the sum, and the sum is stored too."""
    kernel, C = KERNELS[f"rmsnorm-{dtype}"], shape.C
    x, weight = kernel.inputs(M, C)
    residual = normal(1, M, C).astype(x.dtype)
    added = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    got, total = kernel(where, [x, weight, residual], shape)
    np.testing.assert_array_equal(total, added)
    np.testing.assert_array_equal(got, kernel(where, [added, weight], shape)[0])


@on_one_order
def test_views_are_read_where_they_are_or_copied(where: str) -> None:
    kernel = KERNELS["rmsnorm-float16"]
    host, (_, weight) = kernel.inputs(4, 6, 96)[0], kernel.inputs(1, 32)
    with running_on(where, H200):
        x, w = cupy.asarray(host), cupy.asarray(weight)
        for view, expected, stride in (
            (x[..., 32:64], host[..., 32:64], 96),
            (x[..., 1:33], host[..., 1:33], 96),
            (x[1, 2, :32], host[1, 2, :32], 32),
            (x[:, 2, :32], host[:, 2, :32], 576),
            (x[::2, :, :32], host[::2, :, :32], None),
            (x[:, ::-1, :32], host[:, ::-1, :32], None),
            (x[0, ::-1, :32], host[0, ::-1, :32], -96),
            (x[:1, :, None, :32], host[:1, :, None, :32], 96),
            (x.reshape(4, 192, 3)[:, :32, 0], host.reshape(4, 192, 3)[:, :32, 0], None),
        ):
            assert row_stride("x", view) == stride
            got = ops.rmsnorm(view, w)
            assert got.flags.c_contiguous
            kernel.assert_right([got.get()], expected, weight)
        if where == "gpu":  # the emulator's arrays cannot be broadcast
            row, rows = host[0, 0, :32], (5, 32)
            assert row_stride("x", cupy.broadcast_to(x[0, 0, :32], rows)) == 0
            got = ops.rmsnorm(cupy.broadcast_to(x[0, 0, :32], rows), w)
            kernel.assert_right([got.get()], np.broadcast_to(row, rows), weight)
        two = ops.rmsnorm(x[..., :32], cupy.asarray(np.repeat(weight, 2))[::2])
        np.testing.assert_array_equal(two.get(), ops.rmsnorm(x[..., :32], w).get())
        out = cupy.empty((4, 6, 32), "float16")
        assert ops.rmsnorm(x[..., :32], w, out=out) is out
        np.testing.assert_array_equal(two.get(), out.get())
