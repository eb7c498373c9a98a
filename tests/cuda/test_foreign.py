"""Blocks on arrays of other libraries: the order of work on several streams, and threads.

Without a GPU, the emulated device records events, waits and kernels, and a class replaces torch's
tensor. On a GPU, a long-running kernel reveals every missing wait.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpt2block import (
    Block,
    BlockWeights,
    GPT2Config,
    InputError,
    Llama,
    LlamaBlock,
    LlamaBlockWeights,
    LlamaConfig,
    LlamaWeights,
    random_input,
)
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy, foreign
from tests.devices import running_on
from tests.gpus import busy
from tests.threads import together

WIDTH = 128
SMALL = GPT2Config(n_head=2, n_embd=WIDTH)  # heads of 64 channels, which tensor cores need
LLAMA = LlamaConfig(n_head=2, n_embd=WIDTH, n_ff=176, n_layer=1, vocab_size=8, n_ctx=4)
Log = list[tuple[Any, ...]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Record the emulated device's actions, in order: (action, event, stream).

    The current stream is 0. A Block first creates the event "done" of its last call; all other
    events are named "queued".
    """
    with running_on("forward") as device:
        entries: Log = []
        names = itertools.chain(["done"], itertools.repeat("queued"))

        def write(*entry: Any) -> None:
            if entry != ("kernels",) or entry not in entries[-1:]:
                entries.append(entry)

        def name(event: Any, disable_timing: bool) -> None:
            event.ptr = next(names)

        runtime = device.cuda.runtime
        monkeypatch.setattr(device.Event, "__init__", name)
        monkeypatch.setattr(device.Event, "record", lambda e, s=None: write("record", e.ptr, 0))
        monkeypatch.setattr(device.Event, "synchronize", lambda e: write("host waits", e.ptr))
        monkeypatch.setattr(device.Stream, "wait_event", lambda s, e: write("wait", e.ptr, 0))
        monkeypatch.setattr(runtime, "eventRecord", lambda e, s: write("record", e, s))
        monkeypatch.setattr(runtime, "streamWaitEvent", lambda s, e: write("wait", e, s))
        monkeypatch.setattr(device.EmulatedFunction, "_run", lambda *_: write("kernels"))
        yield entries


def in_order_with(*streams: int) -> Log:
    """Return the expected log of a call that uses arrays of these streams."""
    before = [(what, "queued", n) for s in streams for what, n in (("record", s), ("wait", 0))]
    after = [("wait", "done", s) for s in streams]
    return [("wait", "done", 0), *before, ("kernels",), ("record", "done", 0), *after]


class Streamed:
    """A CUDA array of another library, whose interface has these entries for the stream."""

    def __init__(self, array: Any, **said: Any) -> None:
        self.array, self.shape, self._said = array, array.shape, said

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        a = self.array
        known = {"shape": a.shape, "typestr": a.dtype.str, "data": (a.data.ptr, False)}
        return {**known, "strides": None, "version": 3, **self._said}


class Tensor:
    """A substitute for a torch tensor with the attributes that `foreign` reads."""

    is_cuda, requires_grad, layout = True, False, "strided"

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, f"torch.{array.dtype}"

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def get_device(self) -> int:
        return int(cupy.cuda.Device().id)


@pytest.fixture(params=[False, True], ids=["public", "raw"])
def on_stream(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[[int], type[Tensor]]]:
    """Replace torch by a module with a current stream; "raw" gives it without a Stream object."""

    def use(stream: int) -> type[Tensor]:
        current = SimpleNamespace(current_stream=lambda _: SimpleNamespace(cuda_stream=stream))
        torch = SimpleNamespace(Tensor=Tensor, strided="strided", cuda=current)
        if request.param:
            torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: stream)
            del current.current_stream
        monkeypatch.setitem(sys.modules, "torch", torch)
        return Tensor

    yield use
    foreign._new_view.cache_clear()


def arrays(rows: int = 5, width: int = WIDTH) -> tuple[Any, Any]:
    return cupy.asarray(random_input(0, (rows, width))), cupy.empty((rows, width), "float32")


def made(kind: str, dtype: str = "float32") -> Any:
    if kind == "gpt2":
        return Block(BlockWeights.random(0, SMALL), device="cuda", dtype=dtype)
    return LlamaBlock(LlamaBlockWeights.random(0, LLAMA), device="cuda", dtype=dtype)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_block_and_torch_wait_for_each_other(kind: str, log: Log, on_stream: Any) -> None:
    block, (x, out), tensor = made(kind), arrays(), on_stream(7)
    given = tensor(out)
    for _ in range(3):  # launched, captured, replayed
        log.clear()
        assert block(tensor(x), out=given) is given
        assert log == in_order_with(7)
    log.clear()
    block.trace(tensor(x))
    assert log == in_order_with(7)


