"""`gpt2block profile`: bytes and times of kernels, the trace, the table, and the command.

GPU times come from an emulated GPU whose kernels take known times.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_recorder import _Kernel, recording

from benchmarks.decoding import RandomModel
from gpt2block import (
    GPT2,
    Block,
    BlockWeights,
    GPT2Config,
    GPT2Weights,
    Llama,
    LlamaConfig,
    LlamaWeights,
    Sampling,
    random_input,
)
from gpt2block.apps.profiling.runs import Profile, TimedPass, of_block, of_generate, of_score
from gpt2block.apps.profiling.summary import kinds, layer_of, operations, pass_times
from gpt2block.apps.profiling.trace import trace as trace_of
from gpt2block.cuda import cupy, timing
from gpt2block.emulator import stand_in
from gpt2block.engine.cuda import timeline as cuda_timeline
from gpt2block.engine.model import start_all
from gpt2block.engine.recorder import TensorSpec
from gpt2block.engine.timeline import BytesMoved, Timeline, moves
from gpt2block.model import Model
from gpt2block.models.config import model_shapes
from gpt2block.ops.bench import ceilings
from tests.command_line import printed
from tests.devices import on_gpu, one_order
from tests.test_readme import shown

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=128, vocab_size=256, n_ctx=64)
LLAMA = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_ff=96, vocab_size=61, n_ctx=32)
ROWS, TOKENS, STEPS = 2, 9, 3
START, BETWEEN, SAVED = 3.0, 0.5, 0.75  # µs per graph, per launch, and saved by an overlap


def profile_of(
    model: Model[Any], of: Callable[..., list[TimedPass]], rows: int = ROWS, gb_s: float = 10.0
) -> Profile:
    passes = of(model, rows, TOKENS, STEPS)
    return Profile("generate", "a model", model.device, model.dtypes, rows, TOKENS, gb_s, passes)


def own_us(kernel: str) -> float:
    """Return the time of a kernel on the emulated GPU; kernels have different times."""
    return 0.0 if kernel == "mark_occurred" else 2.0 + len(kernel) / 8


@contextmanager
def gpu_with_known_times(
    monkeypatch: pytest.MonkeyPatch,
    effects: Mapping[str, Callable[[], None]] | None = None,
    capability: str = "9.0",
) -> Iterator[list[str]]:
    """Emulate a GPU whose kernels only take time; yield names of kernels run outside of graphs.

    effects: name of a kernel -> function to call when it runs.
    """
    now: list[float] = [0.0]
    direct: list[str] = []

    def record(kernel: Any, grid: Any, block: Any, shared: int, args: Any, early: str = "") -> None:
        def run() -> None:
            now[0] += BETWEEN + own_us(kernel.name) - SAVED * bool(early)
            if effects and kernel.name in effects:
                effects[kernel.name]()

        if stand_in._state.stream._captured is None:
            direct.append(kernel.name)
        stand_in._now_or_captured(run)

    def launched(graph: Any, stream: Any = None) -> None:
        now[0] += START
        for call in graph._calls:
            call()

    monkeypatch.setattr(_Kernel, "record", record)
    monkeypatch.setattr(stand_in._Graph, "launch", launched)
    monkeypatch.setattr(stand_in.Event, "record", lambda event, *_: setattr(event, "at", now[0]))
    elapsed = lambda start, end: 1e-3 * (end.at - start.at)  # noqa: E731
    monkeypatch.setattr(stand_in.cuda, "get_elapsed_time", elapsed)
    with recording(capability):
        yield direct


def slices(trace: dict[str, Any], pid: int | None = None) -> list[dict[str, Any]]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if pid in (None, event["pid"])]


def assert_valid(trace: dict[str, Any]) -> None:
    """Assert that a trace follows the Trace Event Format, and that slices of a track nest."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    named = set()
    last: dict[tuple[int, int], float] = {}
    open_until: dict[tuple[int, int], list[float]] = {}
    for event in trace["traceEvents"]:
        track = event["pid"], event["tid"]
        assert event["name"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            named.add((event["name"], *track))
            assert event["args"]["name"]
            continue
        assert event["ph"] in ("X", "C")
        assert event["ts"] >= last.get(track, 0.0)
        last[track] = event["ts"]
        if event["ph"] == "C":
            assert event["args"]["GB/s"] >= 0
            continue
        assert event["dur"] >= 0
        assert ("process_name", event["pid"], 0) in named
        assert ("thread_name", *track) in named
        # Perfetto stores whole ns
        start, end = round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))
        parents = open_until.setdefault(track, [])
        while parents and parents[-1] <= start:
            parents.pop()
        assert not parents or end <= parents[-1], f"{event['name']} ends after its parent"
        parents.append(end)


