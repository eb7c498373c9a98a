"""Convert Hugging Face's tokenizer files to the keys of a GGUF file that `gguf_tokenizer` reads."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints import gguf_end_tokens, gguf_tokenizer, tokenizer_files
from gpt2block.files.checkpoints.chat_files import default_template
from gpt2block.files.checkpoints.files import about, first_names
from gpt2block.files.checkpoints.gguf_header import PREFIX
from gpt2block.files.checkpoints.gguf_tokenizer import PRE
from gpt2block.files.checkpoints.tokenizer_specs import spec_of_pair, with_settings

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
_MODEL = ("type", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
          "ignore_merges")  # fmt: skip
_INNER = ("normalizers", "pretokenizers", "decoders", "processors")
# Gemma's pre-tokenizer splits at spaces. This splitting has no effect: the normalizer has replaced
# all spaces
_AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
              "invert": False}  # fmt: skip


def keys_of(files: Mapping[str, bytes], vocab_size: int) -> dict[str, object]:
    """Return the GGUF metadata of a tokenizer. `files`: file name → content.

    Ids below vocab_size without a token get padding tokens. Warns of added tokens that are whole
    words or absorb adjacent white space, which GGUF cannot express. Raises CheckpointError for
    damaged files, and for a tokenizer that GGUF's keys would change.
    """
    with about(tokenizer_files.TOKENIZER, _DAMAGE, "cannot be read: {}"):
        spec, settings = _read(files)
        keys = {f"{PREFIX}{key}": each for key, each in _keys(spec, settings, vocab_size).items()}
        exact = _meaning(spec)
        again = _meaning(gguf_tokenizer.files_from(keys)[tokenizer_files.TOKENIZER])
        other = [part for part in exact if exact[part] != again[part]]
        if other or not exact["merges"]:  # GGUF cannot store an empty list of merges
            raise CheckpointError(f"GGUF has no keys for its {', '.join(other) or 'empty merges'}")
        template = settings.get("chat_template")
        if tokenizer_files.CHAT_TEMPLATE in files:
            template = files[tokenizer_files.CHAT_TEMPLATE].decode()
    template = default_template(template) if isinstance(template, list) else template
    flags = ("single_word", "lstrip", "rstrip")
    flagged = [each["content"] for each in spec["added_tokens"] if any(map(each.get, flags))]
    if flagged:
        said = "are whole words or take the white space next to them"
        warnings.warn(f"GGUF does not say that {first_names(flagged)} {said}", stacklevel=2)
    return keys | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _read(files: Mapping[str, bytes]) -> tuple[Any, dict[str, Any]]:
    """Return (content of tokenizer.json or an equivalent, content of tokenizer_config.json)."""
    named = (tokenizer_files.SPECIAL, tokenizer_files.SETTINGS, tokenizer_files.ADDED)
    special, settings, added = (json.loads(files.get(name, b"{}")) for name in named)
    settings = special | settings
    if tokenizer_files.TOKENIZER in files:
        return with_settings(json.loads(files[tokenizer_files.TOKENIZER]), settings), settings
    for vocab, merges in tokenizer_files.PAIRS:
        if vocab in files and merges in files:
            return spec_of_pair(json.loads(files[vocab]), files[merges], added, settings), settings
    raise CheckpointError(f"expected {tokenizer_files.EXPECTED}")


def _keys(spec: Any, settings: Mapping[str, object], vocab_size: int) -> dict[str, object]:
    """Return the tokenizer's GGUF metadata, by key without the prefix "tokenizer.ggml.".

    SentencePiece's score of a token is minus the rank of the first merge that forms the token.
    """
    model, added = spec["model"], {each["content"]: each for each in spec["added_tokens"]}
    ids, before, merges = _ids(spec), _ids_before(spec), _merges(model)
    fallback = bool(model.get("byte_fallback"))
    unknown = {"unk_token": model.get("unk_token")} if fallback else {}
    tokens = [f"[PAD{id_}]" for id_ in range(vocab_size)]
    kinds = np.full(vocab_size, gguf_end_tokens.UNUSED, np.int32)
    for token, id_ in ids.items():
        tokens[id_], kinds[id_] = token, gguf_end_tokens.NORMAL
        if token in unknown.values():
            kinds[id_] = gguf_end_tokens.UNKNOWN
        elif token in added:
            special = added[token].get("special", True)
            kinds[id_] = gguf_end_tokens.CONTROL if special else gguf_end_tokens.USER_DEFINED
        elif fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
            kinds[id_] = gguf_end_tokens.BYTE
    found = {"tokens": tokens, "token_type": kinds, "merges": [" ".join(pair) for pair in merges]}
    for name, key in gguf_tokenizer.NAMED.items():
        given = {**settings, **unknown}.get(name)
        content = given["content"] if isinstance(given, dict) else given
        found |= {f"{key}_token_id": ids[content]} if content in ids else {}
    first = [id_ for id_ in before[:1] if isinstance(id_, int)]
    found |= {"add_bos_token": bool(before)} | ({"bos_token_id": first[0]} if first else {})
    if not fallback:
        return found | {"model": "gpt2", "pre": _pre(spec)}
    scores = np.full(vocab_size, -len(merges), np.float32)
    for rank, pair in reversed([*enumerate(merges)]):
        scores[ids["".join(pair)]] = -rank
    prefix = any(step["type"] == "Prepend" for step in _steps(spec, "normalizer"))
    return found | {"model": "llama", "scores": scores, "add_space_prefix": prefix}


def _pre(spec: Any) -> str:
    """Return llama.cpp's name of a byte-level BPE's pre-tokenizer. Raises if there is no name."""

    def words(spec: object, ignores: bool | None) -> Any:
        return _steps(spec, "normalizer"), _steps(spec, "pre_tokenizer"), bool(ignores)

    meant = words(spec, spec["model"].get("ignore_merges"))
    for name, pre in PRE.items():
        if words(gguf_tokenizer.words_of(pre), pre.ignore_merges) == meant:
            return name
    raise CheckpointError(f"llama.cpp has no name for its pre_tokenizer: known are "
                          f"{', '.join(sorted(PRE))}")  # fmt: skip


def _meaning(spec: Any) -> dict[str, Any]:
    """Return by name the components of a tokenizer that determine its encoding and decoding.

    SentencePiece's adjacent merges of one token are sorted, as their order has no effect: the
    leftmost pair in a text is merged. Merges of user-defined tokens are left out, as a text is
    split at these tokens first; except for runs of spaces, whose merges come first.
    """
    model, merges, words = spec["model"], _merges(spec["model"]), _steps(spec, "pre_tokenizer")
    fallback = bool(model.get("byte_fallback"))
    if fallback:
        words = [] if words == [_AT_SPACES] else words
        users = {each["content"] for each in spec["added_tokens"] if not each.get("special", True)}
        runs = {user for user in users if not user.strip("▁")}
        applied = [pair for pair in merges if "".join(pair) not in users - runs]
        n = sum("".join(pair) in runs for pair in applied)  # number of merges of runs of spaces
        same = groupby(applied[n:], "".join)
        merges = sorted(applied[:n]) + [pair for _, each in same for pair in sorted(each)]
    return {
        "normalizer": _steps(spec, "normalizer"), "pre_tokenizer": words, "merges": merges,
        "decoder": _steps(spec, "decoder") if fallback else [], "post_processor": _ids_before(spec),
        "model": [model.get(name) or None for name in (*_MODEL, *["unk_token"] * fallback)],
        "vocabulary": _ids(spec),
        "added_tokens": {(each["id"], each.get("special", True)) for each in spec["added_tokens"]},
    }  # fmt: skip


def _ids(spec: Any) -> dict[str, int]:
    """Return token → id for the vocabulary and the added tokens."""
    added = {each["content"]: each["id"] for each in spec["added_tokens"]}
    return {**spec["model"]["vocab"], **added}


def _merges(model: Any) -> list[tuple[str, ...]]:
    """Return the two tokens of each merge; old files write a merge as "left right"."""
    pairs = (each.split(" ") if isinstance(each, str) else each for each in model["merges"])
    return [tuple(pair) for pair in pairs]


def _ids_before(spec: object) -> list[Any]:
    """Return the ids that a post-processor puts before a text, and its steps with other effects."""
    found: list[object] = []
    for step in _steps(spec, "post_processor"):
        single = step.get("single", ())
        if [*map(list, single)][-1:] == [["Sequence"]]:
            firsts = [each.get("SpecialToken", {}).get("id") for each in single[:-1]]
            found += [id_ for name in firsts for id_ in step["special_tokens"][name]["ids"]]
        elif step["type"] != "ByteLevel":
            found.append(step)
    return found


def _steps(spec: Any, part: str) -> list[dict[str, Any]]:
    """Return a component's steps in a canonical form. `part`: its key, such as "normalizer"."""
    step = spec.get(part)
    if not step:
        return []
    if step["type"] == "Sequence":
        inner = next(step[name] for name in _INNER if name in step)
        return [each for one in inner for each in _steps({part: one}, part)]
    if step["type"] == "ByteLevel":
        step = {"use_regex": True, **step, "trim_offsets": True}
    elif step.get("behavior") == "Removed" and step.get("invert"):  # keeps only the matches
        step = {**step, "behavior": "Isolated", "invert": False}
    return [step]
