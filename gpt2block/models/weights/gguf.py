"""Weight matrices in quantized blocks, such as those of GGUF files: `GgufMatrix`.

A block has 32 weights, or 256 in sub-blocks. Each weight is an integer code of 4 to 8 bits, or in
MXFP4 a floating-point number of 4 bits; a block or sub-block has a scale and, for some types, a
minimum. Blocks of the types "INT4" and "INT4_128", which are no types of GGUF files, have 32 or 128
weights and a zero point: they hold weights of `files.checkpoints.four_bit`.

Kernels read the bytes in another order than a file has, which a diagram in kernels_cu/lib/gguf.cuh
shows: a tile has 8 rows and 128 inputs, and the codes for a lane of a warp are next to each other.

Source of the types: ggml's quantized types, as the package `gguf` describes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import ceil
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_span
from gpt2block.cuda.formats import GGUF
from gpt2block.errors import InputError
from gpt2block.models.weights.matrix import WeightMatrix, on_host

if TYPE_CHECKING:
    from typing_extensions import Self

ROW_GROUP, UNIT = 8, 128  # rows per tile, and inputs per tile
LANES = 4  # lanes of a warp per row of a tile
MAX_RANGES = 3  # maximum ranges (consecutive outputs of one type): one each for q, k, v
BORDER = 16  # a range begins at a multiple of BORDER outputs, as a warp's outputs have one type
AT_ONCE = 2**20  # number of weights that are decoded at a time
INT4, INT4_128 = "INT4", "INT4_128"
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice E2M1
SHIFTS = np.arange(8, dtype=np.uint8)
QUIET: Any = {"over": "ignore", "invalid": "ignore"}  # scales of a file may be infinity or NaN


class BlockType(NamedTuple):
    """A block type.

    A weight is scale * (code - offset) - minimum, scale * (code - zero), or scale * FP4[code].
    """

    number: int  # number of the type in kernels_cu/lib/gguf.cuh
    size: int  # weights per block
    nbytes: int  # bytes per block
    bits: int  # bits per code
    offset: int
    minimum: bool
    of_scales: int  # bytes of scales per row of a tile; per two tiles if a block has 256 weights
    zero: bool = False  # whether scales are float32 numbers whose low 8 bits are the zero point
    fp4: bool = False  # whether codes are numbers of FP4, and scales exponents of two plus 128

    @property
    def units(self) -> int:
        """Number of tiles (8 rows x 128 inputs each) that share scales; a group of tiles."""
        return 2 if self.size == 2 * UNIT else 1

    @property
    def tile(self) -> int:
        """Bytes of `units` tiles (8 rows x 128 inputs each) and the scales that they share."""
        return ROW_GROUP * (self.units * UNIT * self.bits // 8 + self.of_scales)

    def row_bytes(self, K: int) -> int:
        """Return the bytes of eight rows of K inputs each."""
        return ceil(K / (self.units * UNIT)) * self.tile


TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(1, 32, 18, 4, 8, False, 8),
    "Q4_1": BlockType(2, 32, 20, 4, 0, True, 16),
    "Q5_0": BlockType(3, 32, 22, 5, 16, False, 8),
    "Q5_1": BlockType(4, 32, 24, 5, 0, True, 16),
    "Q8_0": BlockType(5, 32, 34, 8, 128, False, 8),
    "Q4_K": BlockType(6, 256, 144, 4, 0, True, 16),
    "Q5_K": BlockType(7, 256, 176, 5, 0, True, 16),
    "Q6_K": BlockType(8, 256, 210, 6, 32, False, 18),
    INT4: BlockType(9, 32, 20, 4, 0, False, 16, zero=True),
    INT4_128: BlockType(10, 128, 68, 4, 0, False, 4, zero=True),
    "MXFP4": BlockType(11, 32, 17, 4, 0, False, 4, fp4=True),
}


@dataclass(frozen=True, eq=False, repr=False)
class GgufMatrix(WeightMatrix):
    """A weight matrix (K, N) in blocks of GGUF, layout "NK".

    data: uint8 in the order of the kernels, NumPy or CuPy. ranges: (block type, number of outputs)
    for each range of outputs. inputs: K. x @ matrix and matrix[ids] decode some rows at a time.
    scale: None, or scales of the outputs from `times`, which only prompts use. input_order: None,
    or int32 (K,) in host memory: the blocks have the inputs in this order, and kernels read x after
    `reference.operand` has put its channels in this order.
    """

    __array_ufunc__ = None  # makes NumPy call __rmatmul__ for x @ matrix

    ranges: tuple[tuple[str, int], ...] = ()
    inputs: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.ranges) <= MAX_RANGES:
            raise InputError(f"weights: expected 1 to {MAX_RANGES} types, got {self.ranges}")
        if any(begin % BORDER for begin in self.begins):
            raise InputError(
                f"weights: types from outputs {self.begins} on: expected multiples of {BORDER}"
            )
        expected = sum(range_bytes(self.ranges, self.inputs))
        if self.data.shape != (expected,) or self.data.dtype != np.uint8:
            raise InputError(
                f"weights: expected {expected:,} bytes for {self.ranges} of {self.inputs} inputs, "
                f"got {self.data.dtype} {self.data.shape}"
            )

    @classmethod
    def pack(cls, blocks: list[tuple[str, np.ndarray]], K: int) -> GgufMatrix:
        """Create a matrix from pairs (GGUF type, uint8 rows of bytes) for consecutive outputs."""
        merged = []
        for name, group in groupby(blocks, itemgetter(0)):
            raws = [raw for _, raw in group]
            merged.append((name, raws[0] if len(raws) == 1 else np.concatenate(raws)))
        packed = [pack(raw, name, K) for name, raw in merged]
        data = packed[0] if len(packed) == 1 else np.concatenate(packed)
        ranges = tuple((name, len(raw)) for name, raw in merged)
        bounds = (_largest(each, name, K) for each, (name, _) in zip(packed, merged, strict=True))
        return cls(data, GGUF, None, "NK", max(bounds), ranges, K)

    @classmethod
    def random(
        cls, ranges: Sequence[tuple[str, int]], K: int, seed: int = 0, size: float = 1.0
    ) -> GgufMatrix:
        """Create a matrix of random blocks, with weights roughly in ±`size`.

        ranges: pairs (GGUF type, number of outputs).
        """
        return cls.pack([(name, random_blocks(name, n, K, seed, size)) for name, n in ranges], K)

    @property
    def K(self) -> int:  # noqa: N802
        return self.inputs

    @property
    def N(self) -> int:  # noqa: N802
        return sum(n for _, n in self.ranges)

    @property
    def tile(self) -> int:
        """The largest `BlockType.tile`, a number of bytes, among the matrix's block types."""
        return max(TYPES[name].tile for name, _ in self.ranges)

    @property
    def units(self) -> int:
        """The largest `BlockType.units`, a number of tiles, among the matrix's block types."""
        return max(TYPES[name].units for name, _ in self.ranges)

    @property
    def begins(self) -> tuple[int, ...]:
        """Index of the first output of each range (consecutive outputs of one block type)."""
        return (0, *accumulate(n for _, n in self.ranges[:-1]))

    def begins_at(self, multiple: int) -> bool:
        """Return whether each range begins at a multiple of this number of outputs."""
        return not any(begin % multiple for begin in self.begins)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (K, N) of the decoded weights."""
        return self.K, self.N

    def padded(self, outputs: int) -> tuple[WeightMatrix, WeightMatrix]:
        """Return (a view with up to 7 more `outputs`, which are zeros; this matrix)."""
        *others, (name, n) = self.ranges
        return replace(self, ranges=(*others, (name, n + outputs))), self

    def columns(self, begin: int, end: int) -> Self:
        """Return the share with outputs begin … end - 1, a view, as `WeightMatrix.columns` does.

        begin must be a multiple of BORDER, and so must end unless it is N.
        """
        check_span(begin, end, self.N, BORDER)
        ranges = self._ranges(begin, end)
        before, own = (sum(range_bytes(r, self.K)) for r in (self._ranges(0, begin), ranges))
        scale = None if self.scale is None else self.scale[begin:end]
        return self._share(self.data[before : before + own], scale, ranges=ranges)

    def halves(self) -> tuple[Self, ...]:
        """Return copies of the halves of the inputs, each a multiple of a tile's inputs."""
        ((name, _),), multiple = self.ranges, self.units * UNIT
        if self.K % (2 * multiple):
            raise InputError(f"weights: {name} of {self.K} inputs in two halves: expected halves "
                             f"of a multiple of {multiple} inputs")  # fmt: skip
        return self._halves(len(self.data) // TYPES[name].row_bytes(self.K), inputs=self.K // 2)

    def _ranges(self, begin: int, end: int) -> tuple[tuple[str, int], ...]:
        """Return the `ranges` of outputs begin … end - 1."""
        found = zip(self.ranges, self.begins, strict=True)
        sizes = ((name, min(end, first + n) - max(begin, first)) for (name, n), first in found)
        return tuple((name, n) for name, n in sizes if n > 0)

    def pieces(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (index of the first output, weights (n, K)) for each group of n outputs."""
        at_once = max(1, AT_ONCE // (ROW_GROUP * self.K))  # row groups (8 rows) decoded at a time
        for name, n, count, data in self.of_ranges():
            row_groups = data.reshape(-1, TYPES[name].row_bytes(self.K))
            for first in range(0, len(row_groups), at_once):
                piece = unpack(on_host(row_groups[first : first + at_once]).ravel(), name, self.K)
                begin = ROW_GROUP * first
                piece = piece[: count - begin]
                if self.input_order is not None:
                    piece = piece[:, np.argsort(self.input_order)]
                if self.scale is not None:
                    piece *= on_host(self.scale)[n + begin :][: len(piece), None]
                yield n + begin, piece

    def of_ranges(self) -> Iterator[tuple[str, int, int, Any]]:
        """Yield (type, first output, number of outputs, bytes) for outputs of each GGUF type."""
        at = 0
        sizes = range_bytes(self.ranges, self.K)
        for (name, count), begin, size in zip(self.ranges, self.begins, sizes, strict=True):
            yield name, begin, count, self.data[at : at + size]
            at += size

    def dequantized(self) -> NDArray[np.float32]:
        """Return the weights as NumPy float32 (K, N)."""
        whole = np.empty((self.N, self.K), np.float32)
        for n, piece in self.pieces():
            whole[n : n + len(piece)] = piece
        values: NDArray[np.float32] = whole.T
        return values

    def widened(self) -> WeightMatrix:
        return self

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        """Return x (..., K) @ weights, decoding one group of outputs at a time."""
        out = np.empty((*x.shape[:-1], self.N), np.result_type(x.dtype, np.float32))
        for n, piece in self.pieces():
            out[..., n : n + len(piece)] = x @ piece.T
        return out

    @property
    def operand(self) -> GgufMatrix:
        return self

    @property
    def table(self) -> GgufMatrix:
        return self

    def __len__(self) -> int:
        return self.N

    def __getitem__(self, ids: np.ndarray) -> NDArray[np.float32]:
        """Return the weights of the outputs `ids`, in shape ids.shape + (K,)."""
        flat = ids.ravel()
        out = np.empty((len(flat), self.K), np.float32)
        for name, n, count, data in self.of_ranges():
            row_groups = data.reshape(-1, TYPES[name].row_bytes(self.K))
            here = np.flatnonzero((flat >= n) & (flat < n + count))
            of_range = flat[here] - n
            chosen = unpack(on_host(row_groups[of_range // ROW_GROUP]).ravel(), name, self.K)
            places = np.arange(len(here)), of_range % ROW_GROUP
            out[here] = chosen.reshape(-1, ROW_GROUP, self.K)[places]
        return out.reshape(*ids.shape, self.K)

    def __repr__(self) -> str:
        types = ", ".join(f"{name} of {n}" for name, n in self.ranges)
        return f"GgufMatrix(K={self.K}, N={self.N}, {types}, {self.nbytes:,} bytes)"


def random_blocks(name: str, N: int, K: int, seed: int = 0, size: float = 1.0) -> NDArray[np.uint8]:
    """Return rows of random blocks in GGUF files' byte order; weights are roughly in ±`size`."""
    kind, rng = TYPES[name], np.random.default_rng(seed)
    rows = rng.integers(0, 256, (N, K // kind.size, kind.nbytes), dtype=np.uint8)
    largest = 2**kind.bits * (64 if kind.size == 256 else 1)
    for begin in (208,) if name == "Q6_K" else (0, 2) if kind.minimum else (0,):
        scale = rng.standard_normal(rows.shape[:2]) * (size / largest)
        if kind.fp4:
            rows[..., 0] = np.frexp(scale)[1] + 128
            continue
        rows[..., begin : begin + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
        if kind.zero:
            rows[..., :4] = with_zeros(scale.astype(np.float16), rng.integers(17, size=scale.shape))
    return rows.reshape(N, -1)


def with_zeros(scale: np.ndarray, zero: np.ndarray) -> NDArray[np.uint8]:
    """Return the bytes (…, 4) of scales as float32 numbers whose low 8 bits are the zero points.

    scale: (…,) of 16 bits, so that these bits are 0 in the float32 numbers. zero: 0 to 16.
    """
    words = scale.astype(np.float32).view(np.uint32) | zero.astype(np.uint32)
    return words[..., None].view(np.uint8)


def range_bytes(ranges: Sequence[tuple[str, int]], K: int) -> list[int]:
    """Return a list of the bytes of each range (consecutive outputs of one GGUF type)."""
    return [ceil(n / ROW_GROUP) * TYPES[name].row_bytes(K) for name, n in ranges]


def _largest(data: NDArray[np.uint8], name: str, K: int) -> float:
    """Return an upper bound of the magnitudes of packed weights, or NaN if a scale is NaN."""
    kind = TYPES[name]
    of_code = FP4.max() if kind.fp4 else max(kind.offset, 2**kind.bits - 1 - kind.offset)
    tiles = data.reshape(-1, kind.row_bytes(K) // kind.tile, kind.tile)
    with np.errstate(**QUIET):
        scale, minimum = _scales(tiles, kind)
        largest = np.abs(scale) * of_code
        return float((largest if minimum is None else largest + np.abs(minimum)).max())


def pack(raw: NDArray[np.uint8], name: str, K: int) -> NDArray[np.uint8]:
    """Convert rows of blocks, uint8 (N, bytes per row), from the file order to the kernel order."""
    rows, of_row_group = max(1, AT_ONCE // (ROW_GROUP * K)) * ROW_GROUP, TYPES[name].row_bytes(K)
    packed = np.empty(ceil(len(raw) / ROW_GROUP) * of_row_group, np.uint8)

    def some(first: int) -> None:  # runs in several threads: NumPy releases the interpreter lock
        piece = _packed(raw[first : first + rows], name, K)
        begin = first // ROW_GROUP * of_row_group
        packed[begin : begin + len(piece)] = piece

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(some, range(0, len(raw), rows)):
            pass
    return packed


def _packed(raw: NDArray[np.uint8], name: str, K: int) -> NDArray[np.uint8]:
    kind = TYPES[name]
    O, blocks = ceil(len(raw) / ROW_GROUP), K // kind.size  # noqa: E741
    G = ceil(K / (kind.units * UNIT))
    whole = np.zeros((O * ROW_GROUP, G * kind.units * UNIT // kind.size, kind.nbytes), np.uint8)
    whole[: len(raw), :blocks] = raw.reshape(len(raw), blocks, kind.nbytes)
    codes, scales = _codes_and_scales(whole, name)
    # (..., chunk, pair, lane, code)
    codes = codes.reshape(O, ROW_GROUP, G, kind.units, 4, 4, LANES, 2)
    codes = codes.swapaxes(-3, -2).reshape(O, ROW_GROUP, G, kind.units, 4, LANES, 8)
    codes = codes.transpose(0, 2, 3, 1, 4, 5, 6)
    scales = scales.reshape(O, ROW_GROUP, G, -1).swapaxes(1, 2)
    parts = (scales[..., :16], scales[..., 16:]) if kind.bits == 6 else (scales,)
    planes = [plane.reshape(O, G, -1) for plane in (*_planes(codes, kind), *parts)]
    return np.concatenate(planes, axis=-1).ravel()


def _codes_and_scales(b: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (N, blocks, codes per block) and scale bytes, from blocks as in a file."""
    kind = TYPES[name]
    if name == "Q8_0":
        return b[..., 2:] ^ 128, b[..., :2]
    if kind.size < 2 * UNIT:
        own = kind.of_scales * kind.size // UNIT
        high = 4 * (kind.bits == 5)
        low = b[..., own + high :].reshape(*b.shape[:2], -1, 16)
        codes = np.concatenate([low & 15, low >> 4], axis=-1).reshape(*b.shape[:2], kind.size)
        if high:
            bits = b[..., own : own + 4, None] >> SHIFTS & 1
            codes |= bits.reshape(codes.shape) << 4
        return codes, b[..., :own]
    if name == "Q6_K":
        low = b[..., :128].reshape(*b.shape[:2], 2, 2, 32)
        high = b[..., 128:192].reshape(*b.shape[:2], 2, 1, 32)
        four = np.concatenate([low & 15, low >> 4], axis=-2)
        codes = four | (high >> SHIFTS[:4, None] * 2 & 3) << 4
        return codes.reshape(*b.shape[:2], 256), b[..., 192:]
    of_high = 32 * (kind.bits == 5)
    low = b[..., 16 + of_high :].reshape(*b.shape[:2], 4, 1, 32)
    codes = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*b.shape[:2], 8, 32)
    if of_high:
        codes |= (b[..., None, 16:48] >> SHIFTS[:, None] & 1) << 4
    s, m = b[..., 4:8], b[..., 8:12]
    both = b[..., 12:16]
    scale = np.concatenate([s & 63, both & 15 | s >> 6 << 4], axis=-1)
    least = np.concatenate([m & 63, both >> 4 | m >> 6 << 4], axis=-1)
    low = least[..., :4] & 15 | (least[..., 4:] & 15) << 4
    scales = np.concatenate([b[..., :4], scale | least >> 4 << 6, low], axis=-1)
    return codes.reshape(*b.shape[:2], 256), scales


def _planes(codes: np.ndarray, kind: BlockType) -> Iterator[np.ndarray]:
    """Yield the low bits of all codes, then the high bits, as bytes in the kernels' order.

    codes: (eight rows, group of tiles, tile, row, chunk, lane, 8). In a 32-bit word, the low bits
    of code 2j begin at bit 4j, and of code 2j + 1 at bit 4j + 16.
    """
    lanes = codes.swapaxes(-3, -2)  # axes (eight rows, group, tile, row, lane, chunk, code)
    if kind.bits == 8:
        halves = lanes.reshape(*lanes.shape[:-2], 2, 2, 8)  # 16-byte vectors of two chunks
        yield halves.transpose(0, 1, 2, 5, 3, 4, 6, 7)
        return
    first, second = [0, 4, 1, 5], [2, 6, 3, 7]
    yield lanes[..., first] & 15 | (lanes[..., second] & 15) << 4
    high = lanes >> 4
    if kind.bits == 5:  # bit c of each group of 4 bits is the high bit of a code in chunk c
        bits = high << SHIFTS[:4, None]
        bits = bits[..., 0, :] | bits[..., 1, :] | bits[..., 2, :] | bits[..., 3, :]
        yield bits[..., first] | bits[..., second] << 4
    if kind.bits == 6:
        twos = high.reshape(*high.shape[:-2], 2, 2, 8)
        bits = twos[..., 0, :] | twos[..., 1, :] << 2
        yield bits[..., first] | bits[..., second] << 4


def unpack(data: NDArray[np.uint8], name: str, K: int) -> NDArray[np.float32]:
    """Decode groups of eight rows, packed in the kernels' order, to weights (rows, K)."""
    kind = TYPES[name]
    G = ceil(K / (kind.units * UNIT))
    tiles = data.reshape(-1, G, kind.tile)
    O = len(tiles)  # noqa: E741
    low = kind.units * ROW_GROUP * UNIT * (8 if kind.bits == 8 else 4) // 8
    codes = _codes(tiles, kind, low)
    with np.errstate(**QUIET):
        scale, minimum = _scales(tiles, kind)  # axes (eight rows, group, row, sub-block)
        of_scale = codes.reshape(*scale.shape, -1)
        values = FP4[of_scale] if kind.fp4 else of_scale.astype(np.float32) - kind.offset
        values *= scale[..., None]
        if minimum is not None:
            values -= minimum[..., None]
    rows: NDArray[np.float32] = values.transpose(0, 2, 1, 3, 4).reshape(O * ROW_GROUP, -1)[:, :K]
    return rows


def _codes(tiles: NDArray[np.uint8], kind: BlockType, low: int) -> Any:
    """Return uint8 codes by (eight rows, group of tiles, row, input). low: bytes of low bits."""
    O, G = tiles.shape[:2]  # noqa: E741
    shape = O, G, kind.units, ROW_GROUP, LANES
    if kind.bits == 8:
        lanes = tiles[..., :low].reshape(O, G, 1, 2, ROW_GROUP, LANES, 2, 8)
        lanes = lanes.transpose(0, 1, 2, 4, 5, 3, 6, 7).reshape(*shape, 4, 8)
    else:
        words = tiles[..., :low].reshape(*shape, 4, 4)
        lanes = np.empty((*shape, 4, 8), np.uint8)
        lanes[..., [0, 4, 1, 5]], lanes[..., [2, 6, 3, 7]] = words & 15, words >> 4
    if kind.bits in (5, 6):
        size = ROW_GROUP * UNIT * (kind.bits - 4) // 8 * kind.units
        bits = tiles[..., low : low + size].reshape(*shape, -1, 4)
        high = np.empty((*bits.shape[:-1], 8), np.uint8)
        high[..., [0, 4, 1, 5]], high[..., [2, 6, 3, 7]] = bits & 15, bits >> 4
        each = kind.bits - 4
        of_chunks: Any = high[..., None, :] >> each * SHIFTS[: 4 // each, None] & (1 << each) - 1
        lanes |= of_chunks.reshape(lanes.shape) << 4
    chunks = lanes.swapaxes(-3, -2).reshape(O, G, kind.units, ROW_GROUP, 4, LANES, 4, 2)
    chunks = chunks.swapaxes(-3, -2)  # axes (eight rows, group, tile, row, chunk, pair, lane, code)
    return chunks.reshape(O, G, kind.units, ROW_GROUP, UNIT).swapaxes(2, 3)


def _scales(tiles: NDArray[np.uint8], kind: BlockType) -> tuple[Any, Any]:
    """Return float32 scales and minimums by (eight rows, group of tiles, row, sub-block).

    Minimums are None if a type has none. With a zero point, scale * zero is a minimum: it is exact.
    """
    O, G = tiles.shape[:2]  # noqa: E741
    rest = np.ascontiguousarray(tiles[..., kind.tile - ROW_GROUP * kind.of_scales :])
    if kind.bits == 6:
        s = rest[..., :128].view(np.int8).reshape(O, G, ROW_GROUP, 16).astype(np.float32)
        d = np.ascontiguousarray(rest[..., 128:]).view(np.float16).astype(np.float32)
        return s * d[..., None], None
    if kind.zero:
        numbers = rest.view(np.uint32).reshape(O, G, ROW_GROUP, -1)
        scale = (numbers & ~np.uint32(255)).view(np.float32)
        return scale, scale * (numbers & 255).astype(np.float32)
    if kind.fp4:
        powers = np.ldexp(np.float32(1), rest.astype(np.int32) - 128)
        return powers.reshape(O, G, ROW_GROUP, 4), None
    if kind.size == 32:
        halves = rest.view(np.float16).reshape(O, G, ROW_GROUP, 4, -1).astype(np.float32)
        return halves[..., 0], -halves[..., -1] if kind.minimum else None
    words = rest.reshape(O, G, ROW_GROUP, 16)
    d = np.ascontiguousarray(words[..., :4]).view(np.float16).astype(np.float32)
    both, low = words[..., 4:12], words[..., None, 12:] >> SHIFTS[[0, 4], None] & 15
    least = both >> 6 << 4 | low.reshape(both.shape)
    scale = d[..., 0, None] * (both & 63).astype(np.float32)
    return scale, d[..., 1, None] * least.astype(np.float32)
