"""The Pre-LN blocks of GPT-2 and Llama: `Block(weights)(x)`, `LlamaBlock(weights)(x)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from gpt2block.checks import (
    FLOATS,
    LARGEST_COUNT,
    check_choice,
    check_count,
    check_flag,
    named_options,
    plain_array,
)
from gpt2block.cuda import cards, cupy, doctor
from gpt2block.cuda.arrays import check
from gpt2block.cuda.devices import resolve_device
from gpt2block.engine.block import NOTHING, BlockEngine, BlockSpec, Given
from gpt2block.engine.cuda.block import CudaEngine, run_once
from gpt2block.engine.inspect.compare import Comparisons, compare_steps
from gpt2block.engine.numpy.block import NumpyEngine
from gpt2block.engine.passes.bounds import result_bounds
from gpt2block.engine.passes.executor import Step
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.engine.timeline import Call, Timeline
from gpt2block.errors import Argument, Hinted, InputError
from gpt2block.files.parameters.arrays import BlockArrays
from gpt2block.files.parameters.gpt2 import BlockWeights, unpack
from gpt2block.files.parameters.llama import LlamaBlockWeights
from gpt2block.models.architectures import gpt2, llama
from gpt2block.models.config import Scales, block_shapes
from gpt2block.models.config.llama import LlamaConfig
from gpt2block.models.weights.hi_lo import LARGEST_BOUND
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.attention import SIXTEEN_BITS, TENSOR_HEAD, check_heads

KERNELS = ("auto", "skeleton", "fused")
FUSED_WIDTH = 16384  # maximum channels per row in the kernel layernorm_narrow


class BaseBlock(Hinted):
    """Base class of transformer blocks: weights, and an object that runs steps on one device.

    Copying or unpickling a block constructs a new block from the same arguments.
    """

    HINTS = "Block"
    causal: bool
    spec: BlockSpec
    dtype: str
    weights: Any
    _engine: BlockEngine

    @staticmethod
    def _checked(weights: object, kind: type, dtype: object, kernels: object) -> None:
        """Raise InputError unless `weights` has class `kind`, and dtype and kernels are known."""
        if not isinstance(weights, kind):
            raise InputError(
                f"weights: expected a {kind.__name__}, got {type(weights).__name__}: see "
                f"{kind.__name__}.from_packed, .random and .from_pretrained"
            )
        check_choice("dtype", dtype, FLOATS)
        check_choice("kernels", kernels, KERNELS)

    def _start(self, spec: BlockSpec, device: str | None, index: int | None, graph: bool) -> None:
        """Create the object that runs the steps. index: CUDA device index; None for the CPU."""
        self.spec, self._device, self._graph = spec, device, graph
        tensors = self._tensors(self.weights)
        if index is None:
            self._engine = NumpyEngine(spec, tensors, self.dtype)
            return
        self._engine = CudaEngine(spec, tensors, index, graph, self.dtype)

    def __reduce__(self) -> tuple[object, ...]:
        options = self.causal, self._device, self.dtype, self.kernels, self._graph
        return type(self), (self.weights, *options)

    def _tensors(self, weights: BlockArrays) -> dict[str, np.ndarray]:
        """Return a dict from names to weights and constants."""
        return weights.tensors()

    @property
    def kernels(self) -> str:
        """The kind of kernels in use: "skeleton" or "fused", also if the option is "auto"."""
        return self.spec.kernels

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the block, in order: names, operations and the names of their inputs."""
        return self.spec.steps

    @property
    def device(self) -> str:
        """A description of the device."""
        return self._engine.describe()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return self._engine.weight_bytes

    def _timed(self, call: Call) -> list[Timeline]:
        """Return the timelines of the forward passes that `call` runs; see `TracedEngine.timed`."""
        return self._engine.timed(call)

    def _compare(self, x: object, given: Given = NOTHING) -> Comparisons:
        """Compare every step's result with a float64 run that uses the same rounded weights."""
        exact = NumpyEngine(self.spec, self._tensors(self.weights.astype(np.float64)))
        return compare_steps(self._engine, exact, x, self.dtype, given)


