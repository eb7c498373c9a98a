"""`WeightMatrix`: a weight matrix as it is stored in memory, with dtype, scales and layout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import FLOATS, check_choice, check_span, is_plain
from gpt2block.cuda import cupy, is_array
from gpt2block.cuda.arrays import AnyArray, Composite, check
from gpt2block.cuda.kernels import FP8, STORAGE
from gpt2block.errors import InputError
from gpt2block.models.number_formats import FP8_FORMATS, from_fp8, to_fp8
from gpt2block.models.weights import conversions
from gpt2block.models.weights.conversions import LAYOUTS

if TYPE_CHECKING:
    from typing_extensions import Self

SCALED = "float8_e4m3fn"  # the only dtype for which `quantize` computes scales
# An output channel whose magnitudes are all below SMALLEST counts as zero. Results for larger
# weights do not depend on subnormal float32 numbers, which the GPU flushes to zero.
SMALLEST = 2.0**-91
AT_ONCE = 2**18  # number of weights that the host processes at a time
_LARGEST = {"float16": "±65504", "bfloat16": "±3.39e38"}


@dataclass(frozen=True, eq=False)
class WeightMatrix(Composite):
    """A weight matrix (K, N), K inputs and N outputs, stored in one of five dtypes.

    data: NumPy or CuPy array, C-contiguous, (K, N) for layout "KN" or (N, K) for "NK". dtype:
    "float32", "float16", "bfloat16", or FP8 in uint8: "float8_e5m2", "float8_e4m3fn". scale:
    float32 (N,), for FP8 only: a weight of output n is scale[n] times the number in data; None
    means all ones. largest: the largest magnitude before rounding by `quantize`, else None.
    share_of: number of outputs of the whole matrix, if this matrix is a share of its outputs as
    `columns` returns it, else None. input_order: None, or see `GgufMatrix`.

    The arrays are not copied. Raises InputError for arrays that do not match, and for FP8 bytes
    that are infinity or NaN, which the kernels would treat as numbers.
    """

    PARTS = ("", "data"), (".scale", "scale")

    data: Any
    dtype: str
    scale: Any = None
    layout: str = "KN"
    largest: float | None = None
    share_of: int | None = field(default=None, kw_only=True)
    input_order: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_choices(self.dtype, self.layout)
        _check_array("weights", self.data, "uint8" if self.dtype in FP8 else self.dtype)
        if not self.data.flags.c_contiguous:
            raise InputError(
                "weights: expected a C-contiguous array: copy it, or pass the other layout"
            )
        if self.scale is not None:
            self._check_scale()
        if self.dtype in FP8 and self.largest is None:  # `quantize` did not check the weights
            largest = FP8_FORMATS[self.dtype].largest
            bad = (self.data & 0x7F) > largest
            if bool(bad.any()):
                raise InputError(f"weights: {_some(on_host(bad))} infinity or NaN in {self.dtype}")

    def _check_scale(self) -> None:
        if self.dtype not in FP8:
            raise InputError(f"scale: expected None for {self.dtype}: only FP8 has scales")
        check_together(self.scale, self.data, "the weights", "are")
        if self.scale.shape != (self.N,) or self.scale.dtype.name != "float32":
            raise InputError(
                f"scale: expected float32 ({self.N},), a number for each output, "
                f"got {self.scale.dtype} {self.scale.shape}"
            )
        if not self.scale.flags.c_contiguous:
            raise InputError("scale: expected a C-contiguous array")
        host = on_host(self.scale)
        wrong = ~((host >= np.finfo(np.float32).tiny) & (host < np.inf))
        if wrong.any():
            n = int(np.flatnonzero(wrong)[0])
            raise InputError(f"scale: expected positive normal numbers, got {host[n]} at {n}")

    @classmethod
    def quantize(
        cls,
        w: Any,
        dtype: str,
        layout: str = "KN",
        name: str = "w",
        allow_nonfinite: bool = False,
    ) -> WeightMatrix:
        """Round float weights in `layout` to `dtype`, on the GPU if `w` is a CuPy array.

        w: float32, float16 or bfloat16, (K, N) or (N, K). E4M3 has a scale for each output channel:
        its largest magnitude / 448, or 1 if all its weights are zero. E5M2 has no scales, and
        saturates at ±57344. Bytes and scales are the same with NumPy and CuPy. A contiguous `w`
        that already has the dtype is not copied.

        Raises InputError, with the tensor's `name`, for infinity or NaN unless allow_nonfinite is
        set and the dtype is not FP8, and for weights beyond the range of float16 or bfloat16.
        """
        _check_choices(dtype, layout)
        _check_array(name, w, *STORAGE)
        if not w.flags.c_contiguous:
            w = w.copy(order="C")
        if is_array(w):
            check(name, w, dtype=w.dtype.name)
            conversions.check_sizes(name, w.shape)
        absmax = _absmax(w, layout)
        if not np.isfinite(absmax).all() and (dtype in FP8 or not allow_nonfinite):
            check_finite(name, on_host(w))
        largest = float(absmax.max())
        if dtype in FLOATS:
            return cls(_rounded(w, dtype, absmax, name), dtype, None, layout, largest)
        scale: AnyArray | None = None
        if dtype == SCALED:
            scale = np.where(absmax < SMALLEST, np.float32(1), absmax / np.float32(448))
            scale = cupy.asarray(scale) if is_array(w) else scale
        return cls(_to_fp8(w, dtype, scale, layout), dtype, scale, layout, largest)

    def times(self, factor: float) -> WeightMatrix:
        """Return FP8 weights times `factor`, a power of two: equal bytes, multiplied scales."""
        scale = np.full(self.N, factor, np.float32)
        if self.scale is not None:
            scale *= on_host(self.scale)
        return replace(self, scale=cupy.asarray(scale) if is_array(self.data) else scale)

    def padded(self, outputs: int) -> tuple[WeightMatrix, WeightMatrix]:
        """Append `outputs` outputs, whose weights are 0, to a matrix in GPU memory, layout "NK".

        Return the padded matrix, and this one as a view of the same memory.
        """
        rows = cupy.zeros((self.N + outputs, self.K), self.data.dtype)
        rows[: self.N] = self.data
        scale = None
        if self.scale is not None:
            scale = cupy.asarray(np.ones(len(rows), np.float32))
            scale[: self.N] = self.scale
        return replace(self, data=rows, scale=scale), replace(self, data=rows[: self.N])

    def columns(self, begin: int, end: int) -> Self:
        """Return the share with outputs begin … end - 1, a view; layout "NK".

        Products with the shares of a matrix are bitwise equal to the product with the whole matrix:
        `whole_N` determines the order of additions. `largest` remains the whole matrix's value.
        """
        check_span(begin, end, self.N)
        if self.layout != "NK":
            raise InputError("columns: expected layout 'NK', in which a share is a view, got 'KN'")
        scale = None if self.scale is None else self.scale[begin:end]
        return self._share(self.data[begin:end], scale)

    def halves(self) -> tuple[Self, ...]:
        """Return copies of the first and the second half of the inputs; layout "NK"."""
        return self._halves(self.N)

    def _halves(self, rows: int, **more: object) -> tuple[Self, ...]:
        """Return matrices of the two halves of each of `rows` equal parts of the data."""
        bits = self.data.view(f"u{self.data.itemsize}")  # not every CuPy can copy bfloat16
        parts = (bits.reshape(rows, 2, -1)[:, n].copy().view(self.data.dtype) for n in range(2))
        datas = (each.ravel() if self.data.ndim == 1 else each for each in parts)
        return tuple(self.trusted(**{**vars(self), **more, "data": each}) for each in datas)

    def _share(self, data: AnyArray, scale: AnyArray | None, **more: object) -> Self:
        """Return a share of this matrix's outputs, from arrays that need no checks."""
        changes = {"data": data, "scale": scale, "share_of": self.whole_N, **more}
        return self.trusted(**{**vars(self), **changes})

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Shape of the array in memory, (K, N) or (N, K)."""
        return (self.K, self.N) if self.layout == "KN" else (self.N, self.K)

    @property
    def operand(self) -> Any:
        """The right operand of the NumPy product x @ operand, an array (K, N)."""
        return self.dequantized()

    @property
    def table(self) -> Any:
        """The array (N, K) from which table[ids] gathers rows, such as token embeddings."""
        return self.data

    @property
    def K(self) -> int:  # noqa: N802
        """Number of inputs."""
        return int(self.data.shape[self.layout.index("K")])

    @property
    def N(self) -> int:  # noqa: N802
        """Number of outputs."""
        return int(self.data.shape[self.layout.index("N")])

    @property
    def whole_N(self) -> int:  # noqa: N802
        """Number of outputs of the whole matrix; N unless this matrix is a share."""
        return self.N if self.share_of is None else self.share_of

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and the scales."""
        return int(self.data.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))

    def dequantized(self) -> NDArray[np.float32]:
        """Return the weights as NumPy float32 (K, N): a view if `data` is float32 on the host."""
        values = on_host(self.data)
        if self.dtype in FP8:
            values = from_fp8(values, self.dtype)
        values = values.astype(np.float32, copy=False)
        if self.layout == "NK":
            values = values.T
        if self.scale is not None:
            values *= on_host(self.scale)  # in place, as `values` is not `data` with FP8
        return values

    def widened(self) -> WeightMatrix:
        """Return the matrix in NumPy float32, same layout; self if it already is NumPy float32."""
        values = self.dequantized()
        data = values.T if self.layout == "NK" else values
        if data is self.data:
            return self
        return WeightMatrix(data, "float32", None, self.layout, self.largest)

    def __repr__(self) -> str:
        scales = "" if self.scale is None else ", scales"
        return (
            f"WeightMatrix(K={self.K}, N={self.N}, {self.dtype}{scales}, layout {self.layout!r}, "
            f"{kind(self.data)}, {self.nbytes:,} bytes)"
        )