# Bytes


def weights_of(rows: int, itemsize: int) -> int:
    """Bytes of weights that a decoding step reads: each once, but only some rows of tables."""
    stored = RandomModel(CONFIG, "float32" if itemsize == 4 else "bfloat16").weight_bytes
    return stored + rows * CONFIG.n_embd * (itemsize + 4)  # rows of wte and wpe


def cache_of(lengths: list[int], itemsize: int) -> int:
    """Bytes of keys and values that a decoding step reads and writes for all rows."""
    token = 2 * CONFIG.n_layer * CONFIG.n_embd * itemsize
    return token * sum(n + 1 for n in lengths) + token * len(lengths)


def test_a_token_reads_every_weight_once_and_the_keys_so_far() -> None:
    found = profile_of(GPT2(GPT2Weights.random(0, CONFIG), "cpu"), of_generate)
    tokens = [each.timeline for each in found.passes if each.kind == "token"]
    assert len(tokens) == STEPS
    for n, timeline in enumerate(tokens):
        moved = [ran.moved for ran in timeline.ran]
        assert sum(each.weights for each in moved) == weights_of(ROWS, 4)
        assert sum(each.cache for each in moved) == cache_of([TOKENS + n] * ROWS, 4)


def test_a_prompt_reads_its_own_keys() -> None:
    found = profile_of(GPT2(GPT2Weights.random(0, CONFIG), "cpu"), of_generate)
    kind, prompt = found.passes[0]
    assert kind == "prompt"
    token = 2 * CONFIG.n_layer * CONFIG.n_embd * 4
    assert sum(ran.moved.cache for ran in prompt.ran) == 2 * token * ROWS * TOKENS


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_kernels_of_a_gpu_move_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: str, itemsize: int
) -> None:
    with gpu_with_known_times(monkeypatch):
        found = profile_of(GPT2(GPT2Weights.random(0, CONFIG), "cuda:0", dtype), of_generate)
        kind, token = found.passes[1]
    assert kind == "token"
    moved = {ran.step: ran.moved for ran in token.ran}
    # positions stay zero, as kernels here only take time: each row sees one key
    assert sum(each.cache for each in moved.values()) == cache_of([0] * ROWS, itemsize)
    scales = 0
    if dtype == "float32":  # hi/lo weights: 2 x 2 bytes and a scale for each row
        outputs = sum(s[1] for s in CONFIG.block_shapes().values() if len(s) == 2)
        scales = 4 * (CONFIG.n_layer * outputs + CONFIG.vocab_size)
    assert sum(each.weights for each in moved.values()) == weights_of(ROWS, itemsize) + scales
    x = 4 * ROWS * CONFIG.n_embd
    assert moved["h.0.x1"].activations == 3 * x  # attention, the residual, the sum
    assert moved["sample"] == BytesMoved(0, 4 * ROWS * CONFIG.vocab_size + 4 * ROWS, 0)


