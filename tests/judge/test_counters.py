"""Counters of kernels: what the page of the course shows, and `--counters`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpt2block.apps.cli import counters
from gpt2block.emulator.ptx import nvrtc
from gpt2block.emulator.ptx.counters import METRICS, Counts, total
from gpt2block.judge.templates import template
from gpt2block.ops import workload
from gpt2block.ops.registry import find, parse_sizes
from tests.command_line import gpt2block
from tests.devices import on_emulator, slow
from tests.judge.test_verdict import validate

pytestmark = on_emulator

PAGE = (Path(__file__).parents[2] / "docs" / "learn" / "counters.md").read_text("utf-8")
TABLES = re.findall(r"<!-- counters: (\w+) (\S+) -->\n\n\|(.*)\n.*\n((?:\|.*\n)+)", PAGE)
# The page's numbers are of NVRTC 12.9, which joins other loads of shared memory at other addresses:
# another Python can change counters of `registers` by 3 %. Other versions compile other code.
OTHER = 0.05 if "12" in Path(str(nvrtc.find_library())).name else 0.2


@pytest.mark.parametrize(("name", "shape", "head", "rows"), [
    slow(*table) if table[0] == "softmax" else table for table in TABLES
], ids=lambda text: text[:6])  # fmt: skip
def test_the_page_shows_the_counters_of_the_engine(
    name: str, shape: str, head: str, rows: str
) -> None:
    operation = find(name)
    fields = [each.strip().replace(" ", "_") for each in head.split("|")[2:-1]]
    for line in rows.splitlines():
        variant, _, *shown = (cell.strip() for cell in line.split("|")[1:-1])
        at, stored = parse_sizes(operation, shape), workload.check_storage(operation, None, None)
        launched = counters.count(operation, operation.variant(variant), at, stored)
        counts = total(each.total for each in launched)
        numbers = [int(cell.replace(",", "")) for cell in shown]
        found = [getattr(counts, field) for field in fields]
        expected: list[object] = [pytest.approx(each, rel=OTHER, abs=0) for each in numbers]
        if "bank_conflicts" in fields:  # a share of the requests
            at_most = OTHER * numbers[fields.index("shared_requests")]
            place = fields.index("bank_conflicts")
            expected[place] = pytest.approx(numbers[place], abs=at_most)
        assert found == expected


def test_the_page_names_all_counters() -> None:
    assert len(TABLES) == 3
    table = PAGE[PAGE.index("## What is counted") :]
    assert set(re.findall(r"`(\w+)`", table)) >= {*Counts._fields, *METRICS.values()}


def test_sizes_are_halved_except_for_stated_ones_and_rows() -> None:
    found = counters.reduced(find("layernorm"), {})
    assert found["C"] == 768
    assert found["B"] * found["T"] < 8192
    assert counters.reduced(find("layernorm"), {"T": 1024, "B": 8})["T"] == 1024


def test_the_command_counts_the_lines_of_a_kernel_and_of_the_fastest_variant(
    tmp_path: Path,
) -> None:
    file, shape = tmp_path / "my.cu", ("--shape", "B=1,T=64,C=768")
    file.write_text(template(find("layernorm")), encoding="utf-8")
    command = ("kernels", "layernorm", "--mine", file, "--device", "cpu", "--counters", *shape)
    found = json.loads(gpt2block(*command, "--json").out)
    validate(found)
    mine, other = found["counters"]["kernels"]
    assert [mine["variant"], other["variant"]] == ["mine", "6"]
    assert mine["total"]["load_sectors"] > other["total"]["load_sectors"]
    assert all(Path(each["file"]).is_file() for each in (*mine["lines"], *other["lines"]))
    reads = [each for each in mine["lines"] if each["load_requests"]]
    assert sum(each["load_sectors"] for each in reads) == mine["total"]["load_sectors"]
    for each in reads:
        assert "[" in file.read_text("utf-8").splitlines()[each["number"] - 1]
    said = gpt2block(*command).out
    assert f"{mine['total']['load_sectors']:,}" in said
    assert "not counted" not in said
