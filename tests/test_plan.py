"""Plans are checked when they are built, and know every shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpt2block import Block, BlockWeights, GPT2Config, InputError
from gpt2block.architectures.gpt2 import fused_plan, ten_step_plan
from gpt2block.config import block_shapes
from gpt2block.ops.registry import OPERATIONS, largest, shapes
from gpt2block.plan import Plan, Step

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