def test_rounded_activations_move_half_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by wgmma read rounded x; the residual and the sum remain float32."""
    weights, rows = GPT2Weights.random(0, GPT2Config(1, 12, 768, 16, 53)), 48
    for rounding, arrays in (((), 3), (("float16",), 2.5)):
        monkeypatch.setattr(import_module("gpt2block.ops.linear"), "ROUNDING", rounding)
        with gpu_with_known_times(monkeypatch):
            model = GPT2(weights, "cuda:0", "float16")
            token = profile_of(model, of_generate, rows=rows).passes[1].timeline
        moved = {ran.step: ran.moved for ran in token.ran}
        assert moved["h.0.x1"].activations == arrays * 4 * rows * 768
        places = 2 * 4 * rows  # arrays `row` and `position`
        assert moved["h.0.attn"].activations == (arrays - 1) * 4 * rows * 768 + places


def test_attention_that_writes_to_the_kv_cache_moves_its_new_tokens() -> None:
    """The whole cache is not counted, neither as cache nor as weights."""
    N, C = 96, 768
    cache = TensorSpec((64, 1024, C), "float16", 2 * 64 * 1024 * C)
    row, position, seams = np.full(N, 5), np.arange(N), np.array([0, N])
    inputs = (TensorSpec((N, 3 * C), "float16", 6 * N * C), seams, cache, cache, row, position)
    names = ("", "cu_seqlens", "h.0.k", "h.0.v", "row", "positions")
    found = moves("attention_varlen", names, inputs, TensorSpec((N, C), "float16", 2 * N * C))
    assert (found.weights, found.cache) == (0, 2 * 2 * N * C)
    plain = moves(
        "attention_varlen", names[:2], inputs[:2], TensorSpec((N, C), "float16", 2 * N * C)
    )
    assert plain.cache == 0


def test_memory_that_a_product_works_in_is_no_weight() -> None:
    M, N, K = 512, 768, 256
    a, w = TensorSpec((M, K), "float16", 2 * M * K), TensorSpec((N, K), "float8_e5m2", N * K)
    work, out = TensorSpec((N * K,), "float16", 2 * N * K), TensorSpec((M, N), "float16", 2 * M * N)
    names, inputs = (
        ("", "w", "", "", "", "wide", "stream_k_workspace"),
        (a, w, None, None, None, work, work),
    )
    assert moves("gemm", names, inputs, out) == BytesMoved(N * K, 2 * M * (K + N), 0)


def test_bytes_of_a_borrowed_input_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of x and of the result count, though a block owns neither."""
    with gpu_with_known_times(monkeypatch):
        block = Block(BlockWeights.random(0, CONFIG), device="cuda:0", dtype="bfloat16")
        x = random_input(0, (2, 16, CONFIG.n_embd)).astype("bfloat16")
        (timeline,) = block._timed(partial(block, x))
    ran = {each.step: each for each in timeline.ran}
    row = 2 * 2 * 16 * CONFIG.n_embd
    assert ran["ln1"].moved.activations == 2 * row
    assert ran["output"].moved.activations == (4 + 1 + 1) * row
    assert ran["output"].dtype == ran["output"].weights == "bfloat16"


def test_llama_and_grouped_keys() -> None:
    found = profile_of(Llama(LlamaWeights.random(0, LLAMA), "cpu"), of_generate)
    token = found.passes[1].timeline
    width = 2 * LLAMA.n_layer * LLAMA.kv_width * 4
    assert sum(ran.moved.cache for ran in token.ran) == width * ROWS * (TOKENS + 1 + 1)
    matrices = sum(
        int(np.prod(shape)) for name, shape in model_shapes(LLAMA).items() if name != "wte"
    )
    frequencies = LLAMA.n_layer * 8 * LLAMA.head_size // 2
    read = sum(ran.moved.weights for ran in token.ran)
    assert read == 4 * (matrices + ROWS * LLAMA.n_embd) + frequencies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [1, 24])
def test_a_llama_on_a_gpu_reads_every_weight_once(
    monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int
) -> None:
    """With one row one kernel computes the feed-forward; later kernels name its weights too."""
    large = LlamaConfig(
        n_layer=2, n_head=6, n_kv_head=2, n_embd=384, n_ff=1024, vocab_size=512, n_ctx=32
    )
    with gpu_with_known_times(monkeypatch):
        model = Llama(LlamaWeights.random(0, large), "cuda:0", dtype)
        found = profile_of(model, of_generate, rows=rows)
        engine: Any = model.engine
    token = found.passes[1].timeline
    table = engine._matrices["wte"].nbytes
    stored = model.nbytes - table
    if dtype == "float32":  # hi/lo matrices replace the matrices that model.nbytes counts
        vectors = sum(vector.nbytes for vector in engine._vectors.values())
        stored = vectors + sum(matrix.nbytes for matrix in engine.prompts.hi_lo.values())
    expected = stored + rows * table // large.vocab_size
    frequencies = 8 * large.head_size // 2
    if "gated_sums" in {ran.op for ran in token.ran}:
        expected += frequencies  # all layers read the same rotations
        if dtype == "float8_e4m3fn":  # two later kernels read w_down's scales, at the end only one
            expected += (2 * large.n_layer - 1) * 4 * large.n_embd
    else:
        expected += large.n_layer * frequencies
    assert ("gated_sums" in {ran.op for ran in token.ran}) == (rows == 1 and dtype != "float32")
    assert sum(ran.moved.weights for ran in token.ran) == expected


