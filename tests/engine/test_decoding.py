"""Slots: sequences get the same tokens as alone, whenever and in whichever slot they run."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from gpt2block import GPT2, GPT2Config, cuda
from gpt2block.emulator.stand_in import Stream
from gpt2block.engine.cuda import steps as cuda_steps
from gpt2block.engine.generation.sequences import Generation
from gpt2block.engine.model import Ids, Start, start_all
from gpt2block.engine.speculation import SpeculationPolicy
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.models.config import ModelConfig
from gpt2block.sampling import Sampling
from tests.devices import GPU, SOMEWHERE, running_on, slow
from tests.generating import Run, generate
from tests.markov import MarkovEngine, byte_encoding, random_table
from tests.threads import together

TINY = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=24, vocab_size=37)
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU.marks)])


def model(device: str, config: GPT2Config = TINY, dtype: str = "float32") -> GPT2:
    return GPT2(GPT2Weights.random(0, config), device=device, dtype=dtype)


def random_prompts(lengths: list[int], config: ModelConfig = TINY) -> list[Ids]:
    rng = np.random.default_rng(0)
    return [rng.integers(config.vocab_size, size=n).astype(np.int32) for n in lengths]


def the_same(got: Generation, expected: Generation) -> bool:
    """Return whether results agree; log-probabilities may differ, as BLAS depends on rows."""
    near = np.allclose(got.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)
    return near and (got.tokens, got.finish_reason) == (expected.tokens, expected.finish_reason)


def test_slots_on_the_emulator() -> None:
    """Refilled slots, a stop id, and a restarted sequence give the bits alone."""
    with running_on("shuffled"):
        m, prompts = model("cuda"), random_prompts([22, 20, 3, 1])
        options: dict[str, Any] = {"max_new_tokens": 4, "seed": 3, "stop_ids": [2, 10]}
        options |= {"repetition_penalty": 1.5, "temperature": 0.1, "overflow": "truncate"}
        for changes in ({}, {"frequency_penalty": 0.2, "min_new_tokens": 2}):
            options |= changes
            alone = [m.generate(prompt, **options) for prompt in prompts]
            assert m.generate(prompts, rows_at_once=2, **options) == alone


def test_a_prompt_alone_has_the_bits_of_its_length() -> None:
    """Lengths are rounded up to share launches; the result is still of the prompt's last row."""
    with running_on("shuffled"):
        config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_ctx=80, vocab_size=37)
        options: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0, "stop_ids": ()}
        m = model("cuda", config)
        for prompt in random_prompts([20, 34, 79], config):
            (drawn,) = m.generate(prompt, **options).logprobs
            logits = m.engine.forward([prompt], "last")[0].astype(np.float64)
            top = logits.max()
            np.testing.assert_allclose(drawn, -np.log(np.exp(logits - top).sum()), rtol=1e-5)
            assert m.generate(prompt, **options).tokens == (int(logits.argmax()),)
        caches = m.engine._caches._ended  # type: ignore[attr-defined]
        assert [rows for cache in caches for rows, *_ in cache.prefills] == [32, 64, 128]


@everywhere
@pytest.mark.parametrize("rows", [1, slow(2), 7, slow(8), slow(9), 64])
def test_any_number_of_slots(device: str, rows: int) -> None:
    m = model(device)
    prompts = random_prompts([1 + 5 * b % 24 for b in range(64)])
    options: dict[str, Any] = {"max_new_tokens": 9, "seed": 1, "stop_ids": [2, 10]}
    options |= {"temperature": 0.1, "presence_penalty": 0.3, "min_new_tokens": 2}
    options |= {"repetition_penalty": 1.2}
    alone = [m.generate(prompt, **options) for prompt in prompts]
    assert min(len(found.tokens) for found in alone if found.finish_reason == "stop") >= 3
    assert {found.finish_reason for found in alone} == {"stop", "length", "context"}
    together = m.generate(prompts, rows_at_once=rows, **options)
    assert all(map(the_same, together, alone))
    if device == "cuda":
        assert together == alone


