"""Overlapping launches: a kernel accesses arrays that other kernels write only after its wait.

Every step of the plans whose launches may overlap is run twice. The second time its launches are
early and its inputs arrive late. On a GPU, the previous kernel writes them after the step's kernels
have started; until then they hold NaN. On the emulator, an access before the wait is an error. The
results must have the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
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
    emulator,
    random_input,
)
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy, overlap, replaced, requests
from gpt2block.cuda.formats import FILE, Formats
from gpt2block.emulator import stand_in
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.cuda.steps import steps_of
from gpt2block.engine.model import start_all
from gpt2block.engine.recording import Recording
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.architectures.nanochat import NanoChatConfig
from gpt2block.models.architectures.olmo2 import Olmo2Config
from gpt2block.models.weights.gguf import TYPES
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops import registry
from gpt2block.ops.drafts import DraftTokens, bind_take
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.linear import MORE_ROWS
from gpt2block.ops.rmsnorm_matmul import OPERATION as RMSNORM_MATMUL
from gpt2block.ops.sample_token import SampleState, Slots, bind_sampled, bind_state
from gpt2block.sampling import Sampling
from tests import plain
from tests.contract_cases import shape_of, zeros
from tests.devices import assert_same_bits, on_gpu, on_hopper, slow
from tests.gpus import HOPPER_CAPABILITY, cupy_with
from tests.ops.test_contracts import EXAMPLES

SMALL = GPT2Config(n_layer=1, n_head=2, n_embd=128, n_ctx=40, vocab_size=53)
LIKE = (2, 64, 40, 53)  # n_head, n_embd, n_ctx and vocab_size of small models
HEADS: Any = {"n_kv_head": 1, "n_ff": 48, "head_size": 64}
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

# Inputs that no kernel of a pass writes
CONSTANT = {"gamma_q", "gamma_k", "weight", "taps", "bias", "frequencies", "wte", "wpe"}
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
    config: Any = SMALL, kv_dtype: str | None = None
) -> tuple[CudaModel, NDArray[np.int32]]:
    length = 14 if replaced() else 33  # fewer tiles, so fewer programs to compile
    ids = np.random.default_rng(0).integers(config.vocab_size, size=length, dtype=np.int32)
    return CudaModel(config, random_model(3, config), Formats("bfloat16", kv_dtype), 0), ids


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
    ("dtype", "shape"), [slow("bfloat16", (2, 37, 128)), slow("float32", (2, 7, 64))]
)
def test_the_steps_of_a_block(device: Any, dtype: str, shape: tuple[int, ...]) -> None:
    assert_block_waits(dtype, shape)


@on_gpu
@pytest.mark.parametrize("rows", [128, 1024, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_steps_of_a_large_block(device: Any, dtype: str, rows: int) -> None:
    """On Hopper, tiles belong to one block or to a cluster, and K may be divided."""
    assert_block_waits(dtype, (rows, 768))


@pytest.mark.slow
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


GROUPED = LlamaConfig(1, 4, 64, 40, 53, n_kv_head=2, n_ff=48)
WIDE = LlamaConfig(1, *LIKE, **HEADS)
OTHERS: dict[Any, set[str]] = {  # steps that a Llama lacks
    Olmo2Config(1, *LIKE, **HEADS): {"rmsnorm_add", "operand", "qk_norm_rope"},
    NanoChatConfig(1, *LIKE, **HEADS): {"relu_squared", "cap", "operand", "rmsnorm"},
    Lfm2Config(2, *LIKE, **HEADS, conv_layers=(True, False)): {"short_conv"},
}
# A model, the dtype of its kv_cache, rows of decoding (0: a prompt; None: a prompt with a cache
# and its last step), operations that it has, and whether only their steps are tested.
CHAINS: list[Any] = [
    (SMALL, None, 0, set(), False),
    (SMALL, None, None, set(), False),
    slow(SMALL, "float8_e5m2", None, {"linear_qkv", "attention_split"}, True),
    slow(SMALL, "float8_e5m2", 0, {"kv_round"}, True),
    slow(SMALL, None, MORE_ROWS + 3, {"layernorm"}, False),
    (GROUPED, None, 1, {"rmsnorm"}, False),
    slow(GROUPED, None, MORE_ROWS + 1, {"rmsnorm", "rope_append", "silu_mul"}, False),
    slow(WIDE, None, 0, {"rmsnorm", "rope_qkv", "gemm"}, False),
    slow(replace(WIDE, mlp_bias=True), None, 0, {"silu_mul", "gemm"}, True),
    *(slow(config, None, 0, own, True) for config, own in OTHERS.items()),
    *(slow(config, None, 2, own - {"operand", "qk_norm_rope"}, False)
      for config, own in OTHERS.items()),
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize(("config", "kv_dtype", "rows", "own", "alone"), CHAINS)
def test_the_steps_of_a_model(
    device: Any, config: Any, kv_dtype: str | None, rows: int | None, own: set[str], alone: bool
) -> None:
    model, ids = model_and_ids(config, kv_dtype)
    if rows:
        assert own <= ops_of(assert_decoding_waits(model, ids, rows))
        return
    with model.running():
        program = model._pass(ids, cached=rows is None)
        assert own <= ops_of(program)
        constant = {*model.prompt_weights(head=True), "row"}
        assert_steps_wait(program, constant, own if alone else None)


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


# Operations of plans, except those with weights: models above have them.
WAITING = [
    *("silu_mul", "relu_squared", "cap", "hi_lo", "take", "rmsnorm_groups", "gated_columns"),
    *("operand", "attention_cached", "attention_packed", "attention_queries", "attention_split"),
    *("rope_qkv", "rope_packed", "rope_append", "qk_norm", "qk_norm_rope", "qk_norm_append"),
    *("rotations", "encoder_rows", "log_likelihood", "sample_token", "kv_append", "short_conv"),
]


@on_hopper
@pytest.mark.parametrize("name", WAITING)
def test_an_operation_waits_for_all_inputs(device: Any, name: str) -> None:
    """Inputs are those of test_contracts.py, with tokens at different positions."""
    operation, example = {**registry.OPERATIONS, **registry.STEPS}[name], EXAMPLES[name]
    late = [zeros(each, example, shape_of(each, example)) for each in operation.contract.inputs]
    for entry, array in zip(operation.contract.inputs, late, strict=True):
        if array.dtype.kind == "i" and entry.name != "row":  # all rows are of one sequence
            numbers = np.arange(array.size) % 7
            array[...] = device.asarray(numbers.astype(array.dtype).reshape(array.shape))
        elif array.dtype.kind == "f":
            array[...] = device.asarray(plain.normal(0, *array.shape).astype(array.dtype))
    bound = operation.bind(tuple(late), **example.options)
    outs = [each for each in (bound.out, *bound.extra) for each in in_memory(each)]
    own = [each for each in outs if not any(each is array for array in late)]
    early = {name for each in bound.launches for name in READ_EARLY.get(each.name, ())} | CONSTANT
    entries = zip(operation.contract.inputs, late, strict=True)
    assert_waits(bound.launches, [a for entry, a in entries if entry.name not in early], own)


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
