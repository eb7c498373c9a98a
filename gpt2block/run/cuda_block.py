"""The CUDA engine: buffers allocated once per shape; a repeated call replays a graph."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import doctor
from gpt2block.array_checks import host_array
from gpt2block.cuda import cupy, timing
from gpt2block.cuda.arrays import Bound, contiguous, on_16_bytes
from gpt2block.cuda.foreign import InOrder, as_cupy
from gpt2block.errors import InputError
from gpt2block.ops._stored import stored
from gpt2block.ops.registry import OPERATIONS, largest, shapes
from gpt2block.plan import Plan, Shape, Step
from gpt2block.run import NOTHING, Given, StepResult, check_array, check_out
from gpt2block.run.program import Program, bind_step
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

CudaArray = Any  # cupy.ndarray, which has no type stubs
MAX_SHAPES = 8  # buffers kept
MAX_CALLS = 16  # (shape, x pointer, out pointer) kept, each with its launches and graph


@dataclass
class _Workspace:
    """The buffers of one input shape, for every step except the last, and the steps bound to them.

    bounds: the steps that use neither x nor the output, shared by all calls of the shape. given:
    int32 arrays that every call can change, in device memory, so that its graph remains the same.
    """

    buffers: dict[str, CudaArray]
    bounds: dict[str, Bound]
    given: dict[str, CudaArray]
    sent: dict[str, NDArray[Any]] = field(default_factory=dict)

    def send(self, given: Given) -> None:
        """Copy to the device what differs from the last call, on the current stream."""
        for name, array in given.items():
            if name not in self.sent or not np.array_equal(self.sent[name], array):
                self.given[name].set(np.ascontiguousarray(array, np.int32))
                self.sent[name] = array.copy()


class CudaEngine:
    """Runs a plan with the kernels of `gpt2block.ops`, on the caller's current stream.

    dtype: of x, of every step's result and of the matrices of `gemm`, which are already rounded to
    it; all other weights are float32. Where a plan for tensor cores runs in float32, those matrices
    and the activations they are multiplied with are TwoPartMatrix; the scale of such an activation
    is derived from the weights, and a trace returns it as float32. Thread-safe; calls on different
    streams wait for each other, since they share the buffers.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, NDArray[Any]],
        width: int,
        device: int,
        graph: bool,
        dtype: str = "float32",
    ) -> None:
        self.plan = plan
        self._width = width
        self._dtype = dtype
        self.device = device
        self._use_graph = graph
        self._two_part = two_part_steps(plan, dtype)
        self._matrices = {
            step.inputs[i] for step in plan.steps for i in OPERATIONS[step.op].matrices
        }
        normed = (step for step in plan.steps if step.op.startswith("rmsnorm"))
        self._scales_of_rms = {step.inputs[1] for step in normed}
        self._bounds = largest(plan, weights) if self._two_part else {}
        with cupy.cuda.Device(device):
            self._weights = {name: self._stored(name, w) for name, w in weights.items()}
            self._done = cupy.cuda.Event(disable_timing=True)
            self._done.record()  # the copies of the weights may still be in flight
            self._private = cupy.cuda.Stream(non_blocking=True)
        # Buffers return to the pool of the stream that allocated them, not of those that use them.
        weakref.finalize(self, self._done.synchronize).atexit = False
        self._workspaces: OrderedDict[Shape, _Workspace] = OrderedDict()
        self._calls: OrderedDict[tuple[Shape, int, int], Program] = OrderedDict()
        self._lock = threading.RLock()

    def _stored(self, name: str, w: NDArray[Any]) -> Any:
        """A weight in the format of its kernels: a float32 array, or a matrix (N, K).

        RMSNorm's have the dtype of x; float64 arrays, such as frequencies, keep theirs.
        """
        if w.dtype == np.float64:
            return cupy.asarray(w)
        if name not in self._matrices:  # packed matrices of Llama are transposed views
            array = cupy.asarray(w, dtype="float32", order="C")
            return array.astype(self._dtype, copy=False) if name in self._scales_of_rms else array
        array = cupy.asarray(w, dtype="float32")
        if self._two_part:
            return TwoPartMatrix.from_float32(stored(array, "float32", transposed=True))
        rows = stored(array, self._dtype, transposed=True)
        return WeightMatrix(rows, self._dtype, None, "NK")

    def describe(self) -> str:
        return doctor.describe_device(self.device)

    @property
    def weight_bytes(self) -> int:
        return sum(int(w.nbytes) for w in self._weights.values())

    def forward(self, x: Any, out: Any | None, given: Given = NOTHING) -> Any:
        with self._in_order() as order:
            array, on_host = self._accept(x, order)
            if on_host:
                target = cupy.empty(array.shape, dtype=self._dtype)
                if out is not None:
                    check_out(out, array.shape, np.ndarray, self._dtype)
                self._run(array, target, given, order.stream)
                return target.get(out=out)
            target = (
                cupy.empty(array.shape, self._dtype) if out is None else self._adopt(out, order)
            )
            check_out(target, array.shape, cupy.ndarray, self._dtype)
            self._run(array, target, given, order.stream)
            return target if out is None else out

    def trace(self, x: Any, given: Given = NOTHING) -> dict[str, Any]:
        with self._in_order() as order:
            array, on_host = self._accept(x, order)
            program = self._program(array, cupy.empty(array.shape, dtype=self._dtype), given)
            self._workspace(array.shape, given).send(given)
            copies = program.trace()
            return {n: copy.get() for n, copy in copies.items()} if on_host else copies

    def step(self, step: Step, tensors: Mapping[str, NDArray[Any]]) -> StepResult:
        with cupy.cuda.Device(self.device):
            known = {**self._weights, **{n: _sendable(t) for n, t in tensors.items()}}
            known |= {
                n: TwoPartMatrix.from_float32(known[n]) for n in self._two_part & tensors.keys()
            }
            out = None
            if step.name in self._two_part:
                known_shapes = [_shape(known[n], n in self._weights) for n in step.inputs]
                shape = OPERATIONS[step.op].shape(*known_shapes, **step.attrs)
                out = TwoPartMatrix.empty(shape, _scale_bound(step, self._bounds))
            bound = bind_step(step, known, out)
            out = bound.run().get()  # before timing, which runs in-place kernels again and again
            names = ", ".join(launch.name for launch in bound.launches)
            return StepResult(out, names, timing.gpu_ms(bound.launches))

    def _accept(self, x: Any, order: InOrder) -> tuple[CudaArray, bool]:
        """`x` as a checked, C-contiguous CuPy array on this device, and whether it was on the host.

        For products on tensor cores the array is also aligned to 16 bytes.
        """
        host = None if isinstance(x, cupy.ndarray) else host_array(x)
        if host is not None:
            check_array("x", host, self._width, self._dtype)
            return cupy.asarray(host, order="C"), True
        array = self._adopt(x, order)
        check_array("x", array, self._width, self._dtype)
        return (on_16_bytes("x", array) if self.plan.matrices else contiguous(array)[0]), False

    def _adopt(self, array: Any, order: InOrder) -> CudaArray:
        """A CUDA array of any library as a CuPy array, without a copy; it must be on this GPU."""
        view = as_cupy(array)
        if view.device.id != self.device:
            raise InputError(
                f"expected an array on cuda:{self.device}, the device of this Block, "
                f"got one on cuda:{view.device.id}"
            )
        if view is not array:
            order.join(array)
        return view

    def _run(self, x: CudaArray, out: CudaArray, given: Given, stream: Any) -> None:
        key = (x.shape, x.data.ptr, out.data.ptr)
        program = self._calls.get(key)
        repeated = program is not None
        if program is None:
            # Kept alive here, x and out would hold their memory, and no later call could have it.
            caller_owned = (self.plan.input, self.plan.output)
            program = self._program(x, out, given, caller_owned)
        self._workspace(x.shape, given).send(given)
        if repeated and self._use_graph:
            program.replay(stream, self._private)
        else:
            program.run()
        self._calls[key] = program  # which has run: its kernels are loaded
        self._calls.move_to_end(key)
        if len(self._calls) > MAX_CALLS:
            self._calls.popitem(last=False)

    @contextmanager
    def _in_order(self) -> Iterator[InOrder]:
        """Hold the lock; order the call after the last one, which may use another stream."""
        with self._lock, cupy.cuda.Device(self.device):
            order = InOrder()
            order.stream.wait_event(self._done)
            try:
                yield order
            finally:
                self._done.record(order.stream)
                order.release(self._done)

    def _program(
        self,
        x: CudaArray,
        out: CudaArray,
        given: Given = NOTHING,
        borrowed: Iterable[str] = (),
    ) -> Program:
        """The plan bound to x, out and the buffers of the shape."""
        workspace = self._workspace(x.shape, given)
        tensors = {**self._weights, **workspace.given, **workspace.buffers}
        tensors |= {self.plan.input: x, self.plan.output: out}
        program = Program(self.plan, tensors, workspace.bounds, borrowed=borrowed)
        for step in self.plan.steps:
            if step.name != self.plan.output and self.plan.input not in step.inputs:
                workspace.bounds[step.name] = program.bounds[step.name]
        return program

    def _workspace(self, shape: Shape, given: Given) -> _Workspace:
        if shape in self._workspaces:
            self._workspaces.move_to_end(shape)
            return self._workspaces[shape]
        if len(self._workspaces) == MAX_SHAPES:
            self._done.synchronize()  # the oldest buffers may still be in use
            oldest, _ = self._workspaces.popitem(last=False)
            for key in [key for key in self._calls if key[0] == oldest]:
                del self._calls[key]
        on_device = {name: cupy.empty(array.shape, "int32") for name, array in given.items()}
        known = {**self._weights, **on_device}
        buffers = allocate(self.plan, shape, known, self._dtype, self._bounds)
        return self._workspaces.setdefault(shape, _Workspace(buffers, {}, on_device))


