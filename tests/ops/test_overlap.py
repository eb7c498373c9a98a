"""Overlapping launches: a kernel accesses arrays that other kernels write only after its wait.

Every step of the plans whose launches may overlap is run twice. The second time its launches are
early and its inputs arrive late. On a GPU, the previous kernel writes them after the step's kernels
have started; until then they hold NaN. On the emulator, an access before the wait is an error. The
results must have the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import random_weights
from gpt2block import (
    Block,
    BlockWeights,
    GPT2Config,
    HiLoMatrix,
    LlamaConfig,
    LlamaWeights,
    emulator,
    random_input,
)
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy, overlap, replaced, requests
from gpt2block.cuda.arrays import compute_capability
from gpt2block.cuda.formats import FILE, Formats
from gpt2block.emulator import stand_in
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.cuda.steps import steps_of
from gpt2block.engine.model import start_all
from gpt2block.engine.recording import Recording
from gpt2block.files.parameters.arrays import random_model
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.architectures.nanochat import NanoChatConfig
from gpt2block.models.architectures.olmo2 import Olmo2Config
from gpt2block.models.weights.gguf import TYPES
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops import registry
from gpt2block.ops.drafts import DraftTokens, bind_take
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.linear import MORE_ROWS
from gpt2block.ops.operands import Operand
from gpt2block.ops.rmsnorm_matmul import OPERATION as RMSNORM_MATMUL
from gpt2block.ops.sample_token import SampleState, Slots, bind_sampled, bind_state
from gpt2block.sampling import Sampling
from tests.devices import assert_same_bits, on_gpu, on_hopper, slow
from tests.gpus import HOPPER_CAPABILITY, cupy_with

SMALL = GPT2Config(n_layer=1, n_head=2, n_embd=128, n_ctx=40, vocab_size=53)
LATE_NS = 200_000  # long enough for the host to launch a step's kernels
LATER_NS = 50_000_000  # long enough even if other processes use the GPU

# Parameters that kernels read early although they are not const __restrict__. No kernel of a chain
# writes the settings of a sampler, `row`, or keys and values before a query's position; an early
# read of the position is only a hint.
READ_EARLY: Mapping[str, tuple[str, ...]] = {
    "sample_token": ("temperature", "top_p", "min_p", "top_k", "repetition_penalty", "row"),
    "attention_split": ("row", "position", "k", "v"),
    "take_drafts": ("row",),
}

WEIGHT_MAPS = ("w", "w1", "w3", "up")  # tensor maps of weights, which no kernel writes

PROBES = r"""
// jobs (count, 3): addresses of a source and a destination, bytes to copy after `ns` nanoseconds
extern "C" __global__ void copy_late(const unsigned long long* jobs, int count, long long ns) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
    for (int job = 0; job < count; ++job) {
        const char* from = (const char*)jobs[3 * job];
        char* to = (char*)jobs[3 * job + 1];
        const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
        for (long long i = first; i < jobs[3 * job + 2]; i += step) to[i] = from[i];
    }
}

extern "C" __global__ void copy_without_wait(const int* from, int* to) {
    to[threadIdx.x] = from[threadIdx.x];
}

extern "C" __global__ void copy_after_wait(const int* from, int* to) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    to[threadIdx.x] = from[threadIdx.x];
}
"""


@cache
def probe(name: str) -> Any:
    return cupy.RawModule(code=PROBES, options=("-std=c++17",)).get_function(name)


def poison(arrays: list[Any]) -> None:
    for array in arrays:
        array.view("uint8").fill(0xFF)


def launch_early(launches: tuple[Any, ...]) -> None:
    for launch in launches:
        if not isinstance(launch, requests.Launch):
            launch.run()  # a CuPy kernel, which is launched normally
        elif replaced():
            with stand_in.early_launches(READ_EARLY.get(launch.name, ()) + WEIGHT_MAPS):
                launch.run()
        else:
            overlap.run(launch)


def run_behind(late: list[Any], launches: tuple[Any, ...], ns: int = LATE_NS) -> None:
    """Launch early, after a kernel that writes the arrays' current values `ns` after its start."""
    if replaced():
        launch_early(launches)
        return
    written = [array.copy() for array in late]
    jobs = [(a.data.ptr, b.data.ptr, a.nbytes) for a, b in zip(written, late, strict=True)]
    jobs_on_device = cupy.asarray(np.array(jobs, np.uint64))
    poison(late)
    probe("copy_late")((4,), (256,), (jobs_on_device, np.int32(len(jobs)), np.int64(ns)))
    launch_early(launches)
    cupy.cuda.get_current_stream().synchronize()


