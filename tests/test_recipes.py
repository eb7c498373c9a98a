"""The recipes of CONTRIBUTING.md, each followed once: a kernel, an architecture, an option."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import Llama, LlamaWeights, emulator, reference
from gpt2block.checks import Range, documented, option, options_of
from gpt2block.contract import takes
from gpt2block.cuda import kernels
from gpt2block.models import architectures as known
from gpt2block.models.architectures import llama
from gpt2block.models.config.llama import LlamaConfig
from gpt2block.ops.operation import Operation, Workload, as_stated
from gpt2block.sampling import Sampling

TWICE = Path(__file__).parent / "corpus" / "kernels" / "twice.cu"


@takes("x f32 N -> y f32 N")
def twice(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 2 x. x (N,) → (N,)."""
    return 2 * x


@pytest.mark.skipif(emulator.missing() is not None, reason="needs the emulator")
def test_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the reference, a file of kernels_cu, and an operation with one variant."""
    folder = shutil.copytree(kernels.SOURCE_DIR, tmp_path / "kernels_cu")
    shutil.copy(TWICE, folder / "elementwise")
    monkeypatch.setattr(kernels, "SOURCE_DIR", folder)
    contract = twice.contract  # type: ignore[attr-defined]
    monkeypatch.setattr(reference, "CONTRACTS", {**reference.CONTRACTS, "twice": contract})
    monkeypatch.setattr(reference, "twice", twice, raising=False)
    variant = as_stated(
        "one", "elementwise/twice.cu", "twice_kernel", lambda c: (c.x, c.output("y"), c.N)
    )
    operation = Operation(name="twice", variants=(variant,), workload=Workload(sizes={"N": 1000}))
    assert variant.idea == "one thread per element"
    x = np.arange(1000, dtype=np.float32)
    np.testing.assert_array_equal(operation.bind((x,)).run(), twice(x))


@dataclasses.dataclass(frozen=True)
class ToyConfig(LlamaConfig):
    """Sizes of a Toy model, which turns queries and keys twice as fast as Llama."""

    NAME: ClassVar[str] = "Toy"
    MODEL_TYPE: ClassVar[str] = "toy"


def constants(config: ToyConfig, vectors: Any) -> dict[str, Any]:
    """Return the frequencies of RoPE: twice those of Llama."""
    made = llama.constants(config, vectors)
    return {**made, "frequencies": 2 * made["frequencies"]}


def test_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with a config and the functions of a model, most of which are Llama's."""
    toy: Any = SimpleNamespace(**{**vars(llama), "CONFIG": ToyConfig, "constants": constants})
    monkeypatch.setitem(known.ARCHITECTURES, "toy", toy)
    sizes: Any = {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16, "n_ff": 24}
    made = [
        Llama(LlamaWeights.random(0, config(**sizes, n_ctx=8, vocab_size=11)), device="cpu")
        for config in (ToyConfig, LlamaConfig)
    ]
    toys, plain = (model(np.array([1, 2, 3], np.int32)) for model in made)
    assert toys.shape == plain.shape == (3, 11)
    np.testing.assert_allclose(toys[0], plain[0], 1e-5)  # position 0 is not turned
    assert not np.allclose(toys[2], plain[2])


def test_an_option() -> None:
    """A field with a default, a range and a sentence, from which help and docstrings follow."""

    @documented
    @dataclasses.dataclass(frozen=True)
    class More(Sampling):
        """Options.

        {options}
        """

        warmth: float = option(1.0, "Scale the logits.", Range(0, 9, "0 to 9"))

    assert {*options_of(More)} - {*options_of(Sampling)} == {"warmth"}
    assert "warmth: scale the logits." in str(More.__doc__)
