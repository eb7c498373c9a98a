"""The choice of the next token from logits.

The first token whose cumulative mass exp(logit / temperature), of those kept, passes a random
number. Kernels: tokens/sample.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.contract import Contract
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, compute_capability, contiguous, device_attribute
from gpt2block.cuda.kernels import Defines, Geometry, launch_at, load
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError
from gpt2block.ops._products import HOPPER_CAPABILITY
from gpt2block.ops._rows import MAX_ROWS, check_rows
from gpt2block.ops.call import FIXED, Asked, Call
from gpt2block.ops.guesses import TAKE_GUESSES
from gpt2block.ops.operation import Inputs, Operation, Sizes, variant
from gpt2block.sampling import CHANGES, Sampling, changes, check_step, parameters, rows_of

FILE = "tokens/sample.cu"
SLOTS_FILE = "tokens/slots.cu"
THREADS = PASS = 1024
STATIC = 40 * 1024  # bytes of shared memory that a block has in any case, or a little less
ROWS_BLOCK = 256
MAX_V = 2**23  # so that the sum of all masses is less than 2^64
ENDLESS = 2**31 - 1  # n_ctx for no limit
PARAMETERS = (
    "temperature top_p min_p repetition_penalty f32 B; top_k i32 B; seed i64 B; sample i32 B; "
    "seen u8 B V; position step i32 B"
)
STATE = f"{PARAMETERS}; token i32 B; logprob f32 B"
SLOTS = "slot_row? slot_token? slot_position? slot_turn? i32 M"
CHANGED = "changes? f32 B W; counts? i32 B V"


class SampleState(NamedTuple):
    """The sampler's state on the device, for each of B rows; launches hold its addresses."""

    temperature: CudaArray
    top_p: CudaArray
    min_p: CudaArray
    repetition_penalty: CudaArray
    top_k: CudaArray
    seed: CudaArray  # the 64 bits, as int64
    sample: CudaArray
    seen: CudaArray  # (B, V): not 0 for tokens that occurred
    position: CudaArray  # of the next token
    step: CudaArray  # tokens sampled so far
    token: CudaArray  # the last one; -1 where logits held NaN, or -inf alone
    logprob: CudaArray  # its log-probability under the logits alone

    @classmethod
    def allocate(cls, B: int, V: int) -> SampleState:
        """A state of zeros, with no token seen or sampled; `set` writes the parameters."""
        sizes, entries = {"B": B, "V": V}, Contract.parse(STATE).inputs
        return cls(*(cupy.zeros(entry.shape(sizes), FIXED[entry.kind]) for entry in entries))

    def set(self, rows: Sequence[Sampling]) -> None:
        """Write the parameters of each row into the arrays."""
        if len(rows) != len(self.token):
            raise InputError(f"sampling: expected {len(self.token)}, one a row, got {len(rows)}")
        for name, values in parameters(rows).items():
            getattr(self, name).set(values)

    def begin(
        self,
        at: NDArray[np.int32],
        rows: Sequence[Sampling],
        position: NDArray[np.int32],
        step: NDArray[np.int32],
    ) -> None:
        """Write parameters, position and step of the rows `at` of the state, all (N,)."""
        given = {**parameters(rows), "position": position, "step": step}
        seed, N = given.pop("seed"), len(at)
        of_32_bits = (values.view(np.int32) for values in given.values())
        numbers = cupy.asarray(np.concatenate([seed.view(np.int32), at, *of_32_bits]))
        arrays = (self.seed, *(getattr(self, name) for name in given))
        _per_row(SLOTS_FILE, "begin_slots", N, (numbers, *arrays, N, len(self.token))).run()


class Slots(NamedTuple):
    """The rows of a state that M rows of logits belong to, and the inputs of their next step.

    All int32 (M,).
    """

    row: CudaArray  # of the state; outside of it, nothing is sampled
    token: CudaArray  # a copy of the sampled token
    position: CudaArray  # and of its position
    turn: CudaArray  # launches so far


