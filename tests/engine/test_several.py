"""A model on several GPUs gives the same bits as on one GPU.

Without GPUs, threads drive emulated GPUs that share one memory. An all-gather would wait for
launches of other GPUs that the emulator runs only later. Therefore it runs in two parts, with a
barrier of all threads in between.
"""

from __future__ import annotations

import filecmp
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import CheckpointError, GPT2Config, InputError, LlamaConfig
from gpt2block.apps.profiling.runs import Profile, TimedPass
from gpt2block.apps.profiling.summary import kinds, pass_times
from gpt2block.apps.profiling.trace import trace
from gpt2block.cuda import cupy, overlap, replaced
from gpt2block.cuda.formats import FILE, Formats
from gpt2block.cuda.requests import Launch
from gpt2block.cuda.timing import interleaved_ms
from gpt2block.emulator import stand_in
from gpt2block.engine.cuda import timeline as cuda_timeline
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.cuda.several import Crew, SeveralCudaModels
from gpt2block.engine.cuda.several_bytes import bytes_by_gpu
from gpt2block.engine.explain import collect
from gpt2block.engine.inspect.compare import compare_tensors, exact_tensors
from gpt2block.engine.model import Start, start_all
from gpt2block.engine.passes.executor import Executor, Step
from gpt2block.engine.passes.shards import Divided, Meeting, ModelShard
from gpt2block.files.checkpoints import Checkpoint, save_gguf, save_pretrained
from gpt2block.files.checkpoints.gguf_types import Encoded, InBlocks
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.files.parameters.arrays import random_model
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.models.config import ModelConfig, model_shapes
from gpt2block.ops import all_gather
from gpt2block.ops.all_gather import LOAD, STORE, part_of
from gpt2block.sampling import Sampling
from tests.devices import GPU, assert_same_bits, running_on, slow
from tests.engine.test_architectures_cuda import FORMATS, OWN, SIZES

Array = NDArray[Any]
SEVERAL: dict[str, Any] = {"n_head": 4, "n_kv_head": 2, "n_embd": 128, "n_ff": 192, "n_ctx": 64}
SEVERAL |= {"vocab_size": 203}
DIVIDED = [name for name in OWN if name != "qwen3_5"]  # delta nets are not divided


class Again:
    """A substitute for a graph that runs its launches one after another."""

    def __init__(self, launches: Iterable[Any], *_: Any) -> None:
        self._launches = tuple(launches)

    def upload(self, stream: Any) -> None:
        """Do nothing, as there is no graph on a device."""

    def launch(self, stream: Any) -> None:
        for launch in self._launches:
            launch.run()


def noting(patch: pytest.MonkeyPatch, place: Any, name: str, note: Callable[[], Any]) -> None:
    """Call `note` before each call of a function."""
    call = getattr(place, name)
    patch.setattr(place, name, lambda *given: (note(), call(*given))[1])


@contextmanager
def emulated_together(count: int) -> Iterator[None]:
    """Run all-gathers in two parts, and refuse memory that is allocated while gathers could wait.

    On GPUs, an allocation between a meeting of all threads and an all-gather could wait for the
    all-gathers of other threads, which wait for the all-gather of this thread.
    """
    barrier, one_at_a_time, run = threading.Barrier(count), threading.Lock(), Launch.run
    since_met = threading.local()

    def meets() -> None:
        since_met.allocated = False

    def allocates() -> None:
        since_met.allocated = True

    def run_in_parts(launch: Launch) -> None:
        if launch.name not in all_gather.KERNELS:
            # The emulator copies all arrays of a launch, here the peer buffers, back and forth.
            to_peers = "OTHERS" in dict(launch.function._key[-1])
            with one_at_a_time if to_peers else nullcontext():
                run(launch)
            return
        assert not since_met.allocated
        for parts in (STORE, LOAD):
            with one_at_a_time:
                run(part_of(launch, parts))
            barrier.wait(600)  # a thread may compile meanwhile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", run_in_parts)
        patch.setattr(overlap, "capture", Again)
        for name in ("CAPACITY", "WORDS", "ROOM"):
            patch.setattr(all_gather, name, 4096)
        patch.setattr(cuda_timeline, "interleaved_ms", partial(interleaved_ms, count=1))
        noting(patch, Meeting, "exchange", meets)
        noting(patch, Crew, "_guarded", meets)
        noting(patch, stand_in, "_allocated", allocates)
        yield