def test_the_same_stream_needs_no_event(log: Log, on_stream: Any) -> None:
    block, (x, out), tensor = made("gpt2"), arrays(), on_stream(0)
    for x_given, out_given in ((x, out), (tensor(x), tensor(out)), (tensor(x), None)):
        log.clear()
        block(x_given, out=out_given)
        assert log == in_order_with()


@pytest.mark.parametrize(("said", "streams"), [(9, [9]), (2, [2]), (1, []), (None, [])])
def test_the_stream_of_an_interface(said: Any, streams: list[int], log: Log) -> None:
    """1 is the default stream, for which Numba gives None."""
    block, (x, out) = made("gpt2"), arrays()
    log.clear()
    block(Streamed(x, stream=said), out=Streamed(out, stream=said))
    assert log == in_order_with(*streams)


def test_two_libraries(log: Log, on_stream: Any) -> None:
    block, (x, out), tensor = made("gpt2"), arrays(), on_stream(7)
    log.clear()
    block(tensor(x), out=Streamed(out, stream=9))
    assert log[:-2] == in_order_with(7, 9)[:-2]
    assert sorted(log[-2:]) == in_order_with(7, 9)[-2:]


def test_the_host_waits_where_the_stream_is_not_known(log: Log) -> None:
    block, (x, out) = made("gpt2"), arrays()
    log.clear()
    block(x, out=Streamed(out))
    assert log == [*in_order_with(), ("host waits", "done")]


def test_the_work_of_a_refused_call_is_in_order_as_well(log: Log, on_stream: Any) -> None:
    """The order matters because x may have been copied before `out` is refused."""
    block, (x, out), tensor = made("gpt2"), arrays(), on_stream(7)
    log.clear()
    with pytest.raises(InputError, match="out: expected"):
        block(tensor(x), out=out[1:])
    assert log == [entry for entry in in_order_with(7) if entry != ("kernels",)]


