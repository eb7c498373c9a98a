"""`gpt2block generate`, `score` and `info`: output, error output and exit codes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpt2block.checkpoints import Checkpoint
from gpt2block.cli import generate as cli_generate
from gpt2block.cli import score as cli_score
from gpt2block.cli.info import _print_info
from gpt2block.cli.model import ModelOptions, load_model
from gpt2block.config.formats import USUAL, FormatOptions, Formats
from gpt2block.errors import CheckpointError
from gpt2block.run.model import weight_bytes
from gpt2block.sampling import DEFAULT_TEMPERATURE
from gpt2block.tokenizers.tokenizer import from_path
from tests.command_line import Ended, gpt2block, printed
from tests.markov import MarkovEngine, byte_encoding, cycle, random_table

ROOT = Path(__file__).parent.parent


def stand_in(engine: MarkovEngine, end: bool = False) -> Any:
    """Return a substitute for a GPT2 with the attributes that the commands use."""
    return SimpleNamespace(
        engine=engine,
        config=engine.config,
        tokenizer=byte_encoding(end=end),
        name="a table",
        formats=USUAL,
        dtypes="float32",
        device="no device",
    )


class Command:
    """The command line with a substitute for the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = stand_in(MarkovEngine(cycle(256, 10)))
        self.asked: list[ModelOptions] = []
        for module in (cli_generate, cli_score):
            monkeypatch.setattr(module, "load_model", self._load)

    def _load(self, options: ModelOptions, hint: str | None) -> Any:
        self.asked.append(options)
        V, path = self.model.config.vocab_size, options.tokenizer
        encoding = from_path(path, V) if path else self.model.tokenizer
        if encoding is None and hint:
            raise CheckpointError(f"no tokenizer; {hint}")
        return self.model, encoding

    def __call__(self, *arguments: object, stdin: bytes | None = None) -> Ended:
        return gpt2block(*arguments, stdin=stdin)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch)


CONTEXT = "context (all 64 tokens used: --overflow truncate continues)"
LOGPROBS = "  -0.0116  4\n  -0.0116  5\n  -0.0116  6\n"
TWO = "--- sample 1 of 2\n{0}\n--- sample 2 of 2\n{0}"


@pytest.mark.parametrize(
    ("arguments", "out", "ended"),
    [
        (["abc", "--max-new-tokens=5"], "abcdefgh\n", "length"),
        (["abc", "--stop-id=102", "--stop-id=0"], "abcde\n", "stop"),  # 102 is f
        (["y" * 60], "y" * 60 + "z{|}~\n", CONTEXT),
        (["a", "--logprobs", "--max-new-tokens=2"],
         "abc\n\n  -0.0116  'b'\n  -0.0116  'c'\n", "length"),
        (["--ids", "1,2, 3", "--max-new-tokens=3"], "1 2 3 4 5 6\n", "length"),
        (["--ids", "3", "--max-new-tokens=3", "--samples=2", "--logprobs"],
         TWO.format("3 4 5 6\n") + "\n" + TWO.format(LOGPROBS), "length"),
        (["--ids", "254 255"], "254 255 256\n", "stop"),  # <|endoftext|>
    ],
)  # fmt: skip
def test_generate(command: Command, arguments: list[str], out: str, ended: str) -> None:
    command.model = stand_in(MarkovEngine(cycle(257, 10)), end=True)
    ran = command("generate", *arguments, "--temperature=0")
    assert (ran.code, ran.out) == (0, out)
    assert ran.err.startswith("a table, float32, no device: ")
    assert re.search(
        r": \d+ tokens(, [\d,.]+ tokens/s)?, first after \d\.\d\d s; seed 0; ", ran.err
    )
    assert ran.err.endswith(f"; ended: {ended}\n")
    assert command.asked == [ModelOptions()]