@contextmanager
def one_and_several(
    where: str, config: ModelConfig, formats: Formats, count: int
) -> Iterator[tuple[CudaModel, SeveralCudaModels]]:
    with running_on(where):
        tensors = arrays_of(config)
        one = CudaModel(config, iter(tensors), formats, 0)
        with emulated_together(count) if replaced() else nullcontext():
            yield one, SeveralCudaModels(config, iter(tensors), formats, gpus(count))


def arrays_of(config: ModelConfig) -> list[Any]:
    given = GPT2Weights.random(3, config).tensors() if isinstance(config, GPT2Config) else None
    return list(given or random_model(3, config))


def gpus(count: int) -> list[int]:
    """Return the first GPUs, or the emulated GPU `count` times.

    A real GPU appears only once, because two threads on one GPU could block each other: an
    allocation waits for all work of the GPU, also for an all-gather of the other thread.
    """
    if replaced():
        return [0] * count
    if cupy.cuda.runtime.getDeviceCount() < count:
        pytest.skip(f"needs {count} GPUs")
    return list(range(count))


def config_of(name: str, n_layer: int, **more: int) -> ModelConfig:
    if name == "gpt2":
        return GPT2Config(n_layer=n_layer, n_head=4, n_embd=256, n_ctx=64, vocab_size=203)
    kind, own = OWN.get(name, (LlamaConfig, {}))
    n_layer = max(n_layer, len(own.get("conv_layers", ())), own.get("n_layer", 0))
    layers = {key: value[:n_layer] for key, value in own.items() if isinstance(value, tuple)}
    alike = {"head_size": 32, "n_ff": 128} if (name, n_layer) == ("llama", 1) else {}  # few kernels
    return kind(**{**SIZES, **SEVERAL, **alike, **own, **layers, **more, "n_layer": n_layer})


def prompts(count: int, vocab_size: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, 12, count)
    return [rng.integers(vocab_size, size=n).astype(np.int32) for n in lengths]


def sampled(engine: Any, count: int, steps: int, vocab_size: int) -> list[tuple[Any, ...]]:
    """Return tokens and log-probabilities of `count` texts; every other text is greedy."""
    settings = [Sampling(temperature=n % 2, seed=n) for n in range(count)]
    decoding = start_all(engine, prompts(count, vocab_size), settings, steps)
    found = list[tuple[Any, ...]]()
    for _ in range(steps):
        each = decoding.next()
        found += zip(each.slots.tolist(), each.tokens.tolist(), each.logprobs.tolist(), strict=True)
    return found


class Noting(Executor):
    """Notes each step, whether it sends columns, and whether it receives sent columns."""

    def __init__(self) -> None:
        super().__init__({})
        self.steps: list[tuple[str, bool, bool]] = []

    def do(self, step: Step, into: Any) -> Array:
        self.steps.append((step.name, "to_peers" in step.attrs, step.attrs.get("sent", False)))
        return np.zeros((1, step.attrs.get("N", 64)), np.float32)


