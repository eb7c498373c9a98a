"""Every variant of every operation, at two sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gpt2block import InputError
from gpt2block.ops import workload
from gpt2block.ops.registry import OPERATIONS, Operation

SMALL = {"B": 2, "T": 6, "C": 48, "NH": 3, "HS": 20, "V": 50, "M": 9, "K": 144, "N": 37}
SMALL |= {"H": 3, "D": 34}
LARGE = {"B": 2, "T": 70, "C": 192, "NH": 3, "HS": 64, "V": 500, "M": 130, "K": 288, "N": 144}
LARGE |= {"H": 3, "D": 64}
HEADS = {"C": 768}  # heads of 64 channels, which attention on tensor cores supports
Made = Iterator[tuple[str, Any]]


def operations(emulated: bool) -> Made:
    for operation_of in OPERATIONS.values():
        for wanted in (SMALL,) if emulated else (SMALL, LARGE):
            sizes = {name: wanted[name] for name in operation_of.workload.sizes}
            if operation_of.workload.matrices:
                sizes["N"] = 256  # whole heads
            yield from operation(operation_of, sizes)
            if operation_of.name == "attention":
                yield from operation(operation_of, sizes | HEADS)


def operation(of: Operation, sizes: dict[str, int]) -> Made:
    options = {**of.workload.attrs, **({"fill": 0.0} if "fill" in of.workload.attrs else {})}
    for dtype in of.workload.dtypes:
        for layout in ("KN", "NK") if of.workload.matrices else ("KN",):
            host, _ = workload.inputs_and_truth(of, sizes, dtype, layout)
            arrays = tuple(map(workload.uploaded, host))
            for variant in of.variants:
                chosen = options | workload.options_for(of, variant)
                name = f"{of.name} {variant.name} {dtype} {layout} {sizes}"
                with contextlib.suppress(InputError):
                    bound = of.bind(arrays, **chosen)
                    yield name, bound.run().get()
                    yield from ((f"{name} extra", array.get()) for array in bound.extra)
