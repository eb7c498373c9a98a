"""Errors of the command line name its options, not the keywords of the library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from gpt2block import cli
from gpt2block.cli import app as cli_app
from gpt2block.cli.terms import in_terms_of_options

KEYWORD = re.compile(r"(?<![\w-])(?!n_ctx)[a-z]+_[a-z_]+|\b[a-z]+=['\d]")


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that is refused: one line."""
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").removesuffix("\n")


SAMPLING = [
    (["--temperature", "-1"], "--temperature: expected 0 (greedy), or"),
    (["--temperature", "nan"], "--temperature: expected 0 (greedy), or"),
    (["--top-k", "-1"], "--top-k: expected the number of tokens to keep"),
    (["--top-p", "2"], "--top-p: expected a probability"),
    (["--min-p", "-1"], "--min-p: expected a fraction from 0 to 1"),
    (["--repetition-penalty", "0"], "--repetition-penalty: expected "),
    (["--seed", "-1"], "--seed: expected an unsigned integer"),
    (["--max-new-tokens", "0"], "--max-new-tokens: expected a positive integer"),
    (["--samples", "0"], "--samples: expected a positive integer"),
    (["--overflow", "no"], "--overflow: expected 'error' or 'truncate', got 'no'"),
    (["--stop", ""], "--stop: expected strings of at least one character"),
    (["--stop", "\udcff"], "--stop: character 0 is U+DCFF, a lone surrogate"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((["generate", "KING", *options], message) for options, message in SAMPLING),
        (["generate", "KING", "--stop-id", "256"], "--stop-id: token 0 is 256"),
        (["generate", "K" * 257], "or let --overflow truncate keep the last 256"),
        (["generate", "KING", "--dtype", "int8"], "--dtype: expected one of float32"),
        (["generate", "KING", "--device", "gpu"], "--device: expected 'cuda', 'cuda:N', 'cpu', g"),
        (["generate", "KING", "--model", ""], "--model: expected a name or a path"),
        (["generate", "KING", "--samples", "x"], "Invalid value for '--samples': "),
        (["generate", "KING", "--sample", "2"], "No such option: --sample"),
        (["generate", "--ids", "1,x"], "--ids: expected token ids such as 1,2,3, got 'x'"),
        (["generate", "--ids", "-1"], "No such option"),
        (["generate", "--ids", "256"], "prompt: token 0 is 256: expected ids from 0 to 255"),
        (["generate", "--ids", "9" * 40], "--ids: expected token ids"),
        (["generate", "KING", "--ids", "--special"], "--special: expected a text"),
        (["score", __file__, "--stride", "0"], "--stride: expected a positive integer, got 0"),
        (["score", __file__, "--stride", "256"], "--stride: expected 1 to 255"),
        (["score", __file__, "--dtype", "int8"], "--dtype: expected one of float32"),
        (["score", __file__, "--bos"], "--bos: this model has no tokenizer with <|endoftext|>"),
        (["score", __file__, "--tokens", "--special"], "--special: expected a text"),
        (["score"], "Missing argument"),
        (["info", ""], "expected a name or a path, got an empty string"),
        (["block", "--layer", "6"], "shakespeare: --layer 6 is out of range"),
        (["block", "--dtype", "int8"], "--dtype: expected one of float32"),
        (["block", "--kernels", "fast"], "--kernels: expected one of auto"),
        (["block", "--size", "gpt3"], "unknown --size 'gpt3': expected one of gpt2"),
        (["block", "--weights", ""], "--weights: expected a name or a path"),
        (["block", "--kernels", "skeleton", "--dtype", "float16"], "--dtype"),
        (["kernels", "norm"], "unknown operation 'norm' (did you mean rmsnorm?): expected one of"),
        (["kernels", "softmax", "--variant", "9"], "unknown --variant '9': expected one of"),
        (
            ["kernels", "softmax", "--shape", "Q=1"],
            "--shape 'Q=1': softmax has no size Q",
        ),
        (["kernels", "softmax", "--shape", "B=2, T=x"], "--shape 'T=x': T: expected an integer"),
        (["kernels", "softmax", "--shape", "B=2,"], "--shape 'B=2,': expected sizes such as B="),
        (["kernels", "softmax", "--shape", ""], "--shape '': expected sizes such as B="),
        (["kernels", "trimat", "--variant", "fill"], "--variant 'fill' does not run by itself"),
        *(
            ([command, *words, "--dtype", "bf16"], "got 'bf16': did you mean bfloat16?")
            for command, *words in (
                ("generate", "KING"),
                ("score", __file__),
                ("compare", "KING"),
                ("block",),
                ("bench",),
                ("bench", "--decode"),
                ("bench", "--llama"),
                ("convert", "shakespeare", "out"),
            )
        ),
        (["kernels", "gemm", "--dtype", "fp16"], ": did you mean float16?"),
        (["generate", "KING", "--dtype", "fp32"], ": did you mean float32?"),
        (["generate", "KING", "--dtype", "BFloat16"], ": did you mean bfloat16?"),
        (["generate", "KING", "--dtype", "e4m3"], ": did you mean float8_e4m3fn?"),
        (["generate", "KING", "--kv-dtype", "e5m2"], ": did you mean float8_e5m2?"),
        (["compare", ""], "TEXT: expected at least one token, got 0"),
        (["compare", "K", "--cached"], "TEXT: expected at least two tokens for a decoding step"),
        (["bench", "--device", "cpu"], "gpt2block kernels OPERATION --device cpu"),
        (["bench", "--what", "gemm", "--device", "cpu"], "which measures no speed"),
        (["bench", "--decode", "--device", "cpu"], "gpt2block kernels OPERATION --device cpu"),
        (["kernels", "softmax", "--dtype", "int8"], "softmax: --dtype 'int8': expected one of"),
        (["kernels", "softmax", "--layout", "KN"], "softmax: --layout 'KN': it has no weights"),
        (["kernels", "softmax", "--peer", "jax"], "--peer: expected torch, got 'jax'"),
        (["kernels", "sample_token", "--peer", "torch"], "--peer torch: expected one of"),
        (["kernels", "softmax", "--plot", "/no/dir/a.png"], "--plot"),
        (
            ["kernels", "softmax", "--plot", str(Path(__file__).parent)],
            "expected a file, got a dir",
        ),
        (["bench", "--plot", ""], "Invalid value for '--plot': expected a path, got an empty"),
        (["generate", "KING", "--tokenizer", ""], "Invalid value for '--tokenizer': expected a p"),
        (["score", ""], "expected a path, got an empty string"),
        (["bench", "--what", "mlp"], "--what: expected one of"),
        (["bench", "--dtype", "int8"], "--dtype: expected one of"),
        (["bench", "--peer", "jax"], "--peer: expected torch"),
        (["check", "now"], "Got unexpected extra argument"),
        (["genrate"], "No such command 'genrate'"),
    ],
)
def test_a_bad_option_is_named_as_it_is_typed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(arguments, capsys)
    assert message in said
    if arguments[0] != "kernels":  # whose operations have such names
        assert not KEYWORD.search(said.replace(__file__, "")), said