def test_rows_of_a_cache_pass_are_read_in_part() -> None:
    """NumPy writes K and V of rows [Q | K | V] to the kv_cache, and attends with Q."""
    found = profile_of(GPT2(GPT2Weights.random(0, CONFIG), "cpu"), of_generate)
    moved = {ran.step: ran.moved for ran in found.passes[1].timeline.ran}
    row, numbers = 4 * CONFIG.n_embd * ROWS, 8 * 2 * ROWS
    assert moved["h.0.kv"].activations == 2 * row + numbers
    assert moved["h.0.attn"].activations == 2 * row + numbers + 8  # cu_seqlens has one more


# Times


def test_times_of_kernels_on_a_gpu_with_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_with_known_times(monkeypatch):
        model = GPT2(GPT2Weights.random(0, CONFIG), "cuda:0", "bfloat16")
        found = profile_of(model, of_generate)
    assert [each.kind for each in found.passes] == ["prompt", *["token"] * STEPS]
    for _, timeline in found.passes:
        assert timeline.between == pytest.approx(BETWEEN)
        apart = early = START
        for ran in timeline.ran:
            assert ran.own == pytest.approx(own_us(ran.kernel))
            apart += own_us(ran.kernel) + BETWEEN
            early += own_us(ran.kernel) + BETWEEN - SAVED
            assert ran.apart == pytest.approx(apart)
            assert ran.end == pytest.approx(early)
        assert timeline.us == timeline.ran[-1].end == pytest.approx(sum(timeline.added))
        assert timeline.apart == pytest.approx(apart)
    token = found.passes[1].timeline
    assert [ran.step for ran in token.ran][:3] == ["embedding", "h.0.q", "h.0.attn"]
    assert token.ran[-1].kernel == "sample_token"
    assert token.ran[1].grid == (48, 1)


def test_kernels_that_do_not_overlap_have_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_with_known_times(monkeypatch, capability="8.0"):
        found = profile_of(GPT2(GPT2Weights.random(0, CONFIG), "cuda:0", "bfloat16"), of_score)
    assert len(found.passes) == STEPS
    for _, timeline in found.passes:
        assert [ran.end for ran in timeline.ran] == [ran.apart for ran in timeline.ran]
        assert timeline.apart == timeline.us
    assert {event["pid"] for event in trace_of(found)["traceEvents"]} == {1}


def test_each_recording_of_a_call_is_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the call nothing is measured any more."""
    monkeypatch.setattr("gpt2block.engine.cuda.model.TOKENS_AT_ONCE", 16)
    ids = np.zeros(12, np.int32)
    with gpu_with_known_times(monkeypatch) as direct:
        engine = GPT2(GPT2Weights.random(0, CONFIG), "cuda:0", "bfloat16").engine
        found = engine.timed(lambda: engine.log_likelihood([ids, ids]))
        assert len(found) == 2
        direct.clear()
        engine.log_likelihood([ids])
        assert "mark_occurred" not in direct
        with pytest.raises(ZeroDivisionError):
            engine.timed(lambda: 1 // 0)
        assert engine.timed(lambda: None) == []


def test_repeated_calls_of_a_block_are_measured_as_they_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gpu_with_known_times(monkeypatch):
        block = Block(BlockWeights.random(0, CONFIG), device="cuda:0", dtype="bfloat16")
        found = of_block(block, 2, 16, STEPS)
    assert [each.kind for each in found] == ["block"] * STEPS
    for _, timeline in found:
        assert [ran.step for ran in timeline.ran] == [step.name for step in block.steps]
        assert timeline.apart - timeline.us == pytest.approx(SAVED * len(block.steps))


class Part(list[float]):
    """A graph of kernels that take these times."""

    def __call__(self) -> None:
        pass


def ends_with(
    monkeypatch: pytest.MonkeyPatch,
    own: list[float],
    us: Callable[[Part], float],
    lead: Callable[..., None] = lambda *_: None,
) -> list[float]:
    """Return the computed ends of kernels. own: their times alone. us: measures a graph."""

    def measured(parts: list[Part], led: Callable[[], None]) -> list[float]:
        led()
        return [us(part) for part in parts]

    monkeypatch.setattr(cuda_timeline, "_graph", lambda launches, _: Part(launches))
    monkeypatch.setattr(cuda_timeline, "_us", measured)
    return cuda_timeline.ends_us(own, False, lead)


def test_measured_ends_never_decrease(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 4.0, 9.0, 18.0])  # the last is the whole pass, to which ends are scaled
    found = ends_with(monkeypatch, [1.0] * 3, lambda _: next(times))
    assert found == pytest.approx([10.0, 10.0, 18.0])


def test_short_kernels_at_the_end_of_a_long_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a graph vary in proportion to its length: here by 5 µs for a pass of 1,684 µs."""
    rng = np.random.default_rng(0)
    own = [12.0] * 140 + [2.0, 2.0]
    ends = ends_with(monkeypatch, own, lambda part: sum(part) * (1 + rng.normal(0, 0.003)))
    assert ends[-1] == pytest.approx(sum(own), rel=0.01)
    assert np.diff(ends[-3:]) == pytest.approx([2.0, 2.0], abs=1.5)


