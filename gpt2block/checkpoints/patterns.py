"""Regular expressions by which models split a text into words, as in their tokenizer.json.

Each of SPLITS matches every text from its start to its end: a letter, a digit, white space and any
other character begin a word of some kind.
"""

from __future__ import annotations

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS_2 = _OTHERS.replace(r"[\r\n]*", r"[\r\n/]*")
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASES = (f"{_FIRST}{_CAPITALS}*{_SMALL}+", f"{_FIRST}{_CAPITALS}+{_SMALL}*")

LLAMA_3 = rf"{_ENDINGS}|{_FIRST}\p{{L}}+|\p{{N}}{{1,3}}{_OTHERS}"  # and GPT-4's cl100k
QWEN_2 = rf"{_ENDINGS}|{_FIRST}\p{{L}}+|\p{{N}}{_OTHERS}"
GPT_4O = "|".join(f"{each}{_ENDINGS}?" for each in _CASES) + r"|\p{N}{1,3}" + _OTHERS_2
TEKKEN = "|".join(_CASES) + r"|\p{N}" + _OTHERS_2  # Mistral Nemo's
SPLITS = frozenset({LLAMA_3, QWEN_2, GPT_4O, TEKKEN})

# DeepSeek V3 has three, one after the other: digits, Chinese and Japanese, and all others.
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
