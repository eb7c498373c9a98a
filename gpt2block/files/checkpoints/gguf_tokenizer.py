"""Convert the tokenizer of a GGUF file to the content of Hugging Face's tokenizer files.

Two kinds are supported: `gpt2`, a byte-level BPE with a list of merges, and `llama`,
SentencePiece's BPE, whose merges follow from the scores of its tokens. Sources: llama.cpp's
vocabulary, and the conversion of SentencePiece models in `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2block.errors import CheckpointError, shown
from gpt2block.files.checkpoints import patterns
from gpt2block.files.checkpoints.files import about
from gpt2block.files.checkpoints.gguf import header_of
from gpt2block.files.checkpoints.gguf_end_tokens import (
    ADDED,
    BYTE,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    token_ids,
)
from gpt2block.files.checkpoints.gguf_header import PREFIX, TOKEN_ID, under
from gpt2block.files.checkpoints.tokenizer_files import SETTINGS, TOKENIZER

_SPACE = "▁"  # SentencePiece's character for a space
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_READ = {
    "model", "pre", "tokens", "scores", "token_type", "merges", "add_bos_token", "add_space_prefix",
    "token_type_count",
}  # fmt: skip
# GGUF key that is not implemented → the only accepted value, which has no effect on results
_NEUTRAL: Mapping[str, object] = {"add_eos_token": False, "add_sep_token": False,
                               "remove_extra_whitespaces": False}  # fmt: skip


class _Pre(NamedTuple):
    """Steps that a byte-level BPE applies to a text before its merges."""

    steps: Sequence[Mapping[str, object]]
    nfc: bool = False  # whether the text is normalized to NFC first
    ignore_merges: bool = False  # whether a word in the vocabulary becomes its token without merges
    adds_bos: bool = False  # default of the key add_bos_token


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WORDS = _BYTES | {"use_regex": True}  # splits words by GPT-2's regular expression
_DIGITS = {"type": "Digits", "individual_digits": True}
_PUNCTUATION = {"type": "Punctuation", "behavior": "Contiguous"}


def _splits(*expressions: str) -> list[Mapping[str, object]]:
    """Return pre-tokenizer steps: a split for each regular expression, then bytes."""
    flags = {"behavior": "Isolated", "invert": False}
    splits = [{"type": "Split", "pattern": {"Regex": each}, **flags} for each in expressions]
    return [*splits, _BYTES]


# Pre-tokenizers by llama.cpp's names, copied from the tokenizer.json of the model with this name;
# for exaone, dbrx, deepseek-r1-qwen and megrez from llama.cpp. llama.cpp's own versions differ:
# they never normalize. In its tekken and gpt-4o, letters exclude combining marks, and upper and
# lower case are distinguished in ASCII only. falcon3 splits words as Llama 3 does.
PRE: Mapping[str, _Pre] = {
    **dict.fromkeys(("gpt-2", "phi-2", "granite-docling"), _Pre([_WORDS])),
    "olmo": _Pre([_WORDS], nfc=True),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone"), _Pre([_DIGITS, _WORDS])
    ),
    "command-r": _Pre([_DIGITS, _WORDS], nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2"),
        _Pre(_splits(patterns.LLAMA_3), ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(_splits(patterns.LLAMA_3))),
    "qwen2": _Pre(_splits(patterns.QWEN_2), nfc=True),
    "qwen35": _Pre(_splits(patterns.QWEN_3_5), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), _Pre(_splits(patterns.QWEN_2))),
    "tekken": _Pre(_splits(patterns.TEKKEN), ignore_merges=True, adds_bos=True),
    "gpt-4o": _Pre(_splits(patterns.GPT_4O)),
    "deepseek-v3": _Pre(_splits(*patterns.DEEPSEEK_3)),
    "falcon3": _Pre([_PUNCTUATION, _WORDS, _DIGITS]),
}


def files_of(file: Path) -> dict[str, dict[str, Any]]:
    """Return the content of tokenizer.json and tokenizer_config.json for a GGUF file, by file name.

    tokenizer_config.json contains the chat template. Raises CheckpointError for a file without a
    tokenizer, and for an unsupported tokenizer, with the name of the key.
    """
    header = header_of(file)
    with about(file):
        header.check_usable(PREFIX, "tokenizer.chat_template")
        return files_from(header.metadata)


def as_files(file: Path) -> dict[str, bytes]:
    """Return tokenizer files for a Hugging Face folder, as bytes by name; {} if there is none.

    Raises CheckpointError as `files_of` does.
    """
    if f"{PREFIX}tokens" not in header_of(file).metadata:
        return {}
    return {
        name: (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
        for name, content in files_of(file).items()
    }


def files_from(metadata: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Return tokenizer files, {name: content}. Raises CheckpointError for unsupported metadata."""
    found = under(metadata, PREFIX)
    for key, value in found.items():
        if key in _READ or key.endswith(TOKEN_ID):
            continue
        if isinstance(value, (list, np.ndarray)) or value != _NEUTRAL.get(key, _NEUTRAL):
            raise _unsupported(key, value)
    if "tokens" not in found:
        raise CheckpointError(f"no {PREFIX}tokens: the file has no tokenizer: pass one, or ids")
    tokens = _strings(found, "tokens")
    kinds = _numbers(found, "token_type", tokens, np.full(len(tokens), NORMAL))
    ids = token_ids(metadata, len(tokens))
    named = {name: tokens[ids[key]] for name, key in NAMED.items() if key in ids}
    model = found.get("model")
    if not isinstance(model, str):
        raise _unsupported("model", model)
    if model == "gpt2":
        spec, adds_bos = _byte_level(found, tokens, kinds, metadata.get("general.architecture"))
    elif model in ("llama", "gemma4"):
        tokens = [
            token.replace(" ", _SPACE) if kind == USER_DEFINED and _is_run(token) else token
            for token, kind in zip(tokens, kinds, strict=True)
        ]
        spec = _sentence_piece(found, tokens, kinds, named.get("unk_token"), model == "gemma4")
        adds_bos = True
    else:
        raise _unsupported("model", model)
    adds_bos = _flag(found, "add_bos_token", adds_bos) and "bos_token" in named
    spec |= {
        "version": "1.0",
        "added_tokens": list(_added_tokens(tokens, kinds)),
        "post_processor": _first(named["bos_token"], ids["bos"]) if adds_bos else None,
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": adds_bos, **named}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return {TOKENIZER: spec, SETTINGS: settings}


def _unsupported(key: str, value: object, known: str = "") -> CheckpointError:
    return CheckpointError(
        f"{PREFIX}{key}: {shown(value)} is not supported{known}: give a tokenizer with "
        "--tokenizer, or token ids"
    )


def _flag(found: Mapping[str, object], key: str, default: bool) -> bool:
    flag = found.get(key, default)
    if not isinstance(flag, bool):
        raise CheckpointError(f"{PREFIX}{key}: expected true or false, got {shown(flag)}")
    return flag


def _strings(found: Mapping[str, object], key: str) -> list[str]:
    strings = found.get(key)
    if not isinstance(strings, list):
        raise CheckpointError(f"{PREFIX}{key}: expected an array of strings")
    return strings


def _numbers(
    found: Mapping[str, object], key: str, tokens: Sequence[str], default: object = None
) -> list[Any]:
    numbers = found.get(key, default)
    if not isinstance(numbers, np.ndarray) or len(numbers) != len(tokens):
        raise CheckpointError(
            f"{PREFIX}{key}: expected a number for each of {len(tokens):,} tokens"
        )
    return list(numbers.tolist())


def _added_tokens(tokens: Sequence[str], kinds: Iterable[int]) -> Iterable[dict[str, object]]:
    """Yield the added_tokens of a tokenizer.json, which are matched in a text before BPE merges."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in ADDED and token:
            yield {"id": token_id, "content": token, "special": kind != USER_DEFINED, **flags}


def _bpe(
    tokens: Sequence[str], kinds: Iterable[int], merges: Sequence[object], **changed: object
) -> dict[str, object]:
    """Return the `model` of a tokenizer.json; tokens of GGUF's type UNUSED are left out."""
    pairs = enumerate(zip(tokens, kinds, strict=True))
    vocabulary = {token: id_ for id_, (token, kind) in pairs if kind != UNUSED}
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix",
                           "end_of_word_suffix"))  # fmt: skip
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    model = {"type": "BPE", **unset, **flags, **changed}
    return model | {"vocab": vocabulary, "merges": merges}


