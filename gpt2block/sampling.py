"""Sample the next token: a class of options, and the NumPy reference of the GPU sampler.

The kernel `sample_token` uses the same integer arithmetic; only its exp may differ in the last bit.
The algorithm is documented in kernels_cu/tokens/sample.cu.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import (
    Range,
    check_integer,
    check_number,
    check_token,
    documented,
    meaning_of,
    option,
    real,
)
from gpt2block.errors import InputError, shown

DEFAULT_TEMPERATURE = 0.8  # default of `generate` in Python and on the command line
SEED_BITS = 53  # bits of a new seed: JSON readers that use doubles keep it exactly
SMALLEST = 2.0**-126  # smallest normal float32
LARGEST = 2.0**126  # largest power of two whose reciprocal is a normal float32
UNIT = np.float32(2**40)  # mass (scaled probability) of the most likely token
ROUNDS = 10  # rounds of the random number generator Philox4x32-10
PLACES = 128  # entries of a row's table: pairs of a bias before min_new_tokens and one after
CHANGES = 2 * PLACES + 2  # floats per row: the table and two penalties; no token uses entry 0
MAX_BIAS = 2.0**64  # largest bias: a finite logit plus a bias stays finite
MAX_ALTERNATIVES = 20  # limit of most likely tokens to report per position

_USUAL = f"{SMALLEST:.1e} to {LARGEST:.1e}"
_PENALTY = Range(-MAX_BIAS, MAX_BIAS, "a finite number, -2^64 to 2^64, 0 for none")
Floats = NDArray[np.floating]
LogitBias = Mapping[int, float] | Iterable[tuple[int, float]]
Masses = NDArray[np.uint64]
Mask = NDArray[np.int32]  # (ceil(V / 32),): bit t % 32 of word t / 32 is 1 for an allowed token t


class SamplingKeywords(TypedDict, total=False):
    """The keywords of `generate` that are fields of Sampling, in the order of `generate`."""

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
    """The sampling options of one sequence (a prompt and its continuation).

    {options}

    logit_bias, min_new_tokens and the penalties are applied first, then the other options in the
    order of the fields. Sampled tokens are the tokens that the sequence has sampled, without its
    prompt. A temperature of 1 with all filters off draws from the model's own distribution. The
    same logits, seed, sample and step give the same token, alone or in a batch.
    Raises InputError for values out of range.
    """

    temperature: float = option(
        DEFAULT_TEMPERATURE,
        "0: the most likely token; 1: the model's own distribution.",
        Range(SMALLEST, LARGEST, f"0 (greedy), or {_USUAL}"),
        more="The logits are divided by the temperature.",
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
        more="Their positive logits are divided by it, negative logits multiplied; 1: off.",
    )
    seed: int = option(
        0,
        "The same seed, prompt and options give the same text.",
        Range(0, 2**64 - 1, "an unsigned integer of 64 bits"),
        more="An integer of up to 64 bits.",
    )
    sample: int = option(
        0,
        "Index among the samples of one prompt.",
        Range(0, 2**31 - 1, "the number of a sample from 0"),
    )
    logit_bias: LogitBias = option(
        (),
        "Bias for each token id, added to the logits first.",
        more="At most 127 different numbers.",
    )
    frequency_penalty: float = option(
        0.0, "Subtracted once for each time a token was sampled.", _PENALTY
    )
    presence_penalty: float = option(
        0.0, "Subtracted from logits of tokens already sampled.", _PENALTY
    )
    min_new_tokens: int = option(
        0,
        "No stop condition ends the text before this many tokens.",
        Range(0, 2**31 - 1, "a number of tokens, 0 for none"),
        more="Tokens that end the text are not sampled before.",
    )
    end_ids: Iterable[int] = option(
        (), "Tokens that end the text, and are not sampled before min_new_tokens."
    )

    def __post_init__(self) -> None:
        # Convert NumPy numbers to Python numbers: -top_k of a uint8 is not negative. Valid Python
        # numbers are skipped, because every call of generate creates a Sampling.
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

    def with_seed(self, seed: int) -> Sampling:
        """Return a copy with another seed, from 0 to 2^64 - 1, without checks of the options."""
        copied = object.__new__(Sampling)
        vars(copied).update(vars(self), seed=seed)
        return copied

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as stored: pairs of token and bias, with tokens in ascending order."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def late(self) -> tuple[int, ...]:
        """end_ids as stored, in ascending order; empty without min_new_tokens."""
        return cast("tuple[int, ...]", self.end_ids) if self.min_new_tokens else ()

    @property
    def counts(self) -> bool:
        """Whether sampling depends on how often each token was sampled."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def changes(self) -> bool:
        """Whether logits are changed by options other than the repetition penalty."""
        return bool(self.biases or self.late) or self.counts

    def _check_places(self) -> None:
        late, most = set(self.late), PLACES - 1 - bool(self.late)
        if len({(np.float32(bias), token in late) for token, bias in self.biases}) > most:
            twice = ", counted separately for end tokens with min_new_tokens" if late else ""
            raise InputError(f"logit_bias: expected at most {most} different numbers{twice}")


