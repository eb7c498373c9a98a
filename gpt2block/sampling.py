"""Sampling of the next token: the options of a row, and the NumPy reference.

The kernel `sample_token` computes the same with the same integers; only its exp may differ in the
last bit. The algorithm is documented in kernels_cu/tokens/sample.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_integer, check_number, real
from gpt2block.config.options import Range, documented, meaning_of, option
from gpt2block.errors import InputError, shown

DEFAULT_TEMPERATURE = 0.8  # of `generate`, from Python and from the command line
SEED_BITS = 53  # of a new seed: JSON readers that use doubles keep it exactly
SMALLEST = 2.0**-126  # the smallest normal float32
LARGEST = 2.0**126  # the largest power of two whose reciprocal is a normal float32
UNIT = np.float32(2**40)  # the mass of the most likely token
ROUNDS = 10  # of Philox
PLACES = 128  # of a row's table: two numbers each, before and from min_new_tokens on
CHANGES = 2 * PLACES + 2  # numbers of the table: place 0 has no token; at the end the penalties
MOST_BIAS = 2.0**64  # so that a finite logit with a bias is finite
MOST_ALTERNATIVES = 20  # most likely tokens that can be reported at a position

_USUAL = f"{SMALLEST:.1e} to {LARGEST:.1e}"
_PENALTY = Range(-MOST_BIAS, MOST_BIAS, "a finite number, 0 for none")
Floats = NDArray[np.floating[Any]]
LogitBias = Mapping[int, float] | Iterable[tuple[int, float]]
Masses = NDArray[np.uint64]


class SamplingKeywords(TypedDict, total=False):
    """The keywords of `generate` that are options of a Sampling, in their order."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: LogitBias
    min_new_tokens: int


SAMPLING_OPTIONS = tuple(SamplingKeywords.__annotations__)


@documented
@dataclass(frozen=True)
class Sampling:
    """The sampling options of one row.

    {options}

    logit_bias, min_new_tokens and the penalties are applied first, then the other options in the
    order of the fields. Drawn tokens are those that the row has sampled, without its prompt. A
    temperature of 1 with all filters off draws from the model's own distribution. The same logits,
    seed, sample and step give the same token, alone or in a batch.
    Raises InputError for values out of range.
    """

    temperature: float = option(
        DEFAULT_TEMPERATURE,
        "0: the most likely token; 1: the model's own distribution.",
        Range(SMALLEST, LARGEST, f"0 (greedy), or {_USUAL}"),
        more="The logits are divided by it.",
    )
    top_k: int = option(
        0,
        "Keep the k most likely tokens; 0: off.",
        Range(0, 2**31 - 1, "the number of tokens to keep, 0 to keep all"),
    )
    top_p: float = option(
        1.0,
        "Keep the fewest tokens with this total probability; 1: off.",
        Range(0, 1, "a probability from 0 to 1, 1 to keep all"),
    )
    min_p: float = option(
        0.0,
        "Keep tokens at least this fraction as likely as the most likely one; 0: off.",
        Range(0, 1, "a fraction from 0 to 1, 0 to keep all"),
    )
    repetition_penalty: float = option(
        1.0,
        "Above 1: tokens already in the text become less likely.",
        Range(SMALLEST, LARGEST, _USUAL),
        more="It divides their logits above 0, and multiplies the others; 1: off.",
    )
    seed: int = option(
        0,
        "The same seed, prompt and options give the same text.",
        Range(0, 2**64 - 1, "an unsigned integer of 64 bits"),
        more="An integer of up to 64 bits.",
    )
    sample: int = option(
        0,
        "The index among the samples of one prompt.",
        Range(0, 2**31 - 1, "the number of a sample from 0"),
    )
    logit_bias: LogitBias = option(
        (),
        "Numbers by token id, added to the logits before anything else.",
        more="At most 127 different ones.",
    )
    frequency_penalty: float = option(
        0.0, "Subtracted once for each time a token was drawn.", _PENALTY
    )
    presence_penalty: float = option(
        0.0, "Subtracted from logits of tokens already drawn.", _PENALTY
    )
    min_new_tokens: int = option(
        0,
        "No stop ends the text before so many tokens.",
        Range(0, 2**31 - 1, "a number of tokens, 0 for none"),
        more="The tokens that end a text are not drawn before.",
    )
    end_ids: Iterable[int] = option(
        (), "With min_new_tokens: tokens that are not drawn before; those that end the text."
    )

    def __post_init__(self) -> None:
        # Convert NumPy numbers to Python: -top_k of a uint8 is not negative. What needs neither
        # that nor an error stays: every call of generate makes a Sampling.
        for name, (least, most, expected) in _FLOATS.items():
            value = getattr(self, name)
            if type(value) is float and least <= value <= most:
                continue
            if name != "temperature" or real(value) != 0:
                value = check_number(name, value, least, most, expected)
            object.__setattr__(self, name, float(value))
        for name, (least, most, expected) in _INTEGERS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                value = check_integer(name, value, least, most, expected)
                object.__setattr__(self, name, value)
        if not isinstance(self.logit_bias, tuple) or self.logit_bias:
            object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        if not isinstance(self.end_ids, tuple) or self.end_ids:
            object.__setattr__(self, "end_ids", _ids(self.end_ids))
        if self.biases:
            self._check_places()

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as it is stored: tokens in ascending order, and the number of each."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def late(self) -> tuple[int, ...]:
        """end_ids as they are stored, in ascending order; none without min_new_tokens."""
        return cast("tuple[int, ...]", self.end_ids) if self.min_new_tokens else ()

    @property
    def counts(self) -> bool:
        """Whether it matters how often a token was drawn."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def changes(self) -> bool:
        """Whether logits change otherwise than by the repetition penalty."""
        return bool(self.biases or self.late) or self.counts

    def _check_places(self) -> None:
        late, most = set(self.late), PLACES - 1 - bool(self.late)
        if len({(np.float32(bias), token in late) for token, bias in self.biases}) > most:
            twice = ", those of end tokens apart, with min_new_tokens" if late else ""
            raise InputError(f"logit_bias: expected at most {most} different numbers{twice}")


def _ranges(kind: str) -> dict[str, Range]:
    """The ranges of a Sampling's numbers of this type."""
    ranges = {each.name: meaning_of(each).range for each in fields(Sampling) if each.type == kind}
    return {name: found for name, found in ranges.items() if found}