def test_sent_columns_are_gathered_before_other_words() -> None:
    box = SimpleNamespace(data=SimpleNamespace(ptr=1))
    config, do = LlamaConfig(n_layer=1, **SEVERAL), Noting()
    shard = ModelShard(config, "float16", 0, 2, Meeting(2), {"abort": box, "own": box, "to_1": box})
    divided, x = Divided(do, shard, fuses=True), np.zeros((1, 128), np.float32)
    for name in ("w_o", "w_gate", "w_down", "w_up"):
        last = divided(name, "linear", (x, f"h.0.{name}", "", "", "", ""), decoding=True)
    divided.whole(last)
    assert do.steps == [
        ("w_o.shard", True, False),
        ("w_gate.shard", False, False),
        ("w_o", False, True),
        ("w_down.shard", True, False),
        ("w_up.shard", False, False),
        ("w_down", False, True),
        ("w_up", False, False),
    ]


def cases(*names: str) -> list[Any]:
    """Return few cases for the emulator, where each compiles many programs, and all for a GPU."""
    found: list[Any] = [("shuffled", "llama", "float16", 2)]
    more = [("qwen3", "float8_e5m2", 4)]
    if "gemma3-256" in names:  # no tensor cores for prompts
        more += ("gemma3-256", "float32", 2), ("lfm2", "bfloat16", 2)
    found += [slow("shuffled", *case) for case in more]
    everywhere = product(names, FORMATS, (2, 4))
    return found + [pytest.param("gpu", *case, marks=GPU.marks) for case in everywhere]


@pytest.mark.parametrize(("where", "name", "dtype", "count"), cases("gpt2", "llama", *DIVIDED))
def test_texts_and_scores_have_the_bits_of_one_gpu(
    where: str, name: str, dtype: str, count: int
) -> None:
    config = config_of(name, 1 if where == "shuffled" else 2)
    V = config.vocab_size
    with one_and_several(where, config, Formats(dtype, FORMATS[dtype]), count) as (one, several):
        ids = prompts(3, V)
        pairs = [(each.forward(ids, "logits"), each.log_likelihood(ids)) for each in (one, several)]
        for kind in zip(*pairs, strict=True):
            for a, b in zip(*kind, strict=True):
                assert_same_bits(a, b)
        for rows in (3,) if where == "shuffled" else (1, 3, 5, 17, 40):
            assert sampled(several, rows, 3, V) == sampled(one, rows, 3, V)


