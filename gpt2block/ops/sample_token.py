"""The choice of the next token from logits.

The first token whose cumulative mass exp(logit / temperature), of those kept, passes a random
number. Kernels: tokens/sample.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    check_matrix,
    contiguous,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch, load
from gpt2block.errors import InputError
from gpt2block.ops._rows import MAX_ROWS, check_rows
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.sampling import Sampling, check_step, parameters, rows_of

FILE = "tokens/sample.cu"
SLOTS_FILE = "tokens/slots.cu"
THREADS = 1024
ROWS_BLOCK = 256
MAX_V = 2**23  # so that the sum of all masses is less than 2^64
ENDLESS = 2**31 - 1  # n_ctx for no limit
DTYPES = {
    "temperature": "float32",
    "top_p": "float32",
    "min_p": "float32",
    "repetition_penalty": "float32",
    "top_k": "int32",
    "seed": "int64",
    "sample": "int32",
    "seen": "uint8",
    "position": "int32",
    "step": "int32",
    "token": "int32",
    "logprob": "float32",
}


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
        return cls(**{name: cupy.zeros(_shape(name, B, V), DTYPES[name]) for name in cls._fields})

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
    return launch(file, kernel, (ceil(rows / ROWS_BLOCK),), (ROWS_BLOCK,), args)


def _shape(name: str, B: int, V: int) -> tuple[int, ...]:
    return (B, V) if name == "seen" else (B,)


def choose_geometry(
    rows: int, sms: int, threads: int | None = None, defines: Defines = ()
) -> Geometry:
    """One block per row, two on a multiprocessor if there are more rows than those.

    Tests pass other numbers of threads and constants.
    """
    if threads is None:
        threads = THREADS if rows <= sms else THREADS // 2
    sizes = () if threads == THREADS else (("SAMPLE_THREADS", threads),)
    return Geometry("sample_token", (rows,), (threads,), defines=(*sizes, *defines))


def request() -> None:
    """Begin to compile the kernel of few rows, the longest compile of a start."""
    load(FILE, "sample_token", choose_geometry(1, 1).defines)


class Job(NamedTuple):
    """A checked call: logits (M, V), the state of B rows."""

    logits: CudaArray
    state: SampleState
    slots: Slots | None
    report: CudaArray | None
    n_ctx: int


def _launch(job: Job) -> tuple[Launch, ...]:
    M, V = job.logits.shape
    slots = job.slots or (None,) * len(Slots._fields)
    args = (job.logits, *job.state, *slots, job.report, len(job.state.token), V, job.n_ctx)
    geometry = choose_geometry(M, device_attribute("MultiProcessorCount"))
    return (launch_at(FILE, geometry, args),)


def bind_state(
    logits: Any,
    state: SampleState,
    n_ctx: int = ENDLESS,
    report: CudaArray | None = None,
    slots: Slots | None = None,
) -> Bound:
    """Choose a token for each row of logits (M, V) by the parameters in `state`, and update it.

    A run writes token and logprob, marks the token in seen, and adds one to position and step;
    position stays below n_ctx. out is `state.token`. slots: the rows of the state, of which no two
    may be the same; None: M rows in order. report (2, 2, M) int32 gets a copy of token and of the
    bits of logprob, in its first half for even steps, or turns of `slots`; it may be host memory.
    """
    M, V = check_matrix("logits", logits, "(M, V)")
    check_rows("logits", logits, MAX_V)
    if not 0 < n_ctx <= ENDLESS:
        raise InputError(f"n_ctx: expected 1 to {ENDLESS}, got {n_ctx}")
    B = M if slots is None else len(state.token)
    for name, array in state._asdict().items():
        check(name, array, _shape(name, B, V), DTYPES[name])
    for name, array in (slots._asdict() if slots else {}).items():
        check(f"slots.{name}", array, (M,), "int32")
    if report is not None:
        check("report", report, (2, 2, M), "int32")
    launches = _launch(Job(logits, state, slots, report, n_ctx))
    return Bound(state.token, launches, (*state, *(slots or ())))


def bind_place(state: SampleState, slots: Slots) -> Bound:
    """Copy token and position of the state to the rows of slots; out is `slots.token`.

    Rows outside of the state keep theirs.
    """
    M, B = len(slots.row), len(state.token)
    args = (slots.row, state.token, state.position, slots.token, slots.position, M, B)
    placing = _per_row(SLOTS_FILE, "place_rows", M, args)
    return Bound(slots.token, (placing,), (*state, *slots))


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    step: int = 0,
    seen: CudaArray | None = None,
) -> Bound:
    """inputs (logits (B, V),), out (B,) of int32; extra is the rest of a `SampleState`.

    seen (B, V) is copied; without it, no token was seen. Each run is a step.
    """
    (logits,) = inputs
    B, V = check_matrix("logits", logits, "(B, V)")
    token = output(out, (B,), "int32", apart={"logits": logits, "seen": seen})
    state = SampleState.allocate(B, V)._replace(token=token)
    state.set(rows_of(sampling, B))
    state.step.fill(check_step(step))
    if seen is not None:
        check("seen", seen, (B, V), "uint8")
        state.seen[...] = seen
    return bind_state(logits, state)


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["V"])
    return (np.float32(3) * rng.standard_normal(shape, dtype=np.float32),)


OPERATION = Operation(
    name="sample_token",
    document="gpt2block; random numbers by Salmon et al. (2011)",
    idea="the first token whose cumulative mass exp(logit / temperature), of those kept, passes u",
    sizes={"B": 1, "V": 50257},
    variants=(
        Variant(
            "block",
            FILE,
            ("sample_token",),
            "one block per row; after exp all is integers: the same bits in any batch",
            block=THREADS,
            launch=_launch,
        ),
    ),
    auxiliary=(
        Variant("seen", FILE, ("mark_seen",), "tokens of prompts, for the repetition penalty"),
        Variant(
            "slots",
            SLOTS_FILE,
            ("begin_slots", "place_rows"),
            "sampling parameters of sequences that begin; token and position of a step's rows",
        ),
    ),
    make=_make,
    traffic=lambda sizes: 4 * sizes["B"] * sizes["V"],
    flops=lambda sizes: 5 * sizes["B"] * sizes["V"],
    bound="memory",
    attrs={"sampling": Sampling(temperature=0.8, top_k=50, top_p=0.95)},
    binder=bind,
)


def sample_token(
    logits: CudaArray,
    sampling: Sampling | Sequence[Sampling] | None = None,
    step: int = 0,
    seen: CudaArray | None = None,
) -> CudaArray:
    """`reference.sample_token` on CuPy arrays: float32, `seen` uint8; raises InputError.

    Each call copies the parameters to the device; `SampleState` and `bind_state` avoid this.
    """
    (logits,) = contiguous(logits)
    return bind((logits,), sampling=sampling, step=step, seen=seen).run()


def bind_mark_seen(tokens: Any, rows: Any, seen: Any) -> Bound:
    """tokens (N,), rows (N,) of int32, seen (B, V) of uint8, which is out.

    seen[rows[i], tokens[i]] becomes 1; places outside of it are skipped.
    """
    check("tokens", tokens, dtype="int32")
    check("rows", rows, tokens.shape, "int32")
    check("seen", seen, dtype="uint8")
    if seen.ndim != 2 or tokens.size > MAX_ROWS:
        raise InputError(
            f"expected up to {MAX_ROWS:,} tokens and seen (B, V), got {tokens.shape}, {seen.shape}"
        )
    args = (tokens, rows, seen, tokens.size, *seen.shape)
    return Bound(seen, (_per_row(FILE, "mark_seen", tokens.size, args),))


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
    return bind_mark_seen(tokens, rows, seen).run()
