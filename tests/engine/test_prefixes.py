"""Prompts with common prefixes: a prefix is computed once, and each sequence is as alone."""

from __future__ import annotations

import weakref
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2block import GPT2, GPT2Config, Model
from gpt2block.cuda.arrays import device_attribute
from gpt2block.cuda.formats import Formats
from gpt2block.engine.adapters import NONE
from gpt2block.engine.cuda.caches import CudaCache, apart, copy_slots
from gpt2block.engine.generation import batching
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.prefixes import (
    MAX_COMPARED,
    NOTHING,
    HeldPrefix,
    Prefixes,
)
from gpt2block.engine.generation.sequences import TokenSequence
from gpt2block.engine.model import Ids, Start, by_name, in_shared_memory, token_bytes
from gpt2block.engine.numpy.model import NumpyCache, NumpyDecoding
from gpt2block.files.parameters.arrays import random_model
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.models.config import LayerCache
from gpt2block.ops.attention_cached import KV_COPY
from gpt2block.sampling import Sampling
from tests.caches import KINDS, stored
from tests.devices import every_device, running_on
from tests.engine.test_architectures_cuda import FORMATS, OWN, SIZES, WIDE, WINDOW
from tests.engine.test_batching import finish, pending, random_options
from tests.plain import normal

TINY = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=64, vocab_size=37)
BITS = st.lists(st.integers(0, 1), max_size=8)
Entries = dict[int, tuple[str, list[int], int]]


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e5m2"])
def test_halves_of_a_cache_are_aligned(batch: int, kv_dtype: str | None) -> None:
    """K and V are aligned for loads of 16 bytes even if a sequence has an odd number of bytes."""
    config = GPT2Config(n_layer=2, n_head=1, n_embd=3, n_ctx=7, vocab_size=5)
    with running_on("shuffled"):
        cache = CudaCache(config, batch, 7, Formats("float16", kv_dtype))
        (memory,) = cache.arrays
        for each in (half for layer in cache.layers for half in layer):
            assert each.shape == (batch, 7, 3)
            assert (each.data.ptr - memory.data.ptr) % 16 == 0
        assert cache.nbytes == 2 * 2 * batch * 7 * 3 * (1 if kv_dtype else 2)


UNLIKE = (LayerCache(0, 4, 4), LayerCache(1, 6, 0, narrow=False), LayerCache(0, 4, 4),
          LayerCache(3, 6, 0, narrow=False), LayerCache(4, 4, 4))  # fmt: skip


@pytest.mark.parametrize("kind", [NumpyCache, CudaCache])
def test_layers_of_a_cache_can_differ(kind: Any) -> None:
    """Layers 1 and 3 have no values, and rows of 16 bits; layer 2 reads the rows of layer 0."""

    class Config(GPT2Config):
        layer_caches = UNLIKE

    config, formats = Config(5, 1, 4, 300, 5), Formats("float16", "float8_e5m2")
    assert in_shared_memory(UNLIKE) == (*UNLIKE[:3], UNLIKE[1], UNLIKE[4])
    assert token_bytes(UNLIKE, formats) == 4 * 4 + 2 * 6 * 2
    with running_on("shuffled"):
        cache = kind(config, 3, 300, formats)
        if kind is CudaCache:
            assert cache.nbytes == 3 * 300 * token_bytes(UNLIKE, formats)
            assert [each.dtype for each in cache.arrays] == [np.uint8, np.float16]
        widths = [
            [half if half is None else half.shape[-1] for half in own] for own in cache.layers
        ]
        assert widths == [[4, 4], [6, None], [4, 4], [6, None], [4, 4]]
        assert cache.layers[2] == cache.layers[0]
        for n, rows in enumerate(by_name(cache.layers).values()):
            rows[1] = n + 1
        expected = {name: rows[1, 0, 0] for name, rows in by_name(cache.layers).items()}
        assert len({*map(float, expected.values())}) == 6
        if kind is NumpyCache:
            cache.lengths = [0, 2, 0]
            cache.reserve(290)
            NumpyDecoding.copy(SimpleNamespace(_cache=cache), [(1, 2, 2)])  # type: ignore[arg-type]
        else:
            copy_slots(cache, [(1, 2, 2)])
        for name, rows in by_name(cache.layers).items():
            assert (rows[2, :2] == expected[name]).all()
            assert (rows[2, 2:] == 0).all()