def two_part_steps(plan: Plan, dtype: str) -> frozenset[str]:
    """The steps whose result is a TwoPartMatrix when the plan runs in `dtype`."""
    return plan.operands if dtype == "float32" else frozenset()


def _scale_bound(step: Step, bounds: Mapping[str, float]) -> float | None:
    """The bound that determines a two-part result's scale; None where the kernel finds scales."""
    return None if step.op == "attention" else bounds[step.name]


def _sendable(array: NDArray[Any]) -> CudaArray:
    """A C-contiguous copy on the device; integers as int32."""
    return cupy.asarray(array.astype(np.int32) if array.dtype.kind in "iu" else array, order="C")


def _shape(value: Any, weight: bool) -> Shape:
    """The shape as in the plan, where matrices are (K, N)."""
    if isinstance(value, WeightMatrix):
        return value.K, value.N
    shape: Shape = value.shape
    return shape[::-1] if weight and isinstance(value, TwoPartMatrix) else shape


def allocate(
    plan: Plan,
    x: Shape,
    weights: Mapping[str, Any],
    dtype: str = "float32",
    bounds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A buffer of `dtype` for every step except the last; in-place steps share their target's.

    bounds: the largest magnitude of each two-part result. Raises InputError, before anything is
    allocated, when an operation does not support these sizes.
    """
    known = {name: _shape(w, True) for name, w in weights.items()}
    known |= {plan.input: x, **shapes(plan, x, known)}
    two_part = two_part_steps(plan, dtype)
    for step in plan.steps:
        # The limits are those of the ten-step plan's kernels.
        check_limits = OPERATIONS[step.op].check_limits
        if check_limits and dtype == "float32" and not two_part:
            inputs = (known[name] if name else None for name in step.inputs)
            check_limits(*inputs, **step.attrs)
    buffers: dict[str, Any] = {}
    for step in plan.steps[:-1]:
        name, target = step.name, plan.in_place.get(step.name)
        if name in two_part:
            parts = buffers[target].parts if target else None
            bound = _scale_bound(step, bounds or {})
            buffers[name] = TwoPartMatrix.empty(known[name], bound, parts)
        else:
            buffers[name] = buffers[target] if target else cupy.empty(known[name], dtype=dtype)
    return buffers


def run_once(plan: Plan, weights: Mapping[str, CudaArray], x: CudaArray, out: CudaArray) -> None:
    """Run the plan on the current device and stream, with buffers for this call only."""
    buffers = allocate(plan, x.shape, weights)
    Program(plan, {**weights, **buffers, plan.input: x, plan.output: out}).run()
