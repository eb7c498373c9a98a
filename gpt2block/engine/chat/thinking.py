"""The thinking of a model before its answer, which OpenAI's clients read as reasoning_content.

Sources: Qwen, the chat template of Qwen3.5; Google, "Gemma 4 prompt formatting"; Mistral AI, the
chat template of Ministral 3; vLLM, "Reasoning Outputs".
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpt2block.engine.chat.messages import TemplateNames, checked, continued


class Thinking(NamedTuple):
    """The texts around the thinking of a model. label: text after `begin`.

    field: field of messages from which some templates read thinking if they do not read
    reasoning_content; "": there is none. opened: whether an answer begins with thinking, without
    the text `begin`, because that text ends the prompt.
    """

    begin: str
    end: str
    label: str = "\n"
    field: str = ""
    opened: bool = False

    @property
    def marks(self) -> tuple[str, str]:
        """The texts that are special tokens of some tokenizers."""
        return self.begin, self.end

    def after(self, prompt: str) -> Thinking:
        """Return the texts for the answer to a prompt, with `opened`."""
        begin = (self.begin + self.label).rstrip()
        return self._replace(opened=prompt.rstrip().endswith(begin))

    def converted(self, messages: Any, names: TemplateNames) -> Any:
        """Return messages whose reasoning_content is where a template reads thinking.

        That is the field `field`, or else the content. Raises InputError as `checked` does.
        """
        checked(messages)
        if "reasoning_content" in names.fields:
            return messages
        return [self._converted(message, self.field in names.fields) for message in messages]

    def _converted(self, message: Any, has_field: bool) -> dict[str, Any]:
        fields = dict(message)
        thought = fields.pop("reasoning_content", None)
        if thought and has_field:
            fields[self.field] = thought
        elif thought:
            content = continued(message, "")["content"]
            fields["content"] = f"{self.begin}{self.label}{thought}\n{self.end}\n\n{content}"
        return fields


_ALL = (
    Thinking("<think>", "</think>", field="thinking"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<|channel>", "<channel|>", "thought\n"),
)


def thinking_of(source: str) -> Thinking | None:
    """Return the texts around thinking that the source of a chat template shows, or None."""
    return next((each for each in _ALL if all(mark in source for mark in each.marks)), None)
