"""RMSNorm: x / sqrt(mean(x²) + eps) · weight over each row.

Kernels: norms/rmsnorm.cu (rows) and, for forward passes, norms/rmsnorm_stream.cu (stream), where
`rmsnorm_add` adds the norm of x to the residual stream, `rmsnorm_groups` does so for groups of
channels of a row, and `operand` converts rows of the stream without a norm.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd

from gpt2block.cuda.arrays import (
    CudaArray,
    alignment,
    check,
    checked_row_stride,
    contiguous,
    in_rows,
    multiprocessors,
    row_alignment,
)
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import Geometry, Launch, defines_of, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, UncheckedCall, refuse, storage
from gpt2block.ops.engines.linear_mma import HALF_SPLITS
from gpt2block.ops.engines.rows import LONGEST_IN_REGISTERS, ROW_BLOCKS, check_rows, share
from gpt2block.ops.operands import check_operand, stored_defines, stored_scale, written_dtype
from gpt2block.ops.operation import Operation, Workload, variant
from gpt2block.ops.warm import call

FILE = "norms/rmsnorm.cu"
STREAM = "norms/rmsnorm_stream.cu"
MAX_STREAM_THREADS = 256
MAX_THREADS = 1024  # threads per row if the row does not fit in registers


@lru_cache(maxsize=1024)
def choose_geometry(
    rows: int, C: int, width: int, sms: int, block: int | None = None, residual: bool = False
) -> Geometry:
    """Geometry of variant `rows` for `rows` rows of C channels on `sms` multiprocessors.

    width: elements per load. block: threads per row; None chooses. residual: whether a residual is
    added first. Raises InputError if a row does not fit in the registers of `block` threads.
    """
    if C > LONGEST_IN_REGISTERS:
        threads, held, together = block or MAX_THREADS, 0, 1
    else:
        shape = share(rows, C, width, sms, block)
        threads, held, together = shape.threads, shape.held, shape.rows
    defines = (
        *defines_of(RMS_C=C, RMS_WIDTH=width, RMS_THREADS=threads, RMS_VECTORS=held),
        *defines_of(RMS_ROWS=together, RMS_RESIDUAL=int(residual)),
    )
    return Geometry(
        "rmsnorm_rows", (ceil(rows / together),), (threads * together,), defines=defines
    )


@variant("rows", FILE, "rmsnorm_rows", blocks=ROW_BLOCKS)
def _rows(c: Call) -> Launch:
    if c.residual is not None:
        c.output("total")
    stride, item = checked_row_stride("x", c.x), c.x.itemsize
    others = row_alignment(c.C, c.weight, c.residual, c.total, c.output("out"))
    width = alignment(c.x.data.ptr, item * stride, others) // item
    block = c.block if c.requested else None
    geometry = choose_geometry(c.rows, c.C, width, multiprocessors(), block, c.residual is not None)
    args = (c.x, c.residual, c.weight, c.total, c.output("out"), stride, c.eps, c.rows)
    return launch_at(FILE, geometry, args, storage=c.storage)


def stream_geometry(rows: int, C: int) -> Geometry:
    """Return the geometry for `rows` rows of C channels. C determines the order of additions."""
    width = gcd(4, C)
    threads = min(32 * ceil(C / (32 * width)), MAX_STREAM_THREADS)
    defines = (("RS_C", C), ("RS_WIDTH", width), ("RS_THREADS", threads))
    return Geometry("rmsnorm_stream", (rows,), (threads,), defines=defines)


@variant("stream", STREAM, "rmsnorm_stream", dtypes=("float32",))
def _stream(c: Call) -> Launch:
    given = c.residual is not None or c.requested
    refuse(given, "has no residual and no block: use rows")
    c.check_addresses("x", "weight", "out", loaded=gcd(4, c.C))
    geometry = stream_geometry(c.rows, c.C)
    geometry = geometry.with_defines(stored_defines("RS_OPERAND", c.to_operand))
    args = (c.x, c.weight, c.out, stored_scale(c.to_operand), c.eps)
    return launch_at(STREAM, geometry, args, storage=c.out_dtype)


@variant("add", STREAM, "rmsnorm_add", "rmsnorm_add_scaled", dtypes=("float32",))
def _add(c: Call) -> Launch:
    if c.scale is not None and c.S != 1:
        raise InputError(f"scale: expected shape (1,), got {c.scale.shape}")
    return _launch_add(c, c.rows, c.C, *(() if c.scale is None else (c.scale,)))


@variant("groups", STREAM, "rmsnorm_add", dtypes=("float32",))
def _groups(c: Call) -> Launch:
    """Launch rmsnorm_add with each group of P channels as a row."""
    if c.W % c.P:
        raise InputError(f"x: expected rows of a multiple of {c.P} channels, got {c.W}")
    return _launch_add(c, c.N * (c.W // c.P), c.P)


def _launch_add(c: Call, rows: int, C: int, *scale: CudaArray) -> Launch:
    """Launch rmsnorm_add for rows of C channels, or rmsnorm_add_scaled if there is a scale."""
    c.check_addresses("x", "weight", "residual", "out", loaded=gcd(4, C))
    kernel = "rmsnorm_add_scaled" if scale else "rmsnorm_add"
    geometry = stream_geometry(rows, C)._replace(kernel=kernel)
    return launch_at(STREAM, geometry, (c.x, c.weight, c.residual, *scale, c.out, c.eps))


@variant("operand", STREAM, "operand_rows", "operand_columns", "operand_columns_narrow")
def _operand(c: Call) -> Launch:
    narrow = c.storage != "float32"
    reason = f"x in {c.storage}: expected float32, or with channels the dtype {c.out_dtype} of out"
    refuse(narrow and (c.channels is None or c.storage != c.out_dtype), reason)
    c.check_addresses("x", "out", loaded=gcd(4, c.C))
    geometry = stream_geometry(c.rows, c.C)
    loads = ceil(c.C / (geometry.block[0] * gcd(4, c.C)))
    channels = () if c.channels is None else (c.channels,)
    kernel = "operand_columns" + "_narrow" * narrow if channels else "operand_rows"
    geometry = geometry._replace(kernel=kernel, grid=(c.rows, loads))
    geometry = geometry.with_defines(stored_defines("RS_OPERAND", c.to_operand))
    args = (c.x, *channels, c.out, stored_scale(c.to_operand))
    return launch_at(STREAM, geometry, args, storage=c.out_dtype)


@variant("sums", STREAM, "rmsnorm_sums", dtypes=("float32",))
def _sums(c: Call) -> Launch:
    c.check_addresses("x", "weight", "sums", "out", loaded=gcd(4, c.C))
    geometry = stream_geometry(c.M, c.C)
    defines = (*geometry.defines, ("RS_SUMS", c.S))
    defines += (("SUMS_HALF", HALF_SPLITS),) if c.w_down.dtype == GGUF else ()
    geometry = geometry._replace(kernel="rmsnorm_sums", defines=defines)
    return launch_at(STREAM, geometry, (c.x, c.weight, c.sums, c.w_down.scale, c.out, c.eps))


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `rmsnorm`. With a residual, x + residual replaces x and is Bound.extra[0].

    The rows of x may be any constant distance apart. block: threads per row. Variant stream takes
    contiguous float32 rows, without residual and block, and writes `dtype`, by default the dtype of
    out; a row has the same bits in any number of rows. to_operand: the `Operand` that variant
    stream stores in a float32 out for `linear`, instead of floats.
    """
    dtype, to_operand = unchecked.options["dtype"], unchecked.options["to_operand"]
    chosen, x = OPERATION.variant(unchecked.options["variant"] or "rows"), unchecked.inputs[0]
    if chosen.name == "stream":
        dtype = _stream_dtype(unchecked)
    elif dtype is not None or to_operand is not None:
        raise InputError("rmsnorm: dtype and to_operand are options of variant stream: use it")
    c = unchecked.checked(variant=chosen.name, out_dtype=dtype or storage(x))
    check_rows("x", c.x)
    return c


