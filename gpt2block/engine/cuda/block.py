"""Run a block with CUDA kernels: launches are recorded per shape and replayed as CUDA graphs."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpt2block.checks import host_array
from gpt2block.cuda import CudaArray, cupy, doctor, timing
from gpt2block.cuda.arrays import ArrayArg, Shape, contiguous, on_16_bytes
from gpt2block.cuda.foreign import InOrder, as_cupy, direct_view
from gpt2block.engine.block import NOTHING, BlockEngine, BlockSpec, Given, check_array, check_out
from gpt2block.engine.cuda.timeline import timed
from gpt2block.engine.model import StepResult
from gpt2block.engine.passes.executor import Step
from gpt2block.engine.recorder import Recorded
from gpt2block.engine.recording import Recording, Recordings
from gpt2block.engine.timeline import Call, Timeline
from gpt2block.errors import InputError
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.attention import check_limits
from gpt2block.ops.stored import stored

MAX_SHAPES = 8  # maximum input shapes whose workspaces are kept
OUTPUT = "output"  # name of the last step
MAX_CALLS = 16  # maximum triples (shape, x pointer, out pointer) whose launches are kept


@dataclass
class _Workspace:
    """Device arrays and recorded steps that all calls with one input shape share.

    given: int32 device arrays whose values each call can change, while graphs keep their addresses.
    known: the steps of the last recording, for reuse: few steps use x or the output. sent: copies
    of the values in `given`.
    """

    given: dict[str, CudaArray]
    known: Mapping[str, Recorded] = field(default_factory=dict)
    sent: dict[str, np.ndarray] = field(default_factory=dict)

    def send(self, given: Given) -> None:
        """Copy the arrays that changed since the last call to the device, on the current stream."""
        for name, array in given.items():
            if name not in self.sent or not np.array_equal(self.sent[name], array):
                self.given[name].set(np.ascontiguousarray(array, np.int32))
                self.sent[name] = array.copy()


class CudaEngine(BlockEngine):
    """An engine that runs a block with kernels of `gpt2block.ops`, on the caller's current stream.

    dtype: dtype of x, of every step's result and of the matrices of fused products, which are
    already rounded to it; all other weights are float32. With `BlockSpec.bounds`, both operands of
    fused products are stored as HiLoMatrix; a trace returns such activations as float32.
    Thread-safe; calls on different streams wait for each other, since they share memory.
    """

    def __init__(
        self,
        spec: BlockSpec,
        weights: Mapping[str, np.ndarray],
        device: int,
        graph: bool,
        dtype: str = "float32",
    ) -> None:
        super().__init__(spec, {})
        self._dtype = dtype
        self.device = device
        self._use_graph = graph
        normed = (step for step in spec.steps if step.op.startswith("rmsnorm"))
        self._scales_of_rms = {step.inputs[1] for step in normed}
        with cupy.cuda.Device(device):
            self._weights = {name: self._stored(name, w) for name, w in weights.items()}
            self._done = cupy.cuda.Event(disable_timing=True)
            self._done.record()  # event: calls wait until the weights are copied
            self._queued = cupy.cuda.Event(disable_timing=True)
            self._private = cupy.cuda.Stream(non_blocking=True)
        # Wait before memory is freed: CuPy reuses it even while other streams still use it.
        weakref.finalize(self, self._done.synchronize).atexit = False
        self._recordings = Recordings()
        self._workspaces: OrderedDict[Shape, _Workspace] = OrderedDict()
        self._calls: OrderedDict[tuple[Shape, int, int], Recording] = OrderedDict()
        self._lock = threading.RLock()

    def _stored(self, name: str, w: np.ndarray) -> ArrayArg:
        """Return a weight in the format that kernels read: a float32 array, or a matrix (N, K).

        RMSNorm weights get the dtype of x; float64 arrays, such as frequencies, remain float64.
        """
        if w.dtype == np.float64:
            return cupy.asarray(w)
        if name not in self.spec.matrices:  # order="C" copies a transposed view
            array = cupy.asarray(w, dtype="float32", order="C")
            return array.astype(self._dtype, copy=False) if name in self._scales_of_rms else array
        array = cupy.asarray(w, dtype="float32")
        if self.spec.bounds is not None:
            return HiLoMatrix.from_float32(stored(array, "float32", transposed=True))
        rows = stored(array, self._dtype, transposed=True)
        return WeightMatrix(rows, self._dtype, None, "NK")

    def describe(self) -> str:
        return doctor.describe_device(self.device)

    def forward(self, x: object, out: Any | None, given: Given = NOTHING) -> Any:
        with self._lock, cupy.cuda.Device(self.device), InOrder(self._done, self._queued) as order:
            array, on_host = self._accept(x, order)
            if on_host:
                target = cupy.empty(array.shape, dtype=self._dtype)
                if out is not None:
                    check_out(out, array.shape, np.ndarray, self._dtype)
                self._run(array, target, given, order.stream)
                return target.get(out=out)
            if out is None:
                target = cupy.empty(array.shape, self._dtype)
            else:
                target = self._adopt(out, direct_view(out), order)
            check_out(target, array.shape, cupy.ndarray, self._dtype)
            self._run(array, target, given, order.stream)
            return target if out is None else out

    def trace(self, x: object, given: Given = NOTHING) -> dict[str, Any]:
        with self._lock, cupy.cuda.Device(self.device), InOrder(self._done, self._queued) as order:
            array, on_host = self._accept(x, order)
            recording = self._recorded(array, cupy.empty(array.shape, dtype=self._dtype), given)
            self._workspace(array.shape, given).send(given)
            copies = recording.trace()
            return {n: copy.get() for n, copy in copies.items()} if on_host else copies

    def step(self, step: Step, tensors: Mapping[str, np.ndarray]) -> StepResult:
        with cupy.cuda.Device(self.device):
            known = {**self._weights, **{n: _sendable(t) for n, t in tensors.items()}}
            hi_lo = self.spec.hi_lo & tensors.keys()
            known |= {name: HiLoMatrix.from_float32(known[name]) for name in hi_lo}
            recording = Recordings().make(lambda do: do.do(step, None), known)
            recording.run()
            out = recording.out.get()  # copy before timing, which repeats in-place kernels
            names = ", ".join(launch.name for launch in recording.launches)
            return StepResult(step.name, names, out, timing.gpu_ms(recording.launches))

    def timed(self, call: Call) -> list[Timeline]:
        with self._lock:
            return timed(self._recordings, call)

    def _accept(self, x: object, order: InOrder) -> tuple[CudaArray, bool]:
        """Check `x`; return a C-contiguous array on this GPU, and whether `x` was on the host.

        For products on tensor cores the array is also aligned to 16 bytes.
        """
        view = direct_view(x)
        host = host_array(x) if view is None else None
        if host is not None:
            check_array("x", host, self.spec.width, self._dtype)
            return cupy.asarray(host, order="C"), True
        array = self._adopt(x, view, order)
        check_array("x", array, self.spec.width, self._dtype)
        return (on_16_bytes("x", array) if self.spec.matrices else contiguous(array)[0]), False

    def _adopt(self, array: object, view: CudaArray | None, order: InOrder) -> CudaArray:
        """Return a CuPy view of another library's array. Raises InputError for another GPU.

        view: the result of `direct_view`.
        """
        if view is None:
            view = as_cupy(array)
        if view.device.id != self.device:
            raise InputError(
                f"expected an array on cuda:{self.device}, the device of this Block, "
                f"got one on cuda:{view.device.id}"
            )
        if view is not array:
            order.join(array)
        return view

    def _run(self, x: CudaArray, out: CudaArray, given: Given, stream: object) -> None:
        key = (x.shape, x.data.ptr, out.data.ptr)
        recording = self._calls.pop(key, None)
        repeated = recording is not None
        if recording is None:
            # A kept recording must not hold references to x and out, which would keep their memory.
            recording = self._recorded(x, out, given, borrowed=("x", OUTPUT))
        self._workspace(x.shape, given).send(given)
        if repeated and self._use_graph:
            recording.replay(stream, self._private)
        else:
            recording.run()
        self._calls[key] = recording  # only after a run: a graph capture needs loaded kernels
        if len(self._calls) > MAX_CALLS:
            self._calls.popitem(last=False)

    def _recorded(
        self, x: CudaArray, out: CudaArray, given: Given = NOTHING, borrowed: Collection[str] = ()
    ) -> Recording:
        """Return a recording (the launches) of the block, which reads `x` and writes `out`."""
        self._check_limits(x.shape)
        workspace = self._workspace(x.shape, given)
        recording = self._recordings.make(
            self.spec.run,
            {**self._weights, **workspace.given, "x": x},
            {OUTPUT: out},
            known=workspace.known,
            overlapping=self.spec.overlapping,
            borrowed=borrowed,
        )
        workspace.known = recording.steps
        return recording

    def _check_limits(self, shape: Shape) -> None:
        """Raise InputError, before allocating, for sizes that float32 kernels do not support."""
        if self._dtype == "float32" and self.spec.bounds is None:
            s = self.spec.settings
            width = (s.n_head + 2 * s.n_kv_head) * s.head_size
            check_limits((*shape[:-1], width), **s.heads, causal=s.causal)

    def _workspace(self, shape: Shape, given: Given) -> _Workspace:
        if shape in self._workspaces:
            self._workspaces.move_to_end(shape)
            return self._workspaces[shape]
        if len(self._workspaces) == MAX_SHAPES:
            self._done.synchronize()  # the GPU may still use the oldest workspace
            oldest, _ = self._workspaces.popitem(last=False)
            for key in [key for key in self._calls if key[0] == oldest]:
                del self._calls[key]
        on_device = {name: cupy.empty(array.shape, "int32") for name, array in given.items()}
        return self._workspaces.setdefault(shape, _Workspace(on_device))


def _sendable(array: np.ndarray) -> CudaArray:
    """Return a C-contiguous copy of `array` on the device; integers become int32."""
    return cupy.asarray(array.astype(np.int32) if array.dtype.kind in "iu" else array, order="C")


def run_once(
    spec: BlockSpec, weights: Mapping[str, CudaArray], x: CudaArray, out: CudaArray
) -> None:
    """Run a block on the current device and stream, with memory that only this call uses."""
    Recordings().make(spec.run, {**weights, "x": x}, {OUTPUT: out}).run()