def _per_row(file: str, kernel: str, rows: int, args: tuple[Any, ...]) -> Launch:
    """A launch with a thread for each row."""
    return launch_at(file, Geometry(kernel, (ceil(rows / ROWS_BLOCK),), (ROWS_BLOCK,)), args)


def choose_geometry(
    rows: int,
    V: int,
    sms: int,
    room: int,
    clusters: bool,
    threads: int | None = None,
    defines: Defines = (),
) -> Geometry:
    """The most blocks per row that run at once; one block, if `clusters` are not possible.

    room: bytes of shared memory that a block can have. A block of a cluster keeps its part of the
    row there, and the columns of its first pass if they fit too. Tests pass other numbers of
    threads and constants.
    """
    blocks, stored, shared = 1, 0, 0
    for n in (8, 4, 2) if clusters else ():
        part, columns = ceil(V / n), PASS // n * ceil(V / PASS)
        sizes = [4 * part, 4 * (part + columns)]
        fitting = [size for size in sizes if size <= room - STATIC]
        at_once = sms if n == 2 else sms * 4 // 5  # larger clusters leave multiprocessors over
        if rows * n <= at_once and fitting:
            blocks, stored, shared = n, len(fitting), fitting[-1]
            break
    if threads is None:
        threads = THREADS // 2 if blocks > 2 or rows > sms else THREADS
    known = {"THREADS": (threads, THREADS), "CLUSTER": (blocks, 1), "STORED": (stored, 0)}
    own = tuple((f"SAMPLE_{name}", n) for name, (n, usual) in known.items() if n != usual)
    return Geometry("sample_token", (rows * blocks,), (threads,), shared, (*own, *defines))


def _geometry(rows: int, V: int, changed: int = 0) -> Geometry:
    """Of the current device."""
    sms = device_attribute("MultiProcessorCount")
    room = device_attribute("MaxSharedMemoryPerBlockOptin")
    found = choose_geometry(rows, V, sms, room, compute_capability() >= HOPPER_CAPABILITY)
    return found.with_defines((("SAMPLE_CHANGES", changed),)) if changed else found


def request(V: int) -> None:
    """Begin to compile the kernel of few rows, the longest compile of a start, and `begin`'s."""
    load(FILE, "sample_token", _geometry(1, V).defines)
    load(SLOTS_FILE, "begin_slots")


@variant("block", FILE, "sample_token", block=THREADS)
def _block(c: Call) -> Launch:
    slots = (c.slot_row, c.slot_token, c.slot_position, c.slot_turn)
    args = (c.logits, *c.state, *slots, c.changes, c.counts, c.report, c.B, c.V, c.n_ctx)
    changed = 0 if c.changes is None else 1 if c.counts is None else 2
    geometry = _geometry(c.M, c.V, changed)
    if c.together:
        geometry = geometry.with_defines((("SAMPLE_GUESSES", 1),))
    return launch_at(FILE, geometry, (*args, max(c.together, 1)))


def _prepare_state(asked: Asked) -> Call:
    c, given = asked.checked(), asked.inputs
    check_rows("logits", c.logits, MAX_V)
    if c.slot_row is None and c.M != c.B:
        raise InputError(f"logits: expected {c.B} rows, those of the state, got {c.M}")
    if not 0 < c.n_ctx <= ENDLESS:
        raise InputError(f"n_ctx: expected 1 to {ENDLESS}, got {c.n_ctx}")
    if c.changes is not None and c.W != CHANGES:
        raise InputError(f"changes: expected {CHANGES} numbers for each row, got {c.W}")
    c.state = given[1 : 1 + len(SampleState._fields)]
    c.kept = tuple(array for array in given[1:-1] if array is not None)  # all but the report
    return c