# --- the slot that has the tokens of a prompt


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.tuples(
            st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=8), st.integers(0, 8)
        ),
        max_size=8,
    ),
    BITS.filter(bool),
    st.integers(1, 4),
)
def test_the_longest_of_a_client(entries: Entries, prompt: list[int], least: int) -> None:
    """The expected length is counted by hand: common tokens among those already computed.

    The prompt's last token does not count. "c" is a sequence of client "a" that may become longer
    than short sequences.
    """
    kinds, prefixes = {"a": ("a", 8), "b": ("b", 8), "c": ("a", 9)}, Prefixes(least, short=8)
    sequences: Any = {
        name: SimpleNamespace(client=c, most=n, adapter=NONE) for name, (c, n) in kinds.items()
    }
    for slot, (name, ids, done) in entries.items():
        prefixes.hold(slot, sequences["a"], np.array([1, 1, 1, 1, 1], np.int32), 5)  # replaced
        prefixes.hold(slot, sequences[name], np.array(ids, np.int32), min(done, len(ids)))

    def common(ids: list[int]) -> int:
        most = min(len(ids), len(prompt) - 1)
        return next((n for n in range(most) if ids[n] != prompt[n]), most)

    given: Ids = np.array(prompt, np.int32)
    for found, coming in zip(prefixes.longest(sequences["a"], given), (False, True), strict=True):
        counts = {
            slot: common(ids if coming else ids[:done])
            for slot, (name, ids, done) in entries.items()
            if name == "a"
        }
        most = max(counts.values(), default=0)
        if most < least:
            assert found == NOTHING
        elif len(entries) <= MAX_COMPARED:
            last = [slot for slot, count in counts.items() if count == most][-1]
            assert found == HeldPrefix(last, most)
        elif coming:
            assert counts[found.slot] == found.tokens > most / 2
    for slot in entries:
        prefixes.drop(slot)
        prefixes.drop(slot)
    assert prefixes.longest(sequences["a"], given) == (NOTHING, NOTHING)
    assert not prefixes._alike


# --- the copy of keys and values


@every_device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("C", [24, 7])
def test_first_positions_are_copied(device: Any, kind: str, C: int) -> None:
    """All layers are copied, at most to the end of a slot; invalid slots copy nothing."""
    held = stored(normal(0, 4, 5, 9, C), kind)
    copies = np.array([(0, 3, 4), (1, 2, 99), (0, 4, 0), (-1, 4, 3), (5, 4, 3), (4, 5, 3)]).T
    kv, numbers = device.asarray(held), [device.asarray(each, "int32") for each in copies]
    KV_COPY.bind((kv, *numbers), kv_dtype=kind if held.dtype == np.uint8 else None).run()
    held[:, 3, :4], held[:, 2] = held[:, 0, :4], held[:, 1]
    np.testing.assert_array_equal(kv.get().view(np.uint8), held.view(np.uint8))


def test_copies_that_depend_on_each_other() -> None:
    copies = [(0, 1, 5), (0, 2, 5), (1, 3, 4), (4, 0, 9), (5, 0, 9)]
    assert [*apart(copies)] == [copies[:2], copies[2:4], copies[4:]]
    assert not [*apart([])]


