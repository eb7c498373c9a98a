"""Elementwise operations: residual addition, GELU, SiLU gate, squared ReLU, capping of logits.

Addition and GELU are steps of LeetGPU's ten-step GPT-2 block. Kernels: silu_mul.cu, activate.cu,
residual.cu, gelu.cu, relu_squared.cu and cap.cu in elementwise/.
"""

from __future__ import annotations

from math import ceil, gcd

from gpt2block.checks import check_integer
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, alignment, check_alignment, contiguous
from gpt2block.cuda.kernels import Geometry, Launch, launch_at
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.operands import check_operand, stored_defines, written_dtype
from gpt2block.ops.operation import REQUIRED, Operation, Sizes, Workload, as_stated, variant
from gpt2block.ops.products import gate_define
from gpt2block.ops.warm import call

CHALLENGE = "LeetGPU's GPT-2 block challenge"
SILU_MUL_FILE = "elementwise/silu_mul.cu"
BLOCK = 256


_add = as_stated(
    "add",
    "learn/elementwise/residual.cu",
    "add_kernel",
    lambda c: (c.a, c.b, c.output("out"), c.a.size),
)
_gelu = as_stated("gelu", "learn/elementwise/gelu.cu", "gelu_kernel", lambda c: (c.x, c.x.size))


def _elements(s: Sizes) -> int:
    return s["N"] * s["C"]


ADD = Operation(
    name="add",
    variants=(_add,),
    workload=Workload(
        document=CHALLENGE,
        idea="a + b, the residual connection",
        sizes={"N": 8192, "C": 768},
        traffic=lambda s: 12 * _elements(s),
        flops=_elements,
        small=({"N": 1, "C": 5}, {"N": 7, "C": 33}, {"N": 3, "C": 769}),
        arrays={"out": "y"},
        aliases={"n": "N*C"},
    ),
)


def add(a: CudaArray, b: CudaArray) -> CudaArray:
    """Compute `reference.add` on float32 CuPy arrays of one shape. Raises InputError."""
    return call(ADD, contiguous(a, b)).out


GELU = Operation(
    name="gelu",
    variants=(_gelu,),
    workload=Workload(
        document=CHALLENGE,
        idea="0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))), in place",
        sizes={"N": 8192, "C": 3072},
        traffic=lambda s: 8 * _elements(s),
        flops=lambda s: 8 * _elements(s),
        small=({"N": 1, "C": 5}, {"N": 7, "C": 33}, {"N": 3, "C": 769}),
        aliases={"n": "N*C"},
    ),
)


def gelu(x: CudaArray) -> CudaArray:
    """Compute `reference.gelu` of a float32 CuPy array, in a new array. Raises InputError."""
    if isinstance(x, cupy.ndarray):
        check_alignment("x", x)
        x = x.copy(order="C")  # the kernel works in place
    return GELU.bind_on_device((x,)).run()


@variant("silu_mul", SILU_MUL_FILE, "silu_mul")
def _silu_mul(c: Call) -> Launch:
    arrays = (c.gate, c.up, c.output("out"))
    size = c.out.size
    width = alignment(*(array.data.ptr for array in arrays)) // c.out.itemsize  # elements per load
    while size % width:
        width //= 2
    kind = (("GATE_SIGMOID", 1),) if c.sigmoid else gate_define(c.gelu)
    grid, defines = (ceil(size / (width * BLOCK)),), (("SM_WIDTH", width), *kind)
    geometry = Geometry("silu_mul", grid, (BLOCK,), defines=defines)
    return launch_at(SILU_MUL_FILE, geometry, (*arrays, size), storage=c.storage)


