"""The table of kernels_cu/README.md: each kernel, its idea, and the parts of models that run it.

`tools/pages.py` writes the table, which comes from the registry of operations and from
tests/golden/kernels.txt.
"""

from __future__ import annotations

from kernel_uses import GOLDEN, PROMPTS, Use, read

from gpt2block.ops.registry import OPERATIONS

HEAD = "| operation | variant | file | kernels | runs in | idea |\n|---|---|---|---|---|---|\n"
FIGURES = "../docs/performance.md"


def parts_of(uses: set[Use]) -> str:
    """Return the parts of models and blocks in which kernels run, in the order of their time."""
    parts, known = {use.part for use in uses}, []
    if "load" in parts:
        known.append("loading")
    if parts & {*PROMPTS} - {"load"}:
        known.append("prompts")
    if any(part.isdigit() or part in ("lookup", "draft") for part in parts):
        known.append("decoding")
    if {use.model for use in uses if use.part in ("skeleton", "fused")}:
        known.append("blocks")
    oldest = min((use.capability for use in uses), default="7.5", key=float)
    newest = max((use.capability for use in uses), default="9.0", key=float)
    gpus = {("7.5", "9.0"): "", ("9.0", "9.0"): ", sm_90", ("7.5", "8.0"): ", before sm_90",
            ("8.0", "9.0"): ", from sm_80"}  # fmt: skip
    return ", ".join(known) + gpus.get((oldest, newest), f", sm_{oldest.replace('.', '')} alone")


def table() -> str:
    """Return the table, with one row per variant. A kernel of no model has a dash."""
    uses, rows = read(GOLDEN.read_text(encoding="utf-8")), []
    for operation in OPERATIONS.values():
        for variant in operation.table:
            ran = [uses.get(f"{variant.file} {name}", set()) for name in variant.kernels]
            runs_in = parts_of(set().union(*ran)) if any(ran) else "–"
            names = ", ".join(f"`{name}`" for name in variant.kernels)
            rows.append(
                f"| [{operation.name}]({FIGURES}#{operation.name}) | {variant.name} "
                f"| [`{variant.file}`]({variant.file}) | {names} | {runs_in} | {variant.idea} |\n"
            )
    return HEAD + "".join(rows)
