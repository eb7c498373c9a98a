"""Rules of passes: the steps that they write compute what the plain steps compute."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from launch_models import CONFIGS

from gpt2block import reference
from gpt2block.engine.numpy.executor import Functions, NumpyExecutor
from gpt2block.engine.passes.decoding_rules import ALL_FUSED, DecodingPlan, decoding_steps
from gpt2block.engine.passes.executor import Outline, Step
from gpt2block.engine.passes.forward import Pass, forward
from gpt2block.engine.passes.prefill_rules import Prefill, PrefillPlan, prefill_steps
from gpt2block.engine.passes.rewriting import Log, Steps, rewritten, run
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import model_shapes
from gpt2block.ops.gated_sums import Fusions

Arrays = dict[str, Any]
PLANS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "norms apart": {"norms": False},
    "norms, RoPE, gate": {"fuses": Fusions(norms=True, rope=True, gate=True)},
    "norms of heads": {"fuses": ALL_FUSED},
    "attention": {"fuses": Fusions(attention=True)},
    "sums": {"fuses": ALL_FUSED, "splits": 2},
}
CASES = [
    (name, plan)
    for name in ("gpt2", "llama", "qwen3", "olmo2", "nanochat", "gemma3")
    for plan in PLANS
    if (plan != "sums" or name in ("llama", "qwen3"))  # others have no feed-forward of one kernel
    and (plan != "attention" or name != "olmo2")  # its norms are of all heads together
]
B, P = 3, 9  # sequences, and positions of the kv_cache


class Reference(Functions):
    """Functions of the reference, without the options that select kernels."""

    def __missing__(self, op: str) -> Any:
        function = super().__missing__(op)
        known = inspect.signature(getattr(reference, op)).parameters

        def computed(*arrays: Any, **attrs: Any) -> Any:
            return function(*arrays, **{name: attrs[name] for name in attrs.keys() & known.keys()})

        self[op] = computed
        return computed


def tensors_of(name: str) -> Arrays:
    """Return float64 tensors of a step at positions 0, 4 and 8, with a full kv_cache."""
    config, rng = CONFIGS[name], np.random.default_rng(0)
    found = {n: rng.normal(size=s) * s[0] ** -0.5 for n, s in model_shapes(config).items()}
    found["lm_head"] = found.get("lm_head", found["wte"]).T
    found |= architecture_of(config).constants(config, found)
    for n, (_, k, v, _) in enumerate(config.layer_caches):
        found |= {f"h.{n}.k": rng.normal(size=(B, P, k)), f"h.{n}.v": rng.normal(size=(B, P, v))}
    positions = np.array([0, 4, 8])
    return found | {
        "tokens": np.array([1, 2, 3]), "positions": positions, "row": np.arange(B),
        "cu_seqlens": np.arange(B + 1), "start": positions, "last": np.arange(B),
    }  # fmt: skip


def computed(steps: Sequence[Step], tensors: Arrays, out: str = "logits") -> np.ndarray:
    copies = {name: array.copy() for name, array in tensors.items()}
    found: np.ndarray = run(steps, NumpyExecutor(copies, functions=Reference({})), out)
    return found


def plain_steps(name: str, tensors: Arrays, want: Any = "logits") -> list[Step]:
    do, config = Outline(tensors), CONFIGS[name]
    forward(Pass(do, PassSettings.of(config)), architecture_of(config), config, want)
    return do.steps


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_steps_of_decoding_compute_the_plain_steps(name: str, plan: str) -> None:
    """In float64; the rotations of RoPE that layers share are stored as float32."""
    tensors = tensors_of(name)
    plain = plain_steps(name, tensors)
    head_size = CONFIGS[name].head_size
    steps = decoding_steps(plain, DecodingPlan(tensors, head_size, **PLANS[plan]))
    assert len(steps) < len(plain)
    truth = computed(plain, tensors)
    np.testing.assert_allclose(computed(steps, tensors), truth, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("products", ["float32", "16_bits"])
def test_steps_of_a_prompt_compute_the_plain_steps(name: str, products: Any) -> None:
    tensors = tensors_of(name)
    plain = plain_steps(name, tensors, "last")
    shape = Prefill(products, B, B, 1, cached=True, continued=True, ends=B, gated=True)
    heads = PassSettings.of(CONFIGS[name]).heads
    steps = prefill_steps(plain, PrefillPlan(shape, tensors, "float64", heads))
    truth = computed(plain, tensors)
    np.testing.assert_allclose(computed(steps, tensors), truth, rtol=1e-9, atol=1e-9)


def test_every_rule_says_where_it_fired_and_why_not() -> None:
    tensors = tensors_of("llama")
    plain, log = plain_steps("llama", tensors), Log()
    steps = decoding_steps(plain, DecodingPlan(tensors, 64, fuses=ALL_FUSED, splits=2), log)
    assert {each.rule for each in log.tried if not each.why} >= {
        "products", "norms", "gates", "rope_product", "attention", "feed_forward_sums",
        "residual_sums",
    }  # fmt: skip
    (why,) = {each.why for each in log.tried if each.rule == "norms" and each.why}
    assert why.startswith("lm_head")
    assert log.parts["h.1.q"] == ("rmsnorm", "matmul_bias", "rope_qkv", "kv_append")
    fused = sorted(op for each in steps[1:] for op in log.parts[each.name])
    norms = ["rmsnorm"] * CONFIGS["llama"].n_layer  # gate and up have one each
    assert fused == sorted([*(step.op for step in plain), *norms])


def test_a_step_between_others_keeps_its_place() -> None:
    steps = Steps(
        [Step(name, "add", tuple(given), {}) for name, given in (("a", "xy"), ("b", "ay"))]
    )
    for name in "cd":
        steps.insert(Step(name, "gelu", ("a",), {}), "a")
    assert [step.name for step in steps] == ["a", "d", "c", "b"]
    assert [step.name for step in steps.readers("a")] == ["d", "c", "b"]
    steps.replace("b", Step("e", "add", ("d", "c"), {}), "a")
    assert [step.name for step in steps] == ["d", "c", "e"]
    assert not rewritten([], (), None)