def _ranges(kind: str) -> dict[str, Range]:
    """Return {name: range of valid values} for the fields of this type in Sampling."""
    ranges = {each.name: meaning_of(each).range for each in fields(Sampling) if each.type == kind}
    return {name: limits for name, limits in ranges.items() if limits}


_FLOATS, _INTEGERS = _ranges("float"), _ranges("int")
# Names of the numeric keywords of sampling, in the order of `generate`'s signature.
NUMBERS = tuple(name for name in SAMPLING_OPTIONS if name in {**_FLOATS, **_INTEGERS})


def _pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of token and bias, sorted by token. Raises InputError for other values."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        pairs = [(token, bias) for token, bias in pairs]
    except (TypeError, ValueError):
        raise InputError(f"logit_bias: expected numbers by token, got {shown(given)}") from None
    limits = -MAX_BIAS, MAX_BIAS, "a finite number, added to the logit of a token"
    biases = {
        check_token("logit_bias", token): check_number("logit_bias", bias, *limits)
        for token, bias in pairs
    }
    return tuple(sorted(biases.items()))


def _ids(tokens: object) -> tuple[int, ...]:
    """Return distinct token ids in ascending order. Raises InputError for other values."""
    if not isinstance(tokens, Iterable):
        raise InputError(f"end_ids: expected token ids, got {shown(tokens)}")
    return tuple(sorted({check_token("end_ids", token) for token in tokens}))


def new_seed() -> int:
    """Return a random seed."""
    return secrets.randbits(SEED_BITS)