@pytest.mark.parametrize(
    ("where", "name", "dtype", "count"),
    [("shuffled", "llama", "float16", 2), *cases("gpt2", "gemma3", "olmo2")[2:]],
)
def test_steps_and_tensors_are_equal_to_one_gpu(
    where: str, name: str, dtype: str, count: int, tmp_path: Path
) -> None:
    config = config_of(name, 1 if where == "shuffled" else 2)
    ids = np.arange(9, dtype=np.int32)
    with one_and_several(where, config, Formats(dtype, FORMATS[dtype]), count) as engines:
        exact = exact_tensors(engines[0], ids)
        for cached in (False, True):
            traced, expected = (each.trace(ids, cached) for each in reversed(engines))
            assert list(traced) == list(expected)
            for step, array in expected.items():
                assert_same_bits(traced[step], array)
            rows, own = (compare_tensors(each, ids, cached, exact, expected) for each in engines)
            assert [replace(row, ms=0, kernel="") for row in own] == [
                replace(row, ms=0, kernel="") for row in rows
            ]
        pages = [collect(each, None, "", ids, 0) for each in engines]
        for part in ("attention", "lens", "opened", "next"):
            assert pages[0][part] == pages[1][part]
        for engine in engines:
            save_pretrained(tmp_path / str(engine is engines[0]), engine, None)
    for file in ("config.json", "model.safetensors"):
        assert filecmp.cmp(tmp_path / "True" / file, tmp_path / "False" / file, shallow=False)


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
def test_each_gpu_has_a_timeline_of_each_pass(where: str) -> None:
    config, found = config_of("llama", 1), list[Any]()
    with one_and_several(where, config, Formats("float16", "float16"), 2) as engines:
        one, several = (start_all(e, prompts(3, 203), [Sampling()] * 3, 3) for e in engines)
        timelines = engines[1].timed(lambda: found.append(several.next()))
        assert found[0].tokens.tolist() == one.next().tokens.tolist()
        assert several.next().tokens.tolist() == one.next().tokens.tolist()
    assert [each.device for each in timelines] == [f"cuda:{n}" for n in engines[1].devices]
    first, second = ([(k.step, k.kernel) for k in each.ran] for each in timelines)
    assert first == second
    passes = [TimedPass("token", e._replace(device=f"GPU {n}")) for n, e in enumerate(timelines)]
    profile = Profile("", "", "", "", 2, 1, 1.0, passes)
    assert kinds(profile) == ["token, GPU 0", "token, GPU 1"]
    assert [pass_times(profile, each).us for each in kinds(profile)] == [e.us for e in timelines]
    events = [e for e in trace(profile)["traceEvents"] if e["name"] == "process_name"]
    names = {e["args"]["name"].partition(":")[0] for e in events}
    assert names == {"GPU 0", "GPU 1"}


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
def test_a_draft_model_drafts_on_each_gpu(where: str) -> None:
    """The draft model is a copy of the model, so it drafts nearly all tokens."""
    config, rows, steps = config_of("llama", 1), 3, 5
    dtype = "float8_e4m3fn" if where == "gpu" else "float16"
    with one_and_several(where, config, Formats(dtype), 2) as (one, several):
        expected = sampled(one, rows, steps, 203)
        several.draft = one
        drafts: list[Any] = [part.draft for part in several.parts]
        assert drafts[0] is one is not drafts[1]
        for name, matrix in one._matrices.items():
            for part, array in drafts[1]._matrices[name].arrays().items():
                assert_same_bits(array.get(), matrix.arrays()[part].get())
        settings = [Sampling(temperature=n % 2, seed=n) for n in range(rows)]
        decoding, found = several.decode(rows, 64, speculate=True), list[Any]()
        for _ in range(2):  # the second time the draft's graphs run too
            found.clear()
            right = 0
            starts = zip(range(rows), prompts(rows, 203), settings, strict=True)
            decoding.start([Start(*each, steps) for each in starts])
            while len(found) < rows * steps:
                each = decoding.next()
                found += zip(*(a.tolist() for a in each[:3]), strict=True)
                right += 0 if each.drafted is None else int(each.drafted.sum())
            assert sorted(found, key=itemgetter(0)) == sorted(expected, key=itemgetter(0))
            assert right > rows * steps / 2
        several.draft = None
        assert [part.draft for part in several.parts] == [None, None]


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
@pytest.mark.parametrize("steps", [1, slow(3)])
def test_prompts_run_after_all_gpus_have_allocated(where: str, steps: int) -> None:
    """Prompts whose launches are recorded already start in a new decoding, with other steps."""
    config = config_of("llama", 1 if where == "shuffled" else 2)
    with one_and_several(where, config, Formats("float16"), 2) as (one, several):
        expected = first_tokens(one, steps, False)
        for speculate in (False, False, False, True):
            assert first_tokens(several, steps, speculate) == expected


def first_tokens(model: Any, steps: int, speculate: bool) -> list[int]:
    decoding = model.decode(3, 40, speculate=speculate)
    ids = prompts(3, SEVERAL["vocab_size"])
    decoding.start([Start(n, each, Sampling(temperature=0), steps) for n, each in enumerate(ids)])
    tokens: list[int] = decoding.next().tokens.tolist()
    return tokens


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
def test_an_error_of_one_gpu_ends_the_call_of_all(where: str) -> None:
    def fails() -> None:
        raise MemoryError("no room")

    with running_on(where):
        crew = Crew(gpus(2))
        with pytest.raises(MemoryError, match="no room"):
            crew.run([fails, lambda: crew.meeting.exchange(1)])  # the second waits for the first
        found = crew.run([partial(crew.meeting.exchange, n, n) for n in range(2)])
        assert found == [[0, 1], [0, 1]]