@variant("columns", SILU_MUL_FILE, "gated_columns")
def _gated_columns(c: Call) -> Launch:
    expected = f"0 to {c.W - c.P}, for {c.P} of {c.W} columns"
    first = check_integer("first", c.first, 0, c.W - c.P, expected)
    width = min(gcd(4, c.P, c.W, first), alignment(c.gate.data.ptr, c.rows.data.ptr) // 4)
    defines = (("SM_WIDTH", width), *gate_define(c.gelu))
    geometry = Geometry("gated_columns", (ceil(c.N * c.P / (width * BLOCK)),), (BLOCK,), 0, defines)
    args = (c.gate, c.rows, c.output("out"), first, c.P, c.W, c.N * c.P)
    return launch_at(SILU_MUL_FILE, geometry, args)


@variant("activate", "elementwise/activate.cu", "activate")
def _activate(c: Call) -> Launch:
    width = gcd(4, c.C)
    c.check_addresses("gate", "up", "out", loaded=width)
    defines = (*gate_define(c.gelu), ("ACTIVATE_FAST", int(c.fast)), ("ACTIVATE_WIDTH", width))
    defines += stored_defines("ACTIVATE_OPERAND", c.to_operand)
    grid = (ceil(c.C / (width * BLOCK)), c.M)
    geometry = Geometry("activate", grid, (BLOCK,), defines=defines)
    args = (c.gate, c.up, c.output("out"), c.C)
    return launch_at("elementwise/activate.cu", geometry, args, c.out_dtype)


def _prepare_activate(unchecked: UncheckedCall) -> Call:
    """Check a call. dtype, to_operand: as in `operand`."""
    c = unchecked.checked(out_dtype=written_dtype(unchecked, "activate"))
    check_operand(c.to_operand, c.C)
    return c


@variant("relu squared", "elementwise/relu_squared.cu", "relu_squared")
def _relu_squared(c: Call) -> Launch:
    geometry = Geometry("relu_squared", (ceil(c.x.size / BLOCK),), (BLOCK,))
    return launch_at("elementwise/relu_squared.cu", geometry, (c.x, c.output("out"), c.x.size))


@variant("cap", "elementwise/cap.cu", "cap_logits")
def _cap(c: Call) -> Launch:
    geometry = Geometry("cap_logits", (ceil(c.x.size / BLOCK),), (BLOCK,))
    return launch_at("elementwise/cap.cu", geometry, (c.x, c.output("out"), c.limit, c.x.size))


RELU_SQUARED = Operation(name="relu_squared", variants=(_relu_squared,))
CAP = Operation(name="cap", variants=(_cap,), options={"limit": REQUIRED})
GATED_COLUMNS = Operation(
    name="gated_columns", variants=(_gated_columns,), options={"first": REQUIRED, "gelu": False}
)
ACTIVATE = Operation(
    name="activate",
    variants=(_activate,),
    options={"gelu": False, "fast": False, "dtype": None, "to_operand": None},
    prepare=_prepare_activate,
)
SILU_MUL = Operation(
    name="silu_mul",
    variants=(_silu_mul,),
    options={"gelu": False, "sigmoid": False},
    steps=(RELU_SQUARED, CAP, GATED_COLUMNS, ACTIVATE),
    workload=Workload(
        idea="gate / (1 + exp(-gate)) · up, the gated feed-forward of Llama; or GELU(gate) · up",
        sizes={"M": 16, "N": 11008},
        traffic=lambda s: 3 * s["itemsize"] * s["M"] * s["N"],
        flops=lambda s: 4 * s["M"] * s["N"],
        small=({"M": 1, "N": 5}, {"M": 7, "N": 33}, {"M": 3, "N": 1376}),
        aliases={"n": "M*N"},
        dtypes=("float32", "float16", "bfloat16"),
    ),
)


def silu_mul(gate: CudaArray, up: CudaArray, gelu: bool = False) -> CudaArray:
    """Compute `reference.silu_mul` on CuPy arrays of one shape and dtype, float32 or 16 bits.

    Raises InputError.
    """
    return call(SILU_MUL, contiguous(gate, up), gelu=gelu).out
