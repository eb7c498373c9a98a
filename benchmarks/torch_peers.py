"""PyTorch implementations to compare with: eager, compiled, or by cuBLASLt and cuDNN.

For a block in 16 bits the compiler searches for the fastest products (max-autotune), which takes up
to a minute for each shape, until all searches together have taken SEARCH_S. Otherwise, as for
float32, where cuBLAS is fastest anyway, and for a product with an epilogue, the compiler leaves
products to cuBLAS, and fuses and tunes the other operations.

Import this module before CuPy uses cuBLAS, so that PyTorch's cuBLAS is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks import token_peers, torch_functions
from benchmarks.torch_functions import Function, Tensor, tensor
from gpt2block import bench
from gpt2block.bench.ceilings import TF32
from gpt2block.bench.race import Capture, Captured, Contender, first_and_last
from gpt2block.bench.works import Sets, Work
from gpt2block.cli.bench import print_report
from gpt2block.cli.display import console, print_json, tracked
from gpt2block.cuda import cupy
from gpt2block.ops.workload import Host
from gpt2block.weights.matrix import WeightMatrix

SEARCH_S = 120.0
SEARCH = "max-autotune-no-cudagraphs"
NO_SEARCH = {"max_autotune_pointwise": True}


def compare(works: list[Work], as_json: bool) -> bool:
    """Time works by gpt2block and PyTorch; print tables or JSON; return Report.right."""
    report = bench.run(works, progress=_tidied, peers=TorchPeers().contenders_of)
    cudnn = str(torch.backends.cudnn.version())
    torchs = {"torch": torch.__version__, "torch's CUDA": torch.version.cuda, "cuDNN": cudnn}
    report = replace(report, versions={**report.versions, **torchs})
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(console(), report)
    return report.right


def _tidied(works: list[Work]) -> Iterator[Work]:
    """Yield works; after each, free PyTorch's unused memory and compiled functions."""
    for work in tracked(works, "benchmarks"):
        yield work
        torch.compiler.reset()
        torch.cuda.empty_cache()


def operation_peers(
    operation: str, dtype: str, inputs: Sequence[tuple[Any, ...]]
) -> list[Contender]:
    """Return PyTorch's function of an operation as two contenders, eager and compiled, not in TF32.

    inputs: CuPy arrays, on whose memory the contenders run. Their results are not checked.
    """
    tensors = [tuple(map(tensor, arrays)) for arrays in inputs]
    if operation in torch_functions.PREPARED:
        more = torch_functions.PREPARED[operation](tensors[0][0])
        tensors = [(*arrays, *more) for arrays in tensors]
    eager = torch_functions.FUNCTIONS[operation]
    functions = {"torch": eager, "torch.compile": torch.compile(eager, mode=SEARCH)}

    def capture(function: Function, rounds: int) -> Captured:
        return captured(function, tensors, rounds)._replace(outs=())

    return [Contender(name, True, partial(capture, f), dtype) for name, f in functions.items()]