def with_defaults(options: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Add `defaults` for missing keywords of `generate`, unless `options` has a `sampling`."""
    return {**({} if options.get("sampling") else defaults), **options}


class Choice(NamedTuple):
    """A token, and its log-probability under the unmodified logits."""

    token: int  # -1 if a logit is NaN or all are -inf
    logprob: float  # NaN if the token is -1, or if a logit is +inf


def choose(
    logits: Floats,
    sampling: Sampling,
    step: int,
    occurred: NDArray[np.uint8] | None = None,
    counts: NDArray[np.int32] | None = None,
    allowed: Mask | None = None,
    forced: int | None = None,
) -> Choice:
    """Sample the next token of a sequence.

    logits: (V,). occurred: (V,), nonzero for tokens already in the text. counts: (V,), how often
    each token was sampled. step: number of tokens sampled so far. allowed: Mask of
    tokens that can be sampled; None: all tokens. forced: a token that is returned in place of a
    sampled one, with its log-probability. +inf is treated as the largest number; -inf has no mass.
    The filters have the same order and meaning as in `transformers`.
    """
    raw = logits.astype(np.float32)
    largest = raw.max()
    if np.isnan(largest):
        return Choice(-1, math.nan)
    changed = penalized(raw, sampling, occurred, counts, step)
    if allowed is not None:
        changed = np.where(unpacked(allowed, len(raw)), changed, np.float32(-np.inf))
    if changed.max() == -np.inf:
        return Choice(-1, math.nan)
    if forced is not None:
        token = forced
    elif sampling.temperature == 0:
        token = int(changed.argmax())
    else:
        bits = random_bits(sampling.seed, step, sampling.sample)
        token = draw(masses(changed, sampling), bits)
    if largest == np.inf:
        return Choice(token, math.nan)
    exact = raw.astype(np.float64)
    return Choice(token, float(exact[token] - largest - np.log(np.exp(exact - largest).sum())))


def mask_words(V: int) -> int:
    """Return the number of 32-bit words of a Mask for a vocabulary of V tokens."""
    return -(-V // 32)


def packed(allowed: NDArray[np.bool_]) -> Mask:
    """Return the Mask of a boolean array (V,); axes before the last one are kept."""
    *batch, V = allowed.shape
    wide = np.zeros((*batch, 32 * mask_words(V)), bool)
    wide[..., :V] = allowed
    return np.packbits(wide, axis=-1, bitorder="little").view("<i4").astype(np.int32, copy=False)


def unpacked(mask: Mask, V: int) -> NDArray[np.bool_]:
    """Return a boolean array (V,): whether `mask` allows each token."""
    bits = np.unpackbits(mask.astype("<i4").view(np.uint8), count=V, bitorder="little")
    return bits.astype(bool)


def check_biased(sampling: Sampling, V: int) -> None:
    """Raise InputError if a token with a bias, or an end token, is not in a vocabulary of V."""
    last = {"logit_bias": sampling.biases[-1:], "end_ids": [(each, 0) for each in sampling.late]}
    for name, pairs in last.items():
        if pairs and pairs[-1][0] >= V:
            raise InputError(f"{name}: expected token ids from 0 to {V - 1}, got {pairs[-1][0]}")


def changes(sampling: Sampling, V: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return a sequence's logit changes as the kernel reads them: a table, and an index per token.

    Entry 0 of the table holds 1 if anything changes, and the bits of min_new_tokens. The second
    array holds twice the index of each token's entry in the table.
    """
    check_biased(sampling, V)
    values, places = np.zeros(CHANGES, np.float32), np.zeros(V, np.uint8)
    if sampling.changes:
        biases, late = dict(sampling.biases), set(sampling.late)
        tokens = sorted(biases.keys() | late)
        changed = [(-math.inf if t in late else biases[t], biases.get(t, 0.0)) for t in tokens]
        pairs = np.array(changed, np.float32).reshape(-1, 2) + np.float32(0)  # -0.0 + 0 is 0.0
        different, place = np.unique(pairs.view(np.uint64), return_inverse=True)
        values[0], values[-2:] = 1, (sampling.frequency_penalty, sampling.presence_penalty)
        values[1:2].view(np.int32)[:] = sampling.min_new_tokens
        values[2 : 2 + 2 * len(different)] = different.view(np.float32)
        places[tokens] = 2 * (1 + place.ravel())
    return values, places


def penalized(
    raw: Floats,
    sampling: Sampling,
    occurred: NDArray[np.uint8] | None = None,
    counts: NDArray[np.int32] | None = None,
    step: int = 0,
) -> Floats:
    """Return logits after biases, exclusion of end tokens before min_new_tokens, and penalties.

    Sources: Keskar et al., "CTRL" (2019), for the repetition penalty; OpenAI, "API reference".
    """
    if sampling.biases or sampling.late:
        check_biased(sampling, len(raw))
        raw = raw.copy()
    if sampling.biases:
        ids, biases = zip(*sampling.biases, strict=True)
        raw[list(ids)] += np.array(biases, np.float32)
    if step < sampling.min_new_tokens:
        raw[list(sampling.late)] = -np.inf
    penalty = np.float32(sampling.repetition_penalty)
    if occurred is not None and penalty != 1:
        with np.errstate(over="ignore"):
            changed = raw * np.where(raw > 0, np.float32(1) / penalty, penalty)
        raw = np.where(occurred != 0, changed, raw)
    if counts is not None and sampling.counts:
        frequency = np.float32(sampling.frequency_penalty)
        presence = np.float32(sampling.presence_penalty)
        raw = np.where(counts > 0, (raw - frequency * counts.astype(np.float32)) - presence, raw)
    return raw


def masses(l: Floats, sampling: Sampling) -> Masses:  # noqa: E741
    """Return each token's mass, 2^40 exp((l - max l) / temperature) for logits l; 0 if filtered.

    l: result of `penalized`, float32 (V,), without NaN, at least one number above -inf. The
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
        running = np.cumsum(mass[order])
        need = max(1, _part(sampling.top_p, int(running[-1])))
        mass[l < l[order[np.searchsorted(running, np.uint64(need))]]] = 0
    mass[mass < np.uint64(np.float32(sampling.min_p) * UNIT)] = 0
    return mass


def probabilities(logits: Floats, sampling: Sampling) -> NDArray[np.float64]:
    """Return the probability of each token in the first step of `choose`, (V,); 0 if filtered.

    All probabilities are 0 if a logit is NaN or all logits are -inf.
    """
    raw = logits.astype(np.float32)
    result = np.zeros(len(raw))
    if np.isnan(raw.max()):
        return result
    l = penalized(raw, sampling)  # noqa: E741
    if l.max() == -np.inf:
        return result
    if sampling.temperature == 0:
        result[l.argmax()] = 1
        return result
    mass = masses(l, sampling)
    result[:] = mass / mass.sum()
    return result


def _part(p: float, mass: int) -> int:
    """Return p · mass, rounded up; p is a float32, rounded down to 64 fractional bits."""
    return -(-int(float(np.float32(p)) * 2**64) * mass // 2**64)


def draw(mass: Masses, random: int) -> int:
    """Return the first id at which the cumulative mass exceeds random / 2^64 of the total mass."""
    running = np.cumsum(mass)
    r = random * int(running[-1]) >> 64
    return int(np.searchsorted(running, np.uint64(r), side="right"))


def random_bits(seed: int, step: int, sample: int) -> int:
    """Return 64 random bits that depend only on the arguments."""
    # `step` may be a NumPy integer, whose products would overflow.
    words = philox((int(step), sample, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return words[0] | words[1] << 32


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: return four random 32-bit words from a counter of four words and a key of two.

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
    """Return a number of sampled tokens as an int. Raises InputError unless it is 0 to 2^31 - 1."""
    return check_integer("step", step, 0, 2**31 - 1, "an integer from 0 to 2^31 - 1")


def check_alternatives(name: str, value: object, least: int = 0) -> int:
    """Return a number of alternatives as an int. Raises InputError unless it is `least` to 20."""
    most = MAX_ALTERNATIVES
    return check_integer(name, value, least, most, f"an integer from {least} to {most}")


def rows_of(sampling: Sampling | Sequence[Sampling] | None, B: int) -> list[Sampling]:
    """Return a Sampling for each of B rows, from one Sampling for all rows or a sequence of B.

    None draws from the model's own distribution, with seed 0. Raises InputError for other values.
    """
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling(temperature=1.0)] * B
    rows = list(sampling) if isinstance(sampling, Iterable) else []
    if len(rows) != B or not all(isinstance(row, Sampling) for row in rows):
        raise InputError(
            f"sampling: expected a Sampling, or {B} of them, one per row, got {sampling!r}"
        )
    return rows


def parameters(rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Return the kernel's arguments as arrays (B,) by field name; a seed's bits are int64."""
    names = {
        np.float32: ("temperature", "top_p", "min_p", "repetition_penalty"),
        np.int32: ("top_k", "sample"),
        np.uint64: ("seed",),
    }
    arrays: dict[str, np.ndarray] = {
        name: np.array([getattr(row, name) for row in rows], dtype)
        for dtype, of_dtype in names.items()
        for name in of_dtype
    }
    arrays["seed"] = arrays["seed"].view(np.int64)
    return arrays