_FLOATS, _INTEGERS = _ranges("float"), _ranges("int")
# The keywords of `generate` that are numbers, in their order.
NUMBERS = tuple(name for name in SAMPLING_OPTIONS if name in {**_FLOATS, **_INTEGERS})


def _pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """Tokens and biases, sorted; InputError unless they are that, each token once."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        pairs = [(token, bias) for token, bias in pairs]
    except (TypeError, ValueError):
        raise InputError(f"logit_bias: expected numbers by token, got {shown(given)}") from None
    expected = "a finite number, added to the logit of a token"
    found = {
        check_integer("logit_bias", token, 0, 2**31 - 1, "token ids"): check_number(
            "logit_bias", bias, -MOST_BIAS, MOST_BIAS, expected
        )
        for token, bias in pairs
    }
    return tuple(sorted(found.items()))


def _ids(given: Any) -> tuple[int, ...]:
    """Token ids in ascending order, each once."""
    if not isinstance(given, Iterable):
        raise InputError(f"end_ids: expected token ids, got {shown(given)}")
    ids = {check_integer("end_ids", token, 0, 2**31 - 1, "token ids") for token in given}
    return tuple(sorted(ids))


def new_seed() -> int:
    """A random seed."""
    import secrets  # noqa: PLC0415  (slow to import)

    return secrets.randbits(SEED_BITS)


def with_defaults(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `generate`, with defaults of a Sampling's fields unless they have `sampling`."""
    return {**({} if options.get("sampling") else defaults), **options}


class Choice(NamedTuple):
    """A token, and its log-probability under the unmodified logits."""

    token: int  # -1 if a logit is NaN or all are -inf
    logprob: float  # NaN in that case, and if a logit is +inf


