"""Every kernel of LayerNorm, RMSNorm and softmax behind one call, for tests/ops/test_norm_laws.py.

A kernel computes rows from rows x (..., C), with vectors (C,) such as gamma and beta. A new kernel
needs a line in `KERNELS`; special features, such as a residual or a mask, are tested in the file of
its operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.ops.engines.rows import LONGEST_IN_REGISTERS
from gpt2block.ops.layernorm import DECODE, NARROW
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from gpt2block.ops.layernorm_gelu import OPERATION as LAYERNORM_GELU
from gpt2block.ops.operation import Operation
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from gpt2block.ops.softmax import OPERATION as SOFTMAX
from tests import plain
from tests.devices import GPU, H200, outputs

Array = NDArray[Any]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# dtypes (x, out) that variant `narrow` supports
PAIRS = [(x, out) for out in DTYPES for x in dict.fromkeys((out, "float32"))]
EPS = 1e-5
NUMPY = "numpy"  # the reference, in the dtype of x
DEFAULT = ""  # no variant is given


class Shape(NamedTuple):
    """Length C of rows and settings of their computation; each Shape may need its own program.

    sms: multiprocessors of an emulated GPU. 0: even few rows are computed as rows that fill a GPU,
    with one warp per row or several rows per warp. apart: values between rows. block: threads per
    row.
    """

    C: int
    sms: int = H200
    apart: int = 0
    block: int | None = None

    def __str__(self) -> str:
        usual = self._field_defaults
        return "-".join(f"{k}{v}" for k, v in self._asdict().items() if usual.get(k, 0) != v)


@dataclass(frozen=True)
class Kernel:
    """A variant of an operation. dtype: of x, and of the vectors if they are not float32.

    shapes: shapes on which the kernel must be right; most laws use the first two. more: further
    shapes, emulated only with --slow. vectors: the number of vectors. in_place: whether out may be
    x. alone: whether the order of additions in a row depends neither on other rows nor on the GPU.
    widths: C of rows on a GPU -> numbers of rows
    to try.
    """

    operation: Operation
    variant: str
    shapes: Sequence[Shape]
    dtype: str = "float32"
    out_dtype: str = ""
    vectors: int = 0
    in_place: bool = False
    alone: bool = False
    widths: Mapping[int, Sequence[int]] = field(default_factory=dict)
    more: Sequence[Shape] = ()

    @property
    def out(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def float32(self) -> bool:
        return (self.dtype, self.out) == ("float32", "float32")

    @property
    def one_pass(self) -> bool:
        """Whether the variance is E[x²] - E[x]², which loses all digits if the mean is large."""
        return self.variant in ("4", "5", "optimized")

    @property
    def attrs(self) -> dict[str, Any]:
        return {} if self.operation is SOFTMAX else {"eps": EPS}

    @property
    def options(self) -> dict[str, Any]:
        return {**self.attrs, "variant": self.variant or None}

    def inputs(self, *shape: int) -> list[Array]:
        """Return x of this shape, and the vectors."""
        x = plain.normal(0, *shape) * np.float32(3 if self.operation is SOFTMAX else 1)
        dtype = "float32" if self.variant == NARROW else self.dtype
        vectors = [plain.normal(seed, shape[-1]) for seed in range(1, self.vectors + 1)]
        return [x.astype(DTYPES[self.dtype]), *(v.astype(DTYPES[dtype]) for v in vectors)]

    def __call__(
        self,
        where: str,
        arrays: Sequence[Array | None],
        shape: Shape | None = None,
        in_place: bool = False,
        **options: Any,
    ) -> list[Array]:
        """Run the kernel; return its result and its extra outputs.

        A GPU runs it twice and must give the same bits. where: a thread order of the emulator, or
        "gpu". shape: settings of the computation; its C is ignored.
        """
        x = arrays[0]
        assert x is not None
        if self.variant == NUMPY:
            with np.errstate(all="ignore"):
                function = getattr(reference, self.operation.name)
                return [np.asarray(function(*arrays, **{**self.attrs, **options}))]
        C = x.shape[-1]
        _, sms, apart, block = shape or Shape(C)
        wide = np.full((*x.shape[:-1], C + apart), np.nan, x.dtype)
        wide[..., :C] = x

        def bind(given: Sequence[Any], out: Any, **options: Any) -> Any:
            return self.operation.bind((given[0][..., :C], *given[1:]), out, **options)

        if self.operation is LAYERNORM and self.variant not in (NARROW, DECODE, DEFAULT):
            unwritten = np.full(x.shape[:-1], np.nan, np.float32)
            options = {"mean": unwritten, "rstd": unwritten.copy(), **options}
        out = None if in_place else np.full(x.shape, np.nan, DTYPES[self.out])
        options = {**self.options, **({"block": block} if block else {}), **options}
        return outputs(where, bind, (wide, *arrays[1:]), out, multiprocessors=sms, **options)

    def plainly(
        self, x: Array, *vectors: Array | None, eps: float = EPS, causal: bool = False
    ) -> list[Array]:
        """Return result, mean and rstd in float32, with each sum added term by term."""
        x, C = x.astype(np.float32), np.float32(x.shape[-1])
        if self.operation is SOFTMAX:
            seen = np.tri(x.shape[-1], dtype=bool) if causal else np.True_
            x = np.where(seen, x, np.float32(-np.inf))
            weights = np.exp(x - x.max(axis=-1, keepdims=True))
            return [weights / plain.running_sum(weights)]
        mean = plain.running_sum(x) / C if self.operation is not RMSNORM else np.float32(0)
        var = plain.running_sum((x - mean) * (x - mean)) / C
        if self.one_pass:
            var = np.maximum(plain.running_sum(x * x) / C - mean * mean, np.float32(0))
        root = np.sqrt(var + np.float32(eps))
        out = (x - mean) * (1 / root) if self.operation is LAYERNORM else (x - mean) / root
        for vector, apply in zip(vectors, (np.multiply, np.add), strict=False):
            out = out if vector is None else apply(out, vector.astype(np.float32))
        if self.operation is LAYERNORM_GELU:
            out = plain.gelu(out)
        return [out, *(np.broadcast_to(each, root.shape)[..., 0] for each in (mean, 1 / root))]

    def exact(self, *arrays: Array | None, **attrs: Any) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):
            return plain.exact(self.operation.name, *arrays, **{**self.attrs, **attrs})

    def assert_right(
        self, got: Sequence[Array], x: Array, *vectors: Array | None, **attrs: Any
    ) -> None:
        """Assert that each output errs at most twice as much as the plain evaluation, stored in the
        output's dtype.
        """
        result, *statistics = got
        assert result.dtype == DTYPES[self.out]
        expected, *plain_statistics = self.plainly(x, *vectors, **attrs)
        stored = expected.astype(result.dtype).astype(np.float32)
        truth = self.exact(x, *vectors, **attrs)
        plain.assert_as_accurate(result.astype(np.float32), truth, stored)
        if not statistics:
            return
        true_mean, true_rstd = reference.layernorm_stats(x.astype(np.float64), **attrs)
        plain.assert_as_accurate(statistics[0], true_mean, plain_statistics[0])
        # rsqrtf may err by 2 units in the last place (CUDA's manual), a square root by half a unit.
        units = 2 * np.spacing(np.float32(true_rstd.max()))
        limit = 2 * np.abs(plain_statistics[1] - true_rstd).max() + units
        assert np.abs(statistics[1] - true_rstd).max() <= limit


# --- kernels


def shapes(*lengths: int, **options: Any) -> list[Shape]:
    return [Shape(C, **options) for C in lengths]


BLOCKS = [Shape(500, block=32), Shape(500, block=512)]


def layernorms() -> Iterator[tuple[str, Kernel]]:
    every: Any = {"operation": LAYERNORM, "vectors": 2, "alone": True}
    lengths = (1, 2, 3, 7, 48, 64, 100, 768, 769, 1024, 1600, 4096, 8191, 8192, 16384, 16392, 50257)
    widths: dict[int, Sequence[int]] = {C: (33,) if C < 5000 else (5,) for C in lengths}
    yield "skeleton", Kernel(variant=DEFAULT, shapes=shapes(300, 768), widths=widths, **every)
    more = shapes(3, 31, 65, 768)
    for n in "12345":
        kernel = Kernel(variant=n, shapes=shapes(48, 300, 1), more=more, widths=widths, **every)
        yield n, kernel
    six = {
        # Shape(48): 16 threads per row, four of them idle. 768: two warps per row, two rows per
        # block. 37: one element per load. 772: the last vector is not full. 8196: rows are read
        # again.
        "float32": [Shape(48), Shape(768, block=128), *shapes(37, 772, 8196)],
        "float16": shapes(768, 16392),
        "bfloat16": shapes(768),
    }
    for dtype in DTYPES:
        these: Any = {"shapes": six[dtype][:3], "more": six[dtype][3:], "widths": widths}
        yield f"6-{dtype}", Kernel(variant="6", dtype=dtype, **these, **every)
    narrow = {
        "float32-float32": shapes(48, 768),
        # 1111: one element per load, two warps per row. 1600: each warp takes several rows.
        "float32-float16": [*shapes(768, 1111), Shape(1600, sms=0)],
        "float32-bfloat16": [Shape(768), Shape(300, sms=0)],
        "float16-float16": [Shape(768), Shape(300, sms=0)],  # 300: 4 elements per load
        # 48: 8 threads per row, two of them idle
        "bfloat16-bfloat16": [Shape(48), *shapes(768, 1600, sms=0), Shape(768)],
    }
    widths = {C: (1, 17, 33) if C < 5000 else (5,) for C in lengths if C <= 16384}
    for x, out in PAIRS:
        name = f"{x}-{out}"
        these = {"shapes": narrow[name][:2], "more": narrow[name][2:], "widths": widths}
        yield f"narrow-{name}", Kernel(variant=NARROW, dtype=x, out_dtype=out, **these, **every)
    # Rows that fill blocks and rows that do not, with loads of 1, 2 and 4 values.
    decode = [Shape(48), Shape(132, sms=1), *shapes(6, 128)]
    yield "decode", Kernel(variant=DECODE, shapes=decode, more=shapes(1, 1100), **every)
    yield NUMPY, Kernel(variant=NUMPY, shapes=shapes(48, 768), **every)


def rmsnorms() -> Iterator[tuple[str, Kernel]]:
    of = {
        "float32": [
            Shape(300, 0, apart=4),  # three loads per lane, the last one not full
            Shape(768),  # one load per thread
            Shape(37),  # one element per load; two warps, one of them mostly idle
        ],
        "float16": [
            Shape(48, 0, apart=16),  # 8 threads per row, two of them idle; 16 rows per block
            Shape(70, apart=3),  # rows that do not start on a vector
        ],
        "bfloat16": [Shape(768, 0, apart=8), Shape(70), Shape(1)],
    }
    long = Shape(LONGEST_IN_REGISTERS + 8, apart=8, block=256)  # too long for registers
    lengths = (1, 2, 7, 64, 100, 768, 769, 4096, 5120, 8192, 11008, 16384, 16386, 50257)
    widths = {C: (1, 16, 500) if C < 5000 else (1, 16) for C in lengths}
    for dtype in DTYPES:
        yield dtype, Kernel(RMSNORM, "rows", [*of[dtype], long], dtype, vectors=1, widths=widths)
    yield NUMPY, Kernel(RMSNORM, NUMPY, shapes(300, 768), vectors=1)


def with_gelu() -> Iterator[tuple[str, Kernel]]:
    few: Any = {"shapes": shapes(48, 250, 1), "more": [*shapes(4, 33, 768), *BLOCKS]}
    for variant in ("baseline", "optimized"):
        yield variant, Kernel(LAYERNORM_GELU, variant, **few)
    # 1600: the last warps have fewer values
    of_rows, more = shapes(48, 768, 33), [*shapes(1, 1600), *BLOCKS]
    yield "rows", Kernel(LAYERNORM_GELU, "rows", of_rows, in_place=True, more=more)
    affine = [*shapes(48, 768, 257), *shapes(2052, 41, sms=0)]
    more = [Shape(1536), *shapes(1024, 768, 1000, 1026, sms=0)]
    vectors: Any = {"vectors": 2, "in_place": True, "more": more}
    yield "affine", Kernel(LAYERNORM_GELU, "rows", affine, **vectors)
    yield NUMPY, Kernel(LAYERNORM_GELU, NUMPY, shapes(48, 768, 1), vectors=2)


def softmaxes() -> Iterator[tuple[str, Kernel]]:
    lengths, more = shapes(48, 700, 1, 258), [*shapes(7, 63, 1001), *BLOCKS]
    every: Any = {"in_place": True, "more": [*more, Shape(1024)]}
    for variant in ("three_pass", "online_warp", "online_block"):
        yield variant, Kernel(SOFTMAX, variant, lengths, widths={50257: (9,)}, **every)
    of_rows = [*lengths, Shape(1024), *shapes(1024, 12, sms=0)]
    every["more"] = [*more, *shapes(200, 41, 1100, sms=0)]
    yield "rows", Kernel(SOFTMAX, "rows", of_rows, **every)
    yield NUMPY, Kernel(SOFTMAX, NUMPY, lengths)


FAMILIES = {
    "layernorm": layernorms,
    "rmsnorm": rmsnorms,
    "gelu": with_gelu,
    "softmax": softmaxes,
}
KERNELS = {
    f"{family}-{name}": kernel for family, made in FAMILIES.items() for name, kernel in made()
}


def every_kernel(
    *families: str,
    orders: Sequence[str] = ("shuffled",),
    numpy: bool = True,
    shapes_of: Callable[[Kernel], Sequence[Shape]] = lambda kernel: kernel.shapes[:2],
    only: Callable[[Kernel], bool] = lambda _: True,
) -> pytest.MarkDecorator:
    """Parametrize `where`, `kernel` and `shape`; the emulator runs `more` shapes with --slow only.

    families: beginnings of names of kernels. orders: thread orders of the emulator for the first
    two shapes; later shapes run in the last order only. numpy: include the reference as a kernel.
    """
    found = []
    for name, kernel in KERNELS.items():
        on_host = kernel.variant == NUMPY
        if not name.startswith(families or ("",)) or not only(kernel) or (on_host and not numpy):
            continue
        for n, shape in enumerate(shapes_of(kernel)):
            for where in [NUMPY] if on_host else [*(orders if n < 2 else orders[-1:]), "gpu"]:
                late = [pytest.mark.slow] if shape in kernel.more else ()
                marks = GPU.marks if where == "gpu" else late
                case = pytest.param(where, kernel, shape, id=f"{where}-{name}-{shape}", marks=marks)
                found.append(case)
    return pytest.mark.parametrize(("where", "kernel", "shape"), found)
