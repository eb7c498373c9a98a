"""Inputs of the checks of a user's kernel, including inputs that break fragile formulas.

The inputs are ordinary random numbers at all sizes of the module `sizes`, and special inputs
(`SPECIAL`) at a few of them. The exact results of special inputs are finite, but a formula that
overflows, divides by zero or cancels gives other results.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_integer
from gpt2block.errors import InputError
from gpt2block.judge import sizes
from gpt2block.judge.arguments import sizes_at, values
from gpt2block.judge.kernel import Geometry, Kernel, described
from gpt2block.judge.limits import ULP, limit
from gpt2block.judge.source import largest_number
from gpt2block.ops import workload
from gpt2block.ops.operation import Attrs, Inputs, Sizes
from gpt2block.ops.workload import draw_stable, largest
from gpt2block.sampling import Sampling

MEAN, SPREAD = 2048.0, 0.6  # mean and standard deviation of rows with a large mean
DYNAMIC = 65536  # maximum bytes of dynamic shared memory of a case with long rows
SCORE = 1024.0  # large score: exp(SCORE) is infinite, and exp(-SCORE) is 0
FEW = 8  # number of random values of which at least one is not near zero
MAX_SEED = 1_000_000  # drawn seeds are below this number, so that they are short to type
OTHER_SIZES = (
    "right at the sizes before; if a kernel is for some sizes only, check it at one of them with "
    "--shape (in Python shape=)"
)

# (Random inputs, sizes and attributes) → special inputs.
Change = Callable[[Inputs, Mapping[str, Any]], Inputs]


@dataclass(frozen=True)
class Case:
    """A check's inputs in host memory, and the exact value of every output."""

    sizes: Sizes
    attrs: Attrs
    inputs: Inputs
    truths: Mapping[str, np.ndarray]
    bound: float  # largest error that rounding explains, relative to the largest value
    name: str = ""  # name of special inputs; "" for ordinary inputs
    hint: str = ""  # advice if a kernel fails this case after passing all earlier cases
    once: bool = False  # whether the case runs in forward order only
    variant: int = 0  # added to the variant of each launch: the addresses differ between cases

    @property
    def label(self) -> str:
        """Text for messages: sizes, changed fields of an attribute, and the name of the inputs."""
        objects = filter(is_dataclass, self.attrs.values())
        numbers = ", ".join(
            f"{name} {value}"
            for each in objects
            for name, value in vars(each).items()
            if value != getattr(type(each), name)
        )
        sizes = f"{described(self.sizes)} ({numbers})" if numbers else described(self.sizes)
        return f"{sizes}, {self.name}" if self.name else sizes


@dataclass(frozen=True)
class Special:
    """A kind of special inputs."""

    name: str
    why: str  # why a naive formula fails on these inputs, and which formula is stable
    change: Change
    slack: float = 0.0  # further relative error that a stable formula has
    attrs: Attrs = field(default_factory=dict)  # attributes that differ from the case's


ORDINARY = Special("", "", lambda given, _: given)


def resolved_seed(seed: int | None) -> int:
    """Return a seed of random sizes: a new one for None. Raises InputError for an invalid seed."""
    if seed is None:
        return secrets.randbelow(MAX_SEED)
    return check_integer("seed", seed, 0, inf, "0 or more")


def cases(
    kernel: Kernel, layout: str, stated: Sizes | None = None, seed: int = 0
) -> tuple[Case, ...]:
    """Return the cases (sizes and inputs) on which a kernel is checked, in the order of the checks.

    stated: sizes that the user requests; the only case then has the last small case's other sizes.
    seed: seed of the random sizes. Raises InputError for inconsistent sizes.
    """
    operation = kernel.operation
    usual = (sizes.stated(operation, stated),) if stated else operation.cases
    further = () if stated else sizes.further(operation)
    every = [case(kernel, *each, layout) for each in usual]
    every += [replace(case(kernel, *each, layout), hint=OTHER_SIZES) for each in further]
    several = usual[min(1, len(usual) - 1)]  # sizes with several rows and an odd size
    special = SPECIAL.get(operation.name, ())
    for at in (several, *further[-1:]):
        every += [case(kernel, *at, layout, each) for each in special]
    if operation.name in POWERS:
        every.append(case(kernel, *several, layout, _other_magnitudes(kernel)))
    if not stated:
        hint = f"{OTHER_SIZES}\nrandom sizes: the same ones with --seed {seed} (in Python seed=)"
        drawn = tuple(sizes.random(operation, seed))
        long = (sizes.unusual(operation), *_long(kernel))
        every += [replace(case(kernel, *at, layout), hint=OTHER_SIZES, once=True) for at in long]
        every += [replace(case(kernel, *at, layout), hint=hint, once=True) for at in drawn]
        every += [case(kernel, *drawn[0], layout, each) for each in special]
    return tuple(replace(each, variant=5 * k) for k, each in enumerate(every))