# --- batches


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few tokens be worth a copy, or a wait, as tiny models have few."""
    monkeypatch.setattr(batching, "MIN_COPIED", 4)
    monkeypatch.setattr(batching, "min_shared", lambda *_: 10)


class Spy:
    """A CPU engine whose batches compute only new tokens, as a GPU does; it records them."""

    def __init__(self, slots: int, model: Model[Any] | None = None, **options: Any) -> None:
        self.model: Any = model or GPT2(GPT2Weights.random(0, TINY), device="cpu")
        engine: Any = self.model.engine
        engine.continues_exactly = True
        self.batch = Batch(engine, slots, TINY.n_ctx, **options)
        self.computed: list[tuple[int, int]] = []  # numbers of reused and new tokens
        decoding: Any = self.batch._decoding
        start = decoding.start

        def noted(starts: list[Start]) -> None:
            self.computed += [(each.cached, len(each.ids) - each.cached) for each in starts]
            start(starts)

        decoding.start = noted

    def sequence(self, ids: list[int], new: int = 2, client: str = "") -> TokenSequence:
        sequence = pending(self.model.engine, ids, temperature=0, max_new_tokens=new)
        sequence.client = client
        self.batch.submit([sequence], client=client)
        return sequence

    def finish(self, *sequences: TokenSequence) -> list[tuple[int, int]]:
        """Finish sequences, assert that each is as alone, and return the computed numbers."""
        finish(self.batch)
        for sequence in sequences:
            alone = self.model.generate(sequence.prompt, max_new_tokens=2, temperature=0)
            assert tuple(sequence.tokens) == alone.tokens
        found, self.computed = self.computed, []
        return found


@pytest.mark.usefixtures("few")
def test_what_sequences_begin_with_is_computed_once() -> None:
    """Sequences share it if they start together, later or while others run; clients do not."""
    spy, begin = Spy(4), list(range(9))
    alike = [spy.sequence([*begin, 20 + n]) for n in range(4)]
    assert spy.finish(*alike) == [(0, 10), (9, 1), (9, 1), (9, 1)]
    assert [sequence.reused for sequence in alike] == [0, 9, 9, 9]
    others = [spy.sequence([*begin, 20], client="other"), spy.sequence([*begin, 30])]
    assert sorted(spy.finish(*others)) == [(0, 10), (9, 1)]
    running = spy.sequence([7] * 12, new=9)
    spy.batch.step()
    assert not running.finish_reason
    spy.finish(spy.sequence([7] * 8 + [1]))
    assert len(running.tokens) == 9
    two = [spy.sequence([5] * 9), spy.sequence([5] * 9)]  # too few tokens to wait for
    assert spy.finish(*two) == [(0, 9), (0, 9)]


@pytest.mark.usefixtures("few")
def test_sequences_with_other_frequencies_share_nothing() -> None:
    """In Phi-3, sequences of at most 8 tokens have other frequencies than longer ones."""
    kind, own = OWN["phi3"]
    config = kind(**{**SIZES, **own, "n_ctx": TINY.n_ctx})
    spy = Spy(4, Model.from_tensors(config, random_model(3, config), "cpu", "float32"))
    computed = []
    for last, new in ((10, 2), (11, 3), (12, 2), (13, 9)):
        sequence = spy.sequence([1, 2, 3, 4, 5, last], new)
        computed += spy.finish()
        alone = spy.model.generate(sequence.prompt, max_new_tokens=new, temperature=0)
        assert tuple(sequence.tokens) == alone.tokens
    assert computed == [(0, 6), (0, 6), (5, 1), (5, 1)]


@pytest.mark.usefixtures("few")
def test_a_slot_keeps_what_another_sequence_may_continue() -> None:
    """A prompt gets a slot if it has most of its tokens; otherwise it gets a copy of them."""
    spy = Spy(2)
    spy.finish(spy.sequence([1] * 20))
    spy.finish(spy.sequence([2] * 5))
    assert spy.finish(spy.sequence([*[1] * 6, 3, 3])) == [(6, 2)]  # in the slot that had the twos
    assert spy.finish(spy.sequence([1] * 22)) == [(20, 2)]
    assert spy.finish(spy.sequence([*[1] * 6, 3, 3, 4])) == [(8, 1)]


@pytest.mark.usefixtures("few")
def test_a_sequence_that_others_wait_for_is_cancelled() -> None:
    """Another sequence then computes the common prefix; waiting sequences can be cancelled too."""
    spy = Spy(4, tokens_at_once=1)
    first, *rest = [spy.sequence([*range(12), 20 + n]) for n in range(4)]
    spy.batch._pieces._piece = 5
    spy.batch.step()
    assert spy.batch.waiting == 4
    spy.batch.cancel([first, rest[2]])
    assert spy.batch.waiting == 2
    assert spy.finish(*rest[:2]) == [(10, 3), (12, 1)]
    assert [sequence.finish_reason for sequence in (first, rest[2])] == ["cancelled"] * 2


def test_a_batch_is_freed_when_it_is_not_used() -> None:
    """An unused batch is freed at once, so that the next batch gets its kv_cache."""
    engine: Any = GPT2(GPT2Weights.random(0, TINY), device="cpu").engine
    engine.continues_exactly = True
    batch = Batch(engine, 2, TINY.n_ctx)
    batch.submit([pending(engine, [1, 2, 3], max_new_tokens=2)])
    finish(batch)
    left = weakref.ref(batch)
    del batch
    assert left() is None


def arriving(model: Model[Any], rng: np.random.Generator, count: int) -> None:
    """Assert that requests with common prefixes, arriving at random, equal each request alone."""
    V, n_ctx = model.config.vocab_size, model.config.n_ctx
    begins = [rng.integers(V, size=n) for n in (n_ctx // 8, n_ctx // 3, n_ctx // 2)]
    begins.append(np.concatenate([begins[2], rng.integers(V, size=n_ctx // 4)]))
    asked = []
    for _ in range(count):
        begin = begins[rng.integers(len(begins))]
        ids = np.concatenate([begin, rng.integers(V, size=rng.integers(0, n_ctx // 5))])
        options = random_options(rng) | {"stop_ids": (), "max_new_tokens": int(rng.integers(1, 8))}
        asked.append((ids.tolist(), options))
    sequences = [pending(model.engine, ids, **options) for ids, options in asked]
    batch, left = Batch(model.engine, 5, n_ctx, tokens_at_once=n_ctx), list(sequences)
    while left or batch.busy:
        new = [left.pop(0) for _ in range(min(len(left), rng.poisson(1)))]
        batch.submit(new)
        if batch.busy:
            batch.step(each_token=bool(rng.integers(2)))
    for sequence, (ids, options) in zip(sequences, asked, strict=True):
        expected = model.generate(ids, **options)
        assert tuple(sequence.tokens) == expected.tokens
        assert tuple(sequence.logprobs) == expected.logprobs
        assert tuple(sequence.tops) == expected.top_logprobs
    exact: bool = model.engine.continues_exactly
    assert any(sequence.reused for sequence in sequences) == exact


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_convolutions_continue(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of slots and pieces of prompts contain what convolutions read of earlier tokens."""
    kind, own = OWN["lfm2"]
    config = kind(**{**SIZES, **own, "n_ctx": 120, "n_ff": 64, "head_size": 32})
    options: dict[str, Any] = {"max_new_tokens": 3, "stop_ids": (), "seed": 1}
    with running_on(where):
        model: Model[Any] = Model.from_tensors(config, random_model(3, config), "cuda", "bfloat16")
        ids = np.random.default_rng(0).integers(53, size=40)
        whole = model.generate(ids, **options)
        monkeypatch.setattr(batching, "PIECE", 16)
        assert model.generate(ids, **options) == whole
        arriving(model, np.random.default_rng(3), 8 if where == "gpu" else 3)