def tensors_of(source: str, config: ModelConfig, dtype: str, folder: Path) -> Iterable[Any]:
    """Return a model's tensors: unread tensors of a file, or arrays."""
    arrays = arrays_of(config)
    given = Mock(config=config, tensors=lambda: arrays)
    if source == "safetensors":
        return Checkpoint.open(save_pretrained(folder, given, "float16")).tensors(unread=True)
    if source == "gguf":
        path = save_gguf(folder / "m.gguf", given, "q8_0")
        return Checkpoint.open(path).tensors(in_blocks=dtype == FILE, unread=True)
    if source == "device":
        return [(name, cupy.asarray(array), layout) for name, array, layout in arrays]
    return arrays


def read_alone(tensors: Iterable[Any]) -> Iterator[Any]:
    for name, array, layout in tensors:
        yield name, array.read() if isinstance(array, Stored) else array, layout


LOADS = [
    ("safetensors", "llama", "float16", 2),
    slow("safetensors", "qwen3", "float8_e4m3fn", 4),
    ("safetensors", "phi3", "float16", 2),
    ("gguf", "llama", FILE, 2),
    slow("gguf", "llama", "float16", 4),
    slow("arrays", "gpt2", "bfloat16", 2),
    ("device", "gpt2", "float16", 4),
    slow("gguf", "lfm2", FILE, 2),
    ("safetensors", "lfm2-bias", "float16", 2),
]