def assert_waits(launches: tuple[Any, ...], late: list[Any], outs: list[Any]) -> None:
    """Assert that early launches give the same bits as normal launches.

    late: arrays that earlier kernels write. outs: further arrays that these kernels write.
    """
    arrays = [*late, *outs]
    before = [array.copy() for array in arrays]
    for launch in launches:
        launch.run()
    expected = [array.copy() for array in arrays]
    for array, held in zip(arrays, before, strict=True):
        array[...] = held
    run_behind(late, launches)
    for array, wanted in zip(arrays, expected, strict=True):
        assert_same_bits(array.get(), wanted.get())


def in_memory(tensor: Any) -> list[Any]:
    if isinstance(tensor, HiLoMatrix):
        return [tensor.parts, tensor.scale]
    return [] if tensor is None else [tensor]


def assert_steps_wait(
    recording: Recording, constant: Collection[str], only: set[str] | None = None
) -> None:
    """Assert that every step waits for its inputs, except for constant inputs.

    Inputs have the values of the whole chain. only: operations of the steps to test, if other tests
    cover the rest.
    """
    assert recording.overlapping
    assert only is None or only <= ops_of(recording)
    if only is not None:
        recording.run_steps()  # results of skipped steps are inputs of tested steps
    for step, launches, _, result, _ in recording.steps.values():
        if only is not None and step.op not in only:
            continue
        early = step.inputs[1:3] if step.op == "attention_split" else ()  # k and v, see READ_EARLY
        names = [name for name in step.inputs if name and name not in {*constant, *early}]
        late = [array for name in names for array in in_memory(recording.value(name))]
        addresses = {array.data.ptr for array in late}
        outs = [array for array in in_memory(result) if array.data.ptr not in addresses]
        assert_waits(launches, late, outs)


def ops_of(recording: Recording) -> set[str]:
    return {each.step.op for each in recording.steps.values()}


