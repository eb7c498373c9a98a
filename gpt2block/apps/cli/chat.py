"""`gpt2block chat`: a conversation in the terminal.

Modules that are slow to import are imported where they are used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from io import TextIOWrapper
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gpt2block.apps.cli.display import print_json, printable_lines, say, unechoed, working
from gpt2block.apps.cli.model import (
    ChatModelOptions,
    SamplingOptions,
    chat_template_option,
    draft_option,
    keyword,
    load_draft,
    load_model,
    require_for,
    with_numbers,
)
from gpt2block.apps.cli.options import option, path_of, path_option
from gpt2block.apps.cli.texts import BYTE_ORDER_MARK, RECEIPT, read_text
from gpt2block.checks import check_choice, check_encodable
from gpt2block.engine.chat.messages import Message, read_messages
from gpt2block.engine.generation.options import KEYWORDS, Options
from gpt2block.engine.grammars.grammar import RULES
from gpt2block.errors import InputError, PrintableError
from gpt2block.files.checkpoints.chat_files import OPTIONS
from gpt2block.files.writing import write_file

if TYPE_CHECKING:
    from gpt2block.engine.chat.conversation import Conversation

MAX_FILE = 2**24  # maximum bytes of a conversation's file: 16 MiB
HOT = 2.0  # temperature above which even unlikely tokens are drawn often
QUOTES = '"""'  # begins and ends a message of several lines
HELP = f"""\
/reset               begin anew; the system message stays
/undo                take back the last message and its answer
/continue            continue the last answer, such as one that was stopped
/system TEXT         change the system message
/save [FILE]         write the conversation as JSON, which --file reads
/options             show the options of the answers
/temperature X       change an option; likewise /top_k, /top_p, /min_p, /repetition_penalty,
                     /max_new_tokens, /seed (-: a new seed for each answer), and with on or off
                     /speculate and /add_generation_prompt
/regex X             require answers to match a regular expression; likewise /schema, /grammar
                     and /choice a|b; -: none
/help                show this
/quit                end, as Ctrl-D does

{QUOTES} begins and ends a message of several lines. A message that begins with / is written with a
space before it. Ctrl-C stops an answer."""


@with_numbers(*OPTIONS, optional="{}; by default the model's setting")
@dataclass(frozen=True)
class ChatOptions(SamplingOptions):
    """Options that are keywords of `Conversation.stream`; None selects the model's setting."""

    max_new_tokens: int = option("Largest number of tokens of an answer.", 512)
    seed: int | None = option("The same seed gives the same answers; by default a new seed each.")
    speculate: bool = keyword("speculate")
    schema: str | None = keyword("schema", "{} (JSON text)")
    regex: str | None = keyword("regex")
    choice: list[str] | None = option("A text that may be the result; repeat for each text.")
    grammar: str | None = keyword("grammar")
    add_generation_prompt: bool = option(
        "Whether the chat template writes the beginning of an answer.",
        True,
        "--add-generation-prompt/--no-add-generation-prompt",
    )


def chat(
    *,
    model: ChatModelOptions,
    options: ChatOptions,
    draft_model: str | None = draft_option(),
    system: str | None = option("The system message, which tells the model how to answer."),
    file: Path | None = path_option(
        "Continue the conversation of this JSON file, as /save writes it."
    ),
    chat_template_kwargs: Mapping[str, object] | None = chat_template_option(),
    receipt: Path | None = path_option(RECEIPT),
    as_json: bool = option(
        "Read a message from each line, as JSON: a text, or role and content. Write each answer as "
        "a line of JSON.",
        False,
        "--json",
    ),
) -> None:
    """Talk to a model that was trained on conversations.

    Each line is a message; /help lists commands, which also work in a pipe. The answers go to
    stdout, everything else to stderr. The keys and values of what the model has read stay in the
    kv_cache: only new tokens are computed.
    """
    require_for("chat", model.model, "jinja2")
    from gpt2block.engine.chat.conversation import Conversation  # noqa: PLC0415

    if isinstance(sys.stdin, TextIOWrapper):
        # A terminal keeps its encoding. Some programs begin text in UTF-8 with U+FEFF.
        # Invalid UTF-8 affects only one message.
        utf_8 = None if sys.stdin.isatty() else "utf-8-sig"
        sys.stdin.reconfigure(encoding=utf_8, errors="surrogateescape")
    messages = [] if file is None else _read(file)
    if system is not None:
        messages = [_system(system), *(m for m in messages if m["role"] != "system")]
    with unechoed():
        loaded, encoding = load_model(model, "generate --ids takes token ids instead of text")
        load_draft(loaded, model, draft_model, options.speculate)
    assert encoding is not None
    usual = asdict(SamplingOptions()) | loaded.chat_sampling
    given = {name: value for name, value in asdict(options).items() if value is not None}
    options = ChatOptions(**usual | {"max_new_tokens": options.max_new_tokens} | given)
    conversation = Conversation(
        loaded.engine, encoding, loaded.chat_template, messages, None, chat_template_kwargs
    )
    conversation.receipts = receipt
    if as_json:
        _answer_lines(conversation, options)
    else:
        name = f"{loaded.name}, {loaded.dtypes}, {loaded.device}"
        Session(conversation, options, file).run(name)


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _read(file: Path) -> list[Message]:
    text = read_text(str(file), MAX_FILE).removeprefix(BYTE_ORDER_MARK)
    try:
        return read_messages(json.loads(text))
    except (ValueError, RecursionError) as error:  # InputError is a ValueError
        raise InputError(f"{file}: expected the messages of a conversation: {error}") from error