def _line(rows: str) -> str:
    """The contract of a choice that writes tokens and log-probabilities of so many rows."""
    written = f"token i32 {rows}; logprob f32 {rows}"
    given = f"logits f32 M V; {PARAMETERS}; {written}; {SLOTS}; {CHANGED}; report? i32 2 2 M"
    return f"{given} -> token i32 {rows}"


_STATE = Operation(
    name="sample_token",
    variants=(_block,),
    options={"n_ctx": ENDLESS, "together": 0},
    prepare=_prepare_state,
    line=_line("B"),
)
_DRAWN = replace(_STATE, line=_line("M"))


def bind_state(
    logits: Any,
    state: SampleState,
    n_ctx: int = ENDLESS,
    report: CudaArray | None = None,
    slots: Slots | None = None,
    changes: CudaArray | None = None,
    counts: CudaArray | None = None,
) -> Bound:
    """Choose a token for each row of logits (M, V) by the parameters in `state`, and update it.

    A run writes token and logprob, marks the token in seen, and adds one to position and step;
    position stays below n_ctx. out is `state.token`. slots: the rows of the state, of which no two
    may be the same; None: M rows in order. report (2, 2, M) int32 gets a copy of token and of the
    bits of logprob, in its first half for even steps, or turns of `slots`; it may be host memory.
    changes (B, 258), with state.seen: the `changes` of each row. counts (B, V) int32, where their
    penalties need them: how often each token was drawn, to which a run adds.
    """
    of_slots = slots or (None,) * len(Slots._fields)
    given = (logits, *state, *of_slots, changes, counts, report)
    return _STATE.bind_on_device(given, n_ctx=n_ctx)


def bind_drawn(
    logits: Any,
    state: SampleState,
    slots: Slots,
    together: int,
    changes: CudaArray | None = None,
    counts: CudaArray | None = None,
) -> Bound:
    """As `bind_state`, for `together` rows of each slot at successive positions; changes nothing.

    Row i of a slot is drawn at its step + i, as if the tokens of its rows 1 to i had been drawn
    before; where its position is -1, nothing is. token and logprob of `state` are of rows, (M,).
    """
    given = (logits, *state, *slots, changes, counts, None)
    return _DRAWN.bind_on_device(given, together=together)


@variant("slots", SLOTS_FILE, "begin_slots", "place_rows")
def _place(c: Call) -> Launch:
    """Of place_rows; `SampleState.begin` launches begin_slots."""
    guesses = (c.guess, c.left, c.slot_token, c.slot_position, c.together)
    args = (c.slot_row, c.token, c.position, *guesses, c.M, c.B, c.K if c.guess is not None else 0)
    return _per_row(SLOTS_FILE, "place_rows", c.M, args)


PLACE_ROWS = Operation(
    name="place_rows",
    variants=(_place,),
    options={"together": 1},
    line="slot_row i32 M; token position i32 B; guess? i32 B K; left? i32 B; "
    "slot_token slot_position i32 M "
    "-> slot_token slot_position i32 M",
)


def bind_place(
    state: SampleState,
    slots: Slots,
    guess: CudaArray | None = None,
    left: CudaArray | None = None,
    together: int = 1,
) -> Bound:
    """Copy token and position of the state to the rows of slots; out is `slots.token`.

    Rows outside of the state keep theirs. guess (B, K), left (B,): `together` rows are of a slot,
    the others of its guesses, as many as it may still draw tokens.
    """
    given = (slots.row, state.token, state.position, guess, left, slots.token, slots.position)
    placed = PLACE_ROWS.bind_on_device(given, together=together)
    return placed._replace(extra=(*state, *slots, guess, left))


@variant("seen", FILE, "mark_seen")
def _seen(c: Call) -> Launch:
    """seen[rows[i], tokens[i]] becomes 1; places outside of it are skipped."""
    if c.N > MAX_ROWS:
        raise InputError(f"tokens: expected at most {MAX_ROWS:,}, got {c.N:,}")
    return _per_row(FILE, "mark_seen", c.N, (c.tokens, c.rows, c.seen, c.N, c.B, c.V))