def test_options_arrive(command: Command) -> None:
    command.model = stand_in(MarkovEngine(random_table(0, 256)))
    options = (
        "--model=m --revision=v1 --dtype=float16 --kv-dtype=float8_e5m2 "
        "--device=cpu --max-new-tokens=9 --temperature=0.7 --top-k=4 --top-p=0.9 --min-p=0.1 "
        "--repetition-penalty=1.5 --presence-penalty=0.5 --frequency-penalty=0.25 --seed=3 "
        "--min-new-tokens=2 --samples=2 --json"
    )
    ran = command("generate", "abc", *options.split())
    formats = FormatOptions("float16", "float8_e5m2")
    assert command.asked == [ModelOptions("m", "v1", formats, "cpu")]
    command("generate", "abc", "--max-new-tokens=1")
    decoding, default = command.model.engine.decodings
    assert default.sampling[0].temperature == DEFAULT_TEMPERATURE
    assert len(decoding.sampling) == 2
    for sample, chosen in enumerate(decoding.sampling):
        assert vars(chosen) == {
            "temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1,
            "repetition_penalty": 1.5, "seed": 3, "sample": sample, "logit_bias": (),
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_new_tokens": 2,
            "end_ids": chosen.end_ids,
        }  # fmt: skip
    assert [len(found["tokens"]) for found in ran.json["samples"]] == [9, 9]
    assert ran.json["seed"] == 3


def test_generate_as_json(command: Command) -> None:
    found = command(
        "generate", "abc", "--json", "--stop", "nothing", "--stop", "fg", "--temperature", "0"
    ).json
    assert list(found) == [
        "model", "device", "dtype", "kv_dtype", "prompt", "seed", "samples",
        "seconds_to_first_token", "tokens_per_second",
    ]  # fmt: skip
    assert found["prompt"] == "abc"
    (sample,) = found["samples"]
    assert sample["text"] == "de"
    assert sample["tokens"] == list(b"defg")
    assert len(sample["logprobs"]) == 4
    assert sample["finish_reason"] == "stop"
    assert 0 < found["seconds_to_first_token"] < 5
    assert found["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (["one|", "1|"], "--- sample 1 of 2\n> one\n\n--- sample 2 of 2\n> 1\n"),
        (["one\n|", "1\n\n|"], "--- sample 1 of 2\n> one\n\n--- sample 2 of 2\n> 1\n\n"),
    ],
)
def test_samples_are_printed_one_below_the_other(
    command: Command, script: list[str], expected: str
) -> None:
    command.model = stand_in(MarkovEngine(cycle(256), script=[text.encode() for text in script]))
    assert command("generate", "> ", "--samples", "2", "--stop", "|").out == expected


@pytest.mark.parametrize(
    ("arguments", "stdin", "prompt"),
    [
        ([], b"from a pipe\n", "from a pipe"),
        (["-"], b"two\n\n", "two\n"),
        (["-"], "Ü\r\n".encode(), "Ü"),
        (["this"], b"not that", "this"),
        ([], None, cli_generate.DEFAULT_PROMPT),
        ([], b"", cli_generate.DEFAULT_PROMPT),
        (["--model", "other"], None, ""),
    ],
)
def test_where_the_prompt_comes_from(
    command: Command, arguments: list[str], stdin: bytes | None, prompt: str
) -> None:
    command.model = stand_in(MarkovEngine(cycle(257)), end=True)
    ran = command("generate", *arguments, "--json", "--max-new-tokens=1", stdin=stdin)
    assert ran.json["prompt"] == prompt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "-"], "this model has no token that begins a text: write the"),
        (["generate", "x" * 65], "prompt: 65 tokens, the model's context is 64"),
        (["generate", "x", "--tokenizer", "/no/where"], "/no/where: no tokenizer: expected"),
        (["score", "/no/file"], "/no/file: cannot be read: No such file"),
        (["score", "/no/file.npy"], "/no/file.npy: cannot be read: No such file"),
        (["info", "no/such/model/at/all"], "no/such/model"),
    ],
)
def test_what_is_refused(command: Command, arguments: list[str], message: str) -> None:
    assert message in command(*arguments, stdin=b"").error


def test_bytes_that_are_no_text(command: Command, tmp_path: Path) -> None:
    said = command("generate", stdin=b"ab\xff").error
    assert said == "stdin: expected UTF-8 text, byte 2 is invalid"
    (tmp_path / "a").write_bytes(b"ab\xff")
    said = command("score", tmp_path / "a").error
    assert said.endswith("byte 2 is invalid: for a token file give --tokens")