class Block(BaseBlock):
    """A Pre-LN transformer block, computed on a GPU or with NumPy.

    weights: a BlockWeights. causal: whether row i sees keys 0…i only (GPT-2), or all of them
    (LeetGPU's GPT-2 block challenge). device: "cuda", "cuda:1", "cpu", or None for the GPU where
    there is one. graph: replay a CUDA graph for repeated calls (same bits as direct launches).

    dtype: dtype of x, the result, all intermediate tensors and the matrices: "float32", "bfloat16"
    or "float16". Sums, statistics, softmax, biases, gamma and beta are float32. With NumPy a step
    is computed in float32 and its result rounded to the dtype.

    kernels: "skeleton", ten steps in float32 with the kernels of LeetGPU's challenge; "fused",
    seven steps on tensor cores, for heads of 64 channels and compute capability 7.5 or newer; or
    "auto", the faster kind that supports the dtype. Fused float32 has the accuracy of float32:
    the operands of its products are hi/lo (HiLoMatrix), which requires finite weights. With
    NumPy "auto" selects the ten steps for float32.

    Raises InputError for wrong arguments, DeviceError when the device cannot be used.
    """

    @named_options()
    def __init__(
        self,
        weights: BlockWeights = None,  # type: ignore[assignment]  # the check below names it
        causal: bool = True,
        device: str | None = None,
        dtype: str = "float32",
        kernels: str = "auto",
        graph: bool = True,
    ) -> None:
        self._checked(weights, BlockWeights, dtype, kernels)
        self.causal, graph = check_flag("causal", causal), check_flag("graph", graph)
        index = resolve_device(device)
        kernels = _choose(kernels, dtype, weights, index)
        self.dtype = dtype
        self.weights = rounded(weights, dtype)  # float32 arrays; matrices are rounded to dtype
        bounds = None
        if index is not None and kernels == "fused" and dtype == "float32":
            bounds = largest(weights)
        self._start(spec_of(weights, self.causal, kernels, bounds), device, index, graph)

    def __repr__(self) -> str:
        w = self.weights
        return (
            f"Block(n_embd={w.n_embd}, n_head={w.n_head}, causal={self.causal}, {self.dtype}, "
            f"kernels {self.kernels!r}, {self.device}, {self.weight_bytes:,} bytes)"
        )

    def __call__(self, x: object, out: object | None = None) -> Any:
        """Compute the block. x (T, C) or (B, T, C) of the block's dtype → shape and dtype of x.

        For a NumPy x the result is a NumPy array. For a CUDA array (CuPy, DLPack,
        `__cuda_array_interface__`) it is a CuPy array, computed on CuPy's current stream. This
        stream and the current stream of the library of x or `out` wait for each other, so that the
        caller can overwrite x, and read `out`, at once. The result is a new array, which later
        calls leave unchanged, or `out`. An x that is not C-contiguous is copied first; `out` must
        be C-contiguous. NaN propagates. Raises InputError.
        """
        return self._engine.forward(x, out)

    def trace(self, x: object) -> dict[str, Any]:
        """Return a dict from step names, "ln1" to "output", to copies of the steps' results."""
        return self._engine.trace(x)

    def compare(self, x: object) -> Comparisons:
        """Compare every step's result, in order, with float64 NumPy. x: NumPy input of the block.

        The float64 run starts from the same x and weights, rounded to the block's dtype.
        """
        return self._compare(x)


Weights = TypeVar("Weights", bound=BlockArrays)


def rounded(weights: Weights, dtype: str) -> Weights:
    """Return the weights as float32 arrays, with matrices rounded to `dtype`.

    For 16 bits, raises InputError for infinity, NaN and numbers beyond the range of the dtype.
    """
    weights = weights.astype(np.float32)
    if dtype == "float32":
        return weights
    matrices: dict[str, np.ndarray] = {
        name: WeightMatrix.quantize(array, dtype, "KN", name).dequantized()
        for name, array in weights.tensors().items()
        if array.ndim == 2
    }
    return replace(weights, **matrices)  # type: ignore[type-var]  # a dataclass


def _choose(kernels: str, dtype: str, weights: BlockWeights, device: int | None) -> str:
    """Return "skeleton" or "fused", the kind of kernels to use. Raises InputError with advice."""
    if kernels == "skeleton" and dtype in SIXTEEN_BITS:
        raise InputError(
            Argument("kernels"),
            " 'skeleton': expected ",
            Argument("dtype"),
            f" 'float32', got {dtype!r}: use ",
            Argument("kernels", "fused"),
            ", or ",
            Argument("dtype", "float32"),
        )
    if kernels == "skeleton":
        return kernels
    if device is None:  # on the CPU, NumPy supports everything
        return "fused" if kernels == "fused" or dtype in SIXTEEN_BITS else "skeleton"
    problem = fused_problem(weights, cards.capability_of(device))
    if dtype in SIXTEEN_BITS:
        if problem:
            raise InputError(
                Argument("dtype"),
                f" {dtype!r}: {problem}: use ",
                Argument("dtype", "float32"),
                ", whose kernels run here, or ",
                Argument("device", "cpu"),
            )
        return "fused"
    problem = problem or hi_lo_problem(weights)
    if problem and kernels == "fused":
        raise InputError(
            Argument("kernels"), f" 'fused': {problem}: use ", Argument("kernels", "skeleton")
        )
    return "skeleton" if problem else "fused"


