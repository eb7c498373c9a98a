"""Options of the commands, and errors that name them instead of keywords of the library."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from gpt2block.cli.options import add_command, argument, option
from gpt2block.errors import Argument, CheckpointError, InputError, PrintableError
from tests.command_line import gpt2block, printed

KEYWORD = re.compile(r"(?<![\w-])(?!n_ctx)[a-z]+_[a-z_]+|\b[a-z]+=['\d]")


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
        (
            ["generate", "KING", "--device", "gpu"],
            "--device: expected 'cuda', 'cuda:N', 'cuda:N,M'",
        ),
        (["generate", "KING", "--device", "cuda:0,"], "got 'cuda:0,'"),
        (["generate", "KING", "--gpus", "0"], "--gpus 0: expected 1 or more"),
        (["generate", "KING", "--gpus", "2", "--device", "cpu"], "--gpus: expected no --device"),
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
        (["block", "--layer", "6"], "shakespeare: --layer 6 is out of range: it has 6 layers, 0…5"),
        (["block", "--dtype", "int8"], "--dtype: expected one of float32"),
        (["block", "--kernels", "fast"], "--kernels: expected one of auto"),
        (["block", "--size", "gpt3"], "unknown --size 'gpt3': expected one of gpt2, gpt2-medium"),
        (["block", "--device", "gpu"], "--device: expected 'cuda', 'cuda:N', "),
        (["block", "--weights", ""], "--weights: expected a name or a path"),
        (["block", "--weights", "no/such/dir"], "no such file or directory"),
        (["block", "--weights", "model.bin"], "model.bin: no such file or directory"),
        (["block", "--size", "gpt2", "--text", "x"], "--size uses random weights: leave out --w"),
        (["block", "--text", ""], "expected at least one character, got none"),
        (["block", "--text", "abc", "--seq-len", "4"], "--seq-len 4: the text has 3 tokens"),
        (["block", "--text", "x" * 257], "257 tokens: shakespeare has positions for n_ctx = 256"),
        (["block", "--seq-len", "0"], "expected --batch and --seq-len of at least 1, got 1, 0"),
        (["block", "--batch", "0"], "expected --batch and --seq-len of at least 1"),
        *(
            (["block", *words, size, "1" + "0" * 12], "tokens: at most 131,072 are compared")
            for words in (["--size", "gpt2"], ["--text", "KING"])
            for size in ("--batch", "--seq-len")
        ),
        (["block", "--kernels", "skeleton", "--dtype", "float16"], "--dtype"),
        (["kernels", "norm"], "unknown operation 'norm' (did you mean rmsnorm?): expected one of"),
        (["kernels", "softmax", "--variant", "9"], "unknown --variant '9': expected one of"),
        (["kernels", "softmax", "--shape", "Q=1"], "--shape 'Q=1': softmax has no size Q"),
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
        (["kernels", "softmax", "--peer", "torch"], "run a script of the folder benchmarks/"),
        (["kernels", "softmax", "--plot", "/no/dir/a.png"], "--plot"),
        (
            ["kernels", "softmax", "--plot", str(Path(__file__).parent)],
            "expected a file, got a dir",
        ),
        (["block", "--device", "cuda:0,1"], "--device 'cuda:0,1'"),
        (["kernels", "add", "--plot", ""], "Invalid value for '--plot': expected a path, got an"),
        (["generate", "KING", "--tokenizer", ""], "Invalid value for '--tokenizer': expected a p"),
        (["score", ""], "expected a path, got an empty string"),
        (["bench", "--what", "mlp"], "--what: expected one of"),
        (["bench", "--dtype", "int8"], "--dtype: expected one of"),
        (["bench", "--peer", "torch"], "--peer is no option any more: to compare with"),
        (["check", "now"], "Got unexpected extra argument"),
        (
            ["generate", "hi", "there"],
            "(there): write a text with spaces in quotes, as in gpt2block ",
        ),
        (["generate", "KING", "--threads", "64"], "--threads: NumPy is loaded already: set OPENBL"),
        (["generate", "KING", "--threads", "0"], "Invalid value for '--threads': "),
        (["doctor"], "No such command 'doctor': type gpt2block check (see "),
        (["generate", "--file", "a.txt"], "option: --file: type gpt2block generate - < FILE (see "),
        (["generate", "KING", "--dtype", "float64"], "got 'float64': did you mean float32?"),
        (
            ["generate", "KING", "--schema", "a.json"],
            ", got 'a.json': of a file, pass the text: \"$(",
        ),
        (["genrate"], "No such command 'genrate'"),
    ],
)
def test_a_bad_option_is_named_as_it_is_typed(arguments: list[str], message: str) -> None:
    said = gpt2block(*arguments).error
    assert message in said
    if arguments[0] != "kernels":  # operations have arguments with such names
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
        (["embed", "--pooling", "max"], "--pooling: expected one of mean, last, cls, got 'max'"),
        (["score", "--format", "csv"], "--format: expected 'jsonl' or 'parquet', got 'csv'"),
        (["score", "--dtype", "int8"], "--dtype: expected one of float32"),
        (["score", "--shard-size", "0"], "Invalid value for '--shard-size'"),
    ],
)
def test_a_bad_option_of_map(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("distributed", reason="map needs Dask")
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text("To be, or not to be\n")
    command, *options = arguments
    assert message in gpt2block("map", command, "lines.txt", *MAP, *options).error
    assert not Path("scores").exists()


@dataclass(frozen=True)
class Shared:
    model: str = option("A name.", "small")
    stop_ids: list[int] = option("An id.", (), "--stop-id")
    form: str = option("A format.", "jsonl", "--format")


def ran(function: object, *words: str) -> None:
    """Run a function as a command of a new application with these arguments."""
    app = typer.Typer()
    app.callback()(lambda: None)
    add_command(app, function, "example")  # type: ignore[arg-type]
    typer.main.get_command(app).main(["command", *words], standalone_mode=False)


def test_fields_and_parameters_are_options() -> None:
    found = []

    def command(
        file: str = argument("A file.", ...),
        *,
        model: Shared,
        top_k: int | None = option("A number."),
        causal: bool = option("A flag.", True),
    ) -> None:
        found.append((file, model, top_k, causal))

    ran(command, "a.txt")
    ran(command, "a.txt", "--stop-id=3", "--stop-id=4", "--model=b", "--top-k=5", "--no-causal")
    assert found == [
        ("a.txt", Shared("small", []), None, True),
        ("a.txt", Shared("b", [3, 4]), 5, False),
    ]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError("model: expected a name"), "--model: expected a name"),
        (CheckpointError("weights: expected a name"), "--model: expected a name"),
        (InputError("stop_ids: expected"), "--stop-id: expected"),
        (InputError("format: expected"), "--format: expected"),
        (InputError("form: expected"), "--format: expected"),
        (InputError("try ", Argument("model", "a"), " or wait"), "try --model a or wait"),
        (InputError("b: ", Argument("form"), " 'x': expected"), "b: --format 'x': expected"),
        (InputError("use ", Argument("top_k"), " or top_p"), "use --top-k or top_p"),
        (InputError("use ", Argument("dtype", "float32")), "use dtype='float32'"),
        (InputError("text: model: expected"), "text: model: expected"),
        (InputError("/tmp/model/form: no such file"), "/tmp/model/form: no such file"),
        (InputError("a model and a form"), "a model and a form"),
        (InputError("got 'model=1'"), "got 'model=1'"),
        (InputError("file: the argument"), "file: the argument"),
    ],
)
def test_an_argument_in_a_message_becomes_its_option(error: PrintableError, expected: str) -> None:
    def command(
        file: str = argument("A file.", "a.txt"), *, shared: Shared, top_k: int = option("", 0)
    ) -> None:
        raise error

    for raised in (error, pickle.loads(pickle.dumps(error))):
        error = raised
        with pytest.raises(type(error)) as caught:
            ran(command)
        assert str(caught.value) == expected


def test_a_file_with_the_name_of_an_option_stays_a_file() -> None:
    said = gpt2block("score", "stride").error
    assert said == "stride: cannot be read: No such file or directory"


def test_a_model_of_info_is_an_argument_or_an_option() -> None:
    assert printed("info", "--model", "shakespeare-llama") == printed("info", "shakespeare-llama")
    assert gpt2block("info", "x", "--model", "x").error.startswith("--model: expected the model as")


@pytest.mark.parametrize("option", ["--speculate", "--kernels skeleton"])
def test_an_option_without_effect_on_the_cpu_says_so(option: str) -> None:
    command = "generate J --max-new-tokens 1" if option == "--speculate" else "block --seq-len 4"
    ended = gpt2block(*f"{command} --device cpu {option}".split())
    assert ended.code == 0
    assert ended.err.startswith(f"note: {option} has no effect on the CPU: ")
    assert "note" not in gpt2block(*f"{command} --device cpu".split()).err