def test_a_tokenizer_named_by_hand(command: Command, data: Path) -> None:
    command.model = stand_in(MarkovEngine(np.broadcast_to(np.float32(0), (50257, 50257)), n_ctx=8))
    ran = command("generate", "Hello", "--tokenizer", str(data / "gpt2-bpe"), "--json",
                  "--max-new-tokens=1", "--temperature=0")  # fmt: skip
    assert ran.json["samples"][0]["text"] == "!"


def test_ids_of_a_model_without_a_tokenizer(command: Command) -> None:
    command.model.tokenizer = None
    options = ["--ids", "--max-new-tokens", "3", "--temperature", "0"]
    assert command("generate", "-", *options, stdin=b"1 2\n3\n").out == "1 2 3 4 5 6\n"
    found = command("generate", "3", *options, "--json").json
    assert found["prompt"] == [3]
    assert found["samples"][0]["tokens"] == [4, 5, 6]
    assert found["samples"][0]["text"] is None
    said = command("generate", "3", *options, "--stop", "x").error
    assert said == "--stop: this model has no tokenizer, so there is no text: use --stop-id"
    said = command("generate", "abc").error
    assert said.endswith("; --ids takes token ids instead of text")


def test_ids_of_a_model_with_a_tokenizer(command: Command) -> None:
    found = command("generate", "97", "--ids", "--json", "--temperature=0", "--stop", "e").json
    assert found["samples"][0]["text"] == "bcd"


def test_a_tokenizer_is_looked_up_before_the_weights_are_read(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "tensors", lambda self: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=r"expected tokenizer.json .*; --ids"):
        load_model(ModelOptions(str(data / "gpt-nano-sort"), device="cpu"), "--ids")
    with pytest.raises(CheckpointError, match="no tokenizer"):  # though none is needed
        load_model(ModelOptions(device="cpu", tokenizer=tmp_path), None)


def test_special_tokens_in_a_text(command: Command) -> None:
    command.model = stand_in(MarkovEngine(cycle(257)), end=True)
    options = ["a<|endoftext|>", "--json", "--temperature=0", "--max-new-tokens=2"]
    plain = command("generate", *options).json
    assert plain["samples"][0]["tokens"] == list(b"?@")  # follow ">", the prompt's end
    special = command("generate", *options, "--special").json
    assert special["samples"][0]["tokens"] == [0, 1]
    assert special["prompt"] == "a<|endoftext|>"
    shown = command("generate", *options[:1], *options[2:], "--special").out
    assert shown == "a<|endoftext|>\x00\x01\n"
    scored = "score", "-", "--text", "--json"
    assert command(*scored, stdin=b"ab<|endoftext|>c").json["tokens"] == 15
    assert command(*scored, "--special", stdin=b"ab<|endoftext|>c").json["tokens"] == 3


def test_score_from_the_first_token_on(command: Command, tmp_path: Path) -> None:
    table = cycle(257, 10)
    table[256, ord("a")] = 20  # "a" follows the end token, which begins a text
    command.model = stand_in(MarkovEngine(table), end=True)
    (tmp_path / "a.txt").write_text("a")
    found = command("score", tmp_path / "a.txt", "--bos", "--json").json
    assert (found["tokens"], found["bytes"]) == (1, 1)
    assert found["log_likelihood"] == pytest.approx(0, abs=1e-3)
    np.save(tmp_path / "a.npy", np.array([97], np.uint16))
    assert command("score", tmp_path / "a.npy", "--bos", "--json").json["tokens"] == 1
    command.model = stand_in(MarkovEngine(cycle(256)))
    said = command("score", tmp_path / "a.txt", "--bos").error
    assert said == "--bos: this model has no tokenizer with <|endoftext|>"


def test_a_text_that_is_too_long_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_score, "MOST_TEXT", 2**20)
    with (tmp_path / "long").open("wb") as file:
        file.truncate(2**20 + 1)
    said = command("score", tmp_path / "long").error
    assert said.endswith("long: expected at most 1 MiB of text, got more")


