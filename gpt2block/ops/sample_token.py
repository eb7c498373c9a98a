"""Sample the next token from logits.

The result is the first token at which the running sum of masses exp(logit / temperature), of the
tokens that top-k, top-p and min-p keep, exceeds a random number. Kernels: tokens/sample.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.contract import Contract
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import AnyArray, Bound, CudaArray, contiguous, multiprocessors
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch_at, load
from gpt2block.errors import InputError
from gpt2block.ops.call import FIXED, Call, UncheckedCall
from gpt2block.ops.drafts import TAKE_DRAFTS, TAKEN_ROWS
from gpt2block.ops.engines.rows import MAX_ROWS, check_rows
from gpt2block.ops.operation import Inputs, Operation, Workload, variant
from gpt2block.ops.workload import draw_stable
from gpt2block.sampling import CHANGES, Sampling, changes, check_step, parameters, rows_of

FILE = "tokens/sample.cu"
SLOTS_FILE = "tokens/slots.cu"
THREADS = 1024
ROWS_BLOCK = 256  # threads per block of kernels with one thread per row
MAX_V = 2**23  # maximum vocabulary: the sum of all masses stays below 2^64
ENDLESS = 2**31 - 1  # n_ctx if positions have no limit
PARAMETERS = (
    "temperature top_p min_p repetition_penalty f32 B; top_k i32 B; seed i64 B; sample i32 B; "
    "occurred u8 B V; position step i32 B"
)
STATE = f"{PARAMETERS}; token i32 B; logprob f32 B"
SLOTS = "slot_row? slot_token? slot_position? slot_turn? i32 M"
CHANGED = "changes? f32 B W; counts? i32 B V"
MASKS = "mask_index? i32 M; masks? i32 R (V+31)//32"


class SampleState(NamedTuple):
    """The sampler's state of B sequences on the device. Launches keep its arrays' addresses."""

    temperature: CudaArray
    top_p: CudaArray
    min_p: CudaArray
    repetition_penalty: CudaArray
    top_k: CudaArray
    seed: CudaArray  # 64-bit seed, stored as int64
    sample: CudaArray
    occurred: CudaArray  # (B, V): not 0 for tokens that have occurred
    position: CudaArray  # position of the next token
    step: CudaArray  # number of tokens sampled so far
    token: CudaArray  # last sampled token; -1 if the logits held NaN, or only -inf
    logprob: CudaArray  # log-probability of the last token under the unmodified logits

    @classmethod
    def allocate(cls, B: int, V: int) -> SampleState:
        """Allocate a state of zeros, with no token seen or sampled; `set` writes the parameters."""
        sizes, entries = {"B": B, "V": V}, Contract.parse(STATE).inputs
        return cls(*(cupy.zeros(entry.shape(sizes), FIXED[entry.kind]) for entry in entries))

    def set(self, rows: Sequence[Sampling]) -> None:
        """Write the parameters of each row into the arrays."""
        if len(rows) != len(self.token):
            raise InputError(f"sampling: expected {len(self.token)}, one per row, got {len(rows)}")
        for name, values in parameters(rows).items():
            getattr(self, name).set(values)

    def begin(
        self,
        at: NDArray[np.int32],
        rows: Sequence[Sampling],
        position: NDArray[np.int32],
        step: NDArray[np.int32],
        bound: dict[int, Bound] | None = None,
    ) -> None:
        """Write parameters, position and step to rows `at` of the state. All arrays are (N,).

        bound: the launches of earlier calls for this state, by N, to which this call adds its own.
        """
        bound = {} if bound is None else bound
        values = {**parameters(rows), "position": position, "step": step}
        seed, N, B = values.pop("seed"), len(at), len(self.token)
        words = (each.view(np.int32) for each in values.values())
        given = np.concatenate([seed.view(np.int32), at, *words])
        if N not in bound:
            numbers = cupy.empty(len(given), "int32")
            args = (numbers, self.seed, *(getattr(self, name) for name in values), N, B)
            bound[N] = Bound(numbers, (_per_row(SLOTS_FILE, "begin_slots", N, args),))
        bound[N].out.set(given)
        bound[N].run()


class Masks(NamedTuple):
    """R masks of allowed tokens for M rows of logits, on the device."""

    index: CudaArray  # type: ignore[assignment]  # (M,) int32: 1 + the row's mask; 0: no mask
    masks: CudaArray  # (R, ceil(V / 32)) int32: bit t % 32 of word t / 32 is 1 for allowed tokens t


NO_MASKS = (None, None)


class Slots(NamedTuple):
    """For each of M rows of logits: its row of the state, and inputs of the next step, in int32."""

    row: CudaArray  # row of the state; if out of range, no token is sampled
    token: CudaArray  # copy of the sampled token
    position: CudaArray  # copy of the position of the sampled token
    turn: CudaArray  # number of launches of this kernel so far


def _per_row(file: str, kernel: str, rows: int, args: tuple[object, ...]) -> Launch:
    """Return a launch with one thread per row."""
    return launch_at(file, Geometry(kernel, (ceil(rows / ROWS_BLOCK),), (ROWS_BLOCK,)), args)


def choose_geometry(
    rows: int, sms: int, clusters: bool, threads: int | None = None, defines: Defines = ()
) -> Geometry:
    """Return a geometry of one cluster per row: the largest clusters that all run concurrently.

    clusters: whether the GPU has clusters; otherwise each row has one block. Tests pass other
    numbers of threads and other constants.
    """
    blocks = 1
    for n in (8, 4, 2) if clusters else ():
        at_once = sms if n == 2 else sms * 4 // 5  # larger clusters leave some SMs idle
        if rows * n <= at_once:
            blocks = n
            break
    if threads is None:
        threads = THREADS // 2 if blocks > 2 or rows > sms else THREADS
    known = {"THREADS": (threads, THREADS), "CLUSTER": (blocks, 1)}
    changed = tuple((f"SAMPLE_{name}", n) for name, (n, usual) in known.items() if n != usual)
    return Geometry("sample_token", (rows * blocks,), (threads,), defines=(*changed, *defines))


def _geometry(rows: int) -> Geometry:
    """Return the launch geometry for the current device."""
    clusters = gpu().has_clusters
    return choose_geometry(rows, multiprocessors(), clusters)


def request() -> None:
    """Start compiling the kernels that sample one row and that set the state of new sequences.

    Of all kernels that a program needs at its start, the sampling kernel takes longest to compile.
    """
    load(FILE, "sample_token", _geometry(1).defines)
    load(SLOTS_FILE, "begin_slots")


@variant("block", FILE, "sample_token", block=THREADS)
def _block(c: Call) -> Launch:
    slots = (c.slot_row, c.slot_token, c.slot_position, c.slot_turn)
    args = (c.logits, *c.state, *slots, c.changes, c.counts, c.report, c.mask_index, c.masks)
    changed = 0 if c.changes is None else 1 if c.counts is None else 2
    parts = {"CHANGES": changed, "DRAFTS": c.together > 0, "MASKS": c.masks is not None}
    defines = tuple((f"SAMPLE_{name}", int(part)) for name, part in parts.items() if part)
    geometry = _geometry(c.M).with_defines(defines)
    H = c.H if c.forced is not None else 0
    return launch_at(FILE, geometry, (*args, c.forced, c.B, c.V, H, c.n_ctx, max(c.together, 1)))


def _prepare_state(unchecked: UncheckedCall) -> Call:
    c, inputs = unchecked.checked(), unchecked.inputs
    check_rows("logits", c.logits, MAX_V)
    if c.slot_row is None and c.M != c.B:
        raise InputError(f"logits: expected {c.B} rows, like the state, got {c.M}")
    if not 0 < c.n_ctx <= ENDLESS:
        raise InputError(f"n_ctx: expected 1 to {ENDLESS}, got {c.n_ctx}")
    if c.changes is not None and c.W != CHANGES:
        raise InputError(f"changes: expected {CHANGES} numbers for each row, got {c.W}")
    if (c.masks is None) != (c.mask_index is None):
        raise InputError("masks: expected mask_index with it")
    c.state = inputs[1 : 1 + len(SampleState._fields)]
    c.kept = tuple(array for array in inputs[1:-1] if array is not None)  # inputs[-1] is report
    return c


def _line(rows: str) -> str:
    """Return the contract of sample_token. rows: axis of token and logprob, "B" or "M"."""
    written = f"token i32 {rows}; logprob f32 {rows}"
    inputs = f"logits f32 M V; {PARAMETERS}; {written}; {SLOTS}; {CHANGED}; {MASKS}"
    inputs += "; forced? i32 B H; report? i32 2 2 M"
    return f"{inputs} -> token i32 {rows}"


_STATE = Operation(
    name="sample_token",
    variants=(_block,),
    options={"n_ctx": ENDLESS, "together": 0},
    prepare=_prepare_state,
    line=_line("B"),
)
_SAMPLED = replace(_STATE, line=_line("M"))


def bind_state(
    logits: CudaArray,
    state: SampleState,
    n_ctx: int = ENDLESS,
    report: CudaArray | None = None,
    slots: Slots | None = None,
    changes: CudaArray | None = None,
    counts: CudaArray | None = None,
    masks: Masks | None = None,
) -> Bound:
    """Bind a launch that samples a token for each row of logits (M, V) and updates `state`.

    A run writes token and logprob, marks the token in occurred, and adds one to position and step;
    position stays below n_ctx. out is `state.token`. slots: rows of the state, all different; None:
    M rows in order. report (2, 2, M) int32 gets a copy of token and of the bits of logprob, in
    report[0] if the step (with slots, their `turn`) is even, else in report[1]. report may be host
    memory. changes (B, 258), with state.occurred: results of `sampling.changes` per row. counts (B,
    V) int32, needed for penalties: how often each token was sampled. A run increments counts.
    masks: the allowed tokens of each row; None: all.
    """
    slot_arrays = slots or (None,) * len(Slots._fields)
    inputs = (logits, *state, *slot_arrays, changes, counts, *(masks or NO_MASKS), None, report)
    return _STATE.bind_on_device(inputs, n_ctx=n_ctx)


def bind_sampled(
    logits: CudaArray,
    state: SampleState,
    slots: Slots,
    together: int,
    changes: CudaArray | None = None,
    counts: CudaArray | None = None,
    masks: Masks | None = None,
    forced: CudaArray | None = None,
) -> Bound:
    """Bind a launch that samples `together` rows per slot (sequence) and leaves the state as it is.

    The rows of a slot have successive positions. Row i is sampled at step + i, as if the tokens of
    rows 1 to i had been sampled before. Rows with position -1 are skipped. token and logprob of
    `state` must have one element per row, (M,). forced (B, H): the token at each position of each
    sequence, which a row at the position before it reports in place of a sampled token; the
    temperature must be 0. Other arguments are as in `bind_state`.
    """
    inputs = (logits, *state, *slots, changes, counts, *(masks or NO_MASKS), forced, None)
    return _SAMPLED.bind_on_device(inputs, together=together)


@variant("slots", SLOTS_FILE, "begin_slots", "place_rows")
def _place(c: Call) -> Launch:
    """Launch place_rows; `SampleState.begin` launches begin_slots."""
    drafts = (c.draft, c.left, c.slot_token, c.slot_position, c.together)
    args = (c.slot_row, c.token, c.position, *drafts, c.M, c.B, c.K if c.draft is not None else 0)
    return _per_row(SLOTS_FILE, "place_rows", c.M, args)


PLACE_ROWS = Operation(
    name="place_rows",
    variants=(_place,),
    options={"together": 1},
    line="slot_row i32 M; token position i32 B; draft? i32 B K; left? i32 B; "
    "slot_token slot_position i32 M "
    "-> slot_token slot_position i32 M",
)


def bind_place(
    state: SampleState,
    slots: Slots,
    draft: CudaArray | None = None,
    left: CudaArray | None = None,
    together: int = 1,
) -> Bound:
    """Bind a launch that copies each slot's (sequence's) token and position to its rows in `slots`.

    out is `slots.token`. Rows whose slot is not in the state are unchanged. With draft (B, K) and
    left (B,), a slot has `together` rows: the first is for its last token, further rows are for its
    draft tokens, limited by the number of tokens that the slot may still draw.
    """
    inputs = (slots.row, state.token, state.position, draft, left, slots.token, slots.position)
    arrays = tuple(each for each in (*state, *slots, draft, left) if each is not None)
    return PLACE_ROWS.bind_on_device(inputs, together=together)._replace(extra=arrays)


@variant("occurred", FILE, "mark_occurred")
def _occurred(c: Call) -> Launch:
    """Launch mark_occurred: occurred[rows[i], tokens[i]] = 1. AnyArray out of range are skipped."""
    if c.N > MAX_ROWS:
        raise InputError(f"tokens: expected at most {MAX_ROWS:,}, got {c.N:,}")
    return _per_row(FILE, "mark_occurred", c.N, (c.tokens, c.rows, c.occurred, c.N, c.B, c.V))


MARK_OCCURRED = Operation(
    name="mark_occurred",
    variants=(_occurred,),
    line="tokens rows i32 N; occurred u8 B V -> occurred u8 B V",
)


def _prepare(unchecked: UncheckedCall) -> Bound:
    """Bind a call of `sample_token` with a new state, whose arrays are in Bound.extra.

    Each run is a step. occurred and counts (B, V) are copied; None: no token has occurred.
    """
    sampling, step, occurred, counts, masks = (
        unchecked.options[name] for name in ("sampling", "step", "occurred", "counts", "masks")
    )
    c = unchecked._replace(inputs=(*unchecked.inputs, occurred, counts, masks)).checked(step=None)
    state = SampleState.allocate(c.B, c.V)._replace(token=c.output("token"))
    rows = rows_of(sampling, c.B)
    state.set(rows)
    state.step.fill(check_step(step))
    if occurred is not None:
        state.occurred[...] = occurred != 0
    if counts is not None:
        counts, marks = counts.copy(), state.occurred
        marks |= (counts > 0).astype("uint8")
    elif any(row.counts for row in rows):
        counts = cupy.zeros((c.B, c.V), "int32")
    if masks is not None:
        masks = Masks(cupy.asarray(np.arange(1, c.B + 1, dtype=np.int32)), masks)
    if not any(row.changes for row in rows):
        return bind_state(c.logits, state, masks=masks)
    tables = cupy.zeros((c.B, CHANGES), "float32")
    for b, row in enumerate(rows):
        values, places = changes(row, c.V)
        tables[b].set(values)
        state.occurred[b] += cupy.asarray(places)
    return bind_state(c.logits, state, changes=tables, counts=counts, masks=masks)


def _make(at: Mapping[str, object], rng: np.random.Generator) -> Inputs:
    return (draw_stable(at, rng),)


OPERATION = Operation(
    name="sample_token",
    variants=(_block,),
    options={"sampling": None, "step": 0, "occurred": None, "counts": None, "masks": None},
    prepare=_prepare,
    steps=(MARK_OCCURRED, PLACE_ROWS, TAKE_DRAFTS, TAKEN_ROWS),
    workload=Workload(
        document="gpt2block; random numbers by Salmon et al. (2011)",
        idea="first token whose cumulative mass exp(logit / temperature), of kept tokens, passes u",
        sizes={"B": 1, "V": 50257},
        draw=_make,
        traffic=lambda sizes: 4 * sizes["B"] * sizes["V"],
        flops=lambda sizes: 5 * sizes["B"] * sizes["V"],
        attrs={
            "sampling": Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=2**32 + 4),
            "step": 2,
        },
        small=(
            {"B": 2, "V": 70},
            {"B": 3, "V": 33, "sampling": Sampling(temperature=1.5, top_k=5, seed=2), "step": 0},
        ),
    ),
)


def sample_token(
    logits: CudaArray,
    sampling: Sampling | Sequence[Sampling] | None = None,
    step: int = 0,
    occurred: CudaArray | None = None,
    counts: CudaArray | None = None,
    masks: CudaArray | None = None,
) -> CudaArray:
    """Compute `reference.sample_token` on CuPy arrays: logits float32, occurred uint8, rest int32.

    Each call copies the parameters to the device; `SampleState` and `bind_state` avoid these
    copies. Raises InputError.
    """
    inputs, state = contiguous(logits), {"occurred": occurred, "counts": counts, "masks": masks}
    return OPERATION.bind_on_device(inputs, sampling=sampling, step=step, **state).run()


def _integers(name: str, value: AnyArray) -> CudaArray:
    """Return integers from the host or the device as an int32 device array."""
    (array,) = contiguous(value if isinstance(value, cupy.ndarray) else np.asarray(value))
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, got {array.dtype}")
    return cupy.asarray(array, np.int32)


def mark_occurred(tokens: AnyArray, rows: AnyArray, occurred: CudaArray) -> CudaArray:
    """Set occurred[rows[i], tokens[i]] to 1 for packed tokens (N,) of prompts; return `occurred`.

    occurred is (B, V) uint8, rows (N,). Raises InputError.
    """
    indices = _integers("tokens", tokens), _integers("rows", rows)  # launches keep no arrays
    return MARK_OCCURRED.bind_on_device((*indices, occurred)).run()