def choose(
    logits: Floats,
    sampling: Sampling,
    step: int,
    seen: NDArray[np.uint8] | None = None,
    counts: NDArray[np.int32] | None = None,
) -> Choice:
    """Sample the next token of a row.

    logits: (V,). seen: (V,), nonzero for tokens already in the text. counts: (V,), how often each
    was drawn. step: number of tokens that the row has drawn so far. +inf is treated as the largest
    number; -inf has no mass. The filters have the order and meaning of those of `transformers`.
    """
    raw = logits.astype(np.float32)
    largest = raw.max()
    if np.isnan(largest):
        return Choice(-1, math.nan)
    changed = penalized(raw, sampling, seen, counts, step)
    if changed.max() == -np.inf:
        return Choice(-1, math.nan)
    if sampling.temperature == 0:
        token = int(changed.argmax())
    else:
        bits = random_bits(sampling.seed, step, sampling.sample)
        token = draw(masses(changed, sampling), bits)
    if largest == np.inf:
        return Choice(token, math.nan)
    exact = raw.astype(np.float64)
    return Choice(token, float(exact[token] - largest - np.log(np.exp(exact - largest).sum())))


def check_biased(sampling: Sampling, V: int) -> None:
    """InputError for a token with a bias, or an end token, that a vocabulary of V does not have."""
    last = {"logit_bias": sampling.biases[-1:], "end_ids": [(each, 0) for each in sampling.late]}
    for name, pairs in last.items():
        if pairs and pairs[-1][0] >= V:
            raise InputError(f"{name}: expected token ids from 0 to {V - 1}, got {pairs[-1][0]}")