def request(stored: str, dtype: str) -> None:
    """Start compiling the kernels that convert a model's matrices from dtype `stored` to `dtype`.

    Otherwise the first matrix would wait for each of these kernels in turn.
    """
    w, most = cupy.empty((32, 32), FLOATS[stored]), cupy.empty(32, "float32")
    conversions.absmax(w, most, "NK")
    conversions.store(w, w, transposed=True)
    if dtype in FP8:
        scale = most if dtype == SCALED else None
        conversions.to_fp8(w, scale, cupy.empty(w.shape, "uint8"), dtype, "NK")
    elif dtype != stored:
        conversions.store(w, cupy.empty(w.shape, FLOATS[dtype]))


def check_finite(name: str, array: np.ndarray) -> None:
    """Raise InputError, with the first position, if a host array contains infinity or NaN."""
    bad = ~np.isfinite(array.astype(np.float32, copy=False))
    if bad.any():
        raise InputError(
            f"{name}: {_some(bad)} infinity or NaN: expected finite weights "
            "(GPT2's allow_nonfinite=True permits them, but not in FP8 matrices)"
        )


def _check_choices(dtype: str, layout: str) -> None:
    check_choice("dtype", dtype, (*STORAGE, *FP8))
    check_choice("layout", layout, LAYOUTS)