def test_a_part_of_a_pass_follows_enough_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is timed after the kernels before it, and after whole passes if these are short."""
    leads: list[float] = []

    def lead(us: float = cuda_timeline.LEAD_US) -> None:
        leads.append(us)

    ends = ends_with(monkeypatch, [20.0] * 40, sum, lead)
    assert ends == pytest.approx([20.0 * n for n in range(1, 41)])
    assert leads == pytest.approx([200, 200, 40, -120, -280, 200])


def test_measuring_leaves_the_state_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring samples many times; later runs find the sampler's state unchanged."""
    prompts = [np.zeros(TOKENS, np.int32)] * ROWS
    effects: dict[str, Callable[[], None]] = {}
    with gpu_with_known_times(monkeypatch, effects):
        engine: Any = GPT2(GPT2Weights.random(0, CONFIG), "cuda:0", "bfloat16").engine
        decoding: Any = start_all(engine, prompts, [Sampling()] * ROWS, STEPS + 1)
        state, positions = decoding._steps.state, decoding._steps.positions[:ROWS]
        before = [array.copy() for array in (state.occurred, state.step, positions)]

        def sample() -> None:
            for array in (state.occurred, state.step, positions):
                array[...] = array + 1

        effects["sample_token"] = sample
        for step in range(1, STEPS):
            assert len(engine.timed(decoding.next)) == 1
            for array, first in zip((state.occurred, state.step, positions), before, strict=True):
                np.testing.assert_array_equal(array, first + step)


def test_numpy_steps_take_the_time_of_the_call() -> None:
    model = GPT2(GPT2Weights.random(0, CONFIG), "cpu")
    found = profile_of(model, of_generate)
    for _, timeline in found.passes:
        ends = [0.0, *(ran.end for ran in timeline.ran)]
        assert all(
            a + ran.own <= b + 1e-6
            for ran, (a, b) in zip(timeline.ran, itertools.pairwise(ends), strict=True)
        )
        assert timeline.own <= timeline.us
        assert timeline.ran[-1].end < timeline.us  # the token is sampled after the last step
    assert model.engine.timed(lambda: None) == []


def test_numpy_likelihoods_include_the_logits() -> None:
    found = profile_of(GPT2(GPT2Weights.random(0, CONFIG), "cpu"), of_score)
    steps = [ran.step for ran in found.passes[0].timeline.ran]
    assert steps[-2:] == ["logits", "scores"]
    assert steps.count("scores") == ROWS


# The trace and the table