def changes(sampling: Sampling, V: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """A row's changes of logits as the kernel reads them: (CHANGES,), and twice each place, (V,).

    Place 0 of the first has 1 if there are any, and the bits of min_new_tokens.
    """
    check_biased(sampling, V)
    values, places = np.zeros(CHANGES, np.float32), np.zeros(V, np.uint8)
    if sampling.changes:
        own, late = dict(sampling.biases), set(sampling.late)
        tokens = sorted(own.keys() | late)
        of_tokens = [(-math.inf if t in late else own[t], own.get(t, 0.0)) for t in tokens]
        pairs = np.array(of_tokens, np.float32).reshape(-1, 2) + np.float32(0)  # no -0.0
        different, place = np.unique(pairs.view(np.uint64), return_inverse=True)
        values[0], values[-2:] = 1, (sampling.frequency_penalty, sampling.presence_penalty)
        values[1:2].view(np.int32)[:] = sampling.min_new_tokens
        values[2 : 2 + 2 * len(different)] = different.view(np.float32)
        places[tokens] = 2 * (1 + place.ravel())
    return values, places


def penalized(
    raw: Floats,
    sampling: Sampling,
    seen: NDArray[np.uint8] | None = None,
    counts: NDArray[np.int32] | None = None,
    step: int = 0,
) -> Floats:
    """Logits with biases, without end tokens that come too early, and after the penalties.

    Sources: Keskar et al., "CTRL" (2019), for the repetition penalty; OpenAI, "API reference".
    """
    if sampling.biases or sampling.late:
        check_biased(sampling, len(raw))
        raw = raw.copy()
    if sampling.biases:
        ids, of_ids = zip(*sampling.biases, strict=True)
        raw[list(ids)] += np.array(of_ids, np.float32)
    if step < sampling.min_new_tokens:
        raw[list(sampling.late)] = -np.inf
    penalty = np.float32(sampling.repetition_penalty)
    if seen is not None and penalty != 1:
        with np.errstate(over="ignore"):
            changed = raw * np.where(raw > 0, np.float32(1) / penalty, penalty)
        raw = np.where(seen != 0, changed, raw)
    if counts is not None and sampling.counts:
        frequency, presence = map(
            np.float32, (sampling.frequency_penalty, sampling.presence_penalty)
        )
        raw = np.where(counts > 0, (raw - frequency * counts.astype(np.float32)) - presence, raw)
    return raw


def masses(l: Floats, sampling: Sampling) -> Masses:  # noqa: E741
    """The mass of each token in the draw: 2^40 exp((l - max l) / temperature), 0 if filtered out.

    l: as `penalized` returns it, float32 (V,), without NaN, at least one above -inf. The
    temperature must not be 0.
    """
    largest, inverse = l.max(), np.float32(1) / np.float32(sampling.temperature)
    with np.errstate(invalid="ignore", over="ignore"):
        below = np.where(l == largest, np.float32(0), l - largest)
        mass: Masses = (np.exp(below * inverse) * UNIT).astype(np.uint64)
    if 0 < sampling.top_k < len(l):
        mass[l < np.partition(l, -sampling.top_k)[-sampling.top_k]] = 0
    if np.float32(sampling.top_p) < 1:
        order = np.flatnonzero(mass)
        order = order[np.argsort(-l[order])]
        together = np.cumsum(mass[order])
        need = max(1, _part(sampling.top_p, int(together[-1])))
        mass[l < l[order[np.searchsorted(together, np.uint64(need))]]] = 0
    mass[mass < np.uint64(np.float32(sampling.min_p) * UNIT)] = 0
    return mass


def probabilities(logits: Floats, sampling: Sampling) -> NDArray[np.float64]:
    """The probability with which `choose` draws each token as the first one, (V,): 0 if filtered.

    All are 0 if a logit is NaN or all are -inf.
    """
    raw = logits.astype(np.float32)
    found = np.zeros(len(raw))
    if np.isnan(raw.max()):
        return found
    l = penalized(raw, sampling)  # noqa: E741
    if l.max() == -np.inf:
        return found
    if sampling.temperature == 0:
        found[l.argmax()] = 1
        return found
    mass = masses(l, sampling)
    found[:] = mass / mass.sum()
    return found


def _part(p: float, mass: int) -> int:
    """p times `mass`, rounded up, with p as float32 in fixed point with 64 fractional bits."""
    return -(-int(float(np.float32(p)) * 2**64) * mass // 2**64)


def draw(mass: Masses, random: int) -> int:
    """The first token whose cumulative mass, by id, exceeds random / 2^64 of the total."""
    together = np.cumsum(mass)
    r = random * int(together[-1]) >> 64
    return int(np.searchsorted(together, np.uint64(r), side="right"))


def random_bits(seed: int, step: int, sample: int) -> int:
    """64 random bits, determined by the arguments."""
    # Convert to Python integers: NumPy integers overflow.
    words = philox((int(step), sample, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return words[0] | words[1] << 32


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words of a counter of four words and a key of two.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = b >> 32 ^ c1 ^ k0, b & 0xFFFFFFFF
        c2, c3 = a >> 32 ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def check_step(step: object) -> int:
    """The step as an int; InputError unless it is a possible number of drawn tokens."""
    return check_integer("step", step, 0, 2**31 - 1, "an integer from 0 to 2^31 - 1")


def check_alternatives(name: str, value: object, least: int = 0) -> int:
    """The value as an int; InputError unless that many alternatives can be reported."""
    most = MOST_ALTERNATIVES
    return check_integer(name, value, least, most, f"an integer from {least} to {most}")


def rows_of(sampling: Sampling | Sequence[Sampling] | None, B: int) -> list[Sampling]:
    """A Sampling for each of B rows, from one for all rows or a sequence of B; else InputError.

    None draws from the model's own distribution, with seed 0.
    """
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling(temperature=1.0)] * B
    rows = list(sampling) if isinstance(sampling, Iterable) else []
    if len(rows) != B or not all(isinstance(row, Sampling) for row in rows):
        raise InputError(
            f"sampling: expected a Sampling, or {B} of them, one per row, got {sampling!r}"
        )
    return rows


def parameters(rows: Sequence[Sampling]) -> dict[str, NDArray[Any]]:
    """The arguments of the kernel: an array (B,) for each field, the seed viewed as int64."""
    dtypes = {
        "temperature": np.float32,
        "top_p": np.float32,
        "min_p": np.float32,
        "repetition_penalty": np.float32,
        "top_k": np.int32,
        "seed": np.uint64,
        "sample": np.int32,
    }
    arrays: dict[str, NDArray[Any]] = {
        name: np.array([getattr(row, name) for row in rows], dtype)
        for name, dtype in dtypes.items()
    }
    arrays["seed"] = arrays["seed"].view(np.int64)
    return arrays
