"""QK-Norm: RMSNorm of each head of q and k in rows [Q | K | V], alone or before RoPE.

`qk_norm` returns the rows with the heads of Q and K normalized, in place if requested.
`qk_norm_rope` also applies RoPE. `qk_norm_append`, for decoding, returns Q and writes K and V to a
kv_cache. If gamma has a weight for each channel of Q or K instead of one head, the norm is computed
over all heads together. values: whether heads of V have a norm, too, without weights. Kernels:
positions/qk_norm.cu.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd

import numpy as np

from gpt2block.checks import normed_together
from gpt2block.cuda.arrays import CudaArray, contiguous, multiprocessors, same_memory
from gpt2block.cuda.kernels import Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.attention import checked_heads
from gpt2block.ops.call import CACHE, Call
from gpt2block.ops.engines.rows import WARP, power_of_two
from gpt2block.ops.operation import REQUIRED, Inputs, Operation, Sizes, Workload, variant
from gpt2block.ops.rope import FILLED, MAX_BATCH
from gpt2block.ops.rope_qkv import CHANNELS, HEADS, heads_to_append
from gpt2block.ops.warm import call

FILE = "positions/qk_norm.cu"
WIDTH = 4  # maximum elements per load
THREADS = 256  # maximum threads per block
MAX_TOGETHER = 4  # maximum heads per team (threads that process a head together)


@lru_cache(maxsize=1024)
def choose_geometry(kernel: str, B: int, N: int, heads: int, D: int, sms: int) -> Geometry:
    """Return the launch geometry for B sequences, N rows, `heads` heads and D channels per head.

    sms: multiprocessors of the GPU. The order of additions depends only on D. If there are enough
    threads, each processes several heads.
    """
    width = gcd(WIDTH, D // 2)
    lanes = min(power_of_two(D // 2 // width), WARP)
    together = MAX_TOGETHER if B * N * heads * lanes >= MAX_TOGETHER * FILLED * sms else 1
    wanted, whole = ceil(heads / together), WARP // lanes  # teams per row and per warp
    teams = min(ceil(wanted / whole) * whole, THREADS // lanes if together > 1 else whole)
    defines = (("QN_D", D), ("QN_WIDTH", width), ("QN_LANES", lanes), ("QN_HEADS", together))
    return Geometry(kernel, (N, ceil(wanted / teams), B), (lanes, teams), defines=defines)


def geometry_of_rows(kernel: str, B: int, N: int, normed: int, D: int) -> Geometry:
    """Return the launch geometry for one norm over a row's Q heads, and one over its K heads.

    normed: heads of Q and K together. The order of additions depends only on normed and D.
    """
    few = choose_geometry(kernel, B, N, normed, D, 1 << 30)
    lanes, whole = few.block
    teams = min(ceil(normed / whole) * whole, THREADS // lanes)
    geometry = few.with_defines((("QN_TEAMS", teams),))
    return geometry._replace(grid=(N, 1, B), block=(lanes, teams))


def _geometry(
    c: Call, kernel: str, B: int, N: int, moved: int, D: int, n_head: int, n_kv_head: int
) -> Geometry:
    """Return a launch geometry. Raises InputError for unaligned arrays or gamma of wrong shape."""
    if B > MAX_BATCH:
        raise InputError(f"qkv: expected at most {MAX_BATCH:,} sequences in a call, got {B:,}")
    if normed_together(c.gamma_q.shape, c.gamma_k.shape, n_head, n_kv_head, D):
        if c.values:
            raise InputError("values: expected norms of heads, got norms of all heads together")
        geometry = geometry_of_rows(kernel, B, N, n_head + n_kv_head, D)
    else:
        geometry = choose_geometry(kernel, B, N, moved, D, multiprocessors())
    width = int(dict(geometry.defines)["QN_WIDTH"])
    c.check_addresses("qkv", "gamma_q", "gamma_k", "k", "v", "out", loaded=width)
    return geometry.with_defines((("QN_VALUES", 1),)) if c.values else geometry


def _over_rows(
    c: Call, kernel: str, B: int, N: int, D: int, *arrays: CudaArray | None, queries: bool = False
) -> Launch:
    """Launch a kernel on rows of qkv. `arrays`: arguments of the kernel between qkv and gamma_q.

    queries: whether the rows have no keys and values.
    """
    n_head, n_kv_head = checked_heads(c.n_head, c.n_kv_head)
    n_kv_head = 0 if queries else n_kv_head
    normed, heads = n_head + n_kv_head, n_head + 2 * n_kv_head
    if heads * D != c.W:
        raise InputError(
            f"qkv: expected rows of {heads * D}, {heads} heads of {D} channels, got {c.qkv.shape}"
        )
    moved = normed if same_memory(c.qkv, c.output("out")) and not c.values else heads
    geometry = _geometry(c, kernel, B, N, moved, D, n_head, n_kv_head)
    sizes = (n_head, normed, moved, heads, c.eps)
    args = (c.qkv, *arrays, c.gamma_q, c.gamma_k, c.out, *sizes)
    return launch_at(FILE, geometry, args, c.storage)


@variant("heads", FILE, "qk_norm")
def _heads(c: Call) -> Launch:
    """Launch qk_norm for rows of W = (n_head + 2 n_kv_head) D channels."""
    n_head, n_kv_head = checked_heads(c.n_head, c.n_kv_head)
    heads = n_head + 2 * n_kv_head
    D = c.W // heads
    if D * heads != c.W or D % 2:
        raise InputError(f"qkv: expected {heads} heads of an even size, got {c.qkv.shape}")
    return _over_rows(c, "qk_norm", 1, c.rows, D)


@variant("rope", FILE, "qk_norm_rope")
def _rope(c: Call) -> Launch:
    """Launch qk_norm_rope for heads of 2P channels. The host does not check positions."""
    arrays = c.positions, c.frequencies
    return _over_rows(c, "qk_norm_rope", c.rows, c.T, 2 * c.P, *arrays, queries=c.queries)


@variant("append", FILE, "qk_norm_append")
def _append(c: Call) -> Launch:
    """Launch qk_norm_append for heads of 2P channels: n_kv_head of K, and n_head of Q.

    row and position are not read back to the host: the kernel skips K and V outside the cache.
    """
    n_head, n_kv_head = heads_to_append(c)
    heads, out = n_head + 2 * n_kv_head, c.output("out")
    geometry = _geometry(c, "qk_norm_append", 1, c.N, heads, 2 * c.P, n_head, n_kv_head)
    arrays = (c.qkv, c.row, c.position, c.frequencies, c.gamma_q, c.gamma_k, c.k, c.v, out)
    args = (*arrays, n_head, n_kv_head, c.B, c.S, c.eps)
    T = "float32" if c.fp8_cache else c.kv_storage
    return launch_at(FILE, geometry, args, T, cache=c.fp8_cache)


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    T, D, heads = sizes["T"], sizes["D"], sizes["n_head"] + 2 * sizes["n_kv_head"]
    gammas = rng.standard_normal((2, D), dtype=np.float32) + np.float32(1)
    return rng.standard_normal((T, heads * D), dtype=np.float32), *gammas


OPTIONS = {"n_head": REQUIRED, "n_kv_head": REQUIRED, "eps": 1e-6, "values": False}
QK_NORM_ROPE = Operation(
    name="qk_norm_rope", variants=(_rope,), options={**OPTIONS, "queries": False}
)
QK_NORM_APPEND = Operation(
    name="qk_norm_append",
    variants=(_append,),
    options={"n_head": REQUIRED, "eps": 1e-6, "values": False, **CACHE},
)

OPERATION = Operation(
    name="qk_norm",
    variants=(_heads,),
    options=OPTIONS,
    steps=(QK_NORM_ROPE, QK_NORM_APPEND),
    workload=Workload(
        idea="rmsnorm of each head of Q and of K in rows [Q | K | V]",
        sizes={"T": 16, "D": 128},
        draw=_make,
        traffic=lambda s: 2 * s["itemsize"] * s["T"] * CHANNELS * s["D"],
        flops=lambda s: 4 * s["T"] * CHANNELS * s["D"],
        attrs={**HEADS, "eps": 1e-6},
        small=({"T": 5, "D": 6}, {"T": 3, "D": 10, "n_head": 3, "n_kv_head": 1}),
        dtypes=("float16", "bfloat16", "float32"),
        axes={"...": "T", "G": "D", "H": "D", "D": "G"},
        aliases={
            "rows": "T",
            "N": "T",
            "head_dim": "D",
            "heads": "n_head+2*n_kv_head",
            "W": "(n_head+2*n_kv_head)*D",
        },
    ),
)


def qk_norm(
    qkv: CudaArray,
    gamma_q: CudaArray,
    gamma_k: CudaArray,
    n_head: int,
    n_kv_head: int,
    eps: float = 1e-6,
    out: CudaArray | None = None,
) -> CudaArray:
    """Compute `reference.qk_norm` on CuPy arrays. Raises InputError.

    qkv (..., W), W = (n_head + 2 n_kv_head) D with D even, gamma_q, gamma_k (D,), or (n_head D,)
    and (n_kv_head D,), all float32, float16 or bfloat16 → as qkv. `out=qkv` overwrites qkv.
    """
    arrays = (*(contiguous(qkv) if out is not qkv else (qkv,)), *contiguous(gamma_q, gamma_k))
    return call(OPERATION, arrays, out, n_head=n_head, n_kv_head=n_kv_head, eps=eps).out