@pytest.mark.parametrize(("source", "name", "dtype", "count"), LOADS)
@pytest.mark.parametrize("where", ["forward", pytest.param("gpu", marks=GPU.marks)])
@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_each_gpu_reads_its_share_alone(
    where: str,
    source: str,
    name: str,
    dtype: str,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = {"head_size": 128} if source == "gguf" else {}  # so that heads of GGUF types are divided
    config, formats = config_of(name, 1, **more), Formats(dtype)
    with running_on(where):
        tensors = list(tensors_of(source, config, dtype, tmp_path))
        one = CudaModel(config, read_alone(tensors), formats, 0)
        read, lock = Counter[str](), threading.Lock()
        for method in (Stored.read_into, Encoded.read_bytes):
            kind = Stored if method is Stored.read_into else Encoded
            monkeypatch.setattr(kind, method.__name__, counting(read, lock, method))
        several = SeveralCudaModels(config, iter(tensors), formats, gpus(count))
        parts = several.parts
        shards = [part._shard for part in parts if part._shard is not None]
        expected = Counter[str]()
        for tensor, array, _ in tensors:
            blocks = isinstance(array, InBlocks)
            times = count if blocks and not shards[0].spans(tensor) else 1
            pieces = [each for _, each in array.parts] if blocks else getattr(array, "pieces", ())
            for piece in pieces:
                expected[piece.label] += times * piece.nbytes
        assert read == expected
        if dtype != FILE:  # bytes by shapes have no shards of biases
            by_shapes = bytes_by_gpu(config, formats, count, {})
            assert several.bytes_by_gpu.weights == pytest.approx(by_shapes.weights, rel=0.02)
            assert several.bytes_by_gpu.kv_cache_per_token == by_shapes.kv_cache_per_token
        for part, shard in zip(parts, shards, strict=True):
            for tensor, matrix in one._matrices.items():
                spans = shard.spans(tensor) or ((0, matrix.N),)
                columns = [matrix.columns(*span) for span in spans]
                own = part._matrices[tensor]
                assert (own.whole_N, own.largest) == (matrix.N, matrix.largest)
                assert_same_bits(own.data.get(), np.concatenate([c.data.get() for c in columns]))
                if own.scale is not None:
                    scales = [c.scale.get() for c in columns]
                    assert_same_bits(own.scale.get(), np.concatenate(scales))


def counting(read: Counter[str], lock: threading.Lock, method: Any) -> Any:
    def counted(tensor: Stored, *arguments: Any) -> None:
        whole = method.__name__ == "read_into"
        with lock:
            read[tensor.label] += tensor.nbytes if whole else arguments[-1].nbytes
        method(tensor, *arguments)

    return counted


@pytest.mark.parametrize("where", ["forward", pytest.param("gpu", marks=GPU.marks)])
def test_an_error_names_a_weight_of_the_whole_matrix(where: str) -> None:
    config = config_of("llama", 1)
    tensors = {name: (array, layout) for name, array, layout in random_model(3, config)}
    tensors["h.0.w_up"][0].reshape(-1)[-1] = np.inf
    found = list[str]()
    with running_on(where):
        for kind in (partial(CudaModel, device=0), partial(SeveralCudaModels, devices=gpus(2))):
            with pytest.raises(InputError, match="w_up: 1 of") as error:
                kind(config, ((n, *each) for n, each in tensors.items()), Formats("float16"))
            found.append(str(error.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("where", ["forward", pytest.param("gpu", marks=GPU.marks)])
def test_all_gpus_raise_the_error_of_a_read(where: str) -> None:
    config = config_of("llama", 1)

    def tensors() -> Iterator[Any]:
        yield from arrays_of(config)[:3]
        raise CheckpointError("the file has become shorter")

    with running_on(where), pytest.raises(CheckpointError, match="become shorter"):
        SeveralCudaModels(config, tensors(), Formats("float16"), gpus(4))


@pytest.mark.parametrize(
    ("name", "count", "heads"),
    [
        ("llama", 2, True),
        ("llama", 4, False),
        ("gpt2", 4, True),
        ("olmo2", 2, False),
        ("lfm2-bias", 2, True),
        ("gemma4", 2, False),
    ],
)
def test_which_parts_are_divided(name: str, count: int, heads: bool) -> None:
    config = config_of(name, 1)
    meeting = Meeting(count)
    parts = [ModelShard(config, "float16", n, count, meeting) for n in range(count)]
    whole = model_shapes(config)
    for tensor, shape in whole.items():
        widths = [part.shapes()[tensor] for part in parts]
        spans = [span for part in parts for span in part.spans(tensor)]
        if tensor.endswith("w_qkv"):
            assert bool(spans) == heads
        if spans and len(shape) == 2:
            axis = 0 if tensor == "lm_head" else 1
            covered = np.concatenate([np.arange(*span) for span in spans])
            assert sorted(covered.tolist()) == list(range(shape[axis]))
            assert sum(width[axis] for width in widths) == shape[axis]
        array = np.arange(prod(shape)).reshape(shape)
        axis = int(len(shape) == 2 and tensor != "lm_head")
        own = [own_part(array, part.spans(tensor), axis) for part in parts]
        assert_same_bits(joined(parts, tensor, own, axis), array)
    Q, KV, C = config.q_width, config.kv_width, config.n_embd
    results = {"h.0.q": Q, "h.0.qkv": Q + 2 * KV, "h.0.k": KV} if heads else {}
    if config.conv_layers:
        results |= {"h.1.bcx": 3 * C, "h.1.k": C}
    for result, N in results.items():
        rows = np.arange(2 * N).reshape(2, N)
        own = [part.own_part(result, rows) for part in parts]
        assert own[1].shape == (2, N // count)
        assert_same_bits(joined(parts, result, own, -1), rows)


def own_part(array: Array, spans: Sequence[tuple[int, int]], axis: int) -> Array:
    ranges = [np.arange(*span) for span in spans] or [np.arange(array.shape[axis])]
    return array.take(np.concatenate(ranges), axis)


def joined(parts: Sequence[ModelShard], name: str, own: Sequence[Array], axis: int) -> Array:
    """Return the part that the first GPU joins from the parts of all GPUs."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return next(pool.map(lambda part: part.joined(name, own[part.index], axis), parts))
