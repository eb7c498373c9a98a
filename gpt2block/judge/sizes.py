"""Sizes of the checks of a user's kernel: fixed ones, random ones, and sizes that a GPU times.

The fixed sizes are the small ones of the built-in kernels' checks, and further sizes: matrices of
odd K and N, more rows than a block has threads, rows longer than a usual array in shared memory or
registers. They are not multiples of a block's or a vector's size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import gcd, isqrt, lcm

import numpy as np

from gpt2block.models.weights.gguf import TYPES
from gpt2block.ops.operation import Attrs, Operation, Sizes
from gpt2block.sampling import Sampling

Case = tuple[Sizes, Attrs]
COLUMNS = 41  # length of rows: a prime that kernels with special cases rarely list
RANDOM = 2  # number of cases of random sizes
MAX_BYTES, MAX_FLOPS = 100e6, 1.5e8  # limits of a case of cost 1, the largest that is run whole
OF_WHOLE = 0.25  # maximum cost of a case with reduced sizes
STATED = 5  # maximum cost of a case with stated sizes on the emulator
LONGEST = 65536  # a number of a file that is larger is no length of a row

# Sizes of matrix products (M, K) x (K, N): K or N divisible by 8 and the other one odd; odd K; K
# divisible by 4 and many columns N; many rows M.
_WIDE = (
    {"M": 9, "K": 72, "N": 61}, {"M": 9, "K": 61, "N": 72}, {"M": 2, "K": 1501, "N": 3},
    {"M": 4, "K": 1036, "N": 76}, {"M": 65, "K": 1032, "N": 8},
)  # fmt: skip
# Operation → sizes (and attributes) to check in addition to `Operation.small`. In the last entry of
# an operation, a row consists of whole 4-element vectors, and a thread block loops several times
# over a row; heads of qk_norm and rope are shorter. Positions of rope are small, so that a float
# angle is right. In another entry, a row has an odd number of these vectors. In some entry of every
# operation, an array has over 2^16 elements; of every elementwise operation, in one entry an odd
# number of them, and in the last over 2^16 vectors.
FURTHER: Mapping[str, tuple[Mapping[str, object], ...]] = {
    "add": ({"N": 89, "C": 769}, {"N": 13, "C": 772}, {"N": 104, "C": 2568}),
    "attention": ({"B": 86, "T": 2, "C": 128, "n_head": 2},
                  {"B": 1, "T": 257, "C": 8, "n_head": 2}),
    "blocks_matmul": ({"M": 5, "B": 1, "N": 461}, {"M": 2, "B": 6, "N": 85},
                      {"M": 65, "B": 4, "N": 8}),
    "encoder": ({"B": 3, "T": 150, "C": 7, "V": 70000}, {"B": 1, "T": 2, "C": 5001, "V": 3},
                {"B": 1, "T": 2, "C": 4100, "V": 5}, {"B": 1, "T": 65, "C": 1032, "V": 70}),
    "gelu": ({"N": 89, "C": 769}, {"N": 13, "C": 772}, {"N": 104, "C": 2568}),
    "gemm": ({"M": 249, "K": 24, "N": 264}, {"M": 2, "K": 1544, "N": 48}),
    "layernorm": ({"B": 3, "T": 100, "C": 129}, {"B": 1, "T": 2, "C": 5001},
                  {"B": 1, "T": 2, "C": 4100}, {"B": 1, "T": 65, "C": 1032}),
    "layernorm_gelu": ({"N": 300, "C": 129}, {"N": 2, "C": 5001}, {"N": 2, "C": 4100},
                       {"N": 65, "C": 1032}),
    "linear": ({"M": 3, "K": 37, "N": 19}, {"M": 70, "K": 5, "N": 301}, *_WIDE),
    "log_likelihood": ({"N": 300, "V": 13}, {"N": 2, "V": 100001}, {"N": 2, "V": 4100},
                       {"N": 65, "V": 1032}),
    "matmul_bias": ({"M": 218, "K": 5, "N": 301}, *_WIDE),
    "qk_norm": ({"T": 300, "D": 6, "n_head": 2, "n_kv_head": 2},
                {"T": 2, "D": 258, "n_head": 3, "n_kv_head": 1},
                {"T": 17, "D": 132, "n_head": 28, "n_kv_head": 4}),
    "rmsnorm": ({"M": 300, "C": 129}, {"M": 9, "C": 132}, {"M": 2, "C": 5001}, {"M": 2, "C": 4104},
                {"M": 65, "C": 1032}),
    "rmsnorm_ffn": ({"M": 3, "K": 37, "N": 19}, *_WIDE),
    "rmsnorm_matmul": ({"M": 3, "K": 37, "N": 24, "head_dim": 8},
                       {"M": 9, "K": 72, "N": 60, "head_dim": 4},
                       {"M": 2, "K": 1501, "N": 8, "head_dim": 4},
                       *({**each, "head_dim": 4} for each in _WIDE[3:])),
    "rope": ({"T": 3, "H": 300, "D": 6}, {"T": 2, "H": 70, "D": 130, "start": 9},
             {"T": 5, "H": 2, "D": 258}, {"T": 33, "H": 16, "D": 132}),
    "sample_token": ({"B": 300, "V": 13, "sampling": Sampling(0.7, top_p=0.6, seed=9)},
                     {"B": 5, "V": 5001, "sampling": Sampling(1.0, seed=3, sample=2)},
                     {"B": 3, "V": 129, "sampling": Sampling(0.0)},
                     {"B": 1, "V": 70001}, {"B": 2, "V": 4100}, {"B": 64, "V": 1032}),
    "silu_mul": ({"M": 47, "N": 1429}, {"M": 7, "N": 1428}, {"M": 104, "N": 2568}),
    "softmax": ({"B": 1, "NH": 1, "T": 389}, {"B": 1, "NH": 1, "T": 132},
                {"B": 1, "NH": 1, "T": 1032}),
    "to_fp8": ({"K": 89, "N": 769}, {"K": 13, "N": 772}, {"K": 104, "N": 2568}),
    "trimat": ({"B": 1, "T": 257, "NH": 1, "HS": 4}, {"B": 1, "T": 264, "NH": 1, "HS": 8}),
}  # fmt: skip

# Operation → size of a row; by default the first of _OF_ROWS that it has.
_COLUMNS = {"attention": "T", "qk_norm": "D", "rope": "D", "to_fp8": "N", "trimat": "T"}
_OF_ROWS = ("C", "K", "V", "T", "N")
_WITHOUT_ROWS = {"add", "gelu", "qk_norm", "rope", "silu_mul", "to_fp8"}
# Operation → (size, attribute that divides it, number that divides their quotient).
_DIVISORS: Mapping[str, tuple[str, str, int]] = {
    "attention": ("C", "n_head", 4),
    "rmsnorm_matmul": ("N", "head_dim", 1),
}

# Operation → (size, its largest value in random cases): kernels may limit the channels of a head.
_LARGEST = {"attention": ("C", 64), "trimat": ("HS", 64), "rope": ("D", 128), "qk_norm": ("D", 128)}


def stated(operation: Operation, sizes: Sizes) -> Case:
    """Return a case with sizes that a user states, and the other sizes of the last small case.

    If the user states the size that an attribute divides, such as C for n_head heads, the attribute
    has its documented value where this value divides the size.
    """
    last, attrs = operation.cases[-1]
    name = _DIVISORS.get(operation.name, ("",))[0]
    documented = operation.workload.attrs
    if name in sizes and sizes[name] % _unit(operation, name, documented) == 0:
        attrs = documented
    return {**last, **sizes}, attrs


def too_large(operation: Operation, sizes: Sizes) -> bool:
    """Return whether the case of stated sizes takes the emulator minutes, or too much memory."""
    return cost(operation, *stated(operation, sizes)) > STATED


def further(operation: Operation) -> tuple[Case, ...]:
    """Return the cases of `FURTHER`, with their attributes."""
    return operation.with_workload(small=FURTHER.get(operation.name, ())).cases


def several_rows(operation: Operation) -> Case:
    """Return a small case with several rows and odd sizes."""
    return operation.cases[min(1, len(operation.cases) - 1)]


def longer(operation: Operation, number: int) -> Iterator[Case]:
    """Yield cases of few rows of more than `number` elements, then of more than half of it ...

    The cases have longer rows than all others, and are not too large: rows of an operation that
    computes a square matrix are therefore shorter.
    """
    if operation.name in _WITHOUT_ROWS:
        return
    row, per = name_of_row(operation, operation.workload.sizes), 1
    if operation.name == "blocks_matmul":  # a row is a sum over blocks of weights
        row, per = "B", TYPES["Q4_K"].size
    at, attrs = max(further(operation), key=lambda each: each[0][row])
    unit = lcm(8, per * _unit(operation, row, attrs))
    while (size := (number // unit + 1) * unit) > per * at[row]:
        sizes = {**at, row: size // per}
        if cost(operation, sizes, attrs) <= OF_WHOLE:
            yield sizes, attrs
        number //= 2


def name_of_row(operation: Operation, sizes: Sizes) -> str:
    """Return the name of the size that is the length of a row."""
    return _COLUMNS.get(operation.name) or next(name for name in _OF_ROWS if name in sizes)


def unusual(operation: Operation) -> Case:
    """Return a case whose rows have COLUMNS elements, or a multiple of it that the sizes allow."""
    sizes, attrs = several_rows(operation)
    row = name_of_row(operation, sizes)
    return {**sizes, row: COLUMNS * _unit(operation, row, attrs)}, attrs


def random(operation: Operation, seed: int) -> Iterator[Case]:
    """Yield RANDOM cases of random sizes, half of which are primes where any size is allowed."""
    rng = np.random.default_rng(seed)
    known = (*operation.cases, *further(operation))
    most = max(cost(operation, *case) for case in known)
    count = 0
    while count < RANDOM:
        sizes, attrs = known[rng.integers(len(known))]
        drawn = {name: _draw(operation, name, size, attrs, rng) for name, size in sizes.items()}
        if cost(operation, drawn, attrs) <= most:
            count += 1
            yield drawn, attrs


def whole(operation: Operation, sizes: Sizes) -> tuple[Case, ...]:
    """Return the case of these sizes with the documented attributes, or none if it is too large."""
    attrs = dict(operation.workload.attrs)
    return ((sizes, attrs),) if cost(operation, sizes, attrs) <= 1 else ()


def parts(operation: Operation, sizes: Sizes, stated: Collection[str]) -> tuple[Case, ...]:
    """Return cases with reduced sizes; each size has its full value in at least one case.

    stated: names of sizes that the user states, and that keep their values in all cases. Cases that
    are too large nevertheless are left out.
    """
    cases: dict[tuple[int, ...], Case] = {}
    names = list(sizes)
    for i in range(len(names)):
        rotated = names[i:] + names[:i]
        order = [n for n in rotated[:-1] if n not in stated]  # the last size keeps its value
        reduced, attrs = _reduce(operation, sizes, operation.workload.attrs, order)
        divided = _DIVISORS.get(operation.name, ("",))[0]
        if divided in order and reduced[divided] == _unit(operation, divided, attrs):
            reduced, attrs = _reduce(operation, sizes, several_rows(operation)[1], order)
        cases[tuple(reduced.values())] = reduced, attrs
    return tuple(case for case in cases.values() if cost(operation, *case) <= 1)


def _reduce(operation: Operation, sizes: Sizes, attrs: Attrs, order: Iterable[str]) -> Case:
    """Halve sizes in an order until the cost is at most OF_WHOLE."""
    reduced = dict(sizes)
    for name in order:
        unit = _unit(operation, name, attrs)
        while cost(operation, reduced, attrs) > OF_WHOLE and reduced[name] > unit:
            reduced[name] = max(reduced[name] // 2 // unit * unit, unit)
    return reduced, attrs


def cost(operation: Operation, sizes: Sizes, attrs: Attrs) -> float:
    """Return the larger of a case's bytes / MAX_BYTES and its operations / MAX_FLOPS."""
    at = {"itemsize": 4, "weight": 4, **operation.workload.attrs, **attrs, **sizes}
    work = operation.workload
    table = at["itemsize"] * at["V"] * at["C"] if operation.name == "encoder" else 0
    return max(work.traffic(at) / MAX_BYTES, work.flops(at) / MAX_FLOPS, table / MAX_BYTES)


