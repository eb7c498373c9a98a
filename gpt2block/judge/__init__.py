"""Check a user's CUDA kernel for an operation, and time it next to the built-in kernels.

`check` is the interface for Python, in `kernel_check`; it returns a `Verdict`. `folder` checks all
kernels of a folder. `source` reads the `.cu` file, `arguments` lists the arguments of each
operation's kernels, and `kernel` matches parameters with arguments. `cases` has the sizes and
inputs of the checks, and `comparison` compares results with float64. `on_cpu` runs checks on the
emulator, after `refused` has compiled the file with NVRTC.
`on_gpu` runs checks and the benchmark in a child process. `why` traces the threads of a problem,
and `why_page` shows their steps. `templates` has a starter file for each operation.

Imports `gpt2block.ops` and `gpt2block.emulator`; only `gpt2block.apps` may import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2block.judge.finding import Finding
    from gpt2block.judge.kernel_check import check
    from gpt2block.judge.verdict import Verdict

__all__ = ["Finding", "Verdict", "check"]
_MODULE_OF = {"check": "kernel_check", "Finding": "finding", "Verdict": "verdict"}


if not TYPE_CHECKING:  # lazy: shell completion imports `solutions`, but not the checks

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
