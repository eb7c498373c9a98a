"""PyTorch implementations to compare with: eager, compiled, or by cuBLASLt and cuDNN.

For a block in 16 bits the compiler searches for the fastest products (max-autotune), which takes up
to a minute for each shape, until all searches together have taken SEARCH_S. Otherwise, as for
float32, where cuBLAS is fastest anyway, and for a product with an epilogue, the compiler leaves
products to cuBLAS, and fuses and tunes the other operations.

Import this module before CuPy uses cuBLAS, so that PyTorch's cuBLAS is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks import token_peers, torch_functions
from benchmarks.kernel_works import PRODUCTS, block_weights
from benchmarks.reports import released
from benchmarks.run import Report, run
from benchmarks.token_works import ModelWork
from benchmarks.torch_functions import Function, Tensor, tensor
from benchmarks.works import Sets, Work
from gpt2block.cuda import cupy
from gpt2block.errors import InputError
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.bench.ceilings import TF32
from gpt2block.ops.bench.race import Capture, Captured, Contender, first_and_last, first_line
from gpt2block.ops.workload import Host

SEARCH_S = 120.0
SEARCH = "max-autotune-no-cudagraphs"
NO_SEARCH = {"max_autotune_pointwise": True}


def compare(works: list[Work]) -> tuple[Report, set[str]]:
    """Time works by gpt2block and PyTorch; return the report and the names of PyTorch's lines."""
    names: set[str] = set()
    peers = TorchPeers()
    report = run(_tidied([_with_peers(work, peers, names) for work in works]))
    for note in sorted(peers.notes):
        print(note, file=sys.stderr)
    cudnn = str(torch.backends.cudnn.version())
    torchs = {"torch": torch.__version__, "torch's CUDA": torch.version.cuda, "cuDNN": cudnn}
    return replace(report, versions={**report.versions, **torchs}), names


def _with_peers(work: Work, peers: TorchPeers, names: set[str]) -> Work:
    """Return the work with PyTorch's contenders after gpt2block's; add their names to `names`."""

    def contenders(sets: Sets, device: int) -> Iterator[Contender]:
        yield from work.ours(sets, device)
        for each in peers.contenders_of(work, sets):
            names.add(each.name)
            yield replace(each, capture=partial(_guarded_capture, each.capture))

    return replace(work, ours=contenders)


def _guarded_capture(capture: Capture, rounds: int) -> Captured:
    """Capture a graph whose errors of any type are InputErrors, with which other contenders run."""
    found: Captured = _guarded(capture, rounds)
    return found._replace(replay=partial(_guarded, found.replay))


def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise InputError(first_line(error)) from error


def _tidied(works: list[Work]) -> Iterator[Work]:
    """Yield works; after each, free PyTorch's unused memory and compiled functions."""
    for work in released(works):
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

    return [Contender(name, partial(capture, f), dtype) for name, f in functions.items()]


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
        self._work = ""  # kind, dtype and name of the work that runs
        self.notes: set[str] = set()  # lines of text about contenders that ran

    def contenders_of(self, work: Work, sets: Sets) -> Iterator[Contender]:
        """Yield PyTorch's implementations of a benchmark. sets: copies of the inputs."""
        self._work = f"{work.what} {work.dtype} {work.name}"
        dtype, causal = work.dtype, bool(work.sizes.get("causal"))
        if isinstance(work, ModelWork):
            yield from token_peers.contenders(work.task, self.repeated)
        elif work.what == "block":
            functions = torch_functions.blocks(block_weights(dtype).eps, causal)
            yield from self.contenders(functions, sets, dtype, search=dtype != "float32")
        elif work.what == "attention":
            functions = torch_functions.attentions(causal)
            yield from self.contenders(functions, sets, dtype, compiled=False, tf32=False)
        else:
            _, _, gelu, residual = PRODUCTS[work.name.split()[0]]
            functions = torch_functions.products(gelu, residual)
            yield from self.contenders(functions, sets, dtype, compiled=gelu or residual)

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
                yield Contender(name + suffix, capture, arithmetic)
            if compiled:
                first = next(iter(functions.values()))
                compiling = self._compiling(first, tensors, rounded, search)
                yield Contender("torch.compile" + suffix, compiling, arithmetic)

    def _compiling(
        self, function: Function, tensors: list[Any], tf32: bool, search: bool
    ) -> Capture:
        """Return a `capture` that first compiles `function`."""
        compiled: list[Function] = []

        def capture(rounds: int) -> Captured:
            if compiled:
                return _capture(compiled[0], tensors, tf32, rounds)
            searched = search and self._searched_s < SEARCH_S
            how = SEARCH if searched else "products by cuBLAS, the rest tuned"
            self.notes.add(f"torch.compile, {self._work}: {how}")
            compiled.append(self.compiled(function, searched))
            start = perf_counter()
            found = _capture(compiled[0], tensors, tf32, rounds)
            if searched:
                self._searched_s += perf_counter() - start
            return found

        return capture

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
