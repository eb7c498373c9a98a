"""Inline PTX of users' kernels on the emulator: results of instructions, and defects found."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.emulator import ORDERS, ShimError, Source, loader, missing, run
from gpt2block.errors import NotJudged

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")

NAN = 0x7FFFFFFF
KINDS = {"h": "unsigned short", "r": "unsigned", "l": "unsigned long long", "f": "float"}


def bits(x: float, kind: Any = np.float32) -> int:
    """Return the bits of a number as an integer."""
    return int(np.array(x, kind).view(f"u{np.dtype(kind).itemsize}"))


def half(x: float) -> int:
    return bits(x, np.float16)


def bf16(x: float) -> int:
    return bits(x, ml_dtypes.bfloat16)


def fp8(high: float, low: float, kind: Any) -> int:
    return bits(high, kind) << 8 | bits(low, kind)


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
# Instructions, asm constraint of the result, operands, and bits of the expected result.
CASES: list[tuple[str, str, tuple[str, ...], int]] = [
    ("add.u32 %0, %1, %2;", "r", ("r 0xffffffffu", "r 2"), 1),
    ("add.s64 %0, %1, -5;", "l", ("l 3",), 2**64 - 2),
    ("sub.f32 %0, %1, 0f3F800000;", "f", ("f 3.5f",), bits(2.5)),
    ("add.rz.f32 %0, %1, %2;", "f", ("f 1.0f", "f 1e-7f"), bits(1.0)),
    ("add.rp.f32 %0, %1, %2;", "f", ("f 1.0f", "f 1e-10f"), bits(1 + 2**-23)),
    ("mul.ftz.f32 %0, %1, %2;", "f", ("f -1e-20f", "f 1e-20f"), bits(-0.0)),
    ("add.sat.f32 %0, %1, %2;", "f", ("f 0.75f", "f 0.5f"), bits(1.0)),
    ("mul.hi.u32 %0, %1, %2;", "r", ("r 0x80000000u", "r 6"), 3),
    ("mul.wide.s32 %0, %1, %2;", "l", ("r -3", "r 7"), 2**64 - 21),
    ("mad.lo.s32 %0, %1, %2, %3;", "r", ("r -3", "r 7", "r 22"), 1),
    ("mad.wide.u32 %0, %1, 4, %2;", "l", ("r 0xffffffffu", "l 9"), 4 * (2**32 - 1) + 9),
    ("fma.rn.f32 %0, %1, %2, %3;", "f", ("f 3.0f", "f 5.0f", "f -1.0f"), bits(14.0)),
    ("div.s32 %0, %1, %2;", "r", ("r -7", "r 2"), 2**32 - 3),
    ("rem.u32 %0, %1, %2;", "r", ("r 17", "r 5"), 2),
    ("max.f32 %0, %1, %2;", "f", ("f NAN", "f -2.0f"), bits(-2.0)),
    ("min.s32 %0, %1, %2;", "r", ("r -4", "r 3"), 2**32 - 4),
    ("abs.f32 %0, %1;", "f", ("f -0.0f",), 0),
    ("neg.s32 %0, %1;", "r", ("r 5",), 2**32 - 5),
    ("not.b32 %0, %1;", "r", ("r 5",), 2**32 - 6),
    ("shl.b32 %0, %1, 40;", "r", ("r 5",), 0),
    ("shr.s32 %0, %1, %2;", "r", ("r -8", "r 1"), 2**32 - 4),
    ("bfe.s32 %0, %1, 4, 4;", "r", ("r 0xf5",), 2**32 - 1),
    ("bfe.u32 %0, %1, %2, %3;", "r", ("r 0xabcd", "r 8", "r 4"), 0xB),
    ("bfi.b32 %0, %1, %2, 8, 8;", "r", ("r 0xab", "r 0x11223344"), 0x1122AB44),
    ("popc.b64 %0, %1;", "r", ("l 0xff00ff00000000ffull",), 24),
    ("clz.b32 %0, %1;", "r", ("r 1",), 31),
    ("brev.b32 %0, %1;", "r", ("r 1",), 2**31),
    ("prmt.b32 %0, %1, %2, 0x7b40;", "r", ("r 0x81223344", "r 0x55667788"), 0x55FF8844),
    ("lop3.b32 %0, %1, %2, %3, 0xf8;", "r", ("r 8", "r 6", "r 3"), 10),
    ("shf.l.wrap.b32 %0, %1, %2, 8;", "r", ("r 0x11223344", "r 0x55667788"), 0x66778811),
    ("dp4a.s32.s32 %0, %1, %2, %3;", "r", ("r 0xff010203", "r 0x01010101", "r 10"), 15),
    ("cvt.rni.s32.f32 %0, %1;", "r", ("f -2.5f",), 2**32 - 2),
    ("cvt.rzi.u32.f32 %0, %1;", "r", ("f -2.5f",), 0),
    ("cvt.rn.f32.u32 %0, %1;", "f", ("r 0xffffffffu",), bits(2.0**32)),
    ("cvt.sat.u8.s32 %0, %1;", "r", ("r 300",), 255),
    ("cvt.s64.s32 %0, %1;", "l", ("r -2",), 2**64 - 2),
    ("cvt.rn.f16.f32 %0, %1;", "h", ("f 1.1f",), half(1.1)),
    ("cvt.f32.f16 %0, %1;", "f", ("h 0x3c01",), bits(1 + 2**-10)),
    ("cvt.f32.bf16 %0, %1;", "f", ("h 0x3f81",), bits(1 + 2**-7)),
    ("cvt.rz.bf16.f32 %0, %1;", "h", ("f 1.999f",), 0x3FFF),
    ("cvt.rn.bf16x2.f32 %0, %1, %2;", "r", ("f 1.1f", "f -3.0f"), bf16(1.1) << 16 | bf16(-3.0)),
    ("cvt.rn.relu.f16x2.f32 %0, %1, %2;", "r", ("f 1.1f", "f -3.0f"), half(1.1) << 16),
    ("cvt.rna.tf32.f32 %0, %1;", "r", ("f 1.00048828125f",), bits(1 + 2**-10)),
    ("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;", "h", ("f 1e9f", "f .011f"), fp8(448, 0.011, E4M3)),
    ("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;", "h", ("f -1.1f", "f 3e-5f"), fp8(-1.1, 3e-5, E5M2)),
    ("cvt.rn.f16x2.e4m3x2 %0, %1;", "r", ("h 0x7e01",), half(448) << 16 | half(2**-9)),
    ("fma.rn.f16x2 %0, %1, %2, %3;", "r", ("r 0x3c004000", "r 0x40004200", "r 0x3c003c00"),
     half(3) << 16 | half(7)),
    ("fma.rn.bf16x2 %0, %1, %2, %3;", "r", ("r 0x3f804000", "r 0x40004040", "r 0x3f803f80"),
     bf16(3) << 16 | bf16(7)),
    ("max.f16x2 %0, %1, %2;", "r", ("r 0x3c00c000", "r 0x7e00c200"), 0x3C00C000),
    ("add.f16 %0, %1, %2;", "h", ("h 0x3c00", "h 0x1000"), half(1 + 2**-11)),
    ("sqrt.rn.f32 %0, %1;", "f", ("f 2.0f",), bits(np.sqrt(np.float32(2)))),
    ("ex2.approx.f32 %0, %1;", "f", ("f -INFINITY",), 0),
    ("ex2.approx.ftz.f32 %0, %1;", "f", ("f -130.0f",), 0),
    ("mov.b64 %0, {%1, %2};", "l", ("r 7", "r 9"), 9 << 32 | 7),
    ("mov.b32 {_, %0}, %1;", "h", ("r 0xabcd1234",), 0xABCD),
    ("{ .reg .pred p; setp.lt.s32 p, %1, %2; selp.b32 %0, 11, 22, p; }", "r", ("r -1", "r 0"), 11),
    ("{ .reg .pred p, q; setp.eq.f32 p|q, %1, 0f00000000;\\n\\t@!p mov.u32 %0, 1;"
     "@!q mov.u32 %0, 2; }", "r", ("f -0.0f",), 2),
    ("{ .reg .b32 t<2>; // a comment\\n add.u32 t0, %1, 1; shl.b32 t1, t0, 2; mov.b32 %0, t1; }",
     "r", ("r 4",), 20),
    ("{ .reg .pred p; mov.u32 %0, 0; again: add.u32 %0, %0, 3; setp.lt.u32 p, %0, %1;\\n"
     "@p bra again; }", "r", ("r 10",), 12),
    ("set.gt.u32.f32 %0, %1, %2;", "r", ("f 2.0f", "f 1.0f"), 2**32 - 1),
    ("mov.u32 %0, %%ntid.x;", "r", (), 1),
]  # fmt: skip
# Instruction → exact function, and a function from exact results to the maximum error.
APPROXIMATE: dict[str, tuple[Any, Any]] = {
    "ex2.approx.ftz.f32": (np.exp2, lambda y: 2.5 * np.spacing(y.astype(np.float32))),
    "lg2.approx.f32": (np.log2, lambda y: 2**-22 * np.maximum(abs(y), 1)),
    "rcp.approx.ftz.f32": (lambda x: 1 / x, lambda y: np.spacing(abs(y).astype(np.float32))),
    "rsqrt.approx.f32": (lambda x: x**-0.5, lambda y: 2**-22.9 * y),
    "sqrt.approx.f32": (np.sqrt, lambda y: 2**-23 * y),
    "tanh.approx.f32": (np.tanh, lambda y: 2**-11 * abs(y)),
    "sin.approx.f32": (np.sin, lambda y: 2**-20.5 + 0 * y),
    "cos.approx.f32": (np.cos, lambda y: 2**-20.5 + 0 * y),
}


def statement(ptx: str, result: str, operands: tuple[str, ...]) -> str:
    inputs = ", ".join(f'"{each[0]}"(({KINDS[each[0]]})({each[2:]}))' for each in operands)
    read = "__float_as_uint(y)" if result == "f" else "y"
    return f'{{ {KINDS[result]} y; asm("{ptx}" : "={result}"(y) : {inputs}); return {read}; }}'


@cache
def numbers() -> NDArray[np.uint64]:
    """Return results of all CASES, then results of APPROXIMATE for positive numbers."""
    cases = "\n".join(f"case {i}: {statement(*each[:3])}" for i, each in enumerate(CASES))
    text = (
        "__device__ unsigned long long result(int which) {\nswitch (which) {\n"
        f"{cases}\n}}\nreturn 0; }}\n"
        'extern "C" __global__ void evaluate(int* out, int n) {\n'
        "for (int i = 0; i < n; ++i) ((unsigned long long*)out)[i] = result(i); }\n"
    )
    out = np.zeros((len(CASES), 2), np.int32)
    run(Source("/tmp/numbers.cu", text), "evaluate", (1,), (1,), [out, len(CASES)])
    return out.view(np.uint64)[:, 0]


@pytest.mark.parametrize("i", range(len(CASES)), ids=[each[0] for each in CASES])
def test_results(i: int) -> None:
    assert hex(numbers()[i]) == hex(CASES[i][3])


@cache
def approximate() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    cases = "".join(
        f'asm("{name} %0, %1;" : "=f"(out[{k} * n + i]) : "f"(x[i]));\n'
        for k, name in enumerate(APPROXIMATE)
    )
    text = (
        'extern "C" __global__ void evaluate(const float* x, float* out, int n) {\n'
        f"for (int i = threadIdx.x; i < n; i += 32) {{\n{cases}}} }}\n"
    )
    x = np.geomspace(1e-3, 6, 500, dtype=np.float32)
    out = np.zeros((len(APPROXIMATE), len(x)), np.float32)
    run(Source("/tmp/approximate.cu", text), "evaluate", (1,), (32,), [x, out, len(x)])
    return x, out


@pytest.mark.parametrize("name", APPROXIMATE)
def test_an_approximate_function_has_the_error_that_ptx_allows(name: str) -> None:
    """Emulated errors come close to the largest permitted error, with both signs."""
    x, out = approximate()
    exact, most = APPROXIMATE[name]
    expected = exact(x.astype(np.float64))
    error = (out[list(APPROXIMATE).index(name)] - expected) / most(expected)
    assert abs(error).max() <= 1
    assert min(error.max(), -error.min()) > 0.45


WARP = r"""
#define SHUFFLE(kind, y, x, by, control) \
    asm volatile("shfl.sync." #kind ".b32 %0, %1, %2, %3, 0xffffffff;" \
                 : "=r"(y) : "r"(x), "r"(by), "r"(control))
