"""The tokenizer of a GGUF file, as the content of Hugging Face's tokenizer files.

Two kinds: `gpt2`, a byte-level BPE with a list of merges, and `llama`, SentencePiece's BPE, whose
merges follow from the scores of its tokens. Sources: llama.cpp's vocabulary, and the conversion of
SentencePiece models in `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2block.checkpoints.files import about
from gpt2block.checkpoints.gguf import header_of
from gpt2block.checkpoints.tokenizer_files import SETTINGS, TOKENIZER
from gpt2block.errors import CheckpointError, shown

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"  # SentencePiece's character for a space
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_READ = {
    "model", "pre", "tokens", "scores", "token_type", "merges", "add_bos_token", "add_space_prefix",
    "token_type_count",
}  # fmt: skip
# Other keys, except ids of tokens, are accepted only with the value for which they change nothing
_NEUTRAL: Mapping[str, Any] = {"add_eos_token": False, "add_sep_token": False,
                               "remove_extra_whitespaces": False}  # fmt: skip

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def files_of(file: Path) -> dict[str, Any]:
    """The content of tokenizer.json and tokenizer_config.json, by these names.

    The latter has the chat template. Raises CheckpointError for a file without a tokenizer, and for
    one that is not supported, with the name of the key.
    """
    header = header_of(file)
    with about(file):
        return _files(header.under(_PREFIX), header.metadata)


def as_files(file: Path) -> dict[str, bytes]:
    """The tokenizer's files for a Hugging Face folder; none for a file without a tokenizer.

    Raises CheckpointError as `files_of` does.
    """
    if not header_of(file).under(_PREFIX):
        return {}
    return {
        name: (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
        for name, content in files_of(file).items()
    }


def _files(found: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in found.items():
        known = key in _READ or key.endswith("_token_id")
        if not known and (
            isinstance(value, (list, np.ndarray)) or value != _NEUTRAL.get(key, _NEUTRAL)
        ):
            raise _unsupported(key, value)
    tokens = _strings(found, "tokens")
    kinds = _numbers(found, "token_type", tokens, np.full(len(tokens), _NORMAL))
    ids = {name: found.get(f"{key}_token_id") for name, key in _NAMED.items()}
    named = {
        name: tokens[id_]
        for name, id_ in ids.items()
        if isinstance(id_, int) and 0 <= id_ < len(tokens)
    }
    model = found.get("model")
    if model == "gpt2":
        spec, adds_bos = _byte_level(found, tokens, kinds, metadata.get("general.architecture"))
    elif model == "llama":
        spec, adds_bos = _sentence_piece(found, tokens, kinds, named.get("unk_token")), True
    else:
        raise _unsupported("model", model)
    adds_bos = found.get("add_bos_token", adds_bos) and "bos_token" in named
    spec |= {
        "version": "1.0",
        "added_tokens": list(_added(tokens, kinds)),
        "post_processor": _first(named["bos_token"], found["bos_token_id"]) if adds_bos else None,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        **named,
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return {TOKENIZER: spec, SETTINGS: settings}


def _unsupported(key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{_PREFIX}{key}: {shown(value)} is not supported: give a tokenizer with --tokenizer, or "
        "token ids"
    )


def _strings(found: Mapping[str, Any], key: str) -> list[str]:
    strings = found.get(key)
    if not isinstance(strings, list):
        raise CheckpointError(f"{_PREFIX}{key}: expected an array of strings")
    return strings


def _numbers(
    found: Mapping[str, Any], key: str, tokens: Sequence[str], default: Any = None
) -> list[Any]:
    numbers = found.get(key, default)
    if not isinstance(numbers, np.ndarray) or len(numbers) != len(tokens):
        raise CheckpointError(
            f"{_PREFIX}{key}: expected a number for each of {len(tokens):,} tokens"
        )
    return list(numbers.tolist())


def _added(tokens: Sequence[str], kinds: Iterable[int]) -> Iterable[dict[str, Any]]:
    """The tokens that are matched in the text before the model is applied."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token:
            yield {"id": token_id, "content": token, "special": kind != _USER_DEFINED, **flags}


def _bpe(
    tokens: Sequence[str], kinds: Iterable[int], merges: Sequence[Any], **changed: Any
) -> dict[str, Any]:
    """The model of a tokenizer.json; its vocabulary is without tokens that only fill the file's."""
    pairs = enumerate(zip(tokens, kinds, strict=True))
    vocabulary = {token: id_ for id_, (token, kind) in pairs if kind != _UNUSED}
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix",
                           "end_of_word_suffix"))  # fmt: skip
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    model = {"type": "BPE", **unset, **flags, **changed}
    return model | {"vocab": vocabulary, "merges": merges}


def _byte_level(
    found: Mapping[str, Any], tokens: Sequence[str], kinds: Iterable[int], architecture: Any
) -> tuple[dict[str, Any], bool]:
    """The pipeline of a byte-level BPE, and whether texts begin with bos by default."""
    pre = found.get("pre", "gpt-2" if architecture == "gpt2" else None)
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    words = step | {"use_regex": True}
    splits: dict[Any, list[dict[str, Any]]] = {
        "gpt-2": [words],
        "smollm": [{"type": "Digits", "individual_digits": True}, words],
        "llama-bpe": [
            {"type": "Split", "pattern": {"Regex": _LLAMA_3}, "behavior": "Isolated",
             "invert": False},
            step | {"use_regex": False},
        ],
    }  # fmt: skip
    if pre not in splits:
        raise _unsupported("pre", pre)
    steps, llama_3 = splits[pre], pre == "llama-bpe"
    several = {"type": "Sequence", "pretokenizers": steps}
    spec = {
        "normalizer": None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else several,
        "decoder": words,
        "model": _bpe(tokens, kinds, _strings(found, "merges"), ignore_merges=llama_3),
    }
    return spec, llama_3


def _sentence_piece(
    found: Mapping[str, Any], tokens: Sequence[str], kinds: list[int], unknown: str | None
) -> dict[str, Any]:
    """The pipeline of SentencePiece's BPE with bytes.

    As in llama.cpp, the text after a special or user-defined token begins with a space, too.
    """
    scores = _numbers(found, "scores", tokens)
    if kinds.count(_BYTE) != 256 or unknown is None:
        raise CheckpointError(
            f"{_PREFIX}token_type: expected 256 tokens for bytes, and an unknown token"
        )
    added = (token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED)
    spaced = next((token for token in added if _SPACE in token), None)
    if spaced is not None:  # it is matched in the text, where spaces are not replaced yet
        raise _unsupported("token_type", spaced)
    prefix = found.get("add_space_prefix", True)
    prepend = {"type": "Prepend", "prepend": _SPACE}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    to_pieces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_text = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [to_text, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] * prefix)]
    merges = _merges(tokens, kinds, scores)
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend] * prefix + [to_pieces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, kinds, merges, **options),
    }


def _merges(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every two tokens that form a third one, by the scores of the latter, best first."""
    plain = {
        token: id_ for id_, token in enumerate(tokens) if kinds[id_] in (_NORMAL, _USER_DEFINED)
    }
    found = []
    for token, id_ in plain.items():
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in plain and pair[1] in plain]
        pairs.sort(key=lambda pair: (plain[pair[0]], plain[pair[1]]))
        found += [(-scores[id_], id_, pair) for pair in pairs]
    found.sort(key=lambda entry: entry[:2])  # stable
    return [pair for _, _, pair in found]


def _first(bos: str, token_id: int) -> dict[str, Any]:
    """The post-processor that puts a token before every text."""
    start, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"id": "A", "type_id": 0}
    single = [start, {"Sequence": text}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}},
    }