@pytest.mark.parametrize("capturing", [0, 7])
def test_a_capture_is_left_alone(
    capturing: int, log: Log, on_stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, (x, _), tensor = made("gpt2"), arrays(), on_stream(7)
    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", lambda s: s == capturing)
    monkeypatch.setattr(cupy.Stream, "is_capturing", lambda s: s.ptr == capturing)
    log.clear()
    with pytest.raises(InputError, match="is capturing a graph: a Block captures graphs itself"):
        block(tensor(x))
    assert not [entry for entry in log if capturing in entry]


def test_a_model_waits_for_tensors_in_device_memory(log: Log) -> None:
    """The model's stream is non-blocking, and tensors may still be being computed."""
    weights = LlamaWeights.random(0, replace(LLAMA, head_size=10))
    tensors: Any = [
        (name, cupy.asarray(np.ascontiguousarray(a.T if layout == "KN" else a)), layout and "NK")
        for name, a, layout in weights.tensors()
    ]
    log.clear()
    Llama.from_tensors(weights.config, tensors, "cuda", "float32")
    assert log[:2] == [("record", "done", 0), ("wait", "done", 0)]  # before its first kernel


@pytest.mark.usefixtures("log")
def test_threads_share_the_views_of_tensors(on_stream: Any) -> None:
    array, tensor = arrays(rows=400, width=1)[0], on_stream(7)

    def work(number: int) -> None:
        for rows in [*range(1, 400)] * 3:
            view = foreign.direct_view(tensor(array[:rows]))
            assert view is not None
            assert view.shape == (rows, 1)
            assert view.data.ptr == array.data.ptr

    assert together(work) == []
    assert foreign._new_view.cache_info().currsize == foreign.MAX_VIEWS


# --- on the GPU -----------------------------------------------------------------------------------

blocks = pytest.mark.parametrize("kind", ["gpt2", "llama"])


@pytest.fixture
def torch() -> ModuleType:
    module: ModuleType = pytest.importorskip("torch", reason="torch is not installed")
    return module


def on_host(tensor: Any) -> Any:
    return tensor.float().cpu().numpy()


@blocks
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_torch_on_a_stream_of_its_own(
    kind: str, dtype: str, non_blocking: bool, torch: ModuleType
) -> None:
    """x is written late, overwritten immediately after the call, and `out` is read immediately."""
    block = made(kind, dtype)
    host = random_input(0, (30, WIDTH)).astype(FLOATS[dtype])
    expected = block(host).astype(np.float32)
    source = torch.from_numpy(host.astype(np.float32)).cuda().to(getattr(torch, dtype))
    x, out, side = torch.empty_like(source), torch.empty_like(source), torch.cuda.Stream()
    ours = cupy.cuda.Stream(non_blocking=True) if non_blocking else cupy.cuda.Stream.null
    busy(0)
    for _ in range(5):  # launched, captured, replayed
        x.fill_(torch.nan)
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        with ours, torch.cuda.stream(side):
            busy()
            torch.cuda._sleep(100_000_000)  # about 50 ms
            x.copy_(source)
            assert block(x, out=out) is out
            got = out.clone()
            x.fill_(torch.nan)
        torch.cuda.synchronize()
        np.testing.assert_array_equal(on_host(got), expected)
        np.testing.assert_array_equal(on_host(out), expected)


class Dlpack:
    """A CUDA array of another library with only DLPack."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@blocks
@pytest.mark.gpu
@pytest.mark.parametrize("library", ["CuPy", "stream", "default stream", "no stream", "DLPack"])
def test_libraries_on_streams_of_their_own(kind: str, library: str) -> None:
    """x is written late, as in the test with torch; if the stream is unknown, before the call."""
    block, host = made(kind), random_input(0, (30, WIDTH))
    expected = block(host)
    source, x, out = cupy.asarray(host), *(cupy.empty(host.shape, "float32") for _ in range(2))
    default = library == "default stream"
    theirs = cupy.cuda.Stream.null if default else cupy.cuda.Stream(non_blocking=True)
    ours = theirs if library == "CuPy" else cupy.cuda.Stream(non_blocking=True)
    said = {"stream": {"stream": theirs.ptr}, "default stream": {"stream": None}}

    def given(array: Any) -> Any:
        if library in ("CuPy", "DLPack"):
            return array if library == "CuPy" else Dlpack(array)
        return Streamed(array, **said.get(library, {}))

    busy(0)
    for _ in range(5):
        x.fill(np.nan)
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        with theirs:
            busy()
            x[...] = source
        if library in ("no stream", "DLPack"):
            theirs.synchronize()
        with ours:
            busy()
            block(given(x), out=given(out))
        with theirs:
            got = out.copy()
            x.fill(np.nan)
        cupy.cuda.Device().synchronize()
        np.testing.assert_array_equal(got.get(), expected)
        np.testing.assert_array_equal(out.get(), expected)


@blocks
@pytest.mark.gpu
def test_numba_on_a_stream_of_its_own(kind: str) -> None:
    numba_cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    block, host = made(kind), random_input(0, (30, WIDTH))
    expected = block(host)
    for stream in (numba_cuda.stream(), 0):
        out = numba_cuda.to_device(np.full_like(host, np.nan), stream=stream)
        x = numba_cuda.to_device(host, stream=stream)
        with cupy.cuda.Stream(non_blocking=True):
            busy()
            block(x, out=out)
        got = out.copy_to_host(stream=stream)
        numba_cuda.synchronize()
        np.testing.assert_array_equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_capture_of_torch_is_left_alone(non_blocking: bool, torch: ModuleType) -> None:
    block = made("gpt2")
    x = torch.ones((5, WIDTH), device="cuda")
    block(x)
    graph, ours = torch.cuda.CUDAGraph(), cupy.cuda.Stream.null
    if non_blocking:
        ours = cupy.cuda.Stream(non_blocking=True)
    with ours, torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(InputError, match="the current stream of torch is capturing a graph"):
            block(x)
        z = 2 * y
    graph.replay()
    assert bool((z == 4).all())


@pytest.mark.gpu
def test_a_model_of_tensors_that_are_still_computed() -> None:
    weights = LlamaWeights.random(0, LLAMA)
    ids = [1, 2, 3]
    expected = Llama(weights, device="cuda")(ids)
    source = [(name, cupy.asarray(a), layout) for name, a, layout in weights.tensors()]
    tensors: Any = [(n, cupy.full(a.shape, 1.0, "float32"), layout) for n, a, layout in source]
    cupy.cuda.Device().synchronize()
    busy(0)
    with cupy.cuda.Stream(non_blocking=True):
        busy()
        for (_, to, _), (_, array, _) in zip(tensors, source, strict=True):
            to[...] = array
        model = Llama.from_tensors(LLAMA, tensors, "cuda", "float32")
    np.testing.assert_array_equal(model(ids), expected)


@pytest.mark.gpu
def test_threads_with_streams_of_torch(torch: ModuleType) -> None:
    block = made("gpt2")
    hosts = [random_input(rows, (rows, WIDTH)) for rows in range(1, 41)]
    expected = [block(host) for host in hosts]

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(100):
                n = (i + 5 * number) % len(hosts)
                x = torch.from_numpy(hosts[n]).cuda()
                out = torch.full_like(x, torch.nan)
                block(x, out=out)
                x.fill_(torch.nan)
                np.testing.assert_array_equal(on_host(out), expected[n])

    assert together(work, 4) == []