@pytest.mark.parametrize(
    ("device", "speculate"),
    [("cpu", False), ("shuffled", True)]
    + [pytest.param("gpu", each, marks=GPU.marks) for each in (False, True)],
)
def test_sequences_come_and_go(
    device: str, speculate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences start and stop in any order; a stopped sequence does not appear again.

    speculate: with draft tokens, of which a step returns several, also to a host that has stopped
    their slot.
    """
    turns, few = itertools.cycle([4, 1, 8, 8, 4]), device == "shuffled"
    monkeypatch.setattr(
        SpeculationPolicy, "together", lambda *given: min(next(turns), given[2] // len(given[1]))
    )
    with nullcontext() if device == "cpu" else running_on(device):
        m, rng = model("cpu" if device == "cpu" else "cuda"), np.random.default_rng(1)
        prompts = random_prompts(rng.integers(1, 16, 5 if few else 40).tolist())
        alone = [m.generate(p, max_new_tokens=9, temperature=0).tokens for p in prompts]
        decoding = m.engine.decode(3 if few else 6, 24, speculate=speculate)
        waiting, running = list(range(len(prompts))), dict[int, int]()  # slot → prompt
        got: dict[int, list[int]] = {index: [] for index in waiting}
        steps = {index: int(rng.integers(1, 10)) for index in waiting}
        while waiting or running:
            free = [slot for slot in range(decoding.slots) if slot not in running]
            rng.shuffle(free)
            starts = []
            for slot in free[: rng.integers(0 if running else 1, 7)]:
                if waiting:
                    running[slot] = index = waiting.pop(0)
                    starts.append(
                        Start(slot, prompts[index], Sampling(temperature=0), steps[index])
                    )
            if starts:
                decoding.start(starts)
            slots, tokens, logprobs, *_ = decoding.next()
            assert slots.dtype == tokens.dtype == np.int32
            assert logprobs.dtype == np.float32
            assert set(slots.tolist()) <= set(running)
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                got[running[slot]].append(token)
                if len(got[running[slot]]) == steps[running[slot]]:
                    del running[slot]
            stopped = [slot for slot in running if rng.random() < 0.1]
            decoding.stop(np.array(stopped, np.int32))
            for slot in stopped:
                del running[slot]
        for index, found in got.items():
            assert tuple(found) == alone[index][: len(found)]
        with pytest.raises(RuntimeError, match="expected a sequence in at least one slot"):
            decoding.next()


@pytest.mark.parametrize("device", ["cpu", *SOMEWHERE])
def test_a_step_whose_sequences_were_all_stopped(device: str) -> None:
    """The step's result is dropped: the next one is of a sequence that started later, if any."""
    with nullcontext() if device == "cpu" else running_on(device):
        m, (ids, others) = model("cpu" if device == "cpu" else "cuda"), random_prompts([3, 3])
        expected = [m.generate(p, max_new_tokens=2, temperature=0) for p in (ids, others)]
        decoding, greedy = m.engine.decode(2, 24), Sampling(temperature=0)
        decoding.start([Start(0, ids, greedy, 9)])
        first = decoding.next()
        decoding.stop(np.array([0], np.int32))
        decoding.start([Start(1, others, greedy, 9)])
        second, third = decoding.next(), decoding.next()
        assert [step.slots.tolist() for step in (first, second, third)] == [[0], [1], [1]]
        assert int(first.tokens[0]) == expected[0].tokens[0]
        assert (int(second.tokens[0]), int(third.tokens[0])) == expected[1].tokens
        decoding.stop(np.array([1], np.int32))
        with pytest.raises(RuntimeError, match="expected a sequence in at least one slot"):
            decoding.next()


def test_a_lost_gpu_gets_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Mock(side_effect=RuntimeError("an illegal memory access was encountered"))
    with running_on("forward"):
        engine = GPT2(GPT2Weights.random(0, TINY), device="cuda").engine
        monkeypatch.setattr(Stream, "synchronize", lost)
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            engine.decode(1, 8)


def test_a_later_text_reuses_a_cache_of_at_most_twice_its_size() -> None:
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=400, vocab_size=37)
    with running_on("forward"):
        engine: Any = model("cuda", config).engine
        caches = [engine.decode(1, n)._cache for n in (200, 180, 110, 90, 250)]
    assert caches[0] is caches[1] is caches[2]
    assert [cache.n_ctx for cache in caches] == [224, 224, 224, 96, 256]


@everywhere
def test_the_cache_has_the_positions_in_use(device: str) -> None:
    m = model(device, GPT2Config(1, 1, 8, 1024, 37))
    decoding = start_all(m.engine, [np.array([1, 2, 3], np.int32)], [Sampling()], 7)
    assert 9 <= decoding.n_ctx <= 64
    assert m.engine.decode(1, 129).n_ctx in (129, 160)
    assert m.engine.decode(1, 1023).n_ctx in (1023, 1024)


