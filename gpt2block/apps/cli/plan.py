"""`gpt2block explain --plan`: the kernels of a decoding step on any card, and why they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from gpt2block.apps.cli.display import console, new_table, print_json, print_table, shown
from gpt2block.apps.cli.model import ModelOptions
from gpt2block.apps.profiling.summary import layer_of
from gpt2block.checks import check_choice, check_integer
from gpt2block.cuda.cards import CARDS, dotted
from gpt2block.cuda.formats import FILE
from gpt2block.engine.cuda.plan import Plan, Ranges, plan_of
from gpt2block.engine.passes.decoding_rules import RULES, RULES_OF_SUMS
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.gguf_types import in_blocks
from gpt2block.files.checkpoints.hugging_face import CONFIG, read_config
from gpt2block.models.config import SIZES, ModelConfig

MAX_ROWS, POSITION = 512, 500
CARD_NAMES = {dotted(capability): capability for capability in CARDS}


def print_plan(name: str, options: ModelOptions, rows: int, card: str, as_json: bool) -> None:
    """Print the plan of a decoding step. name: of a model, or the path of a config.json."""
    check_integer("rows", rows, 1, MAX_ROWS, f"1 to {MAX_ROWS}")
    check_choice("card", card, tuple(CARD_NAMES))
    config, ranges = _config_of(name, options.revision)
    formats = options.formats.resolved(in_blocks=bool(ranges))
    of_file = ranges if formats.dtype == FILE else {}
    position = min(POSITION, config.n_ctx - 1)
    plan = plan_of(config, formats, CARD_NAMES[card], rows, position, of_file)
    facts: dict[str, Any] = {
        "model": name,
        "card": f"{plan.card.name} (compute capability {card})",
        **formats.facts(),
        "rows": plan.rows,
        "position": position,
        "steps": [_step(plan, kernels) for kernels in _alike(plan)],
        "rules": list(_rules(plan)),
    }
    if as_json:
        print_json(facts)
    else:
        _print(console(), plan, facts)


def _config_of(name: str, revision: str | None) -> tuple[ModelConfig, Ranges]:
    """Return a model's config, and the ranges of the block types of its matrices."""
    if name in SIZES:
        return SIZES[name], {}
    path = Path(name) / CONFIG if Path(name).is_dir() else Path(name)
    if path.name == CONFIG and path.is_file():
        config, _, scheme = read_config(path)
        if scheme is None:
            return config, {}
    checkpoint = Checkpoint.open(name, revision)
    blocks = {each: in_blocks(stored) for each, stored in checkpoint.stored.items()}
    ranges = {
        each: tuple(
            (kind, sum(part.shape[0] for _, part in parts))
            for kind, parts in groupby(found.parts, lambda part: part[0])
        )
        for each, found in blocks.items()
        if found is not None
    }
    return checkpoint.config, ranges


def _alike(plan: Plan) -> Iterable[list[Any]]:
    """Group the kernels of all layers that have the same name, sizes and place in the layer."""
    groups: dict[tuple[object, ...], list[Any]] = {}
    for each in plan.kernels:
        key = layer_of(each.step)[1], each.kernel, each.grid, each.block, plan.computes(each)
        groups.setdefault(key, []).append(each)
    return groups.values()


def _step(plan: Plan, kernels: list[Any]) -> dict[str, Any]:
    first = kernels[0]
    return {
        "step": layer_of(first.step)[1],
        "count": len(kernels),
        "computes": plan.computes(first),
        "operation": first.op,
        "kernel": first.kernel,
        "grid": first.grid,
        "block": first.block,
        "bytes": sum(each.moved.total for each in kernels),
        "floor_us": sum(map(plan.floor_us, kernels)),
    }


def _rules(plan: Plan) -> Iterable[dict[str, Any]]:
    """Return, for each rule, how often it fired, and how often it did not, by reason."""
    texts = {rule.name: rule.text for rule in (*RULES, *RULES_OF_SUMS)}
    for name, tried in groupby(plan.log.tried, attrgetter("rule")):
        reasons = Counter(each.why for each in tried)
        fired = reasons.pop("", 0)
        yield {"rule": name, "text": texts[name], "fired": fired, "not_fired": dict(reasons)}


def _print(out: Console, plan: Plan, facts: dict[str, Any]) -> None:
    out.print(f"model  {shown(facts['model'])}, {plan.formats.dtype}")
    out.print(f"card   {facts['card']}")
    tokens = "a token" if plan.rows == 1 else f"{plan.rows} tokens"
    out.print(f"step   {tokens} at position {plan.position}")
    table = new_table(("step", "computes", "kernel"), ("n", "grid", "block", "MB", "floor us"))
    for each in facts["steps"]:
        sizes = ("x".join(map(str, _without_ones(each[size]))) for size in ("grid", "block"))
        megabytes, us = f"{1e-6 * each['bytes']:,.2f}", f"{each['floor_us']:,.1f}"
        counts = Counter(each["computes"]).items()
        text = ", ".join(f"{n} {op}" if n > 1 else op for op, n in counts)
        table.add_row(each["step"], text, each["kernel"], str(each["count"]), *sizes, megabytes, us)
    total = sum(each["floor_us"] for each in facts["steps"])
    out.print()
    print_table(out, table)
    rate = f"{plan.card.gb_s:,} GB/s"
    out.print(f"floor: the card's memory moves the bytes at {rate}; {total:,.1f} us in all")
    out.print()
    table = new_table(("rule", "rewrites"), ("fired", "not"))
    for each in facts["rules"]:
        reasons = each["not_fired"]
        text = "\n".join([each["text"], *(f"- {why} ({n})" for why, n in reasons.items())])
        table.add_row(each["rule"], text, str(each["fired"]), str(sum(reasons.values())))
    print_table(out, table)


def _without_ones(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes without the ones at the end, except the first."""
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return sizes