def fused_problem(weights: BlockWeights, capability: int) -> str | None:
    """Return the reason why fused kernels cannot run these weights on this GPU, or None."""
    if not cards.properties(capability).has_mma:
        return f"tensor cores: expected compute capability 7.5 or newer, got {capability / 10:.1f}"
    head = weights.n_embd // weights.n_head
    if head != TENSOR_HEAD:
        return f"the fused attention takes heads of {TENSOR_HEAD} channels, these have {head}"
    if weights.n_embd > FUSED_WIDTH:
        return f"the fused LayerNorm takes {FUSED_WIDTH:,} channels at most, not {weights.n_embd:,}"
    return None


def hi_lo_problem(weights: BlockWeights) -> str | None:
    """Return why activations cannot be stored as two float16 numbers per value, or None.

    The weights determine bounds, from which the scales of a HiLoMatrix follow. None: no x can
    make a tensor too large for its scale.
    """
    tensors = weights.astype(np.float32).tensors()
    for name, w in tensors.items():
        if not np.isfinite(w).all():
            return f"{name}: expected finite weights, found infinity or NaN"
    for name, bound in largest(weights).items():
        if bound > LARGEST_BOUND:
            return f"{name}: with these weights it may be as large as {bound:.1e}, beyond 2^127"
    return None


def spec_of(
    weights: BlockWeights, causal: bool, kernels: str, bounds: Mapping[str, float] | None = None
) -> BlockSpec:
    """Return the BlockSpec for these weights. Fused kernels may use split-K for projections."""
    heads = weights.n_head, weights.n_head, Scales(weights.eps), weights.n_embd // weights.n_head
    settings, fused = PassSettings(*heads, causal), kernels == "fused"
    return BlockSpec(gpt2, settings, weights.n_embd, weights.tensors(), kernels, fused, bounds)


def largest(weights: BlockWeights) -> dict[str, float]:
    """Return the largest possible magnitude of results by step name, for steps with a bound."""
    steps = spec_of(weights, True, "fused").steps
    return result_bounds(steps, weights.astype(np.float32).tensors())


def solve(x: Any, output: Any, weights: Any, seq_len: int) -> None:
    """Entry point of LeetGPU's challenge: compute the block without a mask, write it to `output`.

    x, output: CuPy float32, seq_len · 768 elements in any shape; weights: CuPy float32, the packed
    7,087,872 elements. Intermediate tensors are allocated for the call. Runs on the current stream.
    The result is bitwise equal to `Block(BlockWeights.from_packed(weights), causal=False,
    kernels="skeleton")(x)`. Raises InputError.
    """
    seq_len = check_count("seq_len", seq_len)
    doctor.require_cuda("gpt2block.solve")
    shape = (seq_len, 768)
    check("weights", weights)
    for name, array in (("x", x), ("output", output)):
        check(name, array)
        if array.size != seq_len * 768:
            raise InputError(
                f"{name}: expected seq_len · 768 = {seq_len * 768:,} floats, got {array.size:,}"
            )
    settings = PassSettings(12, 12, Scales(1e-5), head_size=64, causal=False)
    spec = BlockSpec(gpt2, settings, 768, block_shapes(768), "skeleton")
    run_once(spec, unpack(weights.ravel()), x.reshape(shape), output.reshape(shape))


