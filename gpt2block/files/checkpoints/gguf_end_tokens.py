"""Find the end tokens of a GGUF file: by its keys, and by the texts of its special tokens.

Source: llama.cpp's src/llama-vocab.cpp, `special_eog_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpt2block.errors import CheckpointError, shown
from gpt2block.files.checkpoints.gguf_header import PREFIX, TOKEN_ID

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's token types
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # token types that are matched in a text before BPE merges
_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|eom_id|>", "<end_of_utterance>", "</s>", "<eos>",
    "<turn|>", "<|tool_response>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip


def token_ids(metadata: Mapping[str, object], vocab_size: int) -> dict[str, int]:
    """Return the token ids in keys `tokenizer.ggml.NAME_token_id`, by NAME such as "eos".

    Raises CheckpointError for a value that is no id of the vocabulary.
    """
    found = {}
    for key, value in metadata.items():
        if not (key.startswith(PREFIX) and key.endswith(TOKEN_ID)):
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            raise CheckpointError(f"{key}: expected a token id below {vocab_size:,}, or -1 for no "
                                  f"token, got {shown(value)}")  # fmt: skip
        found[key.removeprefix(PREFIX).removesuffix(TOKEN_ID)] = value
    return found


def end_tokens(metadata: Mapping[str, object], vocab_size: int) -> dict[int, str]:
    """Return the ids of the end tokens, each with its source: a GGUF key or a special token.

    Raises CheckpointError as `token_ids` does.
    """
    ids, found = token_ids(metadata, vocab_size), dict[int, str]()
    for name in _KEYS:
        if name in ids:
            found.setdefault(ids[name], f"{PREFIX}{name}{TOKEN_ID}")
    for text, id_ in _by_text(metadata).items():
        if id_ < vocab_size:
            found.setdefault(id_, f"special token {text}")
    return found


def _by_text(metadata: Mapping[str, object]) -> dict[str, int]:
    """Return the special tokens whose text marks an end token in llama.cpp: text → id.

    llama.cpp also accepts an ordinary token with such a text, and a user-defined </s>.
    """
    tokens, kinds = (metadata.get(f"{PREFIX}{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, np.ndarray):
        return {}
    found = {}
    for id_, (text, kind) in enumerate(zip(tokens, kinds.tolist(), strict=False)):
        # Gemma's user-defined </s> is an HTML tag, not an end token.
        if text in _TEXTS and kind in ADDED and (text != "</s>" or kind == CONTROL):
            found[text] = id_
    if found.keys() & {"<|call|>", "<|calls|>"} and found.keys() & {"<|return|>", "<|flush|>"}:
        found.pop("<|end|>", None)  # ends one message; an answer may have several messages
    if "<|tool_response>" in found:
        found.pop("</s>", None)
    return found