def test_names_from_files_are_printed_without_control_characters(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "a\x1b[31m.txt"
    path.write_text("abc")
    command.model.name = "m\x1b]0;title\x07"
    for ran in (command("score", path), command("generate", "abc", "--max-new-tokens=1")):
        assert "\x1b" not in ran.out + ran.err
        assert "\x07" not in ran.out + ran.err
        assert "\\x1b]0;title" in ran.out + ran.err


def test_tensor_names_are_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = Checkpoint.open("shakespeare")
    facts: dict[str, Any] = {
        "parameters": 1, "dtypes": ["float16"], "nbytes": 1, "memory": {}, "generation_config": {},
        "end_tokens": [], "default_dtype": "float32",
        "tensors": [{"name": "wte", "in_file": "w\x1b[2J", "shape": [1], "dtype": "float16"}],
    }  # fmt: skip
    _print_info(checkpoint, facts)
    out = capsys.readouterr().out
    assert "w\\x1b[2J" in out
    assert "\x1b" not in out


def test_score_of_a_text(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("abcÜ\r\n".encode())
    ran = command("score", tmp_path / "a.txt")
    assert ran.err == ""
    assert "6 tokens predicted, 6 bytes" in ran.out
    assert "64 tokens, stride 32: each token predicted from at least 32 before it" in ran.out
    found = command("score", tmp_path / "a.txt", "--json", "--stride=3").json
    assert list(found) == [
        "file", "model", "device", "dtype", "kv_dtype", "log_likelihood",
        "nats_per_token", "perplexity", "bits_per_byte", "tokens", "bytes", "n_ctx", "stride",
        "seconds",
    ]  # fmt: skip
    assert (found["tokens"], found["bytes"], found["n_ctx"], found["stride"]) == (6, 6, 64, 3)
    assert found["log_likelihood"] == pytest.approx(-4 * 10, rel=1e-2)
    assert command("score", "-", "--json", stdin="abcÜ\r\n".encode()).json["tokens"] == 6


def test_score_of_every_token(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped output has one line per token; a terminal shows colors."""
    piped = command("score", "-", "--per-token", "--text", stdin=b"abcz").out
    lines = [line.split() for line in piped.splitlines()[:3]]
    assert [line[1:] for line in lines] == [["98", "'b'"], ["99", "'c'"], ["122", "'z'"]]
    assert float(lines[0][0]) < 0.2
    assert float(lines[2][0]) > 12
    assert "3 tokens predicted" in piped
    found = command("score", "-", "--per-token", "--json", stdin=b"abc").json["per_token"]
    assert [(token["id"], token["text"]) for token in found] == [(98, "b"), (99, "c")]
    assert sum(token["logprob"] for token in found) == pytest.approx(0, abs=0.1)
    assert [token["surprisal"] for token in found] == pytest.approx(
        [-token["logprob"] / math.log(2) for token in found]
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = command("score", "-", "--per-token", stdin=b"abc\x07\nzc").out
    assert "\x1b[32mb" in shown
    assert "\x1b[1;31mz" in shown
    assert "\\x07" in shown
    assert "surprisal in bits" in shown


def test_score_of_tokens(command: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(9))
    assert command("score", tmp_path / "a.npy", "--json").json["tokens"] == 8
    (tmp_path / "a.txt").write_bytes(np.arange(9, dtype="<u2").tobytes())
    assert command("score", tmp_path / "a.txt", "--tokens", "--json").json["tokens"] == 8
    assert command("score", tmp_path / "a.txt", "--json").json["tokens"] == 17
    (tmp_path / "a.bin").write_text("text after all")
    assert command("score", tmp_path / "a.bin", "--text", "--json").json["tokens"] == 13


def test_impossible_text_is_null_in_json(command: Command, tmp_path: Path) -> None:
    table = cycle(256)
    table[ord("a"), ord("c")] = -np.inf
    command.model = stand_in(MarkovEngine(table))
    (tmp_path / "a.txt").write_text("ac")
    assert command("score", tmp_path / "a.txt", "--json").json["perplexity"] is None


def test_info_as_json() -> None:
    found = gpt2block("info", "--json").json
    assert list(found) == [
        "name", "file", "config", "generation_config", "end_tokens", "parameters", "dtypes",
        "nbytes", "memory", "default_dtype", "tensors",
    ]  # fmt: skip
    assert found["parameters"] == 4_870_144
    assert found["dtypes"] == ["float16"]
    assert found["nbytes"] == 2 * 4_870_144
    assert found["memory"]["float32"]["weights"] == 4 * 4_870_144
    assert found["memory"]["float32"]["kv_cache_per_row"] == 6 * 2 * 256 * 256 * 4
    assert found["memory"]["float8_e5m2"]["kv_cache_dtype"] == "float16"
    assert len(found["tensors"]) == 4 + 6 * 12
    assert found["tensors"][4] == {
        "name": "h.0.w_qkv", "in_file": "h.0.attn.c_attn.weight", "shape": [256, 768],
        "dtype": "float16", "layout": "KN",
    }  # fmt: skip


def test_info_as_a_table() -> None:
    out = printed("info")
    assert "6 blocks, width 256, 4 heads of 64, context 256, vocabulary 256" in out
    assert "h.0 … h.5: w_qkv" in out
    assert len(out.splitlines()) < 40


def test_info_of_several_gpus() -> None:
    """Each of 4 GPUs has a quarter of each matrix and all other weights.

    Except in float32, it also has a quarter of the heads' keys and values.
    """
    memory = gpt2block("info", "--gpus", "4", "--json").json["memory"]
    matrices = 6 * 12 * 256 * 256
    rest = 4 * (4_870_144 - matrices - 256 * 256)
    own = 2 * (matrices // 4 + 256 * 256) + rest
    of_heads = {"weights": [own] * 4, "kv_cache_per_token": 6 * 2 * 64 * 2}
    assert memory["float16"]["on_each_gpu"] == of_heads
    assert memory["float32"]["on_each_gpu"]["kv_cache_per_token"] == 6 * 2 * 256 * 4
    assert "dtype on each of 4 GPUs" in printed("info", "--gpus", "4")
    assert printed("info", "--gpus", "1") == printed("info")
    assert gpt2block("info", "--gpus", "9").error == "--gpus: expected 1 to 8, got 9"


def test_info_shows_the_scaling_of_rope(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "golden" / "llama-plain", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": yarn}))
    out = " ".join(printed("info", tmp_path / "model").split())
    assert "yarn scaling, factor 4, original context 64, attention factor 1.13863" in out


def test_memory_of_each_dtype() -> None:
    checkpoint = Checkpoint.open("shakespeare")
    matrices = 6 * 12 * 256 * 256 + 256 * 256
    rest = 4 * (4_870_144 - matrices)
    assert weight_bytes(checkpoint.config, Formats("bfloat16")) == 2 * matrices + rest
    assert weight_bytes(checkpoint.config, Formats("float8_e5m2")) == matrices + rest
    scales = 4 * (6 * (768 + 256 + 1024 + 256) + 256)
    assert weight_bytes(checkpoint.config, Formats("float8_e4m3fn")) == matrices + rest + scales
    more_tokens = replace(checkpoint.config, vocab_size=300)  # more than channels
    added = 44 * (256 + 4)  # rows of wte, and their scales
    assert weight_bytes(more_tokens, Formats("float8_e4m3fn")) == matrices + rest + scales + added


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from gpt2block.cli import main\n"
        "slow = 'bench', 'mine', 'run.numpy_model', 'text.generation', 'text.scoring'\n"
        "slow = 'cupy', 'huggingface_hub', *(f'gpt2block.{name}' for name in slow)\n"
        "try: main(['generate', '--help'])\n"
        "finally: print([name for name in slow if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT)
    assert done.stdout.decode().splitlines()[-1] == "[]"


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_held_back_is_shown_when_it_is_interrupted(command: Command, as_json: bool) -> None:
    def interrupted() -> Iterator[int]:
        yield from b"abc"
        raise KeyboardInterrupt

    command.model = stand_in(MarkovEngine(cycle(256), script=[interrupted()]))
    ran = command("generate", "> ", "--stop", "bcd", *["--json"] * as_json)
    assert ran.code == 130
    if as_json:
        (sample,) = ran.json["samples"]
        assert (sample["text"], sample["finish_reason"]) == ("abc", None)
        assert len(sample["tokens"]) == len(sample["logprobs"]) == 3
    else:
        assert ran.out == "> abc\n"
        assert ": 3 tokens, " in ran.err
        assert ran.err.endswith("; ended: interrupted\n")


def test_the_rate_counts_what_came_after_the_first_step() -> None:
    clock = cli_generate.Stopwatch(begun=10.0, at_first=2, first=12.0, last=16.0, tokens=8)
    assert (clock.to_first, clock.rate) == (2.0, 1.5)
    nothing = cli_generate.Stopwatch(begun=10.0, at_first=2)
    assert (nothing.to_first, nothing.rate) == (None, None)
