"""The table of instructions that the engine executes: one row for a family of opcodes.

An instruction is known if its opcode has a row that permits its types and all its modifiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

EXACT = "exact"
INTEGERS = "u16 s16 u32 s32 u64 s64"
WORDS = "b16 b32 b64"
NUMBERS = f"u8 s8 b8 {INTEGERS} {WORDS} f16 f32 f64 bf16 f16x2 bf16x2"
SPACES = "global shared shared::cta shared::cluster local param param::entry param::func const"
ORDERS = "weak volatile relaxed acquire release acq_rel cta cluster gpu sys"
HINTS = (
    "nc ca cg cs lu cv wb wt L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last "
    "L1::no_allocate L2::64B L2::128B L2::256B L2::cache_hint unified"
)
FLOATS = "f16 f16x2 bf16 bf16x2 f32 f64"
WAYS = "rn rz rm rp ftz sat"
COMPARED = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan"


class Row(NamedTuple):
    """Opcodes with what they do. fidelity: EXACT, or "approximate: " and the permitted error."""

    opcodes: str
    types: str
    modifiers: str
    meaning: str
    fidelity: str = EXACT


SHAPES = "m16n8k4 m16n8k8 m16n8k16 m16n8k32 m8n8k4 m8n8k16"
SUMS = (
    "exact products; sums in f32 and f16 are aligned to the largest term and cut off 25 bits below "
    "it, as tensor cores of Hopper were found to do"
)


TWO_ULP = "approximate: at most 2 ulp; the nearest number here"
ELEVEN_BITS = "approximate: an error of at most 2^-11; the nearest number of 11 bits here"


def _error(bound: str) -> str:
    return f"approximate: an error of at most {bound}; the nearest number here"


ROWS = (
    Row("add sub", f"{INTEGERS} u16x2 s16x2", "sat", "sum, difference of integers"),
    Row("mul", INTEGERS, "lo hi wide", "product of integers: low or high half, or both"),
    Row("mad", INTEGERS, "lo hi wide sat", "product of integers, then sum"),
    Row("add addc sub subc", "u32 s32 u64 s64", "cc", "sum, difference with a carry"),
    Row("mad madc", "u32 s32 u64 s64", "lo hi cc", "product, then sum with a carry"),
    Row("mul24 mad24", "u32 s32", "lo hi", "product of 24-bit integers, then sum"),
    Row("sad", INTEGERS, "", "sum of an absolute difference"),
    Row("div rem", INTEGERS, "", "quotient, remainder of integers; division by 0 is a finding"),
    Row("abs neg", "s16 s32 s64", "", "absolute value, negative of an integer"),
    Row("min max", f"{INTEGERS} u16x2 s16x2", "", "the smaller, the larger integer"),
    Row("and or xor not cnot", f"pred {WORDS}", "", "bitwise logic"),
    Row("lop3", "b32", "", "bitwise logic of three operands by a table"),
    Row("shl shr", f"{WORDS} {INTEGERS}", "", "shift; by the width or more: 0 or the sign"),
    Row("shf", "b32", "l r wrap clamp", "shift of two registers as one"),
    Row("bfe", "u32 s32 u64 s64", "", "extract a field of bits"),
    Row("bfi", "b32 b64", "", "insert a field of bits"),
    Row("bfind", "u32 s32 u64 s64", "shiftamt", "position of the highest bit that is not the sign"),
    Row("popc clz brev", "b32 b64", "", "count of bits, of leading zeros; reversed bits"),
    Row("prmt", "b32", "", "bytes chosen from two registers"),
    Row("dp4a dp2a", "u32 s32", "lo hi", "sum of products of bytes"),
    Row("setp set", f"{INTEGERS} {WORDS} f32", f"{COMPARED} and or xor", "comparison of integers"),
    Row(
        "selp slct", f"{INTEGERS} {WORDS} f32 f64 f16 bf16", "ftz", "choice by a predicate or sign"
    ),
    Row("mov", f"{NUMBERS} b128 pred", "", "copy; packing and unpacking of vectors"),
    Row("cvta", "u32 u64", f"to {SPACES}", "generic address from or to one of a space"),
    Row("isspacep", "", SPACES, "whether a generic address lies in a space"),
    Row("ld ldu", f"{NUMBERS} b128", f"{SPACES} {ORDERS} {HINTS} v2 v4 v8", "load"),
    Row("st", f"{NUMBERS} b128", f"{SPACES} {ORDERS} {HINTS} v2 v4 v8", "store"),
    Row(
        "atom red",
        "u32 s32 b16 b32 b64 b128 u64 s64 f16 bf16 f16x2 bf16x2 f32 f64",
        f"{SPACES} {ORDERS} add min max inc dec cas exch and or xor noftz v2 v4 v8 L2::cache_hint",
        "atomic change of memory",
    ),
    Row("fence membar", "", "sc acq_rel acquire release cta cluster gpu gl sys", "fence"),
    Row("prefetch prefetchu", "", "global local L1 L2 L2::evict_last tensormap", "no effect"),
    Row("createpolicy discard applypriority", "b64", f"{HINTS} fractional range", "no effect"),
    Row("bra brx call ret exit", "", "uni idx", "control flow"),
    Row("trap brkpt", "", "", "end of the launch with a finding; no effect"),
    Row("nanosleep", "u32", "", "others run first"),
    Row("pmevent", "", "mask", "no effect"),
    Row("bar barrier", "u32 b32 pred", "sync arrive red warp cta aligned popc and or", "barrier"),
    Row("shfl", "b32", "sync up down bfly idx", "exchange of values in a warp"),
    Row("vote", "b32 pred", "sync all any uni ballot", "vote of a warp"),
    Row("match", "b32 b64", "sync any all", "lanes with the same value"),
    Row("redux", "u32 s32 b32", "sync add min max and or xor", "reduction in a warp"),
    Row("activemask", "b32", "", "the lanes that execute together"),
    Row("elect", "", "sync", "one lane of a mask: the first"),
    Row("vprintf assertfail", "", "", "printed text; a failed assertion is a finding"),
    Row("clock", "u32 u64", "", "a counter: executed instructions"),
    Row("add sub mul", FLOATS, WAYS, "sum, difference, product of numbers"),
    Row("fma mad", FLOATS, f"{WAYS} relu", "product, then sum, with one rounding"),
    Row("div rcp sqrt", "f32 f64", "rn rz rm rp ftz", "quotient, reciprocal, square root"),
    Row("abs neg", FLOATS, "ftz", "absolute value, negative of a number"),
    Row("copysign", "f32 f64", "", "a number with the sign of another"),
    Row("min max", FLOATS, "ftz NaN", "the smaller, the larger number; -0 < +0; a NaN is ignored"),
    Row("setp", FLOATS, f"{COMPARED} and or xor ftz", "comparison of numbers"),
    Row("set", f"{FLOATS} u16 u32 s32", f"{COMPARED} and or xor ftz", "comparison of numbers"),
    Row("testp", "f32 f64", "finite infinite number notanumber normal subnormal", "kind of number"),
    Row(
        "cvt",
        f"{FLOATS} u8 s8 {INTEGERS} tf32 e4m3x2 e5m2x2",
        f"{WAYS} rni rzi rmi rpi rna relu satfinite",
        "conversion",
    ),
    Row("div rcp sqrt", "f32", "approx full ftz", "quotient, reciprocal, square root", TWO_ULP),
    Row("rcp rsqrt", "f64", "approx ftz", "reciprocal, of the square root", _error("2^-20")),
    Row("rsqrt", "f32", "approx ftz", "reciprocal of the square root", _error("2^-22.9")),
    Row("ex2", "f32", "approx ftz", "power of 2", TWO_ULP),
    Row("ex2", "f16 f16x2", "approx", "power of 2", _error("2^-9.9")),
    Row("ex2", "bf16 bf16x2", "approx ftz", "power of 2", _error("2^-7")),
    Row("lg2", "f32", "approx ftz", "logarithm to base 2", _error("2^-22")),
    Row("sin cos", "f32", "approx ftz", "sine, cosine", _error("2^-20.5")),
    Row("tanh", "f32", "approx", "hyperbolic tangent", ELEVEN_BITS),
    Row("tanh", "f16 f16x2", "approx", "hyperbolic tangent", _error("2^-10.987")),
    Row("tanh", "bf16 bf16x2", "approx", "hyperbolic tangent", _error("2^-8")),
    Row(
        "mma",
        "f16 bf16 tf32 f32 e4m3 e5m2 s8 u8 s32 f64",
        f"sync aligned row col satfinite {SHAPES}",
        "product of matrices by a warp",
        SUMS,
    ),
    Row(
        "wmma",
        "f16 bf16 tf32 f32 s8 u8 s32",
        f"sync aligned row col satfinite load store mma a b c d m16n16k16 m16n16k8 {SPACES}",
        "product of matrices by a warp; loads and stores of its fragments",
        SUMS,
    ),
    Row(
        "ldmatrix stmatrix",
        "b16",
        f"sync aligned m8n8 x1 x2 x4 trans {SPACES}",
        "load, store of 8 x 8 matrices by a warp",
    ),
    Row(
        "cp",
        "b64",
        "async ca cg commit_group wait_group wait_all bulk bulk_group mbarrier arrive noinc "
        "mbarrier::complete_tx::bytes multicast::cluster prefetch tensor 1d 2d 3d 4d 5d tile read "
        f"L2 {HINTS} {SPACES}",
        "asynchronous copy; it lands when a thread waits for it",
    ),
    Row(
        "mbarrier",
        "b64",
        f"init inval arrive arrive_drop noComplete expect_tx complete_tx test_wait try_wait parity "
        f"{SPACES} {ORDERS}",
        "barrier with phases, for threads and bytes",
    ),
    Row(
        "st",
        WORDS + " u32 s32 u64 s64 f32 f64",
        f"async mbarrier::complete_tx::bytes v2 v4 {SPACES} {ORDERS}",
        "asynchronous store in a block of the cluster",
    ),
    Row("mapa getctarank", "u32 u64", SPACES, "address in a block of the cluster; its rank"),
    Row(
        "barrier", "", "cluster arrive wait aligned acquire release relaxed", "barrier of a cluster"
    ),
    Row(
        "fence",
        "",
        "proxy alias async async.global global shared::cta shared::cluster mbarrier_init release "
        "acquire sync_restrict::shared::cta sync_restrict::shared::cluster cluster cta gpu sys",
        "fence between threads and copies",
    ),
    Row(
        "wgmma",
        "f16 bf16 tf32 f32 s8 u8 s32",
        "fence commit_group wait_group mma_async sync aligned satfinite "
        + " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16, 32)),
        "product of matrices by a warpgroup",
        SUMS,
    ),
    Row("setmaxnreg", "u32", "inc dec sync aligned", "no effect"),
    Row("griddepcontrol", "", "wait launch_dependents", "waits for the previous kernel"),
)


@cache
def _by_opcode() -> dict[str, list[tuple[frozenset[str], Row]]]:
    """Return for each opcode the permitted types and modifiers, and the row."""
    permitted: dict[str, list[tuple[frozenset[str], Row]]] = {}
    for row in ROWS:
        words = frozenset(f"{row.types} {row.modifiers}".split())
        for opcode in row.opcodes.split():
            permitted.setdefault(opcode, []).append((words, row))
    return permitted


@cache
def find(opcode: str) -> Row | None:
    """Return the row of an opcode with its types and modifiers, such as "fma.rn.ftz.f32"."""
    name, *words = opcode.split(".")
    rows = _by_opcode().get(name, ())
    return next((row for permitted, row in rows if permitted.issuperset(words)), None)


def fidelity(opcodes: Iterable[str], count: int) -> str:
    """Describe in a line how exactly a kernel of `count` instructions is executed."""
    inexact: dict[str, str] = {}
    for opcode in opcodes:
        row = find(opcode)
        if row and row.fidelity == SUMS:
            inexact[opcode.split(".")[0]] = "products exact, sums as tensor cores of Hopper round"
        elif row and row.fidelity != EXACT:
            name = ".".join(opcode.split(".")[:2])
            inexact[name] = row.fidelity.removeprefix("approximate: ").partition(";")[0]
    said = ", ".join(f"{name} ({bound})" for name, bound in sorted(inexact.items()))
    return f"{count:,} instructions, {f'exact except {said}' if said else 'all exact'}"
