"""Chats whose messages have names of tokens: their ids, compared with those of harmless words."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers as hugging_face

from fuzzing import Area, Rng, accepted, attempt, check, check_equal
from fuzzing.vocabularies import CHARACTERS, added_token, byte_level, piece_spec, spec_of
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.files.tokenizers import tokenizer

_TEMPLATES = Path(__file__).parents[2] / "tests" / "chat_templates"
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NAMES = ("<|im_end|>", "<｜User｜>", "→", "<|im_start|>", "<|user|>", "<|assistant|>",
         "<|end|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|eot_id|>",
         "<|im_end|>>", "</s>", "<s>")  # fmt: skip
_SOURCES = (  # templates in addition to the models' templates
    "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>",
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|im_end|> {% endfor %}[INST]",
    "<|im_{{ messages[0].content }}{{ messages | map(attribute='content') | join('im_end|>') }}",
    "{{ tools | tojson }}{% for m in messages %}{{ m.content[1:] ~ '<s>' }}{% endfor %}",
)
_METASPACE = {"type": "Metaspace", "replacement": "▁", "split": True}
_WIDE = str.maketrans({"<": "＜", "d": "ｄ"})  # wide forms, which NFKC maps back


@lru_cache(None)
def _templates() -> tuple[ChatTemplate, ...]:
    sources = [path.read_text(encoding="utf-8") for path in sorted(_TEMPLATES.glob("*.jinja"))]
    return tuple(ChatTemplate(source, _TOKENS) for source in (*sources, *_SOURCES))


def _spec(rng: Rng) -> dict[str, Any]:
    """A tokenizer with these names, in which x and y have merges."""
    flags = rng.pick((), (), ("normalized",), ("lstrip", "rstrip", "normalized"))
    spec = rng.pick(_byte_level, _byte_level, _pieces)(rng)
    first = len(spec["model"]["vocab"])
    new = [name for name in NAMES if name not in spec["model"]["vocab"]]
    spec["added_tokens"] += [
        added_token(first + at, name, **{flag: rng.chance(0.4) for flag in flags},
                    special=not flags or rng.chance(0.7))
        for at, name in enumerate(new)
    ]  # fmt: skip
    return spec


def _byte_level(rng: Rng) -> dict[str, Any]:
    ids = {token: at for at, token in enumerate([*CHARACTERS, "xy", "yz"])}
    normalizer = rng.pick(None, None, {"type": "Lowercase"}, {"type": "NFKC"})
    return spec_of(ids, [["x", "y"], ["y", "z"]]) | {"normalizer": normalizer}


def _pieces(rng: Rng) -> dict[str, Any]:
    spec, scheme = piece_spec("xy"), rng.pick("", "first", "always")
    if scheme:
        spec |= {"normalizer": None, "pre_tokenizer": _METASPACE | {"prepend_scheme": scheme}}
    return spec


def _text(rng: Rng) -> str:
    return "".join(
        rng.pick("x", "y", "é", " ", "\n", "1", "xy yz", "🙂") for _ in range(rng.whole(5))
    )


def _words(rng: Rng) -> list[str]:
    """Draw words for messages: names, texts that a normalizer turns into names, parts of names."""
    name = rng.pick(*NAMES)
    cut = rng.whole(len(name) + 1)
    whole = rng.pick(name, name, name.upper(), name.translate(_WIDE))
    return rng.pick([whole], [whole, ""], [name[:cut], name[cut:]], [whole, rng.pick(*NAMES)])


def _conversation(
    rng: Rng, words: list[str], template: ChatTemplate
) -> Callable[[bool], dict[str, Any]]:
    """Return a function that gives a rendering's arguments, with the words or harmless ones.

    Some messages have the forms of clients: contents in parts, empty fields, calls of tools.
    """
    around = [(_text(rng), rng.pick(*words, ""), _text(rng)) for _ in range(rng.whole(1, 5))]
    role, tool = (rng.pick(*[""] * 6, *words) for _ in range(2))
    parts, continues, null = (rng.chance(0.2) for _ in range(3))
    shift = rng.whole(5) // 4  # some templates refuse an assistant's message at the beginning

    def given(harmless: bool) -> dict[str, Any]:
        def put(word: str) -> str:
            return "q" * len(word) if harmless else word

        roles = [("user", "assistant")[(at + shift) % 2] for at in range(len(around))]
        roles[-1] = put(role) or roles[-1]
        texts = [[before, put(word), after] for before, word, after in around]
        messages: list[dict[str, Any]] = [
            {
                "role": role,
                "content": [{"type": "text", "text": each} for each in text],
                **({"refusal": None, "name": None, "tool_calls": []} if null else {}),
            }
            for role, text in zip(roles, texts, strict=True)
        ]
        if not parts:
            messages = [
                {**each, "content": "".join(text)}
                for each, text in zip(messages, texts, strict=True)
            ]
        if tool and "tool_calls" in template.names.fields:
            call = {"name": put(tool), "arguments": json.dumps({put(tool): [put(words[0])]})}
            messages[0]["tool_calls"] = [{"function": call}]
        tools = [{"name": f"x {put(tool)}", put(tool): "é\n"}] if tool else None
        variables = {"date_string": "1 May", "tools": tools}
        read = {n: v for n, v in variables.items() if n in template.names.variables}
        return {"messages": messages, "continue_final_message": continues, **read}

    return given


def case(rng: Rng, folder: Path) -> None:
    spec, words, template = _spec(rng), _words(rng), rng.pick(*_templates())
    text, given = json.dumps(spec), _conversation(rng, words, template)
    (folder / "tokenizer.json").write_text(text)
    encoding = accepted(tokenizer.from_path, folder, 1000)
    rendered, harmless = (attempt(False, template.render, **given(each)) for each in (False, True))
    ids = accepted(template.ids, encoding, **given(False))
    truth = hugging_face.Tokenizer.from_str(text)
    expected = truth.encode(harmless, add_special_tokens=False).ids
    own = {
        id
        for word in (*words, "q")
        for id in tokenizer.encode_chat(encoding, word, [(0, len(word))])
    }
    names = {token["id"] for token in spec["added_tokens"]}
    check(own.isdisjoint(names), f"tokens of {words} by themselves")
    own -= {*tokenizer.encode_chat(encoding, "x x")}
    others = [[id for id in each if id not in own] for each in (ids, expected)]
    check_equal(f"ids of {rendered!r:.150}", *others)
    least = tokenizer.token_count_bound(encoding)(rendered)
    check(least <= len(ids), f"at least {least} tokens, got {len(ids)}")
    strips = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
    if spec["normalizer"] is None and spec["pre_tokenizer"] == byte_level() and not strips:
        check_equal("decoded", encoding.decode(ids), rendered)


AREA = Area("chat_names", 2, case)