class LlamaBlock(BaseBlock):
    """A Llama transformer block, computed on a GPU or with NumPy.

    weights: a LlamaBlockWeights. causal: whether row i sees keys 0…i only. device: "cuda",
    "cuda:1", "cpu", or None for the GPU where there is one. graph: replay a CUDA graph for repeated
    calls (same bits as direct launches).

    dtype: dtype of x, the result, all intermediate tensors and the matrices, on a GPU also of
    gamma: "float32", "bfloat16" or "float16". With NumPy a step is computed in float32 and its
    result rounded to the dtype.

    kernels: "skeleton", a step per operation; "fused", in which products fuse residuals and norms;
    "auto" is skeleton for float32 and fused for 16 bits. A name stands for the same tensor in both.
    On a GPU, float32 supports skeleton only, and 16 bits support fused only, with head sizes that
    attention on tensor cores supports.

    Raises InputError for wrong arguments, DeviceError when the device cannot be used.
    """

    @named_options()
    def __init__(
        self,
        weights: LlamaBlockWeights = None,  # type: ignore[assignment]  # the check below names it
        causal: bool = True,
        device: str | None = None,
        dtype: str = "float32",
        kernels: str = "auto",
        graph: bool = True,
    ) -> None:
        self._checked(weights, LlamaBlockWeights, dtype, kernels)
        self.causal, graph = check_flag("causal", causal), check_flag("graph", graph)
        index = resolve_device(device)
        self.dtype = dtype
        fused = "fused" if dtype in SIXTEEN_BITS else "skeleton"
        kernels = fused if kernels == "auto" else kernels
        if index is not None:
            self._check_kernels(weights.config, kernels, fused, index)
        self.weights = rounded(weights, dtype)  # float32 arrays, matrices rounded to dtype
        c = weights.config
        heads = c.n_head, c.n_kv_head, c.scales, c.head_size
        settings = PassSettings(*heads, self.causal, weights.half_split, ("frequencies",))
        spec = BlockSpec(llama, settings, c.n_embd, weights.tensors(), kernels)
        self._start(spec, device, index, graph)

    def _check_kernels(self, config: LlamaConfig, kernels: str, supported: str, index: int) -> None:
        """Raise InputError unless the GPU supports the kernels, heads and dtype of the block."""
        if kernels != supported:
            raise InputError(
                f"kernels {kernels!r}: expected {supported!r} for {self.dtype} on a GPU: use "
                "kernels='auto', or device='cpu'"
            )
        heads = (config.n_head, config.n_kv_head, config.head_size)
        with cupy.cuda.Device(index):
            try:
                check_heads(self.dtype, *heads, self.causal)
            except InputError as problem:
                raise InputError(f"dtype {self.dtype!r}: {problem}") from problem

    def _tensors(self, weights: Any) -> dict[str, np.ndarray]:
        return {**weights.tensors(), "frequencies": weights.frequencies}

    def __repr__(self) -> str:
        c = self.weights.config
        return (
            f"LlamaBlock(n_embd={c.n_embd}, n_head={c.n_head}, n_kv_head={c.n_kv_head}, "
            f"causal={self.causal}, {self.dtype}, kernels {self.kernels!r}, {self.device}, "
            f"{self.weight_bytes:,} bytes)"
        )

    def __call__(self, x: object, positions: object = None, out: object | None = None) -> Any:
        """Compute the block. x (T, C) or (B, T, C) of the block's dtype → shape and dtype of x.

        positions: T integers on the host, from 0 to 2^31 - 1; None: 0 … T - 1. As for Block, a
        NumPy x gives a NumPy array, and a CUDA array a CuPy array: a new array, or `out`. NaN
        propagates. Raises InputError.
        """
        return self._engine.forward(x, out, _positions(positions, x))

    def trace(self, x: object, positions: object = None) -> dict[str, Any]:
        """Return a dict from step names, "rms1" to "output", to the steps' results."""
        return self._engine.trace(x, _positions(positions, x))

    def compare(self, x: object, positions: object = None) -> Comparisons:
        """Compare every step's result, in order, with float64 NumPy; arguments as in `__call__`.

        The float64 run starts from the same x and weights, rounded to the block's dtype.
        """
        return self._compare(x, _positions(positions, x))


def _positions(positions: object, x: object) -> Given:
    """Return the input tensor "positions" of a call: the positions of the rows of x, (T,).

    Raises InputError for wrong positions. The engine checks x.
    """
    shape: tuple[int, ...] = getattr(x, "shape", ())
    T = shape[-2] if len(shape) > 1 else 1
    if positions is None or len(shape) < 2:
        return {"positions": np.arange(T)}
    try:
        array = plain_array("positions", positions)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"positions: expected {T} integers: {error}") from error
    if array.shape != (T,) or array.dtype.kind not in "iu":
        raise InputError(f"positions: expected {T} integers, got {array.dtype} {array.shape}")
    wrong = (array < 0) | (array > LARGEST_COUNT)
    if wrong.any():
        raise InputError(
            f"positions: expected 0 to {LARGEST_COUNT}, got {int(array[wrong.argmax()])}"
        )
    return {"positions": array.astype(np.int64)}
