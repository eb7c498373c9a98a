"""Every kernel of attention behind one call signature, for tests/ops/test_attention_laws.py.

A kernel is a function from packed rows [Q | K | V] and the lengths of their sequences to rows. A
new kernel needs a line in `KERNELS`; special features, such as its tiles, have their own test file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise, product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.cuda import replaced
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.ops.attention import OPERATION as ATTENTION
from gpt2block.ops.attention import VARLEN
from gpt2block.ops.attention_cached import ATTENTION_PACKED, ATTENTION_SPLIT
from gpt2block.ops.engines import attention_tiles as _attention_tiles
from gpt2block.ops.engines.attention_tiles import WHOLE_KEYS, AttentionTile, mma_geometry
from gpt2block.reference import hi_lo, joined
from tests import plain
from tests.caches import FORMATS, KINDS, Cache, Heads, repeated, row_width, stored, widened
from tests.devices import assert_same_bits
from tests.gpus import H200, HOPPER_CAPABILITY, MMA_CAPABILITY

Array = NDArray[Any]
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MODULE = import_module("gpt2block.ops.attention")
# Tiles of variant `mma`: one warp, and two warps with two fragments each. They have few warps, as
# the emulator's time grows with the warps. They must give the same bits as the tiles for GPUs.
SMALL, PAIR = AttentionTile(1, 1, 3, 1, 1), AttentionTile(2, 2, 2, 1, 1)
# Two ways of `wgmma`: one warpgroup takes all keys of a query, or two take alternate keys.
WAYS = {"whole": False, "alternate": True}
TWINS = ("bfloat16", "float8_e5m2")  # share their code with float16 and float8_e4m3fn
SELF: Any = {"masks": [True]}  # attention over a cache is always causal
both_masks = pytest.mark.parametrize("causal", [False, True])
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dataclass(frozen=True)
class Rows:
    """Packed rows [Q | K | V] (N, W) of sequences, and the options of attention.

    starts: number of tokens of each sequence that are in the cache already; they need no result.
    scale: factor of scores instead of 1/sqrt(HS). window: number of last keys that a row sees.
    """

    qkv: Array
    lengths: Sequence[int]
    heads: Heads
    causal: bool
    starts: Sequence[int] = ()
    scale: float | None = None
    window: int | None = None

    @property
    def scores(self) -> dict[str, Any]:
        return {"softmax_scale": self.scale, "window": self.window}

    @property
    def options(self) -> dict[str, Any]:
        return {"n_head": self.heads[0], "n_kv_head": self.heads[1], **self.scores}

    @property
    def wanted(self) -> Array:
        """Indices of the rows that need a result."""
        starts = self.starts or [0] * len(self.lengths)
        own = zip(parts(self.lengths), starts, strict=True)
        return np.concatenate([np.arange(part.stop)[part.start + start :] for part, start in own])

    @property
    def width(self) -> int:
        return self.heads[0] * self.heads[2]


Run = Callable[[Any, Rows], Array]


def parts(lengths: Sequence[int]) -> list[slice]:
    """Return the slice of packed rows of each sequence."""
    return [slice(int(a), int(b)) for a, b in pairwise(np.cumsum([0, *lengths]))]


def expanded(qkv: Array, heads: Heads) -> Array:
    """Return rows [Q | K | V] (..., 3Q) of the equivalent attention without grouped queries."""
    NH, NKV, HS = heads
    q, k, v = np.split(qkv, [NH * HS, (NH + NKV) * HS], axis=-1)
    return np.concatenate([q, repeated(k, heads), repeated(v, heads)], axis=-1)


# --- ways to call a kernel


def by_length(variant: str, cp: Any, rows: Rows, **options: Any) -> Array:
    """Run a float32 variant, with all sequences of one length in one call."""
    out, own = np.full((len(rows.qkv), rows.width), np.nan, np.float32), parts(rows.lengths)
    for length in sorted({*rows.lengths} - {0}):
        those = [part for part in own if part.stop - part.start == length]
        batch = np.stack([rows.qkv[part] for part in those])
        x = cp.asarray(batch if len(those) > 1 else batch[0])
        to = cp.full((*x.shape[:-1], rows.width), np.nan, "float32")
        bound = ATTENTION.bind(
            (x,), to, causal=rows.causal, variant=variant, **rows.options, **options
        )
        for scores in bound.extra:
            scores.fill(np.nan)
        for part, got in zip(those, bound.run().get().reshape(-1, length, rows.width), strict=True):
            out[part] = got
    return out


def packed(variant: str, cp: Any, rows: Rows, **patched: Any) -> Array:
    """Run a 16-bit variant on a ragged batch.

    patched: functions that replace functions of the module of tiles.
    """
    x = cp.asarray(rows.qkv)
    out = cp.empty((len(x), rows.width), x.dtype)
    out.data.memset(0xFF, out.nbytes)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in patched.items():
            patch.setattr(_attention_tiles, name, function)
        run(cp, x, out, rows, variant)
    return np.asarray(out.get())


def as_hi_lo(
    variant: str,
    cp: Any,
    rows: Rows,
    convert: Callable[[Array], tuple[Array, Array]] = hi_lo,
    one_scale: float | None = None,
) -> Array:
    """Run a variant on float32 rows as hi/lo matrices.

    convert: function from rows to parts and scales. one_scale: scale that all rows share.
    """
    given, scale = map(cp.asarray, convert(rows.qkv))
    N, shape = len(rows.qkv), (len(rows.qkv), rows.width)
    out = cp.full((2, *shape), np.nan, "float16"), cp.full(N, np.nan, "float32")
    matrix = HiLoMatrix(given, scale, rows.qkv.shape, one_scale)
    run(cp, matrix, HiLoMatrix(*out, shape), rows, variant)
    return joined(*(each.get() for each in out))


def run(cp: Any, x: Any, out: Any, rows: Rows, variant: str) -> None:
    """Run one sequence as x (T, W), sequences of one length as a batch, and all others packed."""
    options = {**rows.options, "causal": rows.causal, "variant": variant}
    B, longest = len(rows.lengths), max(rows.lengths)
    if B > 1 and (isinstance(x, HiLoMatrix) or {*rows.lengths} != {longest}):
        starts = cp.asarray(np.cumsum([0, *rows.lengths], dtype=np.int32))
        VARLEN.bind((x, starts), out, max_seqlen=longest, **options).run()
        return
    if B > 1:
        x, out = (each.reshape(B, longest, -1) for each in (x, out))
    ATTENTION.bind((x,), out, **options).run()


def held_by(rows: Rows, kind: str) -> Cache:
    """Return a cache with K and V of the rows, and NaN after each sequence."""
    Q, KV = rows.width, rows.heads[1] * rows.heads[2]
    both = np.full((2, len(rows.lengths), max(rows.lengths) + 3, KV), np.nan, rows.qkv.dtype)
    for b, part in enumerate(parts(rows.lengths)):
        both[0, b, : rows.lengths[b]] = rows.qkv[part, Q : Q + KV]
        both[1, b, : rows.lengths[b]] = rows.qkv[part, Q + KV :]
    k, v = stored(both, kind)
    return Cache(k, v, rows.heads, kind)


def from_cache(variant: str, kind: str, cp: Any, rows: Rows, **options: Any) -> Array:
    """Run a variant on packed rows whose K and V come from a cache of this kind."""
    held, qkv = held_by(rows, kind), rows.qkv[rows.wanted]
    qkv[:, rows.width :] = np.nan
    starts = np.array(rows.starts or [0] * len(rows.lengths), np.int32)
    new = np.array(rows.lengths, np.int32) - starts
    seams = np.array([0, *np.cumsum(new)], np.int32)
    inputs = tuple(map(cp.asarray, (qkv, held.k, held.v, seams, starts)))
    out = cp.asarray(np.full((len(qkv), rows.width), np.nan, qkv.dtype))
    options |= {"kv_dtype": held.kv_dtype, "variant": variant, "longest": int(new.max())}
    options |= rows.scores
    bound = ATTENTION_PACKED.bind(inputs, out, n_head=rows.heads[0], **options)
    return np.asarray(bound.run().get())


def one_by_one(kind: str, cp: Any, rows: Rows) -> Array:
    """Run each row as a separate query, over a cache with the sequences in reverse order.

    One more query, which sees no key, must not be written.
    """
    held, wanted = held_by(rows, kind).of(slice(None, None, -1)), rows.wanted
    ends = np.cumsum(rows.lengths)
    sequence = np.searchsorted(ends, wanted, side="right")
    position = wanted - (ends - rows.lengths)[sequence]
    places = [np.append(len(ends) - 1 - sequence, 0), np.append(position, -1)]
    q = np.concatenate([rows.qkv[wanted, : rows.width], rows.qkv[:1, : rows.width]])
    given = (q, held.k, held.v, *(each.astype(np.int32) for each in places))
    inputs = tuple(map(cp.asarray, given))  # referenced until the end: a launch keeps none alive
    options = {"n_head": rows.heads[0], "kv_dtype": held.kv_dtype, **rows.scores}
    bound = ATTENTION_SPLIT.bind(inputs, **options)
    bound.out.fill(np.nan)
    got: Array = bound.run().get()
    assert np.isnan(got[-1]).all(), "a query without keys was written"
    return got[:-1]


# --- kernels


@dataclass(frozen=True)
class Kernel:
    """A kernel and its properties. run: computes the wanted rows. dtype: of inputs and results.

    kind: kind of the cache that holds K and V; "" for no cache. alike: name of the kernel without a
    cache that gives the same bits. masks: supported values of `causal`. one_scale: whether a
    row of Q, K and V shares one scale, so that a value that is not finite changes the rounding of
    other channels. infinity: whether an infinity in V gives infinity, not NaN. channels: the only
    supported head size; 0: any. scaled: whether scores can have another scale, and rows a window.
    twin: whether another kernel has most of its code, so that the emulator runs fewer laws. spare:
    whether others have all of its properties, so that the emulator runs it only with --slow.
    """

    run: Run
    dtype: Any = np.float32
    kind: str = ""
    alike: str = ""
    masks: Sequence[bool] = (False, True)
    capability: int = MMA_CAPABILITY
    one_scale: bool = False
    infinity: bool = True
    channels: int = 0
    scaled: bool = True
    twin: bool = False
    spare: bool = False

    def __call__(
        self,
        cp: Any,
        qkv: Array,
        lengths: Sequence[int],
        heads: Heads,
        causal: bool,
        starts: Sequence[int] = (),
        scale: float | None = None,
        window: int | None = None,
    ) -> Array:
        """Compute the wanted rows; a GPU does so three times and must give the same bits."""
        rows = Rows(qkv, lengths, heads, causal, starts, scale, window)
        found = [self.run(cp, rows) for _ in range(1 if replaced() else 3)]
        for other in found[1:]:
            assert_same_bits(found[0], other)
        return found[0]

    @property
    def values(self) -> int:
        """How many of NaN, inf and -inf, in this order, tests may put in K or V: FP8 has no inf."""
        return 1 if self.narrow else 3

    @property
    def narrow(self) -> bool:
        """Whether K and V are FP8."""
        return self.kind in FORMATS

    def made(self, N: int, heads: Heads) -> Array:
        """Return N random rows whose K and V the cache stores without rounding."""
        return self.held(plain.normal(N, N, row_width(heads)).astype(self.dtype), heads)

    def held(self, qkv: Array, heads: Heads) -> Array:
        """Round K and V of the rows as the cache does."""
        Q = heads[0] * heads[2]
        if self.kind:
            kept = stored(qkv[:, Q:], self.kind)
            qkv[:, Q:] = widened(kept, self.kind) if self.narrow else kept.astype(self.dtype)
        return qkv


class Family(NamedTuple):
    """Kernels that take the same heads. Most laws use the first heads.

    The emulator runs each of the further heads with one kernel only, because each combination is a
    program to compile. more: heads for --slow. wide: heads for a GPU only.
    """

    kernels: dict[str, Kernel]
    heads: Sequence[Heads]
    more: Sequence[Heads] = ()
    wide: Sequence[Heads] = ()

    def cases(self) -> Iterator[tuple[str, Kernel, Heads, str]]:
        """Yield name, kernel, heads, and the tier in which the emulator runs them: "" for none."""
        emulated = (*self.heads, *self.more)
        for n, (name, kernel) in enumerate(self.kernels.items()):
            own = emulated[n + 1 :: len(self.kernels)]
            late = kernel.spare or (kernel.twin and not set(own).isdisjoint(self.heads))
            for heads in (*emulated, *self.wide):
                if kernel.channels in (0, heads[2]):
                    tier = "" if heads not in (self.heads[0], *own) else "default"
                    if tier and (heads in self.more or (late and heads == self.heads[0])):
                        tier = "slow"
                    yield name, kernel, heads, tier


def on_tensor_cores() -> Iterator[tuple[str, Kernel]]:
    """Yield the kernels on tensor cores without a cache; `wgmma` in both of its WAYS."""
    wgmma: Any = {"capability": HOPPER_CAPABILITY}
    for d, (name, dtype) in enumerate(DTYPES.items()):
        yield f"mma-{name}", Kernel(partial(mma, (SMALL, PAIR)[d]), dtype)
        for way, few in WAYS.items():
            run = partial(packed, "wgmma", alternates=lambda *_, few=few: few)
            how: Any = {**wgmma, "twin": few or name in TWINS, "spare": (d + few) % 2 == 1}
            yield f"wgmma-{way}-{name}", Kernel(run, dtype, **how)
    rows: Any = {"one_scale": True, "infinity": False}
    yield "mma-hi-lo", Kernel(partial(as_hi_lo, "mma"), **rows)
    yield "wgmma-hi-lo", Kernel(partial(as_hi_lo, "wgmma"), **rows, **wgmma, channels=64)


def cached_on_hopper() -> Iterator[tuple[str, Kernel]]:
    """Yield the `wgmma` kernels over a cache of their own dtype or of FP8."""
    for (d, (name, dtype)), (way, few) in product(enumerate(DTYPES.items()), WAYS.items()):
        for n, kind in enumerate((name, *FORMATS)):
            run, alike = partial(alternating, few, kind), f"wgmma-{way}-{name}"
            how: Any = {"capability": HOPPER_CAPABILITY, **SELF, "channels": 64 * few}
            how |= {"twin": bool(few or d or n), "spare": n != d + few or d != few}
            yield f"cached-{alike}-{kind}", Kernel(run, dtype, kind, alike, **how)


def alternating(few: bool, kind: str, cp: Any, rows: Rows) -> Array:
    """Run `wgmma` over a cache, with alternate keys if `few`, else with all keys per warpgroup."""
    slow = WHOLE_KEYS._replace(step=1e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention_tiles, "WHOLE_KEYS" if few else "ALTERNATE_KEYS", slow)
        _attention_tiles.cached_wgmma_geometry.cache_clear()
        found = from_cache("wgmma", kind, cp, rows)
    _attention_tiles.cached_wgmma_geometry.cache_clear()
    return found


def mma(tile: AttentionTile, cp: Any, rows: Rows) -> Array:
    """Run `mma`: on the emulator with this tile if heads have 64 channels, else as on an H200."""

    def geometry(sizes: Any, **_: int) -> Any:
        return mma_geometry(sizes, **H200, tile=tile if sizes.HS == 64 else None)

    return packed("mma", cp, rows, **({"mma_geometry": geometry} if replaced() else {}))


FAMILIES = (
    Family(
        {
            name: Kernel(partial(by_length, name), scaled=name == "online")
            for name in ("mha", "naive", "online")
        },
        heads=[(2, 2, 16)],
        more=[(3, 1, 8), (2, 2, 7), (3, 1, 16), (3, 3, 16), (1, 1, 64), (2, 1, 128), (4, 2, 64),
              (8, 1, 8), (4, 2, 16), (1, 1, 80), (1, 1, 256)],
        wide=[(12, 12, 64), (3, 3, 80), (2, 2, 256)],
    ),
    Family(
        dict(on_tensor_cores()),
        heads=[(2, 2, 64), (8, 2, 64)],
        more=[(1, 1, 128), (3, 1, 128), (4, 2, 128), (2, 1, 128), (2, 1, 64)],
        wide=[(12, 12, 64), (2, 2, 128), (4, 1, 128), (4, 2, 64), (6, 2, 64)],
    ),
    Family(
        {
            f"mma-256-{name}": Kernel(
                partial(packed, "mma"), each, twin=name in TWINS, spare=name in TWINS
            )
            for name, each in DTYPES.items()
        },
        heads=[(1, 1, 256)],
        more=[(2, 1, 256)],
        wide=[(4, 1, 256), (8, 4, 256)],
    ),
    Family(
        {
            f"split-{kind}": Kernel(
                partial(one_by_one, kind), kind=kind, **SELF, infinity=False, twin=kind in TWINS
            )
            for kind in KINDS
        },
        heads=[(1, 1, 64), (3, 3, 7), (4, 2, 64)],
        more=[(8, 1, 8), (1, 1, 250), (1, 1, 512), (3, 3, 16), (16, 16, 1), (14, 2, 8), (8, 2, 64),
              (4, 2, 48), (1, 1, 128), (4, 1, 128), (3, 1, 256), (1, 1, 255), (4, 2, 8),
              (3, 1, 512)],
        wide=[(12, 12, 64), (4, 1, 512)],
    ),
    Family(
        {
            f"tiles-{kind}": Kernel(
                partial(from_cache, "tiles", kind), kind=kind, **SELF, twin=kind in TWINS
            )
            for kind in KINDS
        },
        heads=[(2, 2, 16), (2, 1, 512), (3, 3, 7)],
        more=[(3, 1, 8), (2, 1, 80), (2, 2, 64), (2, 2, 12), (2, 1, 128), (1, 1, 256), (1, 1, 250),
              (1, 1, 510)],
        wide=[(12, 12, 64), (4, 2, 512)],
    ),
    Family(
        {
            f"cached-mma-{name}": Kernel(
                partial(from_cache, "mma", name), dtype, name, f"mma-{name}", **SELF,
                twin=name in TWINS,
            )
            for name, dtype in DTYPES.items()
        },
        heads=[(2, 2, 64), (4, 2, 64)],
        more=[(2, 1, 128), (1, 1, 256)],
        wide=[(12, 12, 64)],
    ),
    Family(
        dict(cached_on_hopper()),
        heads=[(2, 2, 64)],
        more=[(2, 1, 128)],
        wide=[(9, 3, 64), (12, 12, 64), (2, 2, 128), (4, 1, 128)],
    ),
)  # fmt: skip


KERNELS = {name: each for family in FAMILIES for name, each in family.kernels.items()}


# --- accuracy


def assert_right(
    got: Array,
    qkv: Array,
    lengths: Sequence[int],
    heads: Heads,
    causal: bool,
    xp: Any = np,
    starts: Sequence[int] = (),
    window: int | None = None,
) -> None:
    """Assert that `got` is as accurate as `plainly`, compared with the reference in float64."""
    assert got.dtype == qkv.dtype
    rows = Rows(expanded(qkv, heads), lengths, heads, causal, starts)
    own = [part for part in parts(lengths) if part.stop > part.start]
    wide = [rows.qkv[part].astype(np.float64) for part in own]
    exact = [reference.attention(each, heads[0], causal, window=window) for each in wide]
    by_hand = [plainly(rows.qkv[p], heads[0], causal, xp, window) for p in own]
    truth, expected = (np.concatenate(each)[rows.wanted] for each in (exact, by_hand))
    plain.assert_as_accurate(got.astype(np.float32), truth, expected.astype(np.float32))


def plainly(
    qkv: Array, n_head: int, causal: bool, xp: Any = np, window: int | None = None
) -> Array:
    """Compute attention of one sequence in float32, sum by sum.

    Rows of 16 bits have two roundings to 16 bits: of the softmax's weights exp(s - max), as tensor
    cores multiply only 16-bit numbers, and of the result.
    """
    if qkv.dtype == np.float32:
        return on_host(plain.attention(xp.asarray(qkv), n_head, causal, xp, window))
    T = len(qkv)
    heads = xp.asarray(qkv.astype(np.float32)).reshape(T, 3, n_head, -1)
    q, k, v = (xp.ascontiguousarray(heads[:, i].transpose(1, 0, 2)) for i in range(3))
    scores = plain.product(q, xp.swapaxes(k, -1, -2), xp) / xp.float32(q.shape[-1] ** 0.5)
    if causal:
        scores = xp.where(plain.visible(T, window, xp), scores, xp.float32(-np.inf))
    p = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    # rounded on the host, because CuPy may not support bfloat16
    weights = xp.asarray(on_host(p).astype(qkv.dtype).astype(np.float32))
    out = plain.product(weights, v, xp) / plain.running_sum(p, xp)
    return on_host(out.transpose(1, 0, 2).reshape(T, -1)).astype(qkv.dtype)


def on_host(array: Any) -> Array:
    return np.asarray(array if isinstance(array, np.ndarray) else array.get())