def words_of(pre: _Pre) -> dict[str, object]:
    """Return a byte-level BPE's normalizer and pre-tokenizer, which split a text into words."""
    several = {"type": "Sequence", "pretokenizers": pre.steps}
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": pre.steps[0] if len(pre.steps) == 1 else several,
    }


def _byte_level(
    found: Mapping[str, object], tokens: Sequence[str], kinds: Iterable[int], architecture: object
) -> tuple[dict[str, object], bool]:
    """Return tokenizer.json's steps of a byte-level BPE, and whether bos is added by default."""
    pre = found.get("pre", "gpt-2" if architecture == "gpt2" else None)
    known = PRE.get(pre) if isinstance(pre, str) else None
    if known is None:
        raise _unsupported("pre", pre, f" (known are {', '.join(sorted(PRE))})")
    if _flag(found, "add_space_prefix", False):
        raise _unsupported("add_space_prefix", True)
    spec = {
        **words_of(known),
        "decoder": _WORDS,
        "model": _bpe(tokens, kinds, _strings(found, "merges"), ignore_merges=known.ignore_merges),
    }
    return spec, known.adds_bos


def _sentence_piece(
    found: Mapping[str, object],
    tokens: Sequence[str],
    kinds: list[int],
    unknown: str | None,
    merged: bool = False,
) -> dict[str, object]:
    """Return tokenizer.json's steps of SentencePiece's BPE with byte fallback.

    As in llama.cpp, the text after a special or user-defined token begins with a space, too.
    Merges of user-defined runs of spaces come first, as in the tokenizer.json of Gemma. merged:
    whether the file has merges, as for Gemma 4, which never join a run of newlines with other text;
    else merges follow from the scores of tokens.
    """
    if kinds.count(BYTE) != 256 or unknown is None:
        raise CheckpointError(
            f"{PREFIX}token_type: expected 256 tokens for bytes, and an unknown token"
        )
    added = (token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED)
    spaced = next((token for token in added if _SPACE in token and not _is_run(token)), None)
    if spaced is not None:  # never in a text: spaces become ▁ after added tokens are matched
        raise _unsupported("token_type", spaced)
    prefix = _flag(found, "add_space_prefix", not merged)
    prepend = {"type": "Prepend", "prepend": _SPACE}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    to_pieces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_text = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [to_text, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] * prefix)]
    merges: list[Any] = _strings(found, "merges") if merged else []
    merges = merges or _merges(tokens, kinds, _numbers(found, "scores", tokens))
    newlines = {"type": "Split", "pattern": {"Regex": r"\n+"}, "behavior": "Isolated"}
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend] * prefix + [to_pieces]},
        "pre_tokenizer": newlines | {"invert": False} if merged else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, kinds, merges, **options),
    }


def _is_run(token: str) -> bool:
    """Return whether a token consists of several spaces (written as spaces or as ▁)."""
    return len(token) > 1 and not token.strip(f" {_SPACE}")


def _merges(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens whose concatenation is a token, sorted for use as BPE merges.

    Pairs that form a user-defined run of spaces come first, sorted by the length of their left
    token, longest first; then the other pairs, by the score of the concatenation, highest first.
    """
    plain = {token: id_ for id_, token in enumerate(tokens) if kinds[id_] in (NORMAL, USER_DEFINED)}
    found = []
    for token, id_ in plain.items():
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in plain and pair[1] in plain]
        pairs.sort(key=lambda pair: (plain[pair[0]], plain[pair[1]]))
        first = kinds[id_] == USER_DEFINED and _is_run(token)
        found += [
            (-inf, -len(pair[0]), pair) if first else (-scores[id_], id_, pair) for pair in pairs
        ]
    found.sort(key=lambda entry: entry[:2])  # stable
    return [pair for _, _, pair in found]


def _first(bos: str, token_id: int) -> dict[str, object]:
    """Return a post-processor that puts the token `bos` before every text."""
    start, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"id": "A", "type_id": 0}
    single = [start, {"Sequence": text}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}},
    }
