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
from gpt2block.ops.registry import OPERATIONS, largest
from gpt2block.plan import Plan
from gpt2block.run.cuda_block import allocate, two_part_steps
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
    bound: Sequence[Bound], rounds: int, overlapping: bool = False, outs: Sequence[Any] = ()
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
    """The fused plan, the same with variant `mma` instead of Hopper's, and the skeleton plan.

    A plan reads the weights of `sets`, of which each copy of x has its own.
    """
    for kernels in ("fused", "skeleton"):
        try:
            block = Block(work.weights(), work.causal, f"cuda:{device}", work.dtype, kernels)
            steps = _Steps(block.plan, sets)
        except REFUSALS as error:
            yield Contender(kernels, False, partial(refuse, str(error)), work.dtype)
            continue
        yield Contender(kernels, False, steps.capture, work.dtype)
        if any("hopper" in launch.name for bound in steps.bound for launch in bound.launches):
            older = partial(_capture_older, block.plan, sets)
            yield Contender(f"{kernels}, {OLDER}", False, older, work.dtype)


def _capture_older(plan: Plan, sets: Sequence[Host], rounds: int) -> Run:
    return _Steps(plan, sets, OLDER).capture(rounds)


class _Steps:
    """The steps of a plan, bound to each copy of x and weights; the copies share the buffers.

    variant: of matrix products and attention; None is the default one.
    """

    def __init__(self, plan: Plan, sets: Sequence[Host], variant: str | None = None) -> None:
        x = sets[0][plan.input]
        bounds: Mapping[str, float] = {}
        if two_part_steps(plan, x.dtype.name):
            bounds = largest(plan, {name: cupy.asnumpy(array) for name, array in sets[0].items()})
            sets = [_in_two_parts(plan, each) for each in sets]
        weights = {name: array for name, array in sets[0].items() if name != plan.input}
        buffers = allocate(plan, x.shape, weights, x.dtype.name, bounds)
        self._outs = [cupy.empty_like(x) for _ in sets]
        self._kept = buffers, sets
        self._overlapping = plan.overlapping
        self.bound: list[Bound] = []
        for each, out in zip(sets, self._outs, strict=True):
            tensors = {**each, **buffers, plan.output: out}
            for step in plan.steps:
                options = dict(step.attrs)
                if variant and step.op in ("gemm", "attention"):
                    options["variant"] = variant
                inputs = tuple(tensors[name] for name in step.inputs)
                bound = OPERATIONS[step.op].bind(inputs, tensors[step.name], **options)
                self.bound.append(bound)

    def capture(self, rounds: int) -> Run:
        run = capture_bound(self.bound, rounds, self._overlapping, self._outs)
        return run._replace(kept=self)


def _in_two_parts(plan: Plan, arrays: Host) -> Host:
    """The arrays with the matrices as a float32 plan on tensor cores takes them."""
    matrices = {name: cupy.ascontiguousarray(arrays[name].T) for name in plan.matrices}
    return {**arrays, **{name: TwoPartMatrix.from_float32(w) for name, w in matrices.items()}}