# --- option --json, for programs ----------------------------------------------------------------


def _answer_lines(conversation: Conversation, options: ChatOptions) -> None:
    """Answer each user message from stdin; append messages of other roles without an answer."""
    for line in filter(str.strip, sys.stdin):
        try:
            for message in read_messages(json.loads(line)):
                if message["role"] == "user":
                    print_json(_answer_fields(conversation, message, options))
                else:
                    conversation.append(message)
        except (ValueError, RecursionError) as error:  # InputError is a ValueError
            print_json({"error": str(error)})
        sys.stdout.flush()


def _answer_fields(
    conversation: Conversation, message: Message, options: ChatOptions
) -> dict[str, object]:
    begun = perf_counter()
    for _ in conversation.stream(message, **asdict(options)):
        pass
    sequence = conversation.answer
    assert sequence is not None
    return {
        **conversation.messages[-1],
        "finish_reason": sequence.finish_reason,
        "tokens": len(sequence.tokens),
        "prompt_tokens": len(sequence.prompt),
        "reused_tokens": sequence.reused,
        "left_out": conversation.left_out,
        "seed": sequence.sampling.seed,
        "seconds": perf_counter() - begun,
    }


# --- interactive conversation -------------------------------------------------------------------


class Session:
    """An interactive conversation, read from stdin. `file`: default file of the command /save."""

    def __init__(self, conversation: Conversation, options: ChatOptions, file: Path | None) -> None:
        self.conversation, self.options, self.file = conversation, options, file
        self._typed = sys.stdin.isatty()
        self._written = {file}  # files that /save may overwrite

    def run(self, name: str) -> None:
        """Answer messages until the end of stdin or /quit. `name`: name of the model."""
        if self._typed:
            with suppress(ImportError):  # Windows has no readline
                import readline  # noqa: F401, PLC0415  (input() then edits, and has a history)
            self._say(f"{name}: /help lists commands")
        while (text := self._message()) is not None:
            if text.startswith("/"):
                name, _, argument = text[1:].partition(" ")
                if name in ("quit", "exit"):
                    return
                self._refusable(lambda: self._command(name, argument.strip()))  # noqa: B023
            elif text.strip():
                self._refusable(lambda: self._answer(text.strip()))

    def _message(self) -> str | None:
        """Read a message or command; None at the end of stdin. Ctrl-C discards typed text."""
        while True:
            try:
                text = self._line("> ")
                if not text.startswith(QUOTES):
                    return text
                lines = [text.removeprefix(QUOTES)]
                while not lines[-1].rstrip().endswith(QUOTES):
                    lines.append(self._line(". "))
                lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
                return " " + "\n".join(lines)  # with a leading space, "/" begins no command
            except EOFError:
                if self._typed:
                    print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                print(file=sys.stderr)

    def _line(self, prompt: str) -> str:
        if self._typed:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def _refusable(self, do: Callable[[], None]) -> None:
        try:
            do()
        except (PrintableError, OSError) as error:
            self._say(f"error: {error}")

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        for line in text.split("\n"):
            say(line)

    def _answer(self, text: str | None, **more: object) -> None:
        conversation, before = self.conversation, self.conversation.left_out
        begun, ended = perf_counter(), False
        pieces = conversation.stream(text, **{**asdict(self.options), **more})
        if conversation.left_out > before:
            n_ctx = conversation.n_ctx
            self._say(
                f"the context of {n_ctx:,} tokens is full: the model no longer reads the oldest "
                f"{conversation.left_out} messages"
            )
        with _interrupts() as interrupted, unechoed(), ExitStack() as first:
            first.enter_context(working(self._reading))  # until the first piece
            for piece in pieces:
                first.close()
                self._write(piece)
                if interrupted():
                    break
            else:
                ended = True
        pieces.close()
        self._write("\n")
        sequence = conversation.answer
        assert sequence is not None
        rate = len(sequence.tokens) / (perf_counter() - begun)
        reused = f", {sequence.reused:,} of them computed before" if sequence.reused else ""
        why = sequence.finish_reason if ended else "interrupted"
        self._say(
            f"{len(sequence.tokens)} tokens, {rate:,.1f} tokens/s; "
            f"prompt {len(sequence.prompt):,}{reused}; ended: {why}"
        )

    def _reading(self) -> str:
        """Return the step that runs before the answer begins."""
        sequence = self.conversation.answer
        return f"reading {len(sequence.prompt) - sequence.reused:,} tokens" if sequence else ""

    def _write(self, text: str) -> None:
        sys.stdout.write(printable_lines(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def _command(self, name: str, argument: str) -> None:
        """Run the method `_do_NAME` of a command, or change the option of this name."""
        if command := getattr(self, f"_do_{name}", None):
            command(argument)
        elif name in {each.name for each in fields(self.options)}:
            self._set(name, argument)
        else:
            raise InputError(
                f"there is no /{name}: /help lists commands; a message that begins with / is "
                "written with a space before it"
            )

    def _do_help(self, _: str) -> None:
        self._say(HELP)

    def _do_reset(self, _: str) -> None:
        self.conversation.clear()
        self._say("the conversation begins anew")

    def _do_undo(self, _: str) -> None:
        if not any(message["role"] == "user" for message in self.conversation.messages):
            raise InputError("there is no message to take back")
        self.conversation.undo()
        self._say("the last message and its answer are taken back")

    def _do_continue(self, _: str) -> None:
        if [each["role"] for each in self.conversation.messages[-1:]] != ["assistant"]:
            raise InputError("there is no answer to continue")
        self._answer(None, continue_final_message=True, add_generation_prompt=False)

    def _do_system(self, text: str) -> None:
        if not text:
            raise InputError("expected a text, as in /system You are a poet.")
        messages = self.conversation.messages
        messages[:] = [_system(text), *(each for each in messages if each["role"] != "system")]
        self._say("the system message is changed")

    def _do_save(self, name: str) -> None:
        file = path_of(name) if name else self.file
        if file is None:
            raise InputError("expected a file, as in /save talk.json")
        if file not in self._written and os.path.lexists(file):
            raise InputError(f"{file}: exists already: choose another name")
        text = json.dumps(self.conversation.messages, indent=2, ensure_ascii=False)
        check_encodable("the messages", text)  # /system takes any text
        write_file(file, f"{text}\n".encode())
        self._written.add(file)
        self._say(f"{len(self.conversation.messages)} messages written to {file}")

    def _do_options(self, _: str) -> None:
        for name, value in asdict(self.options).items():
            self._say(f"{name:20} {'-' if value is None else value}")

    def _set(self, name: str, text: str) -> None:
        """Change an option for later answers. Raises InputError for an invalid value."""
        kind = str(KEYWORDS[name].type) if name in KEYWORDS else "bool"
        whole = "int" in kind
        value: Any = None
        if kind == "bool":
            check_choice(name, text, ("on", "off"))
            value = text == "on"
        elif name in RULES:
            if text != "-":
                value = text.split("|") if name == "choice" else text
            Options.of({name: value})
        elif (name, text) != ("seed", "-"):
            try:
                value = int(text) if whole else float(text)
            except ValueError:
                number = "an integer" if whole else "a number"
                raise InputError(f"{name}: expected {number}, got {text!r}") from None
            Options.of({name: value})
        self.options = replace(self.options, **{name: value})
        hot = name == "temperature" and value > HOT
        doubt = f"; above {HOT:g}, an answer is mostly random tokens" if hot else ""
        self._say(f"{name}: {'-' if value is None else text}{doubt}")


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function: has Ctrl-C been pressed? A second Ctrl-C raises KeyboardInterrupt."""
    count = 0

    def handler(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1 and callable(before):
            before(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # the caller handles or ignores Ctrl-C
        yield lambda: False
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)
