"""Counters of kernels: what the page of the course shows, and `--counters`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpt2block import emulator
from gpt2block.bench import measure
from gpt2block.mine import counters
from gpt2block.ops.registry import OPERATIONS, find, parse_sizes
from gpt2block.ptx.counters import METRICS, Counts, total

pytestmark = pytest.mark.skipif(
    emulator.missing() is not None, reason=f"no CUDA on the CPU: {emulator.missing()}"
)

PAGE = (Path(__file__).parents[1] / "docs" / "learn" / "counters.md").read_text("utf-8")
TABLES = re.findall(r"<!-- counters: (\w+) (\S+) -->\n((?:\|.*\n)+)", PAGE)


@pytest.mark.parametrize(("name", "shape", "text"), TABLES, ids=[name for name, *_ in TABLES])
def test_the_page_shows_the_counters_of_the_engine(name: str, shape: str, text: str) -> None:
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
    )
    operation = find(name)
    stored = measure.check_storage(operation, None, None)
    assert len(rows) >= 4
    for variant, _, *shown in rows:
        found = counters.count(
            operation, operation.variant(variant), parse_sizes(operation, shape), stored
        )
        counts = total(each.total for each in found)
        fields = [each.replace(" ", "_") for each in head[2:]]
        assert [f"{getattr(counts, field):,}" for field in fields] == shown


def test_the_page_names_all_counters() -> None:
    assert len(TABLES) == 3
    table = PAGE[PAGE.index("## What is counted") :]
    assert set(re.findall(r"`(\w+)`", table)) >= {*Counts._fields, *METRICS.values()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_reduced_sizes_are_short_and_keep_what_is_stated(name: str) -> None:
    operation = find(name)
    if not operation.workload.sizes:
        return
    sizes = operation.workload.sizes
    found = counters.reduced(operation, sizes, ())
    assert all(0 < found[each] <= size for each, size in sizes.items())
    assert counters.reduced(operation, sizes, sizes) == sizes