@pytest.mark.gpu
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("name", "dtype", "wide"), [*product(("gpt2", *OWN), FORMATS, (False, True))]
)
def test_of_every_architecture(name: str, dtype: str, wide: bool) -> None:
    if name == "gemma4-512" and device_attribute("MaxSharedMemoryPerBlockOptin") < 75_072:
        pytest.skip("heads of 512 channels need 75,072 bytes of shared memory per block")
    kv_dtype = FORMATS[dtype]
    if name == "gpt2":
        of = GPT2Config(n_layer=2, n_head=2, n_embd=256 if wide else 128, n_ctx=400, vocab_size=37)
        model: Model[Any] = GPT2(GPT2Weights.random(0, of), "cuda", dtype, kv_dtype=kv_dtype)
    else:
        kind, own = OWN[name]
        own = {key: WINDOW if wide and key == "window" else each for key, each in own.items()}
        config = kind(**{**SIZES, **(WIDE if wide else {}), **own, "n_ctx": 400})
        model = Model.from_tensors(config, random_model(3, config), "cuda", dtype, kv_dtype)
    arriving(model, np.random.default_rng(3), 60)
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=300)
    options: dict[str, Any] = {"max_new_tokens": 5, "stop_ids": ()}
    alone = [model.generate(ids, sampling=Sampling(seed=1, sample=n), **options) for n in range(4)]
    assert model.generate(ids, samples=4, seed=1, **options) == alone