def _unit(operation: Operation, name: str, attrs: Attrs) -> int:
    """Return a number that divides all allowed values of a size."""
    known = (sizes.get(name, 0) for sizes, _ in (*operation.cases, *further(operation)))
    unit = gcd(*known)
    size, attribute, multiple = _DIVISORS.get(operation.name, ("", "", 1))
    if size == name:
        return lcm(unit, multiple * int({**operation.workload.attrs, **attrs}[attribute]))
    return unit


def _draw(
    operation: Operation, name: str, size: int, attrs: Attrs, rng: np.random.Generator
) -> int:
    """Draw a size from an eighth to twice a known one; its logarithm is uniformly distributed."""
    unit = _unit(operation, name, attrs)
    bounded, most = _LARGEST.get(operation.name, ("", 0))
    if operation.name in _DIVISORS:
        most *= int({**operation.workload.attrs, **attrs}[_DIVISORS[operation.name][1]])
    known = size / unit
    number = int(np.exp(rng.uniform(np.log(max(1.0, known / 8)), np.log(max(2.0, 2 * known) + 1))))
    if name == bounded:
        number = min(number, most // unit)
    if unit == 1 and rng.random() < 0.5:
        primes = (n for n in range(number, 0, -1) if all(n % d for d in range(2, isqrt(n) + 1)))
        number = next(primes)  # or 1
    return number * unit