def case(kernel: Kernel, at: Sizes, attrs: Attrs, layout: str, special: Special = ORDINARY) -> Case:
    """Create inputs of these sizes and the exact outputs. Raises InputError for wrong sizes."""
    operation = kernel.operation
    all_attrs = {**operation.workload.attrs, **attrs, **special.attrs}
    own = operation.with_workload(attrs=all_attrs)

    def draw(sizes: Sizes, rng: np.random.Generator) -> Inputs:
        return special.change(own.make(sizes, rng), {**all_attrs, **sizes})

    drawn = own.with_workload(draw=draw)
    of_seed = partial(workload.inputs_and_truth, drawn, at, kernel.dtype, layout)
    host, truth = of_seed(0)
    if truth.size < FEW and truth.dtype.kind == "f":  # the terms of all sums may cancel
        several = [(host, truth), *map(of_seed, range(1, FEW // truth.size + 1))]
        least = max(largest(each) for _, each in several) / 4
        host, truth = next(each for each in several if largest(each[1]) >= least)
    truths = [truth]
    if own.workload.further is not None:
        truths += own.workload.further(*map(workload.widened, host), **all_attrs)
    outputs = values(own, host, all_attrs).outputs
    bound = limit(operation, kernel.dtype, {**all_attrs, **at}) + special.slack
    named, once = dict(zip(outputs, truths, strict=True)), special is not ORDINARY
    return Case(at, all_attrs, host, named, bound, special.name, special.why, once)


def _long(kernel: Kernel) -> tuple[tuple[Sizes, Attrs], ...]:
    """Return a case whose rows are longer than every number of the file, or none.

    The rows of a kernel that keeps a row in dynamic shared memory are as long as this permits.
    """
    operation = kernel.operation

    def geometry(at: Sizes, attrs: Attrs) -> Geometry:
        own = operation.with_workload(attrs={**operation.workload.attrs, **attrs})
        return kernel.stated_geometry(sizes_at(own, at))

    with suppress(InputError):  # the launch line is wrong: the first check raises the error
        threads = prod(geometry(*operation.cases[0])[1])
        number = largest_number(kernel.source.text, sizes.LONGEST, threads)
        for each in sizes.longer(operation, number):
            with suppress(InputError):
                if geometry(*each)[2] <= DYNAMIC:
                    return (each,)
    return ()


def _steps(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return an array of integers from -8 to 8, in an irregular order that differs between rows."""
    i = np.arange(np.prod(shape))
    return ((7 * i + i // 17) % 17 - 8).astype(np.float32).reshape(shape)


def _first(value: Callable[[tuple[int, ...]], np.ndarray]) -> Change:
    """Return a `change` that replaces the first input by `value(shape of the first input)`."""
    return lambda given, _: (value(given[0].shape).astype(np.float32), *given[1:])


def _equal(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return rows of equal numbers: all 0, all 1.5 or all -3."""
    rows = np.resize([0.0, 1.5, -3.0], shape[:-1])
    return np.broadcast_to(rows[..., None], shape).astype(np.float32)


def _masked(given: Inputs, _: Mapping[str, object]) -> Inputs:
    """Set the first two, all later or all even-numbered scores of a row to -inf, except one."""
    scores, *targets = given
    rows = scores.reshape(-1, scores.shape[-1]).copy()
    columns = np.arange(rows.shape[1])
    for i, row in enumerate(rows):
        kept = (columns == targets[0].ravel()[i]) if targets else columns == len(columns) // 2
        row[~kept & [columns < 2, columns > 1, columns % 2 == 0][i % 3]] = -np.inf
    return rows.reshape(scores.shape), *targets


def _peaked(inputs: Inputs, _: Mapping[str, object]) -> Inputs:
    """Raise one score of each row by 200, at a different place in each row."""
    scores = inputs[0].copy()
    rows = scores.reshape(-1, scores.shape[-1])
    rows[np.arange(len(rows)), np.arange(len(rows)) * 7 % rows.shape[1]] += 200
    return scores, *inputs[1:]


def _unlikely(inputs: Inputs, _: Mapping[str, object]) -> Inputs:
    """Lower the logit of each row's target token by 200."""
    logits, targets = inputs[0].copy(), inputs[1]
    logits[np.arange(len(targets)), targets] -= 200
    return logits, targets


def _without_v(special: Special) -> Special:
    """Return special inputs of which the values V of rows [Q | K | V] are ordinary numbers.

    Large V would hide errors of Q and K, which are relative to the largest value.
    """

    def change(given: Inputs, at: Mapping[str, Any]) -> Inputs:
        qkv = special.change(given, at)[0].copy()
        first = (at["n_head"] + at["n_kv_head"]) * at["D"]
        qkv[:, first:] = given[0][:, first:]
        return qkv, *given[1:]

    return replace(special, change=change)


def _logits(change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Change:
    """Return a `change` that draws logits again, by `draw_stable`, and changes each row."""
    return lambda _, at: (draw_stable(at, np.random.default_rng(1), change),)


def _scored(sign: float) -> Change:
    """Return a `change` of Q and K that makes attention scores about sign * 4096 / sqrt(HS)."""

    def change(given: Inputs, at: Mapping[str, Any]) -> Inputs:
        (qkv,) = given
        parts = _steps((*qkv.shape[:-1], 3, at["n_head"], at["C"] // at["n_head"])) / 8
        parts[..., 0, :, 0], parts[..., 1, :, 0] = sign * 64, 64
        return (parts.reshape(qkv.shape),)

    return change


def _numbers_of_fp8(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return numbers for E5M2 rounding: ties, subnormal numbers and the largest numbers."""
    ties = [(1 + f / 4 + 1 / 8) * 2.0**e for e in (-14, 0, 1) for f in range(4)]
    small = [n * 2.0**-17 for n in range(1, 9)]
    magnitudes = np.array([*ties, *small, 49152.0, 53248.0, 57344.0, 60000.0, 65504.0])
    return np.resize(np.concatenate([magnitudes, -magnitudes]), shape)


def _with_peak(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Raise one of the last logits by 200."""
    row[-1 - len(row) // 8] += 200
    return row


def _other_magnitudes(kernel: Kernel) -> Special:
    """Return special inputs: random ones, multiplied by 2**power; by at most 2**13 in float16."""
    most = 13 if kernel.dtype == "float16" else 126
    powers = np.clip(POWERS[kernel.operation.name], -most, most)

    def change(given: Inputs, _: Mapping[str, object]) -> Inputs:
        pairs = zip(given, powers, strict=True)
        return tuple(np.ldexp(array, power) if power else array for array, power in pairs)

    return Special(
        "other magnitudes",
        "float has magnitudes from 2^-126 to 2^127, which integers and fixed-point numbers do not "
        "have: compute in float",
        change,
    )


_MEAN_SLACK = 64 * ULP * MEAN / SPREAD  # allows for the error of a mean summed in any order
_SCORE_SLACK = 16 * ULP * SCORE  # allows for the rounded argument of exp2(score * log2(e))
_EPS = "1 / sqrt(variance + eps): eps is added to the variance, before the root"
_SCORES = (
    Special(
        "scores near 1024",
        "exp is infinite above 88.7: subtract the largest score of the row before exp",
        _first(lambda shape: SCORE + _steps(shape) / 8),
        _SCORE_SLACK,
    ),
    Special(
        "scores near -1024",
        "exp of all scores is 0, and 0 / 0 is NaN: the largest score of the row, which is "
        "subtracted before exp, may be negative: begin with -infinity or a score, not with 0",
        _first(lambda shape: _steps(shape) / 8 - SCORE),
        _SCORE_SLACK,
    ),
    Special(
        "one large score",
        "exp is infinite above 88.7: the score that is subtracted must be the largest one of the "
        "whole row",
        _peaked,
    ),
    Special(
        "-inf scores",
        "a score of -inf has weight 0, as masks have: -inf - (-inf) is NaN where the largest "
        "score so far is -inf",
        _masked,
    ),
)
_NORM = (
    Special(
        "equal values",
        f"the variance is 0, and 1 / sqrt(0) infinite: {_EPS}",
        _first(_equal),
        16 * ULP * 3 / 1e-5**0.5,  # allows for an error of the mean, divided by sqrt(eps)
    ),
    Special("variance near eps", _EPS, _first(lambda shape: _steps(shape) * 2.0**-10)),
    Special(
        "large mean",
        "E[x^2] - E[x]^2 cancels where the mean is large compared with the standard deviation: "
        "add up the squares of x - mean",
        _first(lambda shape: MEAN + _steps(shape) / 8),
        _MEAN_SLACK,
    ),
)
_ROOT_MEAN_SQUARE = (
    Special(
        "zeros",
        "the mean square is 0, and 1 / sqrt(0) infinite: 1 / sqrt(mean square + eps)",
        _first(np.zeros),
    ),
    Special(
        "mean square near eps",
        "1 / sqrt(mean square + eps): eps is added to the mean square, before the root",
        _first(lambda shape: _steps(shape) * 2.0**-12),
    ),
    Special(
        "large values",
        "a sum of squares in 16 bits overflows: add up in float",
        _first(lambda shape: 128 * _steps(shape)),
    ),
)
# Operation → powers of 2 by which the inputs of one small case are multiplied.
POWERS: Mapping[str, tuple[int, ...]] = {
    "add": (-100, -100), "attention": (-40,), "blocks_matmul": (40, 0), "encoder": (0, -100, -100),
    "gelu": (-40,), "gemm": (40, -40), "layernorm": (40, -40, -40), "layernorm_gelu": (40,),
    "linear": (40, -40, 0), "matmul_bias": (40, -40, 0), "qk_norm": (40, 40, 40),
    "rmsnorm": (40, -40), "rmsnorm_ffn": (40, -40, 0, 40), "rmsnorm_matmul": (40, -40, 40),
    "rope": (-100,), "silu_mul": (-40, 40), "trimat": (13,),
}  # fmt: skip
SPECIAL: Mapping[str, tuple[Special, ...]] = {
    "attention": tuple(
        replace(each, change=_scored(sign))
        for each, sign in zip(_SCORES[:2], (1.0, -1.0), strict=True)
    ),
    "gelu": (
        Special(
            "large values",
            "exp of a large number is infinite, and inf / inf NaN: use tanhf, or "
            "tanh(u) = 1 - 2 / (1 + exp(2u))",
            _first(lambda shape: _steps(shape) * 20),
        ),
    ),
    "layernorm": _NORM,
    "layernorm_gelu": _NORM,
    "log_likelihood": (
        *(replace(each, slack=_SCORE_SLACK) for each in _SCORES),
        Special(
            "unlikely targets",
            "log(exp(x) / sum) is -inf where exp(x) is 0: x[target] - largest - log(sum)",
            _unlikely,
        ),
    ),
    "qk_norm": tuple(map(_without_v, _ROOT_MEAN_SQUARE)),
    "rmsnorm": _ROOT_MEAN_SQUARE,
    "rmsnorm_ffn": _ROOT_MEAN_SQUARE,
    "rmsnorm_matmul": _ROOT_MEAN_SQUARE,
    "rope": (
        Special(
            "positions from 100,000",
            "an angle of 100,000 radians in float is off by up to 0.004: compute the angle in "
            "double, or subtract whole turns before rounding",
            lambda given, _: given,
            attrs={"start": 100_000},
        ),
    ),
    "sample_token": (
        replace(_SCORES[0], name="logits near 1024", change=_logits(lambda row: row + SCORE)),
        replace(_SCORES[1], name="logits near -1024", change=_logits(lambda row: row - SCORE)),
        replace(_SCORES[2], name="one large logit", change=_logits(_with_peak)),
        Special(
            "-inf logits",
            "a logit of -inf has probability 0, also if fewer than top_k others remain",
            _logits(lambda row: np.where(np.arange(len(row)) % 9, np.float32(-np.inf), row)),
        ),
        Special(
            "ties",
            "tokens with the same logit as the last token that top-k or top-p keeps are kept, too",
            _logits(np.rint),
        ),
        Special(
            "equal largest logits",
            "at temperature 0, of the tokens with the largest logit the one with the lowest id is "
            "chosen",
            _logits(lambda row: np.minimum(row, np.float32(1))),
            attrs={"sampling": Sampling(0.0)},
        ),
    ),
    "silu_mul": (
        Special(
            "large values",
            "exp of a large number is infinite, and inf / inf NaN: gate / (1 + exp(-gate))",
            # the first gate gives the largest value, even if it is the only one
            _first(lambda shape: np.resize([100, -100, 20, -20, 0], shape)),
        ),
    ),
    "softmax": _SCORES,
    "to_fp8": (
        Special(
            "ties and limits",
            "a number halfway between two goes to the one with the even byte, numbers below the "
            "smallest normal one are rounded too, and those beyond the largest one become it",
            _first(_numbers_of_fp8),
        ),
    ),
}