MARK_SEEN = Operation(
    name="mark_seen", variants=(_seen,), line="tokens rows i32 N; seen u8 B V -> seen u8 B V"
)


def _prepare(asked: Asked) -> Bound:
    """`bind_state` of a new state, the rest of which is `extra`. Each run is a step.

    seen and counts (B, V) are copied; without them, no token was seen, or drawn.
    """
    sampling, step, seen, counts = (
        asked.options[name] for name in ("sampling", "step", "seen", "counts")
    )
    c = asked._replace(inputs=(*asked.inputs, seen, counts)).checked(step=None)
    state, rows = SampleState.allocate(c.B, c.V)._replace(token=c.token), rows_of(sampling, c.B)
    state.set(rows)
    state.step.fill(check_step(step))
    if seen is not None:
        state.seen[...] = seen != 0
    if counts is not None:
        counts, marks = counts.copy(), state.seen
        marks |= (counts > 0).astype("uint8")
    elif any(row.counts for row in rows):
        counts = cupy.zeros((c.B, c.V), "int32")
    if not any(row.changes for row in rows):
        return bind_state(c.logits, state)
    tables = cupy.zeros((c.B, CHANGES), "float32")
    for b, row in enumerate(rows):
        values, places = changes(row, c.V)
        tables[b].set(values)
        state.seen[b] += cupy.asarray(places)
    return bind_state(c.logits, state, changes=tables, counts=counts)


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["V"])
    return (np.float32(3) * rng.standard_normal(shape, dtype=np.float32),)


OPERATION = Operation(
    name="sample_token",
    document="gpt2block; random numbers by Salmon et al. (2011)",
    idea="the first token whose cumulative mass exp(logit / temperature), of those kept, passes u",
    sizes={"B": 1, "V": 50257},
    variants=(_block,),
    options={"sampling": None, "step": 0, "seen": None, "counts": None},
    prepare=_prepare,
    steps=(MARK_SEEN, PLACE_ROWS, TAKE_GUESSES),
    draw=_make,
    traffic=lambda sizes: 4 * sizes["B"] * sizes["V"],
    flops=lambda sizes: 5 * sizes["B"] * sizes["V"],
    attrs={"sampling": Sampling(temperature=0.8, top_k=50, top_p=0.95)},
    small=({"B": 2, "V": 70},),
)


def sample_token(
    logits: CudaArray,
    sampling: Sampling | Sequence[Sampling] | None = None,
    step: int = 0,
    seen: CudaArray | None = None,
    counts: CudaArray | None = None,
) -> CudaArray:
    """`reference.sample_token` on CuPy arrays: float32, `seen` uint8, `counts` int32.

    Raises InputError.

    Each call copies the parameters to the device; `SampleState` and `bind_state` avoid this.
    """
    (logits,) = contiguous(logits)
    options = {"sampling": sampling, "step": step, "seen": seen, "counts": counts}
    return OPERATION.bind_on_device((logits,), **options).run()


def _integers(name: str, given: Any) -> CudaArray:
    """Integers from the host or the device as an int32 device array."""
    (array,) = contiguous(given if isinstance(given, cupy.ndarray) else np.asarray(given))
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, got {array.dtype}")
    return cupy.asarray(array, np.int32)


def mark_seen(tokens: CudaArray, rows: CudaArray, seen: CudaArray) -> CudaArray:
    """Set seen (B, V) of uint8 for the tokens (N,) of prompts, packed; rows (N,) has their rows.

    Returns `seen`. Raises InputError.
    """
    tokens, rows = (_integers(n, a) for n, a in (("tokens", tokens), ("rows", rows)))
    return MARK_SEEN.bind_on_device((tokens, rows, seen)).run()
