"""Headers of CUDA's C++ libraries that a user's file may include, and the emulator's stand-ins."""

from __future__ import annotations

import re
from pathlib import Path

_STD = (
    "array bit cassert cfloat climits cmath cstddef cstdint cstdlib cstring functional "
    "initializer_list limits numeric optional tuple type_traits utility version"
)
_CUB = (
    "cub.cuh block/block_load.cuh block/block_reduce.cuh block/block_scan.cuh "
    "block/block_store.cuh thread/thread_operators.cuh warp/warp_reduce.cuh warp/warp_scan.cuh"
)
_TYPES = "builtin_types.h driver_types.h vector_functions.h vector_types.h"
LIBRARY = {
    **dict.fromkeys((f"cub/{name}" for name in _CUB.split()), "cub.h"),
    **dict.fromkeys((f"cuda/std/{name}" for name in _STD.split()), "cuda_std.h"),
    **dict.fromkeys(("cuda/cmath", "cuda/functional"), "cuda_std.h"),
    **dict.fromkeys(("cuda/atomic", "cuda/std/atomic"), "cuda_atomic.h"),
    **dict.fromkeys(("cuda/barrier", "cuda/pipeline"), "cuda_barrier.h"),
    "cuda_pipeline_primitives.h": "cuda_pipeline.h",
    **dict.fromkeys(_TYPES.split(), "cuda_runtime.h"),
}  # header of a CUDA library → header of this folder that replaces it
_INCLUDE = re.compile(r"(^[ \t]*#[ \t]*include[ \t]*)[<\"]([\w/.]+)[>\"]", re.MULTILINE)
# Headers of the C++ library that the stand-ins use. The loader includes these headers before the
# unnamed namespace of a kernel file.
_SYSTEM = """\
#include <array>
#include <bits/atomic_base.h>
#include <bits/stl_function.h>
#include <new>
#include <numeric>
#include <optional>
#include <tuple>
"""


def supported() -> list[str]:
    """Return the names of all headers of CUDA that a user's file may include."""
    here = Path(__file__).parent
    removed = ("cuda.h", "cuda_runtime_api.h")  # the loader removes their includes
    return sorted(
        {*LIBRARY, *removed, *(path.relative_to(here).as_posix() for path in here.rglob("*.h"))}
    )


def with_library(text: str) -> tuple[str, str]:
    """Return system headers for a kernel file, and its text with includes of the stand-ins."""

    def stand_in(found: re.Match[str]) -> str:
        return f"{found[1]}<{LIBRARY[found[2]]}>" if found[2] in LIBRARY else found[0]

    own = _INCLUDE.sub(stand_in, text)
    return ("" if own == text else _SYSTEM), own
