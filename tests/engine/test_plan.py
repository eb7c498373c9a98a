"""`explain --plan`: the kernels of a decoding step, planned without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch_models import CONFIGS

from gpt2block import LlamaConfig, Model
from gpt2block.cuda.cards import CARDS
from gpt2block.cuda.formats import Formats
from gpt2block.engine.cuda.plan import plan_of
from gpt2block.files.checkpoints import save_gguf
from gpt2block.files.parameters.arrays import random_model
from tests.command_line import gpt2block, printed

MMA = dict.fromkeys(("q", "x1", "gelu", "output"), "decode_mma")
TILES = {**MMA, **dict.fromkeys(("q", "gelu", "output"), "decode_mma_tiles")}
WGMMA = dict.fromkeys(MMA, "decode_wgmma")
NORMS = dict.fromkeys(("ln1", "ln2"), "layernorm_decode")


@pytest.mark.parametrize(("card", "many"), [("7.5", MMA), ("8.9", TILES), ("9.0", WGMMA)])
def test_the_kernels_of_a_layer_of_gpt2(card: str, many: dict[str, str]) -> None:
    for rows, expected in ((1, MMA), (64, {**NORMS, **many})):
        options = "--plan", "gpt2", "--rows", rows, "--card", card, "--dtype", "bfloat16"
        steps: Any = gpt2block("explain", *options, "--json").json["steps"]
        found = {each["step"]: each["kernel"] for each in steps if each["count"] == 12}
        assert found == {"attn": "attention_split", **expected}
        text, _ = printed("explain", *options).split("floor:")
        rows_of_table = [line.split()[0] for line in text.splitlines()[5:] if line]
        assert rows_of_table == [each["step"] for each in steps]


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_the_blocks_of_a_gguf_file_are_planned(tmp_path: Path) -> None:
    config = LlamaConfig(1, 4, 256, 64, 53)
    model: Model[Any] = Model.from_tensors(config, random_model(0, config), "cpu", "float32")
    file = save_gguf(tmp_path / "m.gguf", model, "q8_0")
    found = {s["step"]: s for s in gpt2block("explain", "--plan", file, "--json").json["steps"]}
    assert found["x1"]["kernel"] == "decode_mma_gguf"
    assert found["x1"]["bytes"] == 256 * 256 * 34 // 32 + 3 * 256 * 4  # Q8_0: 34 bytes for 32


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_card_and_architecture_has_a_plan(name: str) -> None:
    for capability in CARDS:
        for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
            plan = plan_of(CONFIGS[name], Formats(dtype), capability, 1, 500)
            assert {"logits", "sample"} <= {each.step for each in plan.kernels}, capability
