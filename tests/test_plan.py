"""Plans are checked when they are built, and know every shape."""

from __future__ import annotations

import pytest

from gpt2block import InputError
from gpt2block.config import block_shapes
from gpt2block.plan import OUTPUT_SHAPES, Plan, Step, fused_plan, ten_step_plan

TEN = ("ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output")
SEVEN = ("ln1", "qkv", "attn", "x1", "ln2", "gelu", "output")


def test_ten_steps_and_their_shapes() -> None:
    plan = ten_step_plan(12, False, 1e-5, block_shapes(768))
    assert plan.names == TEN
    assert plan.output == "output"
    shapes = plan.shapes((2, 30, 768), block_shapes(768))
    assert tuple(shapes) == TEN
    assert shapes["qkv"] == (2, 30, 2304)
    assert shapes["gelu"] == shapes["ff1"] == (2, 30, 3072)
    assert all(shapes[name] == (2, 30, 768) for name in TEN if name not in ("qkv", "ff1", "gelu"))


def test_seven_steps_of_the_same_names_and_shapes() -> None:
    weights = block_shapes(768)
    ten, seven = (plan(12, True, 1e-5, weights) for plan in (ten_step_plan, fused_plan))
    assert seven.names == SEVEN
    assert seven.output == "output"
    shapes = ten.shapes((2, 30, 768), weights)
    assert seven.shapes((2, 30, 768), weights) == {name: shapes[name] for name in SEVEN}
    assert seven.matrices == {"w_qkv", "w_attn", "w_fc", "w_proj"}
    assert not ten.matrices
    assert seven.overlapping
    assert not ten.overlapping


def test_every_op_has_all_its_meanings() -> None:
    from gpt2block import reference  # noqa: PLC0415

    for op in OUTPUT_SHAPES:
        assert callable(getattr(reference, op))


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
