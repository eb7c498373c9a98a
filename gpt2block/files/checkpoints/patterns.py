"""Regular expressions that split a text into words, from the tokenizer.json of several models.

The matches of each expression in SPLITS cover a text without gaps: a letter, a digit, white space
or any other character can begin a word.
"""

from __future__ import annotations

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS_2 = _OTHERS.replace(r"[\r\n]*", r"[\r\n/]*")
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASES = (f"{_FIRST}{_CAPITALS}*{_SMALL}+", f"{_FIRST}{_CAPITALS}+{_SMALL}*")

LLAMA_3 = rf"{_ENDINGS}|{_FIRST}\p{{L}}+|\p{{N}}{{1,3}}{_OTHERS}"  # GPT-4 (cl100k) has it, too
QWEN_2 = rf"{_ENDINGS}|{_FIRST}\p{{L}}+|\p{{N}}{_OTHERS}"
QWEN_3_5 = (  # as QWEN_2, with combining marks as letters
    rf"{_ENDINGS}|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = "|".join(f"{each}{_ENDINGS}?" for each in _CASES) + r"|\p{N}{1,3}" + _OTHERS_2
TEKKEN = "|".join(_CASES) + r"|\p{N}" + _OTHERS_2  # used by Mistral Nemo
SPLITS = frozenset({LLAMA_3, QWEN_2, QWEN_3_5, GPT_4O, TEKKEN})

# DeepSeek V3 splits by three expressions one after another: the first matches digits, the second
# Chinese and Japanese, the third all other text.
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