extern "C" __global__ void exchange(int* out) {
    const unsigned lane = threadIdx.x, value = 100 + lane;
    unsigned y, inside;
    SHUFFLE(bfly, y, value, 1, 0x1f);
    out[lane] = y;
    SHUFFLE(up, y, value, 3, 0x1800);
    out[32 + lane] = y;
    asm volatile("{\n\t.reg .pred p;\n\tshfl.sync.down.b32 %0|p, %2, 30, 0x1f, -1;\n\t"
                 "selp.u32 %1, 1, 0, p;\n\t}" : "=r"(y), "=r"(inside) : "r"(value));
    out[64 + lane] = y * 2 + inside;
    asm volatile("shfl.sync.idx.b32 %0, %1, 5, 0x181f, -1;" : "=r"(y) : "r"(value));
    out[96 + lane] = y;
    asm volatile("{ .reg .pred p; setp.gt.u32 p, %1, 110; vote.sync.ballot.b32 %0, p, -1; }"
                 : "=r"(y) : "r"(value));
    out[128 + lane] = y;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(value));
    out[160 + lane] = y;
    asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(value / 8));
    out[192 + lane] = y;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(y));
    out[224 + lane] = y;
}
"""


def test_exchanges_of_a_warp() -> None:
    out = np.zeros((8, 32), np.int32)
    run(Source("/tmp/warp.cu", WARP), "exchange", (1,), (32,), [out])
    lane = np.arange(32)
    value = 100 + lane
    assert (out[0] == value[lane ^ 1]).all()
    assert (out[1] == value[np.where(lane % 8 < 3, lane, lane - 3)]).all()
    assert (out[2] == value[np.where(lane < 2, lane + 30, lane) % 32] * 2 + (lane < 2)).all()
    assert (out[3] == value[lane // 8 * 8 + 5]).all()
    assert (out[4].view(np.uint32) == 0xFFFFF800).all()
    assert (out[5] == 131).all()
    assert (
        out[6].view(np.uint32) == [np.sum(1 << lane[value // 8 == v // 8]) for v in value]
    ).all()
    assert (out[7].view(np.uint32) == (1 << lane) - 1).all()


MMA = r"""
extern "C" __global__ void multiply(const int* a, const int* b, float* c) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;  // rows of a and of b have W words
    unsigned ra[4], rb[2];
    for (int i = 0; i < R; ++i) ra[i] = a[(g + i % 2 * 8) * 2 * R + t + i / 2 * 4];
    for (int i = 0; i < R / 2; ++i) rb[i] = b[g * 2 * R + t + i * 4];
    SUM d[4] = {1, 2, 3, 4};
    asm volatile(MMA : "+LETTER"(d[0]), "+LETTER"(d[1]), "+LETTER"(d[2]), "+LETTER"(d[3]) : INPUTS);
    for (int j = 0; j < 4; ++j) c[(g + j / 2 * 8) * 8 + 2 * t + j % 2] = d[j];
}
"""
FORMATS = {
    "m16n8k16.row.col.f32.f16.f16.f32": np.float16,
    "m16n8k8.row.col.f32.bf16.bf16.f32": ml_dtypes.bfloat16,
    "m16n8k8.row.col.f32.tf32.tf32.f32": np.float32,
    "m16n8k4.row.col.f32.tf32.tf32.f32": np.float32,
    "m16n8k32.row.col.f32.e4m3.e4m3.f32": E4M3,
    "m16n8k32.row.col.s32.s8.s8.s32": np.int8,
}


@pytest.mark.parametrize("name", FORMATS)
def test_mma(name: str) -> None:
    kind, k = FORMATS[name], int(re.search(r"k(\d+)", name)[1])  # type: ignore[index]
    registers = k * np.dtype(kind).itemsize // 8
    whole = kind is np.int8
    a_names = ", ".join(f"%{4 + i}" for i in range(registers))
    b_names = ", ".join(f"%{4 + registers + i}" for i in range(registers // 2))
    inputs = [f'"r"(ra[{i}])' for i in range(registers)] + [
        f'"r"(rb[{i}])' for i in range(registers // 2)
    ]
    sums = "{%0, %1, %2, %3}"
    ptx = f"mma.sync.aligned.{name} {sums}, {{{a_names}}}, {{{b_names}}}, {sums};"
    text = MMA.replace("MMA", f'"{ptx}"').replace("INPUTS", ", ".join(inputs))
    text = re.sub(r"\bR\b", str(registers), text)
    text = text.replace("SUM", "int" if whole else "float").replace("LETTER", "r" if whole else "f")
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-8, 8, (rows, k)).astype(np.float32).astype(kind) for rows in (16, 8))
    c = np.zeros((16, 8), np.float32)
    given = [a.view(np.int32), b.view(np.int32)]
    run(Source("/tmp/mma.cu", text), "multiply", (1,), (32,), [*given, c])
    start = np.array([[1, 2], [3, 4]], np.float32)
    expected = a.astype(np.float32) @ b.astype(np.float32).T + np.tile(
        np.repeat(start, 8, 0), (1, 4)
    )
    np.testing.assert_array_equal(c, expected)


# Kernels of 128 threads, or of the stated number, that copy x to out.
MEMORY = {
    "vectors": """
    if (t >= 32) return;
    float a, b, c, d;
    asm volatile("{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0;\\n\\t"
                 "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], p; }"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(x + 4 * t));
    asm volatile("st.global.cs.v2.f32 [%0], {%1, %2};\\n\\tst.wt.v2.f32 [%0 + 8], {%3, %4};"
                 :: "l"(out + 4 * t), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");""",
    "shared": """
    __shared__ float s[128];
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(address(s + t)), "f"(x[t]) : "memory");
    asm volatile("bar.sync 0;" ::: "memory");
    asm volatile("{ .reg .u64 a; cvta.to.shared.u64 a, %1; ld.shared.f32 %0, [a+0]; }"
                 : "=f"(out[t]) : "l"(s + t));
    asm volatile("bar.sync 0;"); /* STALE */ out[t] = out[t] + 0 * s[(t + 64) % 128];""",
    "copies": """
    extern __shared__ float d[];
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;"
                 :: "r"(address(d + t)), "l"(x + t), "r"(4));
    asm volatile("cp.async.commit_group;\\n" /* WAIT */ "cp.async.wait_group %0;" :: "n"(0));
    __syncthreads();
    out[t ^ 1] = d[t ^ 1];""",
    "groups": """
    __shared__ float s[2][64];  // each half of the block has a barrier of its own
    const int half = t / 64, i = t % 64;
    s[half][i] = x[t];
    asm volatile("bar.sync %0, 64;" :: "r"(1 + half) : "memory");
    out[64 * half + 63 - i] = s[half][63 - i];""",
    "producer": """
    __shared__ float s[64];  // two warps write, two read
    for (int half = 0; half < 2; ++half) {
        if (t < 64) {
            if (half) asm volatile("bar.sync 2, 128;" ::: "memory");
            s[t] = x[64 * half + t];
            asm volatile("bar.arrive 1, 128;" ::: "memory");
        } else {
            asm volatile("bar.sync 1, 128;" ::: "memory");
            out[64 * half + 127 - t] = s[127 - t];
            if (!half) asm volatile("bar.arrive 2, 128;" ::: "memory");
        }
    }""",
    "mbarrier": """
    __shared__ float s[128];
    __shared__ unsigned long long bar;
    const unsigned at = address(&bar);
    if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(128));
    __syncthreads();
    for (int phase = 0; phase < 4; ++phase) {
        if (phase % 2 == 0) s[t] = x[t] + phase;
        asm volatile("{\\n.reg .pred p;\\n.reg .b64 state;\\n"
                     "mbarrier.arrive.shared::cta.b64 state, [%0];\\nWAIT:\\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n"
                     "@p bra DONE;\\nbra WAIT;\\nDONE:\\n}" :: "r"(at), "r"(phase & 1) : "memory");
        if (phase % 2 == 0) out[127 - t] = s[127 - t] - phase;
    }""",
    "flag": """
    __shared__ int ready;
    __shared__ float s;
    const unsigned at = address(&ready);
    if (t == 0) ready = 0;
    __syncthreads();
    for (int i = 0; i < 128; ++i) {
        if (t == 0) {
            s = x[i];
            asm volatile("st.release.cta.shared.u32 [%0], %1;" :: "r"(at), "r"(i + 1) : "memory");
        }
        int seen = 0;
        if (t == 64) {
            do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(at));
            while (seen != i + 1);
            out[i] = s;
        }
        __syncthreads();
    }""",
    "atomics": """
    __shared__ unsigned order, most;
    unsigned old;
    if (t == 0) order = most = 0;
    __syncthreads();
    asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(address(&order)));
    asm volatile("red.shared.max.u32 [%0], %1;" :: "r"(address(&most)), "r"(t));
    out[old] = x[old];
    __syncthreads();
    asm volatile("atom.cas.b32 %0, [%1], 127, 5;" : "=r"(old) : "l"(&most) : "memory");
    if (old != (t == 0 ? old : 5) && old != 127) out[t] = -1;""",
}
KERNEL = """extern "C" __global__ void NAME(const float* x, float* out) {
    const int t = threadIdx.x;BODY
}
"""
ADDRESS = (
    "__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); } "
)