MAP = ["--output", "scores", "--device", "cpu", "--workers", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["generate", *options], message)
            for options, message in SAMPLING
            if options[0] != "--stop"
        ),
        (["generate", "--rows-at-once", "0"], "--rows-at-once: expected a positive integer"),
        (["score", "--stride", "256"], "--stride: expected 1 to 255"),
        (["embed", "--pooling", "max"], "--pooling: expected 'mean' or 'last', got 'max'"),
        (["score", "--format", "csv"], "--format: expected one of jsonl, parquet"),
        (["score", "--dtype", "int8"], "--dtype: expected one of float32"),
        (["score", "--shard-size", "0"], "Invalid value for '--shard-size'"),
    ],
)
def test_a_bad_option_of_map(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("distributed", reason="map needs Dask")
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text("To be, or not to be\n")
    command, *options = arguments
    said = error_of(["map", command, "lines.txt", *MAP, *options], capsys)
    assert message in said
    assert not Path("scores").exists()


def command(*names: str) -> object:
    found = typer.main.get_command(cli_app.app)
    return cli_app._command(found, list(names))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("stride: expected 1 to 63", "--stride: expected 1 to 63"),
        ("try dtype='float32'", "try --dtype float32"),
        ('try dtype="float32" or special=True', "try --dtype float32 or --special"),
        ("got 'dtype=1' and \"stride=2\"", "got 'dtype=1' and \"stride=2\""),
        ("/tmp/top_k/stride: no such file", "/tmp/top_k/stride: no such file"),
        ("text: stride: expected", "text: stride: expected"),
        ("a stride and a dtype", "a stride and a dtype"),
        ("unknown=3 stays", "unknown=3 stays"),
        ("dtype 'x': expected", "--dtype 'x': expected"),
    ],
)
def test_what_is_rewritten(message: str, expected: str) -> None:
    assert in_terms_of_options(message, command("score"), []) == expected


def test_flags_and_other_names() -> None:
    assert in_terms_of_options("use causal=False", command("block"), []) == "use --no-causal"
    assert in_terms_of_options("use causal=True", command("block"), []) == "use --causal"
    assert in_terms_of_options("use stop_ids", command("generate"), []) == "use --stop-id"
    assert in_terms_of_options("use top_k", command("map", "generate"), []) == "use --top-k"
    assert in_terms_of_options("use top_k", command("map", "score"), []) == "use top_k"


def test_a_file_with_the_name_of_an_option_stays_a_file() -> None:
    message = "stride: cannot be read: No such file or directory"
    assert in_terms_of_options(message, command("score"), ["score", "stride"]) == message


@pytest.mark.parametrize(
    "names",
    [[], ["generate"], ["score"], ["info"], ["convert"], ["block"], ["check"], ["bench"],
     ["kernels"], ["map"], ["map", "score"], ["map", "generate"], ["map", "embed"]],
)  # fmt: skip
def test_h_is_help(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for option in ("-h", "--help"):
        with pytest.raises(SystemExit) as end:
            cli.main([*names, option])
        assert end.value.code == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "Usage:" in printed[0]
