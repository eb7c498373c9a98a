"""`gpt2block info`: show a model's sizes, end tokens, memory and tensors, from its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any

from gpt2block.apps.cli import complete, display
from gpt2block.apps.cli.model import model_option, revision_option
from gpt2block.apps.cli.options import argument, json_option, option, option_of
from gpt2block.checks import check_integer
from gpt2block.cuda.doctor import MAX_GPUS
from gpt2block.cuda.formats import CACHE_WITH_FP8, FILE, FormatOptions, Formats, with_cache
from gpt2block.engine.cuda.several_bytes import bytes_by_gpu
from gpt2block.engine.model import check_divides, state_bytes, token_bytes, weight_bytes
from gpt2block.errors import InputError
from gpt2block.files.checkpoints import BUNDLED, Checkpoint
from gpt2block.files.tokenizers.tokenizer import sources_of_end_tokens
from gpt2block.models.config import DRAFTING, EXPERTS, DeltaNets


def info(
    model: str | None = argument(
        f"As in generate --model; by default {BUNDLED}.", complete=complete.models
    ),
    named: str | None = model_option(None, "--model"),
    revision: str | None = revision_option(),
    kv_dtype: str | None = option_of(FormatOptions, "kv_dtype"),
    gpus: int = option("Also show the memory on each GPU if this many GPUs divide the model.", 1),
    as_json: bool = json_option(),
) -> None:
    """Show the sizes, end tokens, memory and tensors of a model, without reading tensor data."""
    models = [each for each in (model, named) if each is not None]
    if len(models) > 1:
        raise InputError("--model: expected the model as the argument or as this option, not both")
    checkpoint = Checkpoint.open(models[0] if models else BUNDLED, revision)
    c = checkpoint.config
    memory: dict[str, dict[str, Any]] = {
        formats.dtype: {
            "weights": weight_bytes(c, formats),
            "kv_cache_dtype": formats.cache_dtype,
            "kv_cache_per_row": c.n_ctx * token_bytes(c.layer_caches, formats),
            **({} if c.delta_nets is None else {"states_per_row": state_bytes(c)}),
        }
        for formats in with_cache(kv_dtype)
    }
    check_integer("gpus", gpus, 1, MAX_GPUS, f"1 to {MAX_GPUS}")
    check_divides(c, gpus)
    in_blocks = checkpoint.nbytes_in_blocks
    if in_blocks and CACHE_WITH_FP8 in memory:  # FILE allows the kv_dtypes that float16 allows
        memory[FILE] = {**memory[CACHE_WITH_FP8], "weights": in_blocks}
    for dtype, sizes in memory.items() if gpus > 1 else ():
        formats = Formats(dtype, sizes["kv_cache_dtype"])
        sizes["on_each_gpu"] = bytes_by_gpu(c, formats, gpus, checkpoint.stored)._asdict()
    ends = sources_of_end_tokens(checkpoint).items()
    facts = {
        "name": checkpoint.name,
        "file": str(checkpoint.file),
        "config": asdict(c),
        "generation_config": checkpoint.generation_config(),
        "end_tokens": [{"id": token, "source": source} for token, source in ends],
        "parameters": sum(prod(tensor.shape) for tensor in checkpoint.stored.values()),
        **({} if c.experts is None else {"active_parameters": _active_parameters(checkpoint)}),
        "dtypes": sorted({name for each in checkpoint.stored.values() for name in each.types}),
        "nbytes": checkpoint.nbytes,
        "memory": memory,
        "default_dtype": FormatOptions().resolved(in_blocks > 0).dtype,
        "tensors": [
            {
                "name": name,
                "in_file": tensor.label,
                "shape": tensor.shape,
                "dtype": ", ".join(tensor.types),
                "layout": tensor.layout,
            }
            for name, tensor in checkpoint.stored.items()
        ],
    }
    if as_json:
        display.print_json(facts)
    else:
        _print_info(checkpoint, facts)


def _print_info(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    c = checkpoint.config
    tied = "tied to the embedding" if c.tie_word_embeddings else "a separate matrix"
    n_kv_head = c.kv_width // c.head_size
    grouped = f" ({n_kv_head} of keys and values)" if n_kv_head != c.n_head else ""
    active = f", a token uses {facts['active_parameters']:,}" if c.experts is not None else ""
    lines = {
        "model": checkpoint.name,
        "file": str(checkpoint.file),
        "sizes": f"{c.n_layer} blocks, width {c.n_embd}, {c.n_head} heads of {c.head_size}"
        f"{grouped}, context {c.n_ctx}, vocabulary {c.vocab_size}, lm_head {tied}",
        **_delta_facts(c.delta_nets, facts["memory"]),
        **_expert_facts(c),
        **_draft_facts(checkpoint),
        **_rope_facts(getattr(c, "scaling", None)),
        "parameters": f"{facts['parameters']:,}{active}",
        "stored": f"{', '.join(facts['dtypes'])}, {display.megabytes(facts['nbytes'])}",
        **_generation_facts(facts["end_tokens"], facts["generation_config"]),
    }
    display.print_facts(lines)
    out = display.console()
    table = display.new_table(("dtype on a GPU", "weights", f"kv_cache, a sequence of {c.n_ctx}"))
    divided: Any = None  # a table, if the model is on several GPUs
    for dtype, sizes in facts["memory"].items():
        cache = f"{display.megabytes(sizes['kv_cache_per_row'])} {sizes['kv_cache_dtype']}"
        named = f"{dtype}, the default" if dtype == facts["default_dtype"] else dtype
        table.add_row(named, display.megabytes(sizes["weights"]), cache)
        if own := sizes.get("on_each_gpu"):
            title = f"dtype on each of {len(own['weights'])} GPUs"
            divided = divided or display.new_table((title, "weights", "kv_cache, a token"))
            divided.add_row(named, *display.on_each_gpu(**own))
    for each in filter(None, (table, divided)):
        out.print()
        display.print_table(out, each)
    out.print("On the CPU every dtype but file takes the memory of float32.")
    if facts["default_dtype"] == FILE:
        out.print("Before compute capability 8.0, and on the CPU, the default is float32.")
    table = display.new_table(("tensor", "shape", "stored as", "in the file"))
    for tensor in _without_repetition(facts["tensors"], c.n_layer):
        shape = "x".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], shape, tensor["dtype"], display.shown(tensor["in_file"]))
    out.print()
    display.print_table(out, table)


def _generation_facts(
    ends: Sequence[Mapping[str, object]], settings: Mapping[str, object]
) -> dict[str, str]:
    """Return lines: the end tokens, and generation_config.json's settings except token ids."""
    named = [
        f"{', '.join(str(end['id']) for end in same)} ({source})"
        for source, same in groupby(ends, key=itemgetter("source"))
    ]
    facts = {"end tokens": ", ".join(named)} if ends else {}
    others = ", ".join(
        f"{name} {json.dumps(value)}"
        for name, value in settings.items()
        if not name.endswith("_token_id") and not name.startswith(("_", "transformers_"))
    )
    return facts | ({"suggested": f"{others}; not applied"} if others else {})


