"""The operations of mixtures of experts: feed-forwards of which each row uses a few.

`route` chooses the experts of each row, `expert_tiles` sorts the choices by expert, `experts_gated`
and `experts_down` multiply rows by the matrices of their experts, and `add_experts` adds the
weighted results. Kernels: experts/route.cu, experts/tiles.cu, matmul/decode/mma_experts.cu, and for
GGUF blocks matmul/decode/mma_gguf.cu. A row has the same bits in any batch: a product of an expert
has the bits of `linear` with option decoding.
"""

from __future__ import annotations

from math import ceil, gcd
from typing import NamedTuple

from gpt2block.checks import check_integer
from gpt2block.cuda.arrays import check_address
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch_at, nonzero_defines
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, Refusal, UncheckedCall, accept
from gpt2block.ops.engines import linear_gguf as blocks
from gpt2block.ops.engines import linear_mma as mma
from gpt2block.ops.engines.rows import WARP, power_of_two
from gpt2block.ops.operands import count_define, rounds
from gpt2block.ops.operation import REQUIRED, Operation, Variant, variant
from gpt2block.ops.products import gate_define, limits, storage_of

ROUTE, TILES, PRODUCT = "experts/route.cu", "experts/tiles.cu", "matmul/decode/mma_experts.cu"
MAX_EXPERTS = 512
MAX_USED = 32  # MAX_USED of route
# Constants of route
ROUTE_WARPS, HELD, FOUR = 16, 16, 4  # HELD: vectors of the router's weights per lane
CLUSTER = 8  # most blocks that divide the experts of a row
FEW_ROUTED, FEW_ROWS = 64, 4  # rows up to which blocks route FEW_ROWS rows
MANY_ROWS, MANY_EACH = 8, 4  # rows per block, and experts per warp, for more rows
SORTING, ADDING = 512, 256  # most threads of expert_tiles, threads of add_experts
# Limits for products with up to FEW_CHOICES choices per expert: several small blocks per
# multiprocessor wait for memory at different times. With more choices, they would read x too often.
FEW_CHOICES = 8
NARROW, FLIGHT = 16, 2  # columns per block; units of K in flight per lane
MOST_BLOCKS = 16  # blocks per multiprocessor, which loop over tiles


class ExpertProduct(NamedTuple):
    """The facts by which the kernel for experts is planned.

    M: rows of x, the most choices of an expert. choices: mean number of choices per expert. T,
    places: tiles, and choices per tile. N, K: sizes of an expert's matrix. dtype: dtype of the
    weights. up: whether there are two matrices.
    """

    M: int
    choices: float
    T: int
    places: int
    N: int
    K: int
    dtype: str
    up: bool


def plan(p: ExpertProduct) -> Geometry | Refusal:
    """Return the launch of the kernel for the products of all tiles, or the reason to refuse."""
    outputs, possible = p.N * (1 + p.up), mma.PAIRED_COLUMNS if p.up else mma.COLUMNS
    few, floats = p.choices <= FEW_CHOICES, p.dtype == "float32"
    columns = tuple(n for n in possible if n <= NARROW or not few)
    instead = blocks.INSTEAD_OF_EXPERTS
    refused = mma.refusal(p.dtype, p.K, instead)
    if refused:
        return refused
    card = limits(mma.STATIC)
    most = (mma.FLOATS if floats else mma.NARROW).max_rows
    rows = min(most, power_of_two(min(p.M, p.places)))
    cut = mma.layout(
        rows, outputs, p.K, p.dtype, card["sms"], columns, gpu().has_overlap, row_blocks=p.T
    )
    flight = min(cut.flight, FLIGHT if few and not floats else 1)  # floats need more registers
    cut = cut._replace(rows=rows, flight=flight)
    geometry = mma.geometry(rows, outputs, p.K, p.dtype, cut=cut, **card)
    if geometry is None:
        return Refusal(f"K {p.K:,}: a row does not fit in shared memory{instead}")
    across = geometry.grid[0]
    tiles = min(p.T, ceil(MOST_BLOCKS * card["sms"] / across))
    return geometry._replace(kernel="decode_mma_experts", grid=(across, tiles))


