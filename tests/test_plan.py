"""Plans are checked when they are built, and know every shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from gpt2block import Block, BlockWeights, GPT2Config, InputError, reference
from gpt2block.architectures.gpt2 import fused_plan, ten_step_plan
from gpt2block.architectures.passes import Prefill, decode_plan, model_plan
from gpt2block.architectures.steps import Products
from gpt2block.config import block_shapes
from gpt2block.config_llama import LlamaConfig
from gpt2block.ops.registry import OPERATIONS, largest, shapes
from gpt2block.plan import Plan, Step
from gpt2block.run import program
from gpt2block.run.numpy_walk import walk

TEN = ("ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output")
SEVEN = ("ln1", "qkv", "attn", "x1", "ln2", "gelu", "output")


def test_ten_steps_and_their_shapes() -> None:
    plan = ten_step_plan(12, False, 1e-5, block_shapes(768))
    assert plan.names == TEN
    assert plan.output == "output"
    found = shapes(plan, (2, 30, 768), block_shapes(768))
    assert tuple(found) == TEN
    assert found["qkv"] == (2, 30, 2304)
    assert found["gelu"] == found["ff1"] == (2, 30, 3072)
    assert all(found[name] == (2, 30, 768) for name in TEN if name not in ("qkv", "ff1", "gelu"))


def test_seven_steps_of_the_same_names_and_shapes() -> None:
    weights = block_shapes(768)
    ten, seven = (plan(12, True, 1e-5, weights) for plan in (ten_step_plan, fused_plan))
    assert seven.names == SEVEN
    assert seven.output == "output"
    found = shapes(ten, (2, 30, 768), weights)
    assert shapes(seven, (2, 30, 768), weights) == {name: found[name] for name in SEVEN}
    assert seven.matrices == {"w_qkv", "w_attn", "w_fc", "w_proj"}
    assert not ten.matrices
    assert seven.overlapping
    assert not ten.overlapping


@pytest.mark.parametrize("kernels", ["skeleton", "fused"])
def test_no_x_passes_the_bounds(kernels: str) -> None:
    """Rows of one large value alone, which LayerNorm makes largest, and what else there may be."""
    weights = BlockWeights.random(0, GPT2Config(n_head=2, n_embd=48))
    weights = replace(weights, gamma1=-3 * weights.gamma1, beta2=100 * weights.beta2)
    block = Block(weights, causal=True, device="cpu", kernels=kernels)
    bounds = largest(block.plan, weights.tensors())
    rows = [np.eye(48) * 1e6, np.eye(48) * -1e-3, np.random.default_rng(0).normal(size=(48, 48))]
    trace = block.trace(np.concatenate(rows).astype(np.float32))
    products = {"skeleton": {"proj", "ff1", "ff2"}, "fused": set()}[kernels]
    assert set(bounds) == {"ln1", "qkv", "attn", "ln2", "gelu"} | products
    for name, bound in bounds.items():
        assert np.abs(trace[name]).max() <= bound * (1 + 1e-6)
    assert np.abs(trace["ln1"]).max() > 0.7 * bounds["ln1"]


def test_the_bounds_by_hand() -> None:
    weights = BlockWeights.random(0, GPT2Config(n_head=2, n_embd=48))
    plan = fused_plan(2, True, 1e-5, weights.tensors())
    assert plan.operands == {"ln1", "qkv", "attn", "ln2", "gelu"}
    assert not ten_step_plan(2, True, 1e-5, weights.tensors()).operands
    bounds = largest(plan, weights.tensors())
    ln1 = 48**0.5 * float(np.abs(weights.gamma1).max()) + float(np.abs(weights.beta1).max())
    sums = [sum(abs(float(v)) for v in column) for column in weights.w_qkv.T]
    qkv = ln1 * max(sums) + max(abs(float(v)) for v in weights.b_qkv)
    assert bounds["ln1"] == ln1
    assert bounds["qkv"] == bounds["attn"] == pytest.approx(qkv, rel=1e-12)
    nan = replace(weights, w_fc=weights.w_fc * np.float32(np.nan))
    assert np.isnan(largest(plan, nan.tensors())["gelu"])


def test_every_op_has_all_its_meanings() -> None:
    from gpt2block import reference  # noqa: PLC0415

    for plan in (ten_step_plan, fused_plan):
        for step in plan(2, True, 1e-5, block_shapes(128)).steps:
            assert callable(getattr(reference, step.op))
            assert OPERATIONS[step.op].name == step.op


@pytest.mark.parametrize(
    ("steps", "in_place", "message"),
    [
        ([Step("a", "relu", ("x",))], {}, "unknown op 'relu'"),
        ([Step("a", "gelu", ("b",))], {}, "reads 'b', which is not made yet"),
        ([Step("a", "gelu", ("x",)), Step("a", "gelu", ("x",))], {}, "already taken"),
        ([Step("w", "gelu", ("x",))], {}, "already taken"),
        ([Step("a", "gelu", ("x",))], {"a": "x"}, "cannot overwrite 'x'"),
        ([Step("a", "gelu", ("w",))], {"a": "w"}, "cannot overwrite 'w'"),
        ([Step("a", "gelu", ("x",))], {"a": "a"}, "cannot overwrite 'a'"),
        (
            [Step("a", "gelu", ("x",)), Step("b", "gelu", ("x",))],
            {"a": "b"},
            "cannot overwrite 'b'",
        ),
        (
            [Step("a", "gelu", ("x",)), Step("b", "gelu", ("a",)), Step("c", "gelu", ("a",))],
            {"b": "a"},
            "reads 'a', which is already overwritten",
        ),
    ],
)
def test_a_wrong_plan_is_refused(steps: list[Step], in_place: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Plan(tuple(steps), weights=("w",), in_place=in_place)


def test_a_step_may_take_the_place_of_what_nobody_needs_any_more() -> None:
    steps = tuple(Step(name, "gelu", (x,)) for x, name in ("xa", "ab", "bc", "cd"))
    Plan(steps, (), in_place={"c": "a", "d": "b"})
    with pytest.raises(InputError, match="step c: reads 'b', which is already overwritten"):
        Plan((*steps[:2], Step("d", "gelu", ("x",)), steps[2]), (), in_place={"d": "b"})


CONFIG = GPT2Config(n_layer=3, n_head=2, n_embd=128, n_ctx=40, vocab_size=53)
WANTS: tuple[Any, ...] = (None, "last", "logits", "hidden", "log_likelihood")


def every_model_plan() -> Iterator[Plan]:
    yield decode_plan(CONFIG)
    yield decode_plan(CONFIG, fused_norm=False)
    yield decode_plan(CONFIG, kv_dtype="float8_e5m2")
    for want in WANTS:
        yield model_plan(CONFIG, None if want == "log_likelihood" else want, 7)
        for products, batch, kind in itertools.product(get_args(Products), (1, 3), range(3)):
            if kind == 0 or products != "float32":
                shape = Prefill(products, 1030, batch, 7, kind != 1, kind == 2)
                yield shape.plan(CONFIG, want)
                if products in ("16_bits", "fp8", "float32"):
                    yield replace(shape, kv_dtype="float8_e4m3fn").plan(CONFIG, want)


def test_every_op_of_every_plan_runs_in_numpy_and_in_cuda() -> None:
    plans = list(every_model_plan())
    assert len(plans) > 50
    for step in itertools.chain.from_iterable(plan.steps for plan in plans):
        assert callable(getattr(reference, step.op))
        assert step.op in OPERATIONS or step.op in program.BINDERS


def test_a_layer_of_each_plan() -> None:
    def ops_of(plan: Plan) -> list[str]:
        return [f"{s.name[4:]} {s.op}" for s in plan.steps if s.name.startswith("h.1.")]

    assert ops_of(decode_plan(CONFIG)) == [
        "q linear_qkv", "attn attention_split", "x1 linear", "gelu linear", "output linear",
    ]  # fmt: skip
    assert ops_of(decode_plan(CONFIG, fused_norm=False)) == [
        "ln1 layernorm", "q linear_qkv", "attn attention_split", "x1 linear", "ln2 layernorm",
        "gelu linear", "output linear",
    ]  # fmt: skip
    for products in get_args(Products)[1:]:
        assert ops_of(Prefill(products, 9, 1, 9, False).plan(CONFIG, "logits")) == [
            "ln1 layernorm", "qkv gemm", "attn attention_varlen", "x1 gemm", "ln2 layernorm",
            "gelu gemm", "output gemm",
        ]  # fmt: skip
    continued = ops_of(Prefill("16_bits", 9, 2, 9, True, True).plan(CONFIG, "logits"))
    assert continued[2:4] == ["kv kv_append", "attn attention_packed"]
    continued = ops_of(Prefill("two_part", 9, 2, 9, True, True).plan(CONFIG, "logits"))
    assert continued[2:5] == [
        "kv kv_append", "attn_cached attention_packed", "attn two_part",
    ]  # fmt: skip
    for cached, append in ((False, []), (True, ["kv kv_append"])):
        narrow = Prefill("16_bits", 9, 2, 9, cached, kv_dtype="float8_e5m2").plan(CONFIG, "logits")
        assert ops_of(narrow)[2:-4] == ["rounded kv_round", *append, "attn attention_varlen"]
        assert narrow.buffer("h.1.rounded") == narrow.buffer("h.1.qkv") == "h.0.qkv"
        given = {step.op for step in narrow.steps if step.attrs.get("kv_dtype") == "float8_e5m2"}
        assert given == {"kv_round"} | ({"kv_append"} if cached else set())
    numpy = ops_of(model_plan(CONFIG, "logits", 9))
    assert [name.split()[0] for name in numpy] == ["ln1", "qkv", "kv", "attn", *TEN[3:]]


LLAMA = LlamaConfig(n_layer=2, n_head=2, n_embd=128, n_ctx=40, vocab_size=53, n_kv_head=1, n_ff=144)


def test_gate_and_up_are_one_product_of_a_prompt() -> None:
    """Where products can have two matrices, and have no bias."""
    apart = Prefill("16_bits", 9, 2, 9, True)
    gated = replace(apart, gated=True)
    plan = gated.plan(LLAMA, "logits")
    ops_of = [f"{s.name[4:]} {s.op}" for s in plan.steps if s.name.startswith("h.0.")]
    assert ops_of == [
        "rms1 rmsnorm", "qkv gemm", "rope rope_qkv", "kv kv_append", "attn attention_varlen",
        "x1 gemm", "rms2 rmsnorm", "ff gemm", "output gemm",
    ]  # fmt: skip
    ff = next(step for step in plan.steps if step.name == "h.0.ff")
    assert ff.inputs == ("h.0.rms2", "h.0.w_gate", "", "", "h.0.w_up")
    before = apart.plan(LLAMA, "logits")
    assert plan.buffer("h.1.ff") == "h.0.ff"
    assert plan.matrices == before.matrices
    assert set(before.names) - set(plan.names) == {
        f"h.{layer}.{name}" for layer in range(2) for name in ("gate", "up")
    }
    with_bias = replace(LLAMA, mlp_bias=True)
    for config in (CONFIG, with_bias):
        assert gated.plan(config, "last").steps == apart.plan(config, "last").steps


def test_the_stream_and_the_normed_rows_have_one_buffer_each() -> None:
    plan = Prefill("16_bits", 9, 2, 9, True).plan(CONFIG, "last")
    buffers = {name: plan.buffer(name) for name in plan.names}
    assert {buffers[f"h.{n}.output"] for n in range(2)} == {"embedding"}
    assert {buffers[f"h.{n}.{name}"] for n in range(3) for name in ("ln1", "attn")} == {"h.0.ln1"}
    assert buffers["h.2.x1"] == buffers["h.2.output"] == "last.x"
    assert buffers["h.1.gelu"] == "h.0.gelu"
    assert buffers["h.2.gelu"] == "h.2.gelu"


def test_the_plan_of_a_block_is_the_formula() -> None:
    """Both plans in float64 give what `reference.block_forward` gives, the text to read."""
    config = GPT2Config(n_head=2, n_embd=48)
    weights = BlockWeights.random(0, config).astype(np.float64)
    x = np.random.default_rng(0).normal(size=(2, 7, 48))
    for causal in (False, True):
        truth = reference.block_forward(x, weights, causal)
        for plan in (ten_step_plan, fused_plan):
            steps = plan(2, causal, weights.eps, weights.tensors())
            out = walk(steps, {**weights.tensors(), "x": x})["output"]
            np.testing.assert_allclose(out, truth, rtol=1e-13, atol=1e-13)
