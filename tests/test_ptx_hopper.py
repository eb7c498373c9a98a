"""Kernels of kernels_cu for sm_90a on the PTX engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpt2block import ops
from gpt2block.emulator import emulated, stand_in
from tests.attentions import assert_right
from tests.products import KERNELS, Case
from tests.test_attention_mma import made

pytestmark = pytest.mark.slow  # the engine is compiled first


@pytest.fixture
def cp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the substitute of CuPy, for a device of compute capability 9.0."""
    for name in ("float64", "exp", "abs", "where", "nextafter"):  # for the references
        monkeypatch.setattr(stand_in, name, getattr(np, name), raising=False)
    with emulated(checks=stand_in.CHECKED, capability="90") as cupy:
        yield cupy


HOPPER = [name for name in KERNELS if "hopper" in name]


@pytest.mark.parametrize("name", HOPPER)
def test_products(name: str, cp: Any) -> None:
    kernel, case = KERNELS[name], Case(70, 128, 192)
    given = kernel.made(case)
    kernel.assert_right(kernel.run(cp, given, case, False, ()), given, case, "gpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "B", "T"), [("float16", 2, 30), ("bfloat16", 16, 40)])
def test_attention(dtype: str, B: int, T: int, causal: bool, cp: Any) -> None:
    x = made(dtype, B * T, 1).reshape(B, T, -1)
    got = ops.attention(cp.asarray(x), 1, causal, "hopper").get()
    assert_right(got.reshape(B * T, -1), x.reshape(B * T, -1), [T] * B, (1, 1, 64), causal)