def _product(c: Call, M: int, chosen: int) -> Launch:
    """Return a launch of products with experts. chosen: number of choices of a row of x."""
    w, up, E = c.w, c.up, c.n_expert
    p = ExpertProduct(M, M * chosen / E, c.T, c.R - 1, w.N // E, c.K, w.dtype, up is not None)
    geometry = accept(plan(p))
    c.check_addresses("x")
    defines = (("DECODE_EXPERTS", chosen), *count_define(c.rounded))
    args = {"x": c.x, "tiles": c.tiles, "N": p.N, "T": p.T, "places": p.places}
    args["out"] = c.output("out")
    for name, matrix in (("w", w), ("up", up)):
        if matrix is not None:
            check_address(name, matrix.data)
            args |= {name: matrix.data, "scale" if name == "w" else "up_scale": matrix.scale}
    if up is not None:
        defines += (("DECODE_UP", 1), *gate_define(c.gelu))
    return launch_at(PRODUCT, geometry.with_defines(defines), args, *storage_of(w))


@variant("experts routed", ROUTE, "route")
def _route(c: Call) -> Launch:
    c.check_addresses("x", "router")
    few = c.M <= FEW_ROUTED
    rows = power_of_two(min(c.M, FEW_ROWS)) if few else MANY_ROWS
    each = 1 if few else MANY_EACH
    vectors = min(HELD // each, ceil(c.C / (FOUR * WARP)))
    shares = ceil(c.E / (ROUTE_WARPS * each))
    cluster = min(CLUSTER, power_of_two(shares)) if gpu().has_clusters else 1
    defines = nonzero_defines(
        ROUTE_ROWS=rows, ROUTE_EACH=each, ROUTE_VECTORS=vectors, ROUTE_CLUSTER=cluster,
        ROUTE_SIGMOID=c.sigmoid,
    )  # fmt: skip
    shared = 4 * rows * (FOUR * WARP * vectors + 2 * c.E + MAX_USED)
    grid = (cluster, ceil(c.M / rows))
    geometry = Geometry("route", grid, (WARP * ROUTE_WARPS,), shared, defines)
    sizes = (c.M, c.C, c.E, c.n_used, int(c.normed), float(c.factor), float(c.eps))
    return launch_at(ROUTE, geometry, (c.x, c.router, c.bias, c.output("routes"), *sizes))


@variant("experts sorted", TILES, "expert_tiles")
def _sorted(c: Call) -> Launch:
    choices = c.M * c.R // 2
    threads = min(SORTING, max(WARP, power_of_two(choices)))
    geometry = Geometry("expert_tiles", (c.n_expert,), (threads,), 4 * c.n_expert, _used(c))
    tiles = c.output("tiles")
    sizes = (choices, c.n_expert, tiles.shape[1] - 1, len(tiles))
    return launch_at(TILES, geometry, (c.routes, tiles, *sizes))


@variant("experts gated", PRODUCT, "decode_mma_experts")
def _gated(c: Call) -> Launch:
    return _product(c, c.M, c.n_used)


@variant("experts down", PRODUCT, "decode_mma_experts")
def _down(c: Call) -> Launch:
    return _product(c, c.P, 1)


@variant("experts gated gguf", blocks.FILE, blocks.OF_EXPERTS)
def _gated_blocks(c: Call) -> Launch:
    return blocks.launch_experts(c, c.M, c.n_used)


@variant("experts down gguf", blocks.FILE, blocks.OF_EXPERTS)
def _down_blocks(c: Call) -> Launch:
    return blocks.launch_experts(c, c.P, 1)


@variant("experts added", TILES, "add_experts")
def _added(c: Call) -> Launch:
    width = gcd(FOUR, c.N)
    c.check_addresses("y", "residual", "out", loaded=width)
    grid = (c.M, ceil(c.N / width / ADDING))
    geometry = Geometry("add_experts", grid, (ADDING,), 0, (("ADD_WIDTH", width), *_used(c)))
    return launch_at(TILES, geometry, (c.y, c.routes, c.residual, c.output("out"), c.N))


def _used(c: Call) -> Defines:
    """Return the constant for the number of experts that each row uses."""
    return (("EXPERTS_USED", c.R // 2),)


def _prepare_route(unchecked: UncheckedCall) -> Call:
    """Check a call of `route`."""
    c = unchecked.checked()
    check_integer("n_used", c.n_used, 1, c.E, f"1 to {c.E}")
    check_sizes(c.C, c.E, c.n_used)
    return c


def check_sizes(C: int, n_expert: int, n_used: int) -> None:
    """Raise InputError unless kernels can choose n_used of n_expert experts for C channels."""
    if C % FOUR or n_expert > MAX_EXPERTS or n_used > MAX_USED:
        raise InputError(
            f"router: expected, on a GPU, up to {MAX_EXPERTS} experts, of which a token uses up to "
            f"{MAX_USED}, and a multiple of {FOUR} channels, got {n_expert:,} experts, {n_used:,} "
            f"used, {C:,} channels: device='cpu' computes all sizes"
        )


def _prepare_tiles(unchecked: UncheckedCall) -> Call:
    """Check a call of `expert_tiles`, but not the numbers of experts in routes."""
    for name, most in (("n_expert", MAX_EXPERTS), ("rows", 2**15)):
        check_integer(name, unchecked.options[name], 1, most, f"1 to {most:,}")
    c = unchecked.checked()
    _check_routes(c)
    return c


def _prepare_gated(unchecked: UncheckedCall) -> Call:
    """Check a call of `experts_gated`, but not the numbers in tiles. x_dtype: as in `linear`."""
    check_integer("n_used", unchecked.options["n_used"], 1, MAX_USED, f"1 to {MAX_USED}")
    c = _prepare_product(unchecked)
    c.w, c.up = c.w_gate, c.w_up
    if c.up.dtype != c.w.dtype:
        expected = f"{c.w.dtype}, as w_gate has{blocks.INSTEAD_OF_EXPERTS}"
        raise InputError(f"w_up: {c.up.dtype}: expected {expected}")
    return _checked_product(c, _gated, _gated_blocks)


def _prepare_down(unchecked: UncheckedCall) -> Call:
    """Check a call of `experts_down`, but not the numbers in tiles. x_dtype: as in `linear`."""
    c = _prepare_product(unchecked)
    c.x, c.w, c.up = c.h, c.w_down, None
    return _checked_product(c, _down, _down_blocks)


def _prepare_product(unchecked: UncheckedCall) -> Call:
    number = unchecked.options["n_expert"]
    check_integer("n_expert", number, 1, MAX_EXPERTS, f"1 to {MAX_EXPERTS}")
    return unchecked.checked()


def _checked_product(c: Call, others: Variant, of_blocks: Variant) -> Call:
    """Check the sizes of a product, and choose the variant by the dtype of the weights."""
    c.order = (of_blocks if c.w.dtype == GGUF else others,)
    c.rounded = rounds(c.x_dtype, c.w.dtype)
    if any(w is not None and w.input_order is not None for w in (c.w, c.up)):
        expected = f"the order of x{blocks.INSTEAD_OF_EXPERTS}"
        raise InputError(f"w: inputs in an order of their own: expected {expected}")
    if c.w.N % c.n_expert:
        raise InputError(f"w: {c.w.N:,} outputs: expected a multiple of {c.n_expert} experts")
    if c.T == 0 or c.R < 2:
        raise InputError(f"tiles: expected one tile and one choice or more, got ({c.T}, {c.R})")
    return c


def _prepare_sum(unchecked: UncheckedCall) -> Call:
    """Check a call of `add_experts`."""
    c = unchecked.checked()
    _check_routes(c)
    if c.P != c.M * c.R // 2:
        raise InputError(f"y: expected {c.M * c.R // 2} rows, one for each choice, got {c.P}")
    return c


def _check_routes(c: Call) -> None:
    if c.R % 2 or not 2 <= c.R <= 2 * MAX_USED:
        expected = f"an even number of columns, up to {2 * MAX_USED}"
        raise InputError(f"routes: expected {expected}, got {c.R}")


STEPS = (
    Operation(
        name="route",
        variants=(_route,),
        options={"n_used": REQUIRED, "sigmoid": False, "normed": False, "factor": 1.0, "eps": 0.0},
        prepare=_prepare_route,
    ),
    Operation(
        name="expert_tiles",
        variants=(_sorted,),
        options={"n_expert": REQUIRED, "rows": REQUIRED},
        prepare=_prepare_tiles,
    ),
    Operation(
        name="experts_gated",
        variants=(_gated, _gated_blocks),
        options={"n_expert": REQUIRED, "n_used": REQUIRED, "gelu": False, "x_dtype": None},
        prepare=_prepare_gated,
    ),
    Operation(
        name="experts_down",
        variants=(_down, _down_blocks),
        options={"n_expert": REQUIRED, "x_dtype": None},
        prepare=_prepare_down,
    ),
    Operation(name="add_experts", variants=(_added,), prepare=_prepare_sum),
)