def assert_block_waits(dtype: str, shape: tuple[int, ...]) -> None:
    C = shape[-1]
    weights = BlockWeights.random(0, GPT2Config(n_head=C // 64, n_embd=C))
    block = Block(weights, causal=True, device="cuda", dtype=dtype, kernels="fused")
    x = cupy.asarray(random_input(1, shape).astype(FLOATS[dtype]))
    engine: Any = block._engine
    assert_steps_wait(engine._recorded(x, cupy.empty_like(x)), weights.tensors())


def model_and_ids(
    config: Any = SMALL, kind: Any = GPT2Weights, kv_dtype: str | None = None
) -> tuple[CudaModel, NDArray[np.int32]]:
    weights = kind.random(3, config).tensors()
    length = 14 if replaced() else 33  # fewer tiles, so fewer programs to compile
    ids = np.random.default_rng(0).integers(config.vocab_size, size=length, dtype=np.int32)
    return CudaModel(config, weights, Formats("bfloat16", kv_dtype), 0), ids


# --- tests of the helpers, and the emulator's error -----------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [False, True])
def test_the_late_kernel_is_late(waits: bool) -> None:
    """Launches do overlap: a kernel that does not wait reads the old values."""
    cupy_with(HOPPER_CAPABILITY)
    x, out = cupy.arange(32, dtype="int32"), cupy.zeros(32, "int32")
    args = np.uintp(x.data.ptr), np.uintp(out.data.ptr)
    name = "copy_after_wait" if waits else "copy_without_wait"
    launch = requests.Launch(name, probe(name), (1,), (32,), args)
    launch.run()  # loads the kernel now; loading later would wait for the running kernel
    run_behind([x], (launch,), LATER_NS)
    assert out.get().tolist() == (list(range(32)) if waits else [-1] * 32)


SOURCE = """
#include "lib/overlap.cuh"
extern "C" __global__ void scaled(const float* x, const float* __restrict__ w, float* out) {
    const int i = threadIdx.x;
    const float factor = w[i];
    BEFORE
    wait_for_previous();
    out[i] = x[i] * factor;
}
"""


@pytest.mark.parametrize(
    ("before", "report"),
    [
        ("", ""),
        ("if (i == 3) out[i] = 0.0f;", "before the wait: .*, writes 4 bytes at byte 12 of out"),
        ("if (x[6] < 0.0f) return;", "before the wait: .*, reads 4 bytes at byte 24 of x"),
        ("if (i < 9) return;", "before the wait: .* no thread of the block waits"),
    ],
)
def test_the_emulator_reports_an_early_access(before: str, report: str, tmp_path: Path) -> None:
    if problem := emulator.missing():
        pytest.skip(problem)
    file = tmp_path / "scaled.cu"
    file.write_text(SOURCE.replace("BEFORE", before))
    x, w, out = np.arange(7, dtype=np.float32), np.full(7, 2, np.float32), np.zeros(7, np.float32)

    def run(early: tuple[str, ...] | None) -> None:
        args: Any = (str(file), "scaled", (1,), (7,), (x, w, out))
        emulator.run(*args, capability="90", early=early)

    run(None)
    if not report:
        run(())
        assert out.tolist() == [0, 2, 4, 6, 8, 10, 12]
        return
    with pytest.raises(stand_in.EmulatorError, match=report):
        run(())
    if "bytes" in report:
        run(("x", "out"))


# --- the chains -----------------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize(
    ("dtype", "shape"), [slow("bfloat16", (2, 37, 128)), ("float32", (2, 7, 64))]
)
def test_the_steps_of_a_block(device: Any, dtype: str, shape: tuple[int, ...]) -> None:
    assert_block_waits(dtype, shape)


@on_gpu
@pytest.mark.parametrize("rows", [128, 1024, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_steps_of_a_large_block(device: Any, dtype: str, rows: int) -> None:
    """On Hopper, tiles belong to one block or to a cluster, and K may be divided."""
    assert_block_waits(dtype, (rows, 768))


@on_hopper
@pytest.mark.parametrize("cached", [False, True], ids=["prefill", "decoding"])
def test_the_steps_of_a_model(device: Any, cached: bool) -> None:
    model, ids = model_and_ids()
    with model.running():
        assert_steps_wait(model._pass(ids, cached), {*model.prompt_weights(head=True), "row"})


@on_hopper
@pytest.mark.parametrize("cached", [slow(False), True], ids=["prefill", "decoding"])
def test_the_steps_with_a_kv_cache_of_fp8(device: Any, cached: bool) -> None:
    model, ids = model_and_ids(kv_dtype="float8_e5m2")
    only = {"linear_qkv", "attention_split"} if cached else {"kv_round"}
    with model.running():
        constant = {*model.prompt_weights(head=True), "row"}
        assert_steps_wait(model._pass(ids, cached), constant, only)


@on_hopper
def test_a_prompt_that_is_continued(device: Any) -> None:
    """Attention of such a prompt reads the cache, to which K and V were appended before."""
    model, ids = model_and_ids()
    with model.running():
        cache = model.new_cache(1, 33)
        model.prefill([ids[:9]], cache)
        program = model.prefill([ids[9:]], cache, "last").recording(model, "last")
        constant = {*model.prompt_weights(head=False), "row"}
        assert_steps_wait(program, constant, {"kv_append", "attention_packed"})


def assert_decoding_waits(model: CudaModel, ids: NDArray[np.int32], rows: int) -> Recording:
    """Assert that the steps of decoding wait.

    If there are enough rows, one has no sequence, and another is at a much earlier position.
    """
    slots = np.arange(rows, dtype=np.int32)
    slots[3:4] = -1
    positions = np.where(slots == 5, 2, len(ids) - 1).astype(np.int32)
    with model.running():
        cache = model.new_cache(rows, len(ids))
        model.prefill([ids[:-1], *[ids[:0]] * (rows - 1)], cache)
        tokens = np.resize(ids, rows)
        step = steps_of(model, cache).next_token(model, slots, tokens, positions)
        recording = step.recording(model)
        assert_steps_wait(recording, {*model.given(), "row"})
        return recording


@pytest.mark.slow
@on_hopper
def test_the_steps_of_decoding_many_rows(device: Any) -> None:
    """LayerNorm has separate steps."""
    assert "layernorm" in ops_of(assert_decoding_waits(*model_and_ids(), MORE_ROWS + 3))


@on_gpu
@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1", "Q5_1", "Q6_K", "float16", "float8_e5m2"])
def test_early_attention_changes_no_bit_of_a_wide_layer(
    device: Any, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are equal if attention starts while blocks of the product before it still run."""
    dtype = FILE if kind in TYPES else kind
    monkeypatch.setattr(random_weights, "gguf_types", lambda config, name, N: ((kind, N),))
    config, steps = LlamaConfig(2, 32, 4096, 256, 512, n_ff=1024), 12
    ids, found = [np.full(200, row, np.int32) for row in range(rows)], list[list[Any]]()
    for overlapping in (False, True):
        monkeypatch.setattr(overlap, "possible", lambda early=overlapping: early)
        engine = CudaModel(config, random_weights.random_tensors(config, dtype), Formats(dtype), 0)
        for _ in range(4):
            decoding = start_all(engine, ids, [Sampling(temperature=0)] * rows, steps)
            each = [decoding.next() for _ in range(steps)]
            found.append([(e.slots.tolist(), e.tokens.tolist(), e.logprobs.tolist()) for e in each])
    assert all(each == found[0] for each in found)


@on_hopper
@pytest.mark.parametrize("rows", [1, slow(MORE_ROWS + 1)])
def test_the_steps_of_decoding_a_llama(device: Any, rows: int) -> None:
    config = LlamaConfig(1, 4, 64, 40, 53, n_kv_head=2, n_ff=48)
    model, ids = model_and_ids(config, LlamaWeights)
    found = ops_of(assert_decoding_waits(model, ids, rows))
    fused = rows == 1 and compute_capability() == HOPPER_CAPABILITY
    assert {"rmsnorm", *(("rope_sums",) if fused else ("rope_append", "silu_mul"))} < found


@pytest.mark.slow
@on_hopper
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_the_steps_of_a_prompt_of_a_llama(device: Any, mlp_bias: bool) -> None:
    """On Hopper, gate and up are one product unless they have biases."""
    config = LlamaConfig(1, 2, 64, 40, 53, n_kv_head=1, n_ff=48, head_size=64, mlp_bias=mlp_bias)
    model, ids = model_and_ids(config, LlamaWeights)
    with model.running():
        program = model._pass(ids[:21], cached=False)
        found = ops_of(program)
        assert {"rmsnorm", "rope_qkv", "gemm"} < found
        assert ("silu_mul" in found) == (mlp_bias or compute_capability() != HOPPER_CAPABILITY)
        constant = {*model.prompt_weights(head=True), "row"}
        assert_steps_wait(program, constant, {"silu_mul", "gemm"} if mlp_bias else None)


@pytest.mark.slow
@on_hopper
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Olmo2Config, {"rmsnorm_add", "operand", "qk_norm_rope"}),
        (NanoChatConfig, {"relu_squared", "cap", "operand", "rmsnorm"}),
        (Lfm2Config, {"short_conv"}),
    ],
)
def test_the_steps_of_other_architectures(device: Any, kind: type[Any], own: set[str]) -> None:
    """Steps that a Llama lacks wait, in prompts and in decoding."""
    convs = {"conv_layers": (True, False)} if kind is Lfm2Config else {}
    config = kind(1 + len(convs), 2, 64, 40, 53, n_kv_head=1, n_ff=48, head_size=64, **convs)
    model = CudaModel(config, random_model(3, config), Formats("bfloat16", None), 0)
    ids = np.random.default_rng(0).integers(53, size=14, dtype=np.int32)
    with model.running():
        constant = {*model.prompt_weights(head=True), "row"}
        assert_steps_wait(model._pass(ids, cached=False), constant, own)
    found = ops_of(assert_decoding_waits(model, ids, 2))
    assert own - {"operand", "qk_norm_rope"} < found


@on_hopper
@pytest.mark.parametrize("row", [[2, -1, 0], [-1, -1, -1]])
def test_the_sampler_of_some_rows(device: Any, row: list[int]) -> None:
    """A block without a sequence also waits, as it counts its turns."""
    V, rng = 500, np.random.default_rng(0)
    state = SampleState.allocate(4, V)
    logits = cupy.asarray(rng.standard_normal((3, V), np.float32))
    of_row, token, position, turn = (cupy.asarray(np.array(row, np.int32)) for _ in range(4))
    launches = bind_state(logits, state, slots=Slots(of_row, token, position, turn)).launches
    assert_waits(launches, [logits, turn], [*state[-4:], token, position])


@on_hopper
def test_the_sampler_of_rows_with_draft_tokens(device: Any) -> None:
    """Absent rows wait too; the next kernel takes the tokens that the rows have drawn."""
    V, together, rng = 500, 2, np.random.default_rng(0)
    state, drafts = SampleState.allocate(4, V), DraftTokens.allocate(4, 20)
    drafts.left.fill(9)
    logits = cupy.asarray(rng.standard_normal((6, V), np.float32))
    numbers = ([2, 2, -1, -1, 0, 0], [5, 6, 0, 0, 5, -1], [3, 4, 0, 0, 3, -1], [0] * 6)
    slots = Slots(*(cupy.asarray(np.array(each, np.int32)) for each in numbers))
    drawn = cupy.zeros(6, "int32"), cupy.zeros(6, "float32")
    report = cupy.zeros((2, 3, 6), "int32")
    of_rows = state._replace(token=drawn[0], logprob=drawn[1])
    sampler = bind_sampled(logits, of_rows, slots, together)
    assert_waits(sampler.launches, [logits, slots.token, slots.position, state.step], [*drawn])
    taking = bind_take(drawn, slots, drafts, state, together, None, report)
    assert_waits(taking.launches, [*drawn, *slots[1:], *drafts, *state[-4:]], [report])


@on_hopper
def test_the_sampler(device: Any) -> None:
    V, rng = 500, np.random.default_rng(0)
    state = SampleState.allocate(3, V)
    state.set([Sampling(temperature=t, top_p=0.9, repetition_penalty=1.3) for t in (0.0, 0.7, 1.2)])
    state.occurred.set(rng.integers(2, size=(3, V), dtype=np.uint8))
    logits = cupy.asarray(rng.standard_normal((3, V), np.float32))
    late = [logits, state.occurred, state.position, state.step]
    assert_waits(bind_state(logits, state).launches, late, [state.token, state.logprob])


def uploaded(array: NDArray[Any], dtype: str = "float32") -> Any:
    return cupy.asarray(array.astype(FLOATS[dtype]))


@on_hopper
def test_steps_of_packed_rows(device: Any) -> None:
    """Steps that GPT-2 lacks; there are two heads of Q, and one of K and V."""
    qkv = device.asarray(np.random.default_rng(0).standard_normal((3, 32), np.float32))
    row, position = (device.asarray(np.array(n, np.int32)) for n in ([1, 0, 1], [2, 4, 0]))
    frequencies = device.asarray(100.0 ** -np.arange(4))
    k, v = device.zeros((2, 2, 5, 8), "float32")
    out, q = device.zeros((3, 32), "float32"), device.zeros((3, 16), "float32")
    turned = registry.bind("rope_qkv", (qkv, position, frequencies), out, n_head=2, n_kv_head=1)
    assert_waits(turned.launches, [qkv, position], [out])
    appended = registry.bind("rope_append", (qkv, frequencies, k, v, row, position), q, n_head=2)
    assert_waits(appended.launches, [qkv, row, position, k, v], [q])
    turns = registry.bind("rotations", (position, frequencies))
    assert_waits(turns.launches, [position], [turns.out])
    own = device.asarray(np.stack([frequencies.get(), 1 - frequencies.get()]))
    given, heads = (qkv, position, own, row), {"n_head": 2, "n_kv_head": 1}
    turned = registry.bind("rope_packed", given, out, **heads)
    assert_waits(turned.launches, [qkv, position, row], [out])
    turns = registry.bind("rotations", (position, own, row))
    assert_waits(turns.launches, [position, row], [turns.out])
    gamma, weight = (device.asarray(np.full(n, 0.5, np.float32)) for n in (8, 32))
    turned = registry.bind("qk_norm_rope", (qkv, position, frequencies, gamma, gamma), out, **heads)
    assert_waits(turned.launches, [qkv, position], [out])
    added = registry.bind("rmsnorm_add", (qkv, weight, out), out)
    assert_waits(added.launches, [qkv, out], [])
    for name, inputs, options in (
        ("relu_squared", (qkv,), {}),
        ("cap", (qkv,), {"limit": 15.0}),
        ("silu_mul", (qkv, out), {}),
        ("operand", (qkv,), {"dtype": "float32", "to_operand": Operand("float16")}),
    ):
        bound = registry.bind(name, inputs, **options)
        assert_waits(bound.launches, [*inputs], [] if bound.out is qkv else [bound.out])
    bcx, taps, kept = (device.zeros(shape, "float32") for shape in ((3, 24), (8, 1, 3), (2, 5, 8)))
    row, position = (device.asarray(np.array(n, np.int32)) for n in ([0, 0, 1], [0, 1, 4]))
    convolved = registry.bind("short_conv", (bcx, taps, None, kept, row, position))
    assert_waits(convolved.launches, [bcx, position, kept], [convolved.out])


@on_hopper
@pytest.mark.parametrize("rows", [5, pytest.param(1500, marks=pytest.mark.gpu)])
def test_a_conversion_to_two_parts_and_its_product(device: Any, rows: int) -> None:
    """The product is launched early after split_rows, which is launched early too."""
    rng = np.random.default_rng(0)
    a, residual = (uploaded(rng.standard_normal((rows, n))) for n in (72, 96))
    w = HiLoMatrix.from_float32(uploaded(rng.standard_normal((96, 72))))
    bias = uploaded(rng.standard_normal(96))
    bound = GEMM.bind((a, w, bias, residual))
    assert bound.launches[0].name == "split_rows"
    assert_waits(bound.launches, [a, residual], [bound.out, *bound.extra])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 500])
def test_the_product_behind_rmsnorm(rows: int) -> None:
    cupy_with(HOPPER_CAPABILITY)
    rng, C = np.random.default_rng(0), 512
    x, gamma = uploaded(rng.standard_normal((rows, C)), "float16"), uploaded(np.ones(C), "float16")
    w = WeightMatrix(uploaded(rng.standard_normal((C, C)) / 20, "float16"), "float16", None, "KN")
    bound = RMSNORM_MATMUL.bind((x, gamma, w), head_dim=64, variant="wgmma")
    norm, product = bound.launches
    norm.run()
    normed = bound.extra[-1]
    assert_waits((product,), [normed], [bound.out])
