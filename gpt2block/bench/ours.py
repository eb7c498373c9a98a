"""Our contenders: what is used unasked first, then the other variants; blocks by their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gpt2block.bench.race import REFUSALS, Contender, DeviceArray, Run
from gpt2block.bench.works import NH, AttentionWork, BlockWork, GemmWork, Host, Work
from gpt2block.block import Block
from gpt2block.cuda import cupy, overlap, timing
from gpt2block.cuda.arrays import Bound
from gpt2block.errors import InputError, KernelError
from gpt2block.ops.registry import OPERATIONS, Operation, largest
from gpt2block.plan import Plan
from gpt2block.run.cuda_block import allocate, split_steps
from gpt2block.weights.two_part import SplitMatrix

OLDER = "mma"  # the variant beside Hopper's that runs there too


def contenders(work: Work, sets: Sequence[Host], device: int) -> Iterator[Contender]:
    """Those that there are for a work; whether they run shows when they are captured."""
    if isinstance(work, BlockWork):
        yield from _blocks(work, sets, device)
    elif isinstance(work, GemmWork):
        inputs = [tuple(each.values()) for each in sets]
        options = {"gelu": work.gelu, "split_k": True}  # as a block asks for its projections
        yield from _variants("gemm", inputs, options, work.dtype)
    elif isinstance(work, AttentionWork):
        inputs = [(each["qkv"],) for each in sets]
        heads = {"n_head": NH, "causal": work.causal}
        yield from _variants("attention", inputs, heads, work.dtype)


def _blocks(work: BlockWork, sets: Sequence[Host], device: int) -> Iterator[Contender]:
    """The fused plan as it is used, the same with `mma` in Hopper's place, the documents' kernels.

    A plan reads the bench's own weights, since each copy of x has its own.
    """
    for kernels in ("fused", "skeleton"):
        try:
            block = Block(work.weights(), work.causal, f"cuda:{device}", work.dtype, kernels)
            steps = _Steps(block.plan, sets)
        except REFUSALS as error:
            yield Contender(kernels, False, partial(_refuse, str(error)), work.dtype)
            continue
        yield Contender(kernels, False, steps.capture, work.dtype)
        if any("hopper" in launch.name for launch in steps.launches):
            older = partial(_older, block.plan, sets)
            yield Contender(f"{kernels}, {OLDER}", False, older, work.dtype)


def _older(plan: Plan, sets: Sequence[Host], rounds: int) -> Run:
    return _Steps(plan, sets, OLDER).capture(rounds)


def _variants(
    name: str, inputs: list[tuple[Any, ...]], options: Mapping[str, Any], dtype: str
) -> Iterator[Contender]:
    operation = OPERATIONS.get(name)
    if operation is None:
        yield Contender(name, False, partial(_refuse, f"there is no operation {name}"), dtype)
        return
    outs: list[DeviceArray] = [None] * len(inputs)  # shared by all variants
    unasked = _chosen_unasked(operation, partial(operation.bind, inputs[0], **options))
    names = [each.name for each in operation.variants if dtype in (each.dtypes or (dtype,))]
    for variant in sorted(names, key=lambda each: each != unasked):
        bound = partial(operation.bind, **options, variant=variant)
        waits = dtype != "float32"  # the documents' kernels, which float32 has, do not
        yield Contender(variant, False, partial(_capture, bound, inputs, outs, waits), dtype)


def _refuse(why: str, rounds: int) -> Run:
    raise InputError(why)


def _chosen_unasked(operation: Operation, bind: Callable[[], Bound]) -> str | None:
    """The variant that runs when none is asked for."""
    try:
        kernel = bind().launches[0].name
    except (InputError, KernelError):
        return None
    names = [variant.name for variant in operation.variants if kernel in variant.kernels]
    return names[0] if names else None


def _capture(
    bind: Callable[..., Bound],
    inputs: list[tuple[Any, ...]],
    outs: list[DeviceArray],
    waits: bool,
    rounds: int,
) -> Run:
    """waits: every kernel waits for the one before it, so that launches may overlap."""
    bound = [bind(arrays, out) for arrays, out in zip(inputs, outs, strict=True)]
    outs[:] = [each.out for each in bound]
    launches = [launch for each in bound for launch in each.launches]
    if waits:  # as in a block's graph
        launches = [overlap.early(launch) for launch in launches]
    return _run(timing.captured(launches * rounds), outs, bound)


def _run(replay: Callable[[], None], outs: Sequence[DeviceArray], kept: Any) -> Run:
    """The first output and the last. A graph holds pointers only: `kept` lives as long as it."""
    ends = (outs[0], outs[-1]) if len(outs) > 1 else (outs[0],)
    return Run(partial(_replay, replay, kept), ends)


def _replay(replay: Callable[[], None], _kept: Any) -> None:
    replay()


class _Steps:
    """A plan's launches on every copy of its inputs and weights, through the same buffers.

    variant: of products and attention; None is what is used unasked.
    """

    def __init__(self, plan: Plan, sets: Sequence[Host], variant: str | None = None) -> None:
        x = sets[0][plan.input]
        bounds: Mapping[str, float] = {}
        if split_steps(plan, x.dtype.name):
            bounds = largest(plan, {name: cupy.asnumpy(array) for name, array in sets[0].items()})
            sets = [_split(plan, each) for each in sets]
        weights = {name: array for name, array in sets[0].items() if name != plan.input}
        buffers = allocate(plan, x.shape, weights, x.dtype.name, bounds)
        self._outs = [cupy.empty_like(x) for _ in sets]
        bound: list[Bound] = []
        for each, out in zip(sets, self._outs, strict=True):
            tensors = {**each, **buffers, plan.output: out}
            for step in plan.steps:
                options = dict(step.attrs)
                if variant and step.op in ("gemm", "attention"):
                    options["variant"] = variant
                inputs = tuple(tensors[name] for name in step.inputs)
                bound.append(OPERATIONS[step.op].bind(inputs, tensors[step.name], **options))
        self.launches = [launch for each in bound for launch in each.launches]
        if plan.overlapping:
            self.launches = [overlap.early(launch) for launch in self.launches]
        self._kept = buffers, sets, bound

    def capture(self, rounds: int) -> Run:
        return _run(timing.captured(self.launches * rounds), self._outs, self._kept)


def _split(plan: Plan, arrays: Host) -> Host:
    """The same with the matrices as a float32 plan for tensor cores has them."""
    matrices = {n: cupy.ascontiguousarray(arrays[n].T) for n in plan.matrices}
    return {**arrays, **{n: SplitMatrix.split(w) for n, w in matrices.items()}}