def copied(body: str, shared: int = 512, threads: int = 128, **options: Any) -> NDArray[np.float32]:
    text = ADDRESS + KERNEL.replace("NAME", "copy").replace("BODY", body)
    x = np.arange(1, 129, dtype=np.float32)
    out = np.full(128, np.nan, np.float32)
    source = Source("/tmp/k.cu", text)
    run(source, "copy", (1,), (threads,), [x, out], shared=shared, **options)
    return out


@pytest.mark.parametrize("name", MEMORY)
def test_memory_and_barriers(name: str) -> None:
    for order, races in [
        *((order, False) for order in ORDERS),
        ("forward", True),
        ("shuffled", True),
    ]:
        found = copied(MEMORY[name], order=order, races=races, build="patterned")
        assert (found == np.arange(1, 129)).all(), (order, races)


DEFECTS: dict[str, tuple[str, bool, str]] = {
    "outside an array": (
        """
    float a, b, c, d;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(x + 4 * t));
    out[t] = a;""",
        False,
        r"READ out of bounds: byte 512 of x.*k.cu:4\b",
    ),
    "outside shared memory": (
        """
    __shared__ float s[100];
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(address(s) + 4 * t), "f"(x[t]) : "memory");""",
        False,
        r"WRITE of size 4.*k.cu:4\b",
    ),
    "misaligned vector": (
        """
    asm volatile("st.global.v2.f32 [%0], {%1, %1};" :: "l"(out + 1), "f"(x[t]) : "memory");""",
        False,
        "misaligned address",
    ),
    "no barrier": (
        MEMORY["shared"]
        .replace('asm volatile("bar.sync 0;" ::: "memory");', "")
        .replace(': "l"(s + t)', ': "l"(s + (t ^ 1))'),
        True,
        r"race in copy: .* writes s\[1\] at k.cu:4; .* read it at k.cu:6\b",
    ),
    "barrier of half the threads": (
        MEMORY["groups"].replace("s[half][63 - i]", "s[1 - half][63 - i]"),
        True,
        r"race in copy: .* s\[\d\]\[\d+\] at .*k.cu:7; .* wrote it at .*k.cu:5\b",
    ),
    "barrier of too many threads": (
        MEMORY["groups"].replace(", 64;", ", 96;"),
        False,
        r"divergent barrier .*k.cu:6 \(64 of 96 threads arrive\)",
    ),
    "no second barrier": (
        MEMORY["producer"].replace('if (half) asm volatile("bar.sync 2, 128;" ::: "memory");', ""),
        True,
        r"race in copy: .* reads s\[63\] at k.cu:11; .*k.cu:7\b",
    ),
    "phase that never ends": (
        MEMORY["mbarrier"].replace('"r"(128))', '"r"(129))'),
        False,
        r"divergent barrier .* all threads wait: .*k.cu:10\b",
    ),
    "no wait for an mbarrier": (
        MEMORY["mbarrier"].replace("bra WAIT;", "bra DONE;"),
        True,
        r"race in copy: .* s\[\d+\] at .*k.cu:(9|15)\b",
    ),
    "mbarrier without init": (
        MEMORY["mbarrier"].replace("if (t == 0) asm", "if (t < 0) asm"),
        False,
        r"not initialised\nat .*k.cu:10\b",
    ),
    "non-coherent load of written memory": (
        """
    asm volatile("st.global.f32 [%0], %1;" :: "l"(out + t), "f"(x[t]) : "memory");
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(out[t]) : "l"(out + t));""",
        True,
        r"read-only load in copy: .* reads out\[0\] at k.cu:4 by .* wrote it at k.cu:3\b",
    ),
    "relaxed store of a flag": (
        MEMORY["flag"].replace("st.release.cta", "st.relaxed.cta"),
        True,
        r"race in copy: thread \(64, 0, 0\) reads s at .*k.cu:17; .*k.cu:10\b",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_found(name: str) -> None:
    body, races, report = DEFECTS[name]
    with pytest.raises(ShimError) as error:
        copied(body, races=races, build="patterned")
    assert re.search(report, str(error.value), re.DOTALL), str(error.value)


def test_a_copy_without_wait_does_not_arrive() -> None:
    without = MEMORY["copies"].replace('/* WAIT */ "cp.async.wait_group %0;"', "")
    assert np.isnan(copied(without)).all()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ('asm("frob.f32 %0, %1;" : "=f"(y) : "f"(x[0]));', "lacks the PTX instruction frob.f32"),
        ('asm("wgmma.fence.sync.aligned;");', "wgmma.fence.sync.aligned is out of the emulator's"),
        ('asm("mov.f32 %0, %smem;" : "=f"(y));', "does not know the operand %smem"),
        ('asm("add.f32 %0, %1, %1;" : "=x"(y) : "f"(x[0]));', 'the constraint "=x"'),
        ('PASTED(a, sm)("frob;");', "k.cu:3: the emulator lacks the PTX instruction frob"),
        ('a\\\nsm("frob;");', "k.cu:3: the emulator lacks the PTX instruction frob"),
    ],
)  # fmt: skip
def test_unknown_instructions_are_not_judged(statement: str, said: str) -> None:
    text = f"""#define PASTED(a, b) a##b
extern "C" __global__ void k(const float* x, float* out) {{
    float y = 0; {statement}
    out[0] = y;
}}
"""
    with pytest.raises(NotJudged, match=re.escape(said)):
        loader.compile_kernel_file(Source("/tmp/k.cu", text))


def test_asm_of_a_header_is_not_judged() -> None:
    header = '\n__device__ void wait() { asm volatile("bar.sync 0;"); }\n'
    text = '#include "own.cuh"\n' + KERNEL.replace("BODY", "").replace("NAME", "k")
    with pytest.raises(NotJudged, match=r"own.cuh:2: the emulator does not run the inline PTX"):
        loader.compile_kernel_file(Source("/tmp/k.cu", text, (("own.cuh", header),)))
