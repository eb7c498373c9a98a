"""The table of docs/emulator.md: the PTX instructions that the engine executes.

`tools/pages.py` writes the table, which comes from gpt2block/emulator/ptx/table.py.
"""

from __future__ import annotations

from gpt2block.emulator.ptx.table import EXACT, FLOATS, INTEGERS, NUMBERS, ROWS, SUMS, WORDS

HEAD = "| instructions | types | effect | result |\n|---|---|---|---|\n"
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
