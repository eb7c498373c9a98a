"""Names that users of other libraries try, and the names that `dir` lists."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

import gpt2block
from gpt2block import GPT2, Block, GPT2Config, InputError
from gpt2block.errors import INSTEAD

CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=8, vocab_size=9)
OBJECTS: dict[str, Any] = {
    "": gpt2block,
    "Model": GPT2(gpt2block.GPT2Weights.random(0, CONFIG), "cpu"),
    "Block": Block(gpt2block.BlockWeights.random(0, CONFIG), device="cpu"),
}
OPERATIONS = {
    "layernorm": "gpt2block.reference.layernorm with NumPy, gpt2block.ops.layernorm with CuPy",
    "softmax": "gpt2block.reference.softmax with NumPy, gpt2block.ops.softmax with CuPy",
    "relu_squared": "gpt2block.reference.relu_squared with NumPy",
}


@pytest.mark.parametrize("of", OBJECTS)
def test_a_guessed_name_says_what_to_write(of: str) -> None:
    """The suggested attributes of a model exist."""
    for name, instead in {**INSTEAD[of], **({} if of else OPERATIONS)}.items():
        expected = f"has no attribute {name!r}: use {re.escape(instead)}$"
        with pytest.raises(AttributeError, match=expected):
            getattr(OBJECTS[of], name)
        with pytest.raises(AttributeError, match=expected if of else "no attribute"):
            getattr(type(OBJECTS[of]), name)
        assert not hasattr(OBJECTS[of], name)
        assert name not in dir(OBJECTS[of])
        for suggested in re.findall(r"(?:\bmodel|\(name\))\.(\w+)", instead):
            assert hasattr(GPT2, suggested)


def test_other_names_copies_and_completion() -> None:
    model = OBJECTS["Model"]
    with pytest.raises(AttributeError, match=r"'GPT2' object has no attribute 'nothing'$"):
        _ = model.nothing
    for same in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(same([1, 2, 3]), model([1, 2, 3]))
    assert {"generate", "compare", "tokenizer"} <= set(dir(model))
    assert set(dir(gpt2block)) == {*gpt2block.__all__, *gpt2block._MODULES, "__version__"}


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Block", "LlamaBlock"])
def test_a_class_without_weights_names_where_they_come_from(kind: str) -> None:
    with pytest.raises(InputError, match=r"weights: expected a \w+, .*from_pretrained$"):
        getattr(gpt2block, kind)()


def test_a_text_is_compared_and_traced_as_its_ids() -> None:
    model = GPT2.from_pretrained(device="cpu")
    ids = model.tokenizer.encode_ordinary("To")
    of_text, of_ids = ([(r.name, r.max_rel) for r in model.compare(x, True)] for x in ("To", ids))
    assert of_text == of_ids != []
    np.testing.assert_array_equal(model.trace("To")["logits"], model.trace(ids)["logits"])
