"""The table of docs/emulator.md: the PTX instructions that the engine executes.

    python tools/instruction_table.py

writes the table anew, from gpt2block/ptx/table.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpt2block.ptx.table import EXACT, FLOATS, INTEGERS, NUMBERS, ROWS, SUMS, WORDS

PAGE = Path(__file__).parents[1] / "docs" / "emulator.md"
HEAD = "| instructions | types | effect | result |\n|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(\|.*\n)+")
GROUPS = {NUMBERS: "all", FLOATS: "f16…f64", INTEGERS: "u16…s64", WORDS: "b16…b64"}
SHORT = {EXACT: "exact", SUMS: "[sums](#tensor-cores)"}


def table() -> str:
    """Return the table, with one row per row of the engine's table."""
    rows = []
    for row in ROWS:
        types = row.types
        for names, short in GROUPS.items():
            types = types.replace(names, short)
        inexact = row.fidelity.removeprefix("approximate: ").partition(";")[0]
        cells = (
            f"`{row.opcodes}`",
            types.replace(" ", "/") or "–",
            row.meaning,
            SHORT.get(row.fidelity, inexact),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


def written(text: str) -> str:
    """Return the text of the page with a new table."""
    found = TABLE.search(text)
    assert found is not None
    return text[: found.start()] + table() + text[found.end() :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
