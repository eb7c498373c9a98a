"""Build a tokenizer.json from vocab.json and merges.txt; add tokens of tokenizer_config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpt2block.files.checkpoints.tokenizer_files import SETTINGS

GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_ANY_CLASS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes for any tokenizer.json
_SPECIAL = re.compile(r"<.+>|\[.+\]")
BYTE_LEVEL: Mapping[str, object] = {"type": "ByteLevel", "add_prefix_space": False,
                                 "trim_offsets": True, "use_regex": True}  # fmt: skip


def spec_of_pair(
    ids: Mapping[str, int], merges: bytes, added: Mapping[str, int], settings: Mapping[str, object]
) -> dict[str, object]:
    """Build the content of a tokenizer.json from the content of vocab.json and merges.txt.

    ids: token → id. merges: content of the file of merges. added: content of added_tokens.json.
    settings: content of tokenizer_config.json. Raises ValueError for unsupported settings.
    """
    kind = settings.get("tokenizer_class")
    if kind not in (None, *GPT2_CLASSES, *_ANY_CLASS):
        raise ValueError(f"{SETTINGS} has tokenizer_class {kind!r}: expected GPT-2's")
    lines = merges.decode("utf-8").replace("\r\n", "\n").split("\n")
    pairs = [line for line in lines if line and not line.startswith("#version")]
    names = {token for token in ids if token[-1:] in (">", "]") and _SPECIAL.fullmatch(token)}
    names.difference_update([pair.replace(" ", "") for pair in pairs])
    special: dict[str, tuple[int, object]] = {token: (ids[token], True) for token in names}
    for token, token_id in added.items():
        special[token] = token_id, _SPECIAL.fullmatch(token)
    special |= _in_settings(settings)
    prefix = bool(settings.get("add_prefix_space"))
    return {
        "added_tokens": _special_tokens(special),
        "pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": prefix},
        "model": {"type": "BPE", "vocab": ids, "merges": pairs},
    }


def with_settings(spec: Any, settings: Mapping[str, object]) -> Any:
    """Return `spec` plus added tokens that only `settings` has. Raises ValueError."""
    added = spec.get("added_tokens") or []
    known = {token["content"] for token in added}
    more = {token: of for token, of in _in_settings(settings).items() if token not in known}
    return spec | {"added_tokens": [*added, *_special_tokens(more)]}


def _in_settings(settings: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    """Return tokenizer_config.json's added tokens: text → (id, whether the token is special)."""
    entries = (settings.get("added_tokens_decoder") or {}).items()
    return {entry["content"]: (int(key), entry.get("special")) for key, entry in entries}


def _special_tokens(found: Mapping[str, tuple[int, object]]) -> list[dict[str, object]]:
    """Return entries for tokenizer.json, by id. Raises ValueError if a token is not special."""
    for token, (_, special) in found.items():
        if not special:
            raise ValueError(f"{token!r} is an added token that is not special, and not in "
                             "added_tokens of a tokenizer.json")  # fmt: skip
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}  # fmt: skip
    by_id = sorted(found.items(), key=lambda item: item[1][0])
    return [{"id": token_id, "content": token, **flags} for token, (token_id, _) in by_id]
