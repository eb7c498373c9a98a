"""Contenders of a race: a contender captures a CUDA graph of its calls on every copy of the inputs.

Those of gpt2block are here: the variants of an operation, the default one first, and whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gpt2block.bench.measure import Host
from gpt2block.bench.works import NH, AttentionWork, BlockWork, GemmWork, Work
from gpt2block.block import Block
from gpt2block.cuda import cupy, overlap, timing
from gpt2block.cuda.arrays import Bound
from gpt2block.errors import InputError, KernelError
from gpt2block.ops.registry import OPERATIONS
from gpt2block.passes.machine import Machine, Step, Value
from gpt2block.run.block import BlockSpec
from gpt2block.run.cuda_block import OUTPUT
from gpt2block.run.recording import Recording, Recordings
from gpt2block.weights.two_part import TwoPartMatrix

OLDER = "mma"  # the variant for GPUs before Hopper, which Hopper runs too
REFUSALS = (InputError, KernelError, MemoryError)  # reasons that a variant cannot run

DeviceArray = Any  # cupy.ndarray, which has no type stubs


class Run(NamedTuple):
    """A captured graph: a call replays it. `outs` are some of the outputs that it writes."""

    replay: Callable[[], None]
    outs: tuple[DeviceArray, ...]
    kept: Any = None  # a graph holds pointers only, and these objects hold the memory


@dataclass(frozen=True)
class Contender:
    """One way to compute something.

    `capture(rounds)` returns a graph that goes over all copies of the inputs that many times.
    `arithmetic` is a dtype or "tf32"; it chooses the ceiling and the allowed error.
    """

    name: str
    peer: bool
    capture: Callable[[int], Run]
    arithmetic: str
    note: Callable[[], str] = str


def contenders(work: Work, sets: Sequence[Host], device: int) -> Iterator[Contender]:
    """The contenders for a work, on copies of its inputs; capturing shows whether they run."""
    if isinstance(work, BlockWork):
        yield from _blocks(work, sets, device)
    elif isinstance(work, GemmWork):
        options: dict[str, Any] = {"gelu": work.gelu, "split_k": True}  # as in a block
        yield from _variants("gemm", sets, options, work.dtype)
    elif isinstance(work, AttentionWork):
        options = {"n_head": NH, "causal": work.causal}
        yield from _variants("attention", sets, options, work.dtype)


def bind_copies(
    bind: Callable[..., Bound], inputs: Sequence[tuple[Any, ...]], outs: list[DeviceArray]
) -> list[Bound]:
    """`bind(arrays, out)` for each copy; `outs`, at first None, then holds the outputs.

    So the variants of an operation share one output for each copy.
    """
    bound = [bind(arrays, out) for arrays, out in zip(inputs, outs, strict=True)]
    outs[:] = [each.out for each in bound]
    return bound


def capture_bound(
    bound: Sequence[Bound | Recording],
    rounds: int,
    overlapping: bool = False,
    outs: Sequence[Any] = (),
) -> Run:
    """A graph of all launches, with the first and the last of `outs`, or of all outputs.

    overlapping: every kernel waits for the previous one itself, so launches may overlap.
    """
    launches = [launch for each in bound for launch in each.launches]
    if overlapping:
        launches = [overlap.early(launch) for launch in launches]
    found = outs or [each.out for each in bound]
    ends = (found[0], found[-1]) if len(found) > 1 else (found[0],)
    return Run(timing.captured(launches * rounds), ends, bound)


def _variants(
    name: str, sets: Sequence[Host], options: Mapping[str, Any], dtype: str
) -> Iterator[Contender]:
    operation = OPERATIONS.get(name)
    if operation is None:
        yield Contender(name, False, partial(refuse, f"there is no operation {name}"), dtype)
        return
    inputs = [tuple(each.values()) for each in sets]
    outs: list[DeviceArray] = [None] * len(inputs)

    def capture(variant: str, rounds: int) -> Run:
        bound = bind_copies(partial(operation.bind, **options, variant=variant), inputs, outs)
        overlapping = dtype != "float32"  # kernels of float32 do not wait for the previous one
        return capture_bound(bound, rounds, overlapping)

    try:
        kernel = operation.bind(inputs[0], **options).launches[0].name
    except (InputError, KernelError):
        kernel = ""
    default = next((each.name for each in operation.variants if kernel in each.kernels), None)
    names = [each.name for each in operation.variants if dtype in (each.dtypes or (dtype,))]
    for variant in sorted(names, key=lambda each: each != default):
        yield Contender(variant, False, partial(capture, variant), dtype)


def refuse(why: str, rounds: int) -> Run:
    raise InputError(why)


def _blocks(work: BlockWork, sets: Sequence[Host], device: int) -> Iterator[Contender]:
    """The fused block, the same with variant `mma` instead of Hopper's, and the skeleton.

    A block reads the weights of `sets`, of which each copy of x has its own.
    """
    for kernels in ("fused", "skeleton"):
        try:
            block = Block(work.weights(), work.causal, f"cuda:{device}", work.dtype, kernels)
            copies = _Copies(block.spec, sets)
        except REFUSALS as error:
            yield Contender(kernels, False, partial(refuse, str(error)), work.dtype)
            continue
        yield Contender(kernels, False, copies.capture, work.dtype)
        if any("hopper" in launch.name for each in copies.bound for launch in each.launches):
            older = partial(_capture_older, block.spec, sets)
            yield Contender(f"{kernels}, {OLDER}", False, older, work.dtype)


def _capture_older(spec: BlockSpec, sets: Sequence[Host], rounds: int) -> Run:
    return _Copies(spec, sets, OLDER).capture(rounds)


class _Variant(Machine):
    """Runs the steps of a machine, matrix products and attention by a variant."""

    def __init__(self, do: Machine, variant: str) -> None:
        super().__init__(do.tensors)
        self._do, self._variant = do, variant

    def do(self, step: Step, into: Value) -> Value:
        if step.op in ("gemm", "attention"):
            step = step._replace(attrs={**step.attrs, "variant": self._variant})
        return self._do.do(step, into)


class _Copies:
    """A block bound to each copy of x and weights; the copies share the memory of activations.

    variant: of matrix products and attention; None is the default one.
    """

    def __init__(self, spec: BlockSpec, sets: Sequence[Host], variant: str | None = None) -> None:
        def run(do: Machine) -> Value:
            return spec.run(do if variant is None else _Variant(do, variant))

        if spec.bounds is not None:
            sets = [_with_two_part(spec, each) for each in sets]
        self._outs = [cupy.empty_like(each["x"]) for each in sets]
        recordings = Recordings()
        self._overlapping = spec.overlapping
        self.bound = [
            recordings.make(run, each, {OUTPUT: out})
            for each, out in zip(sets, self._outs, strict=True)
        ]

    def capture(self, rounds: int) -> Run:
        run = capture_bound(self.bound, rounds, self._overlapping, self._outs)
        return run._replace(kept=self)


def _with_two_part(spec: BlockSpec, arrays: Host) -> Host:
    """The arrays with the matrices as float32 on tensor cores takes them."""
    matrices = {name: cupy.ascontiguousarray(arrays[name].T) for name in spec.matrices}
    return {**arrays, **{name: TwoPartMatrix.from_float32(w) for name, w in matrices.items()}}
