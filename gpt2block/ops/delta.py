"""The operations of gated delta nets, layers that keep a matrix for each head instead of keys.

`delta_spans` finds the tokens that a pass computes and the states to continue from, `delta_inputs`
computes q, k, v, decay and β, `delta_rule` applies the rule to the states, and `gated_rmsnorm`
normalizes its result. Kernels: attention/delta/inputs.cu and attention/delta/rule.cu.
"""

from __future__ import annotations

from math import ceil

from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.models.config import SAVED
from gpt2block.ops.call import Call
from gpt2block.ops.operation import REQUIRED, Operation, variant

INPUTS, RULE = "attention/delta/inputs.cu", "attention/delta/rule.cu"
WARPS = 4  # rows and heads of a block that has a warp for each
LANES, COLUMNS = 8, 16  # DELTA_LANES and DELTA_COLUMNS of the kernel
# Heads of v of all slots from which a thread has two columns. H200, 16 and 32 heads, one row: 3.0
# and 3.8 µs with one column, 3.2 and 3.3 µs with two; 512 tokens: 94 and 131 µs, 111 and 118 µs.
MANY_HEADS = 17
THREADS = 256  # threads of delta_spans
LARGEST = 352  # channels of a head of k: two chunks of 8 tokens fit into 48 KiB of shared memory
LARGEST_OF_PROMPTS = 160  # channels of a head of k: two chunks of 16 tokens fit


def check_heads(n_k_head: int, n_v_head: int, k_size: int, v_size: int) -> None:
    """Raise InputError if the kernels cannot compute heads of these numbers and sizes."""
    fits = k_size % 4 == 0 and k_size <= LARGEST and v_size % 4 == 0
    if n_v_head % n_k_head or n_v_head % 2 or v_size <= 0 or not fits:
        raise InputError(
            "heads of a gated delta net: expected, on a GPU, sizes that are multiples of 4, heads "
            f"of k of up to {LARGEST} channels, and heads of v in a multiple of heads of k, an "
            f"even number, got {n_k_head} heads of {k_size} channels of k, {n_v_head} heads of "
            f"{v_size} channels of v: device='cpu' computes all sizes"
        )


def _sizes(c: Call) -> tuple[int, int, int, Defines]:
    """Return the channels of [q | k | v], the heads of v, v's channels per head, and macros.

    Raise InputError if the kernels cannot compute the heads, or load vectors of the arrays.
    """
    D, H = c.D, c.A // 2
    v_size, rest = divmod(D - 2 * c.n_k_head * c.k_size, H)
    check_heads(c.n_k_head, H, c.k_size, 0 if rest else v_size)
    c.check_addresses("x", "conv", "state", "recent")
    return D, H, v_size, (("DELTA_K", c.k_size), ("DELTA_V", v_size))


def _pitch(c: Call) -> int:
    """Return the number of floats of a state; 0 without states."""
    return 0 if c.state is None else int(c.state.shape[2])


@variant("delta spans", INPUTS, "delta_spans")
def _spans(c: Call) -> Launch:
    args = (c.row, c.positions, c.held, c.output("out"), c.N, c.B, int(c.steps))
    return launch_at(INPUTS, Geometry("delta_spans", (1,), (THREADS,)), args)


@variant("delta inputs", INPUTS, "delta_inputs")
def _inputs(c: Call) -> Launch:
    D, H, _, defines = _sizes(c)
    grid = (c.N, ceil((2 * c.n_k_head + H + 1) / WARPS))
    geometry = Geometry("delta_inputs", grid, (32, WARPS), defines=defines)
    arrays = (c.x, c.ba, c.conv, c.rate, c.dt_bias, c.row, c.spans, c.state, c.recent)
    sizes = (c.W, _pitch(c), D, H, c.n_k_head, c.N, c.B)
    return launch_at(INPUTS, geometry, (*arrays, c.output("out"), *sizes))


@variant("delta rule", RULE, "delta_rule")
def _rule(c: Call) -> Launch:
    D, H, v_size, defines = _sizes(c)
    c.check_addresses("rows", "pool")
    grid = (H, ceil(v_size / COLUMNS), c.B)
    each = 2 if c.B * H >= MANY_HEADS else 1
    chunk = 8 if c.steps or c.k_size > LARGEST_OF_PROMPTS else 16
    defines += (("DELTA_SAVED", SAVED), ("DELTA_EACH", each), ("DELTA_CHUNK", chunk))
    defines += (("DELTA_TILED", 1),) if c.tiled else ()
    geometry = Geometry("delta_rule", grid, (LANES, COLUMNS // each), defines=defines)
    arrays = (c.x, c.ba, c.rows, c.spans, c.state, c.recent, c.pool, c.saved, c.output("out"))
    saved = 0 if c.saved is None else c.M
    sizes = (c.W, _pitch(c), D, H, c.n_k_head, c.N, saved, int(c.steps))
    return launch_at(RULE, geometry, (*arrays, *sizes))


@variant("gated norm", RULE, "gated_rmsnorm")
def _gated(c: Call) -> Launch:
    if c.V % c.G or c.W < c.V:
        raise InputError(f"o: expected heads of {c.G} channels, up to {c.W}, got {c.V} channels")
    if c.G % 4:
        raise InputError(
            f"gamma: expected, on a GPU, heads of a multiple of 4 channels, got {c.G}: "
            "device='cpu' computes all sizes"
        )
    geometry = Geometry("gated_rmsnorm", (c.N, ceil(c.V // c.G / WARPS)), (32, WARPS))
    geometry = geometry.with_defines((("DELTA_V", c.G),))
    args = (c.o, c.x, c.gamma, c.output("out"), c.W, c.V // c.G, c.eps)
    return launch_at(RULE, geometry, args)


_HEADS = {"n_k_head": REQUIRED, "k_size": REQUIRED}
STEPS = (
    Operation(name="delta_spans", variants=(_spans,), options={"steps": False}),
    Operation(name="delta_inputs", variants=(_inputs,), options=_HEADS),
    Operation(
        name="delta_rule", variants=(_rule,), options={**_HEADS, "steps": False, "tiled": False}
    ),
    Operation(name="gated_rmsnorm", variants=(_gated,), options={"eps": 1e-6}),
)