def captured(
    function: Function, sets: Sequence[tuple[Tensor, ...]], rounds: int, tf32: bool = False
) -> Captured:
    """Capture a CUDA graph that calls `function` on every copy of the inputs, `rounds` times.

    tf32: whether inputs of float32 products may be rounded to TensorFloat-32.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with torch.no_grad():  # compile `function` in the mode in which it is captured below
            for arguments in sets:
                function(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The compiler's threads may still load kernels, which would invalidate a "global" capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
            for _ in range(rounds):  # keep each output until the next round replaces it
                outs = [function(*arguments) for arguments in sets]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return Captured(graph.replay, first_and_last(outs), (graph, outs, function, sets))


class TorchPeers:
    """Create PyTorch's implementations of benchmarks; limit the time of the compiler's searches."""

    def __init__(self) -> None:
        self._searched_s = 0.0

    def contenders_of(self, work: Work, sets: Sets) -> Iterator[Contender]:
        """Yield PyTorch's implementations of a benchmark. sets: copies of the inputs."""
        for_peers, dtype = work.for_peers, work.dtype
        if for_peers is None:
            return
        if work.what == "block":
            functions = torch_functions.blocks(**for_peers)
            yield from self.contenders(functions, sets, dtype, search=dtype != "float32")
        elif work.what == "attention":
            functions = torch_functions.attentions(**for_peers)
            yield from self.contenders(functions, sets, dtype, compiled=False, tf32=False)
        elif work.what == "gemm":
            functions = torch_functions.products(**for_peers)
            yield from self.contenders(functions, sets, dtype, compiled=any(for_peers.values()))
        else:
            yield from token_peers.contenders(for_peers, self.repeated)

    def contenders(
        self,
        functions: Mapping[str, Function],
        sets: Sequence[Host],
        dtype: str,
        compiled: bool = True,
        search: bool = False,
        tf32: bool = True,
    ) -> Iterator[Contender]:
        """Yield for each of `functions` a Contender that calls it on each copy of the inputs.

        sets: copies of the inputs. compiled: also compile the first function. search: let the
        compiler search for the fastest products while time is left. tf32: also compute float32
        products in TF32.
        """
        tensors = [arguments_of(each) for each in sets]
        for rounded in (False, True) if tf32 and dtype == "float32" else (False,):
            suffix, arithmetic = (", TF32", TF32) if rounded else ("", dtype)
            for name, function in functions.items():
                capture = partial(_capture, function, tensors, rounded)
                yield Contender(name + suffix, True, capture, arithmetic)
            if compiled:
                first = next(iter(functions.values()))
                compiling, note = self._compiling(first, tensors, rounded, search)
                yield Contender("torch.compile" + suffix, True, compiling, arithmetic, note)

    def _compiling(
        self, function: Function, tensors: list[Any], tf32: bool, search: bool
    ) -> tuple[Capture, Callable[[], str]]:
        """Return a `capture` that first compiles `function`, and a function that returns a note."""
        compiled: list[Function] = []
        note = ""

        def capture(rounds: int) -> Captured:
            nonlocal note
            if compiled:
                return _capture(compiled[0], tensors, tf32, rounds)
            searched = search and self._searched_s < SEARCH_S
            note = SEARCH if searched else "products by cuBLAS, the rest tuned"
            compiled.append(self.compiled(function, searched))
            start = perf_counter()
            found = _capture(compiled[0], tensors, tf32, rounds)
            if searched:
                self._searched_s += perf_counter() - start
            return found

        return capture, lambda: note

    def compiled(self, function: Function, search: bool = False) -> Function:
        """Compile a function for fixed shapes. search: whether to autotune matrix products."""
        from torch import _inductor  # noqa: PLC0415
        from torch._inductor import select_algorithm  # noqa: PLC0415

        select_algorithm.PRINT_AUTOTUNE = False  # suppress a printed table for every product
        options = _inductor.list_mode_options(SEARCH) if search else NO_SEARCH
        compiled: Function = torch.compile(function, dynamic=False, options=options)
        return compiled

    def repeated(self, function: Function, arguments: tuple[Any, ...]) -> Callable[[], Tensor]:
        """Compile and capture a call; return a function that replays it and returns its output."""
        run = captured(self.compiled(function), [arguments], rounds=1)

        def replay() -> Tensor:
            run.replay()
            return run.outs[0]

        return replay


def _capture(function: Function, tensors: list[Any], tf32: bool, rounds: int) -> Captured:
    run = captured(function, tensors, rounds, tf32)
    return run._replace(outs=tuple(_array(in_rows(out)) for out in run.outs))


def in_rows(out: Tensor) -> Tensor:
    """Transpose a 4-D output (B, NH, T, HS) to (B, T, NH, HS); return other outputs unchanged."""
    return out.transpose(-2, -3) if out.ndim == 4 else out


def _array(out: Tensor) -> Any:
    if out.dtype == torch.bfloat16:
        return cupy.from_dlpack(out.view(torch.int16)).view("bfloat16")
    return cupy.from_dlpack(out)


def arguments_of(arrays: Host) -> Any:
    """Convert arrays to tensors; all but weight matrices get the first array's dtype."""
    tensors = [tensor(array) for array in arrays.values()]
    matrices = [isinstance(array, WeightMatrix) for array in arrays.values()]
    dtype = tensors[0].dtype
    return tuple(t if m else t.to(dtype) for t, m in zip(tensors, matrices, strict=True))