def _stream_dtype(unchecked: UncheckedCall) -> str:
    """Return the checked dtype of out, which is float32 if out is an `Operand`."""
    x = unchecked.inputs[0]
    check("x", x)
    dtype = written_dtype(unchecked, "rmsnorm")
    check_operand(unchecked.options["to_operand"], x.shape[-1], x.shape[-1])
    return dtype


def _prepare_operand(unchecked: UncheckedCall) -> Call:
    """Check a call of `operand`. dtype and to_operand are as in variant stream of `rmsnorm`."""
    c = unchecked.checked(out_dtype=written_dtype(unchecked, "operand"))
    check_operand(c.to_operand, c.C, c.C)
    check_rows("x", c.x)
    return c


RMSNORM_ADD = Operation(name="rmsnorm_add", variants=(_add,), options={"eps": 1e-6})
RMSNORM_GROUPS = Operation(name="rmsnorm_groups", variants=(_groups,), options={"eps": 1e-6})
OPERAND = Operation(
    name="operand",
    variants=(_operand,),
    options={"dtype": None, "to_operand": None},
    prepare=_prepare_operand,
)
RMSNORM_SUMS = Operation(name="rmsnorm_sums", variants=(_sums,), options={"eps": 1e-6})

OPERATION = Operation(
    name="rmsnorm",
    variants=(_rows, _stream),
    options={"eps": 1e-6, **dict.fromkeys(("block", "variant", "dtype", "to_operand"))},
    prepare=_prepare,
    steps=(RMSNORM_SUMS, RMSNORM_ADD, RMSNORM_GROUPS, OPERAND),
    workload=Workload(
        document="kernl's Llama kernels",
        idea="x / sqrt(mean(x²) + eps) · weight over each row",
        sizes={"M": 16, "C": 4096},
        traffic=lambda s: s["itemsize"] * (2 * s["M"] * s["C"] + s["C"]),
        flops=lambda s: 4 * s["M"] * s["C"],
        attrs={"eps": 1e-6},
        small=({"M": 1, "C": 24}, {"M": 5, "C": 33}, {"M": 3, "C": 769}),
        aliases={"gamma": "weight", "rows": "M"},
        dtypes=("float16", "bfloat16", "float32"),
    ),
)


def rmsnorm(
    x: CudaArray,
    weight: CudaArray,
    eps: float = 1e-6,
    block: int | None = None,
    out: CudaArray | None = None,
    variant: str | None = None,
) -> CudaArray:
    """Compute `reference.rmsnorm` on float16, bfloat16 or float32 CuPy arrays. Raises InputError.

    x (..., C), weight (C,) of the same dtype; sums are float32. A view whose rows are a constant
    distance apart, such as some columns of a matrix, is read in place; any other view is copied
    first. out (..., C): array for the result, not x itself. Few rows get more threads each, so the
    last bits of a row can depend on the number of rows; `block` fixes the threads per row. variant:
    "rows", the default, or "stream", for contiguous float32 rows, without block: a row has the same
    bits in any number of rows.
    """
    (weight,) = contiguous(weight)
    x = contiguous(x)[0] if variant == "stream" else in_rows(x)
    return call(OPERATION, (x, weight), out, eps=eps, block=block, variant=variant).out