def test_a_trace_with_overlapping_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_with_known_times(monkeypatch):
        model = GPT2(GPT2Weights.random(0, CONFIG), "cuda:0", "bfloat16")
        found = profile_of(model, of_generate)
    trace = trace_of(found)
    assert_valid(trace)
    kernels = sum(len(timeline.ran) for _, timeline in found.passes)
    for pid in (1, 2):
        events = slices(trace, pid)
        of_kernels = [e for e in events if e["tid"] > 1 and e["name"] != "floor"]
        assert len(of_kernels) == kernels
        passes = [e["name"] for e in events if e["cat"] == "pass"]
        assert passes == ["prompt 1", "token 1", "token 2", "token 3"]
        layers = [e["name"] for e in events if e["cat"] == "layer"]
        assert layers == ["layer 0", "layer 1"] * (STEPS + 1)
    assert {e["tid"] for e in slices(trace, 1)} == {1, 2, 3}  # two kernels at a time
    assert {e["tid"] for e in slices(trace, 2)} == {1, 2}
    (q, *_) = (e for e in slices(trace, 2) if e["name"] == "q: decode_mma")
    ran = found.passes[1].timeline.ran[1]
    assert q["dur"] == pytest.approx(ran.own, abs=2e-3)
    assert q["args"]["layer"] == 0
    assert (q["args"]["grid"], q["args"]["dtype"]) == ([48, 1], "float32")
    assert q["args"]["weights dtype"] == "bfloat16"
    assert q["args"]["bytes"] == ran.moved.total
    assert q["args"]["GB/s"] == pytest.approx(1e-3 * ran.moved.total / ran.own, abs=1e-3)
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert {e["pid"] for e in counters} == {2}
    assert counters[0]["ts"] == pytest.approx(START + BETWEEN)  # start of the first kernel
    assert counters[1]["args"]["GB/s"] == 0  # between two kernels


def test_a_trace_of_numpy_steps() -> None:
    found = profile_of(GPT2(GPT2Weights.random(0, CONFIG), "cpu"), of_generate)
    trace = trace_of(found)
    assert_valid(trace)
    whole = sum(timeline.us for _, timeline in found.passes)
    last = max(event["ts"] + event["dur"] for event in slices(trace))
    assert last == pytest.approx(whole, abs=0.01)
    assert trace["otherData"]["copy_gb_s"] == 10.0
    assert all("grid" not in event["args"] for event in slices(trace))


def test_the_floor_fills_a_part_of_each_kernel() -> None:
    found = profile_of(GPT2(GPT2Weights.random(0, CONFIG), "cpu"), of_score, gb_s=1e-6)
    trace = trace_of(found)  # at such a low bandwidth the floor fills the whole trace
    assert_valid(trace)
    steps = [e for e in slices(trace) if e["tid"] == 2]
    for step, floor in zip(steps[::2], steps[1::2], strict=True):
        assert floor["name"] == "floor"
        assert floor["dur"] == step["dur"]
        assert step["args"]["of floor"] > 1
        assert floor["args"]["floor_us"] == pytest.approx(1e3 * step["args"]["bytes"])


def test_rows_of_operations_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_with_known_times(monkeypatch):
        model = GPT2(GPT2Weights.random(0, CONFIG), "cuda:0", "bfloat16")
        found = profile_of(model, of_generate)
    assert kinds(found) == ["prompt", "token"]
    rows, times = operations(found, "token"), pass_times(found, "token")
    assert [row.step for row in rows] == [
        "embedding", "q", "attn", "x1", "gelu", "output", "logits", "sample"
    ]  # fmt: skip
    assert [row.count for row in rows] == [1, 2, 2, 2, 2, 2, 1, 1]
    assert sum(row.added_us for row in rows) == pytest.approx(times.us)
    assert sum(row.own_us for row in rows) == pytest.approx(times.own_us)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert sum(row.moved.total for row in rows) == times.moved.total
    assert times.floor_us == pytest.approx(1e-4 * times.moved.total)  # at 10 GB/s
    assert times.kernels == sum(row.count for row in rows)
    assert times.apart_us - times.us == pytest.approx(SAVED * times.kernels)
    q = rows[1]
    assert q.own_us == pytest.approx(2 * own_us("decode_mma"))
    assert q.gb_s == pytest.approx(1e-3 * q.moved.total / q.own_us)
    assert q.of_floor == pytest.approx(1e-4 * q.moved.total / q.own_us)


def test_a_kernel_that_takes_no_time_has_no_rate() -> None:
    one = GPT2(GPT2Weights.random(0, CONFIG), "cpu")
    found = profile_of(one, of_score)
    kind, timeline = found.passes[0]
    still = Timeline(tuple(ran._replace(own=0.0) for ran in timeline.ran), timeline.us)
    none = Profile("score", "m", "d", "float32", 1, 9, 10.0, [TimedPass(kind, still)])
    assert {(row.gb_s, row.of_floor) for row in operations(none, "score")} == {(None, None)}
    assert_valid(trace_of(none))


