"""Contenders of PyTorch: eager, compiled, and its libraries by name; gpt2block itself uses none.

For a block in 16 bits the compiler searches for the fastest products (max-autotune), which takes up
to a minute for each shape, until all searches together have taken SEARCH_S. Otherwise it leaves the
products to cuBLAS, and fuses and tunes the rest: so for float32, where cuBLAS wins anyway, and for
a product with an epilogue. This module imports PyTorch; `peers` imports it when it is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from gpt2block.bench import token_peers, torch_functions
from gpt2block.bench.ceilings import TF32
from gpt2block.bench.measure import Host
from gpt2block.bench.race import Capture, Captured, Contender, first_and_last
from gpt2block.bench.torch_functions import Function, Tensor, tensor
from gpt2block.bench.works import Sets, Work
from gpt2block.cuda import cupy
from gpt2block.weights.matrix import WeightMatrix

SEARCH_S = 120.0
SEARCH = "max-autotune-no-cudagraphs"
NO_SEARCH = {"max_autotune_pointwise": True}


def operation_peers(
    operation: str, inputs: Sequence[tuple[Any, ...]], dtype: str
) -> list[Contender]:
    """PyTorch's own operation on the CuPy arrays `inputs`, eager and compiled, without TF32.

    Their results are not checked.
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
    """A CUDA graph of `function` on all sets, `rounds` times, with the first output and the last.

    tf32: whether products of float32 may be rounded to TensorFloat-32.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with torch.no_grad():  # as in the capture, which must not compile again
            for arguments in sets:
                function(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The compiler's own threads may still load kernels, which would end a global capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
            for _ in range(rounds):  # each set's output lives until that of the next round
                outs = [function(*arguments) for arguments in sets]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return Captured(graph.replay, first_and_last(outs), (graph, outs, function, sets))


class TorchPeers:
    """PyTorch's contenders for one work after another; limits the time of the compiler's search."""

    def __init__(self, device: int) -> None:
        torch.cuda.set_device(device)
        self._searched_s = 0.0

    @property
    def versions(self) -> Mapping[str, str]:
        cudnn = torch.backends.cudnn.version()
        return {"torch": torch.__version__, "torch's CUDA": torch.version.cuda, "cuDNN": str(cudnn)}

    def contenders_of(self, work: Work, sets: Sets) -> Iterator[Contender]:
        """Those of a work, on copies of its inputs."""
        given, dtype = work.for_peers, work.dtype
        if given is None:
            return
        if work.what == "block":
            functions = torch_functions.blocks(**given)
            yield from self.contenders(functions, sets, dtype, search=dtype != "float32")
        elif work.what == "attention":
            functions = torch_functions.attentions(**given)
            yield from self.contenders(functions, sets, dtype, compiled=False, tf32=False)
        elif work.what == "gemm":
            functions = torch_functions.products(**given)
            yield from self.contenders(functions, sets, dtype, compiled=any(given.values()))
        else:
            yield from token_peers.contenders(given, self.repeated)

    def contenders(
        self,
        functions: Mapping[str, Function],
        sets: Sequence[Host],
        dtype: str,
        compiled: bool = True,
        search: bool = False,
        tf32: bool = True,
    ) -> Iterator[Contender]:
        """Functions of the inputs of a work, on copies of them.

        compiled: whether the first one is compiled, too. search: for the fastest products, while
        there is time for it. tf32: whether float32 is also multiplied in TF32.
        """
        tensors = [arguments_of(each) for each in sets]
        for rounded in (False, True) if tf32 and dtype == "float32" else (False,):
            suffix, arithmetic = (", TF32", TF32) if rounded else ("", dtype)
            for name, function in functions.items():
                capture = partial(_capture, function, tensors, rounded)
                yield Contender(name + suffix, True, capture, arithmetic)
            if compiled:
                first = next(iter(functions.values()))
                made, note = self._compiling(first, tensors, rounded, search)
                yield Contender("torch.compile" + suffix, True, made, arithmetic, note)

    def _compiling(
        self, function: Function, tensors: list[Any], tf32: bool, search: bool
    ) -> tuple[Capture, Callable[[], str]]:
        """What captures the compiled function, compiled at the first capture, and its note."""
        made: list[Function] = []
        note = ""

        def capture(rounds: int) -> Captured:
            nonlocal note
            if made:
                return _capture(made[0], tensors, tf32, rounds)
            searched = search and self._searched_s < SEARCH_S
            note = SEARCH if searched else "products by cuBLAS, the rest tuned"
            made.append(self.compiled(function, searched))
            start = perf_counter()
            found = _capture(made[0], tensors, tf32, rounds)
            if searched:
                self._searched_s += perf_counter() - start
            return found

        return capture, lambda: note

    def compiled(self, function: Function, search: bool = False) -> Function:
        """The function, compiled for fixed shapes; search: for the fastest products."""
        from torch import _inductor  # noqa: PLC0415
        from torch._inductor import select_algorithm  # noqa: PLC0415

        select_algorithm.PRINT_AUTOTUNE = False  # it prints a table for every product
        options = _inductor.list_mode_options(SEARCH) if search else NO_SEARCH
        compiled: Function = torch.compile(function, dynamic=False, options=options)
        return compiled

    def repeated(self, function: Function, arguments: tuple[Any, ...]) -> Callable[[], Tensor]:
        """The compiled function as a CUDA graph; a call replays it and returns its output."""
        run = captured(self.compiled(function), [arguments], rounds=1)

        def replay() -> Tensor:
            run.replay()
            return run.outs[0]

        return replay

    def tidy(self) -> None:
        """Free the memory of a work, and what was compiled for its shapes."""
        torch.compiler.reset()
        torch.cuda.empty_cache()


def _capture(function: Function, tensors: list[Any], tf32: bool, rounds: int) -> Captured:
    run = captured(function, tensors, rounds, tf32)
    return run._replace(outs=tuple(_array(in_rows(out)) for out in run.outs))


def in_rows(out: Tensor) -> Tensor:
    """An output in the order of ours: that of attention, (B, NH, T, HS), has heads before rows."""
    return out.transpose(-2, -3) if out.ndim == 4 else out


def _array(out: Tensor) -> Any:
    if out.dtype == torch.bfloat16:
        return cupy.from_dlpack(out.view(torch.int16)).view("bfloat16")
    return cupy.from_dlpack(out)


def arguments_of(arrays: Host, convert: Callable[[Any], Tensor] = tensor) -> Any:
    """The same memory as tensors, but vectors in the dtype of the first array, for PyTorch."""
    found = [convert(array) for array in arrays.values()]
    matrices = [isinstance(array, WeightMatrix) for array in arrays.values()]
    dtype = found[0].dtype
    return tuple(t if m else t.to(dtype) for t, m in zip(found, matrices, strict=True))
