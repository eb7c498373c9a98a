"""Geometry of the launch that a variant makes for a job, computed without a device."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpt2block.cuda import kernels
from gpt2block.cuda.kernels import Geometry
from gpt2block.ops.operation import Variant


def stub(dtype: str = "float32", shape: tuple[int, ...] = (1,), address: int = 512) -> Any:
    """Return a substitute for an array on the device; no launch reads its values."""
    kind, data = np.dtype(dtype), SimpleNamespace(ptr=address)
    size = math.prod(shape)
    return SimpleNamespace(dtype=kind, itemsize=kind.itemsize, shape=shape, size=size, data=data)


def geometry_of(variant: Variant, job: Any) -> Geometry:
    """Return kernel, grid, block, shared memory and defines of the variant's only launch."""

    def load(file: str, name: str, defines: kernels.Defines = ()) -> Any:
        assert file == variant.file
        return SimpleNamespace(allow_shared=lambda nbytes: None, defines=defines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "load", load)
        made = variant.launch(job)
        (launch,) = made if isinstance(made, tuple) else (made,)
    return Geometry(launch.name, launch.grid, launch.block, launch.shared, launch.function.defines)