def _delta_facts(of: DeltaNets | None, memory: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a line: the layers that are gated delta nets, and the memory of their states."""
    if of is None:
        return {}
    (states,) = {sizes["states_per_row"] for sizes in memory.values()}
    heads = f"{of.n_k_head} heads of {of.k_size} for keys, {of.n_v_head} of {of.v_size} for values"
    return {"gated delta nets": f"{sum(of.layers)} of {len(of.layers)} blocks, {heads}; states of "
                                f"{display.megabytes(states)} float32 a row"}  # fmt: skip


def _active_parameters(checkpoint: Checkpoint) -> int:
    """Return the number of parameters of a mixture of experts that a token uses."""
    of, total = checkpoint.config.experts, 0
    assert of is not None
    for name, tensor in checkpoint.stored.items():
        size = prod(tensor.shape)
        total += size // of.n_expert * of.n_used if name.endswith(EXPERTS) else size
    return total


def _expert_facts(config: Any) -> dict[str, str]:
    """Return a line: the blocks with experts, and how many experts a token uses."""
    of = config.experts
    if of is None:
        return {}
    return {"experts": f"{sum(of.layers)} of {len(of.layers)} blocks, {of.n_expert} experts of "
                       f"{config.n_ff_expert} channels, a token uses {of.n_used}"}  # fmt: skip


def _draft_facts(checkpoint: Checkpoint) -> dict[str, str]:
    """Return a line: the block that drafts tokens, and its memory."""
    c, stored = checkpoint.config, checkpoint.stored.items()
    if c.draft_config is None:
        return {}
    own = [each for name, each in stored if name.startswith(DRAFTING)]
    count, nbytes = sum(prod(each.shape) for each in own), sum(each.nbytes for each in own)
    cache = c.n_ctx * token_bytes(c.draft_config.layer_caches, Formats("float16"))
    size, of_row = display.megabytes(nbytes), display.megabytes(cache)
    speculates = f"with speculate, keys and values of {of_row} float16 a row"
    return {"drafts": f"a block of {count:,} parameters, {size}; {speculates}"}


def _rope_facts(scaling: Any) -> dict[str, str]:
    """Return a line: the kind of RoPE scaling, and its numbers that differ from defaults."""
    if scaling is None:
        return {}
    values = {each.name: getattr(scaling, each.name) for each in fields(scaling)
              if getattr(scaling, each.name) not in (each.default, 1)}  # fmt: skip
    told = [f"{name.replace('_', ' ')} {value:g}" for name, value in values.items()
            if isinstance(value, (int, float))]  # fmt: skip
    return {"RoPE": ", ".join([f"{scaling.kind} scaling", *told])}


def _without_repetition(tensors: list[dict[str, Any]], n_layer: int) -> Iterator[dict[str, Any]]:
    """Yield tensors; of equal blocks only the first block's, with names such as "h.0 … h.11"."""
    blocks: dict[str, list[tuple[object, ...]]] = {}
    named = [(tensor, *tensor["name"].rpartition(".")[::2]) for tensor in tensors]
    for tensor, block, kind in named:
        blocks.setdefault(block, []).append((kind, tuple(tensor["shape"]), tensor["dtype"]))
    alike = n_layer > 1 and all(found == blocks["h.0"] for h, found in blocks.items() if h)
    for tensor, block, kind in named:
        if not (alike and block):
            yield tensor
        elif block == "h.0":
            yield {**tensor, "name": f"h.0 … h.{n_layer - 1}: {kind}"}