def _check_array(name: str, array: object, *dtypes: str) -> None:
    if not is_plain(array) and not is_array(array):
        raise InputError(f"{name}: expected a NumPy or CuPy array, got {kind(array)}")
    if array.ndim != 2 or array.size == 0:
        raise InputError(f"{name}: expected a matrix with elements, got shape {array.shape}")
    if array.dtype.name not in dtypes:
        raise InputError(f"{name}: expected {' or '.join(dtypes)}, got {array.dtype}")


def check_together(scale: Any, array: Any, name: str, verb: str) -> None:
    """Raise InputError unless both arrays are NumPy arrays, or CuPy arrays on one device."""
    if kind(scale) != kind(array):
        raise InputError(
            f"scale: expected a {kind(array)} array, as {name} {verb} one, got {kind(scale)}"
        )
    if is_array(array) and scale.device.id != array.device.id:
        raise InputError(f"scale: on device {scale.device.id}, {name} on {array.device.id}")


def kind(array: object) -> str:
    if is_plain(array):
        return "NumPy"
    return "CuPy" if is_array(array) else type(array).__name__


def on_host(array: Any) -> np.ndarray:
    """Return a NumPy or CuPy array as a NumPy array."""
    return array.get() if is_array(array) else array


def _absmax(w: Any, layout: str) -> NDArray[np.float32]:
    """Return each output channel's largest magnitude on the host; infinity or NaN are kept."""
    if is_array(w):
        most = cupy.empty(w.shape[layout.index("N")], "float32")
        conversions.absmax(w, most, layout).run()
        return on_host(most)
    axis = layout.index("K")
    largest = [np.abs(some.astype(np.float32, copy=False)).max(axis=axis) for some in _rows(w)]
    return np.concatenate(largest) if layout == "NK" else np.maximum.reduce(largest)


def _to_fp8(w: Any, dtype: str, scale: Any, layout: str) -> AnyArray:
    """Round a matrix to FP8 as `reference.to_fp8` does; a NumPy array by groups of rows."""
    if is_array(w):
        rounded = cupy.empty(w.shape, "uint8")
        conversions.to_fp8(w, scale, rounded, dtype, layout).run()
        return rounded
    codes = np.empty(w.shape, np.uint8)
    first = 0
    for some, to in zip(_rows(w), _rows(codes), strict=True):
        own = scale[first : first + len(some)] if scale is not None and layout == "NK" else scale
        to[...] = to_fp8(some, dtype, True, own, layout)
        first += len(some)
    return codes


def _rows(matrix: np.ndarray) -> list[np.ndarray]:
    """Return views of groups of rows, for calls that would need too much memory for all rows."""
    rows = max(1, AT_ONCE // matrix.shape[1])
    return [matrix[first : first + rows] for first in range(0, len(matrix), rows)]


def _rounded(w: AnyArray, dtype: str, absmax: NDArray[np.float32], name: str) -> AnyArray:
    """Round w to a float dtype. Raises InputError if finite weights would become infinite."""
    target = FLOATS[dtype]
    with np.errstate(over="ignore"):
        if not np.isfinite(absmax.astype(target)).all():
            host = on_host(w).astype(np.float32, copy=False)
            beyond = np.isfinite(host) & ~np.isfinite(host.astype(target))
            if beyond.any():
                raise InputError(
                    f"{name}: {_some(beyond)} beyond {dtype}, up to {_LARGEST[dtype]}: use float32"
                )
    if w.dtype == target:
        return w
    if not is_array(w):
        return w.astype(target)
    rounded = cupy.empty(w.shape, dtype)
    conversions.store(w, rounded).run()
    return rounded


def _some(bad: NDArray[np.bool_]) -> str:
    """Return text for a message: how many elements of `bad` are True, and the first index."""
    first = ", ".join(map(str, np.unravel_index(int(bad.argmax()), bad.shape)))
    return f"{int(bad.sum()):,} of {bad.size:,} weights, the first at [{first}], are"