@pytest.mark.parametrize(
    ("step", "layer", "name"),
    [("h.11.q", 11, "q"), ("logits.1024", None, "logits"), ("embedding", None, "embedding")],
)
def test_layers_of_steps(step: str, layer: int | None, name: str) -> None:
    assert layer_of(step) == (layer, name)


# The command


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "HOST_COPIED", 1 << 20)
    monkeypatch.setattr(ceilings, "COPIED", 1 << 20)


def test_times_below_the_resolution_and_bytes_from_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(*sizes: Any) -> list[TimedPass]:
        ((kind, timeline),) = of_score(*sizes)
        *first, last = timeline.ran
        return [TimedPass(kind, Timeline((*first, last._replace(own=0.0)), timeline.us))]

    monkeypatch.setattr("gpt2block.apps.profiling.runs.of_score", passes)
    arguments = ("profile", "score", "--steps", 1, "--device", "cpu", "-o", tmp_path / "t.json")
    for gb_s, told in ((1e-3, True), (1e9, False)):
        monkeypatch.setattr("gpt2block.apps.profiling.runs.copy_gb_s", lambda _, rate=gb_s: rate)
        out = printed(*arguments)
        assert re.search(r"scores +\S+ +1 +< 0\.5 ", out)
        assert ("% floor above 100: the bytes come from a cache" in out) == told


def test_the_output_on_the_page_is_what_the_command_prints(tmp_path: Path) -> None:
    out = printed("profile", "--device", "cpu", "-o", tmp_path / "t.json").splitlines()
    trace = json.loads((tmp_path / "t.json").read_text())
    assert_valid(trace)
    assert trace["otherData"]["model"] == "shakespeare"
    first = next(n for n, line in enumerate(out) if line.startswith("token"))
    lines, page = out[first : first + len(shown("profile"))], shown("profile")
    found, expected = (
        [re.sub(r"\d[\d.,]*", "#", line).split() for line in part] for part in (lines, page)
    )
    assert found == expected


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_times_on_a_gpu_are_those_of_its_graph(dtype: str) -> None:
    model = GPT2(GPT2Weights.random(0), "cuda", dtype)
    found = of_generate(model, 1, 512, 3)
    assert [each.kind for each in found] == ["prompt", *["token"] * 3]
    engine: Any = model.engine
    replays: list[float] = []

    def note(recording: Any) -> None:
        again = cuda_timeline._graph(recording.launches[:-1], recording.overlapping)
        replays.append(1e3 * timing.interleaved_ms({"": again}, lead=again)[""])

    decoding = start_all(engine, [np.zeros(512, np.int32)], [Sampling()], 3)
    engine.recordings.watch = note
    decoding.next()
    engine.recordings.watch = None
    for _, timeline in found[1:]:
        without_sampler = timeline.ran[-2].end
        assert without_sampler == pytest.approx(replays[0], rel=0.15)
        assert 0 < timeline.between < 5
        assert timeline.own < timeline.apart
        assert timeline.us <= 1.05 * timeline.apart
        floor = 1e-3 * sum(ran.moved.total for ran in timeline.ran) / cupy_rate()
        assert floor < timeline.us


@on_gpu
def test_measuring_changes_no_token(device: Any) -> None:
    engine = GPT2(GPT2Weights.random(0), "cuda").engine
    prompts = [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)]
    sampling = [Sampling(seed=3), Sampling(seed=3, sample=1, repetition_penalty=1.3)]
    drawn = []
    for measured in (False, True):
        decoding = start_all(engine, prompts, sampling, 5)
        steps: list[Any] = []
        for _ in range(5):
            step = partial(lambda into, of: into.append(of.next()), steps, decoding)
            engine.timed(step) if measured else step()
        drawn.append([(each.tokens.tolist(), each.logprobs.tolist()) for each in steps])
    assert drawn[0] == drawn[1]


def cupy_rate() -> float:
    with cupy.cuda.Device(0):
        return ceilings.copy_gb_s(1 << 28)


@one_order
def test_copies_of_the_device_have_a_rate(device: Any) -> None:
    assert ceilings.copy_gb_s(1 << 16) > 0