@everywhere
def test_a_consumer_that_stops_or_fails(device: str) -> None:
    """An abandoned generation does not change the next one."""
    m = model(device)
    prompts = random_prompts([3, 9, 4, 7])
    options: dict[str, Any] = {"max_new_tokens": 9, "seed": 1}
    expected = m.generate(prompts, **options)
    for taken in (0, 1, 5):
        run = Run(m.engine, None, prompts, rows_at_once=2, **options)
        rows = iter(run)
        for _ in range(taken):
            next(rows)
        rows.close()
    pieces = m.stream([1, 2])
    next(pieces, None)
    pieces.close()
    with pytest.raises(ZeroDivisionError):
        [1 // (len(row.tokens) - 4) for row in Run(m.engine, None, prompts, **options)]
    assert m.generate(prompts, **options) == expected


@pytest.mark.parametrize("device", ["forward", GPU])
def test_an_interrupt_after_a_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C before the host has counted a launch, the next generation is right."""
    with running_on(device):
        m, prompts = model("cuda"), random_prompts([2])
        options: dict[str, Any] = {"max_new_tokens": 3, "seed": 1}
        expected = m.generate(prompts, **options)
        result, calls = cuda_steps.DecodingStep._result, itertools.count()

        def interrupted(*args: Any) -> Any:
            if next(calls) == 1:
                raise KeyboardInterrupt
            return result(*args)

        with monkeypatch.context() as patch:
            patch.setattr(cuda_steps.DecodingStep, "_result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                m.generate(prompts, **options)
        assert m.generate(prompts, **options) == expected


@everywhere
def test_threads(device: str) -> None:
    m, prompts = model(device), random_prompts([1 + 5 * b % 16 for b in range(24)])
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "temperature": 0.1,
        "rows_at_once": 5,
        "seed": 1,
    }
    expected = m.generate(prompts, **options)

    def run(first: int) -> None:
        assert all(map(the_same, m.generate(prompts[first:], **options), expected[first:]))

    assert together(run) == []


def test_ten_thousand_prompts() -> None:
    engine = MarkovEngine(random_table(0, 256))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(256, size=n) for n in rng.integers(1, 9, 10_000)]
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "stop_ids": range(40)}
    options["seed"] = 1
    found = generate(engine, byte_encoding(), prompts, rows_at_once=200, **options)
    assert len(found) == 10_000
    assert max(map(len, engine.batches)) <= 200
    for index in rng.integers(10_000, size=50):
        assert found[index] == generate(engine, byte_encoding(), prompts[index], **options)


def limited(monkeypatch: pytest.MonkeyPatch, cupy: Any, most: int) -> list[int]:
    """Let allocations of more than `most` bytes fail; return a list to which they are added."""
    failed: list[int] = []
    zeros = cupy.zeros

    def allocate(shape: Any, dtype: Any = "float64") -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size > most:
            failed.append(size)
            raise cupy.cuda.memory.OutOfMemoryError(size, 0)
        return zeros(shape, dtype)

    monkeypatch.setattr(cupy, "zeros", allocate)
    return failed


@pytest.mark.parametrize("device", ["shuffled", GPU])
def test_out_of_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on(device):
        m, prompts = model("cuda"), random_prompts([3, 5, 1])
        options: dict[str, Any] = {"max_new_tokens": 1, "seed": 1}
        expected = m.generate(prompts, **options)
        keys = 2 * TINY.n_layer * TINY.n_ctx * TINY.n_embd * 4  # bytes of K and V per row
        with monkeypatch.context() as patch:
            failed = limited(patch, cuda.cupy, 2 * keys)
            m.engine._caches._ended.clear()  # type: ignore[attr-defined]
            with pytest.raises(MemoryError, match=r"3 sequences of 24 tokens .* expected fewer"):
                m.generate(prompts, rows_at_once=3, **options)
            assert m.engine.decode(3, 24, fewer=True).slots == 1
            assert failed[:2] == [3 * keys] * 2
            m.generate(prompts, **options)
        with monkeypatch.context() as patch:
            limited(patch, cuda.cupy, keys - 1)
            m.engine._caches._ended.clear()  # type: ignore[attr-defined]
            with pytest.raises(MemoryError, match="Out of memory: keys and values of 1 sequences"):
                m.generate(prompts, **options)
        assert m.generate(prompts, **options) == expected


def test_activations_for_which_memory_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later prompt allocates them; results equal those of a model that had the memory."""
    prompt = list(range(9))
    with running_on("forward"):
        m, other = model("cuda"), model("cuda")
        m([1])
        missing = cuda.cupy.cuda.memory.OutOfMemoryError(1, 0)
        with monkeypatch.context() as patch:
            patch.setattr("gpt2block.engine.recording.Arena", Mock(side_effect=missing))
            with pytest.raises(MemoryError):
                m(prompt)
        np.testing.assert_array_equal(m(prompt), other(prompt))


def test_slots_by_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on("forward"):
        m = model("cuda", GPT2Config(1, 1, 8, 64, 5))
        device = type(cuda.cupy.cuda.Device())
        per_row = m.engine._caches._sequence_bytes(64)  # type: ignore[attr-defined]
        for free, slots in ((1 << 32, 512), (2 * 9 * per_row, 9), (per_row, 1)):
            monkeypatch.setattr(device, "mem_info", (free, 1 << 40))
            assert m.engine.decode(4000, 64, fewer=True).slots == slots
            m.engine._caches._ended.clear()  # type: ignore[attr-defined]
        assert m.engine.decode(12, 64).slots == 12
