"""Conversations that keep their kv_cache, in Python and by `gpt2block chat`."""

from __future__ import annotations

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
    for number in range(25, 75):  # each planted bug shows at least twice
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


def test_the_step_before_an_answer_is_shown(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(side_effect=lambda step: nullcontext())
    monkeypatch.setattr(cli_chat, "working", spy)
    chat("hi", "ho")
    assert [call.args[0]() for call in spy.mock_calls] == ["reading 7 tokens"] * 2  # the last row's


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


QUESTIONS = b"What is the capital of France?\nWhich river flows through it?\n"


@pytest.mark.slow
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
