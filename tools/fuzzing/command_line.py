"""`gpt2block` with random options and files: exit codes, error lines, results of the API."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fuzzing import Area, Difference, Refused, Rng, check, check_equal, check_message
from fuzzing.bulk import model, model_folder
from fuzzing.values import TEXTS, odd_text, replace
from gpt2block.apps import cli

EXIT_CODES = (0, 1, 2, 130, 141)
SUBPROCESSES = 0.005  # share of the cases, as each takes a second
NUMBERS = (
    "0", "-1", "1", "2", "3", "1.5", "nan", "inf", "1e400", "9" * 400, "2147483648", "x", "",
    "0x10", "1e-5",
)  # fmt: skip


class Ended(NamedTuple):
    """A finished command: exit code, stdout and stderr."""

    code: Any
    out: str
    err: str


def run(arguments: Sequence[str], stdin: bytes = b"", valid: bool = False) -> Ended:
    """Run `gpt2block ARGUMENTS` in this process, and check how it ends.

    Raises Refused unless it succeeds, and Difference if the arguments are valid.
    """
    streams = [io.TextIOWrapper(io.BytesIO(data), "utf-8") for data in (stdin, b"", b"")]
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = streams
    code: Any = 0
    try:
        cli.main(list(arguments))
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    texts = []
    for stream in streams[1:]:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))
    ended = Ended(code, *texts)
    check_ended(ended, arguments)
    check(not valid or code == 0, f"refused: {ended.err.strip()}")
    if code != 0:
        raise Refused
    return ended


def check_ended(ended: Ended, arguments: Sequence[str]) -> None:
    """Raise Difference for another exit code, a traceback, or an error of more than one line."""
    command = " ".join(arguments)[:100]
    check(ended.code in EXIT_CODES, f"exit code {ended.code!r}: {command!a}")
    quiet = "Traceback" not in ended.err + ended.out
    check(quiet, f"a traceback: {command!a}: {ended.err.strip()[-100:]}")
    if ended.code == 2 and "Usage:" not in ended.err + ended.out:
        line = ended.err.rstrip("\n")
        one = line.startswith("error: ") and "\n" not in line
        check(one, f"expected one line 'error: …', got {ended.err[:120]!r}")
        check_message(line.removeprefix("error: "))
    prints_help = {"--help", "-h", "--version"} & {*arguments}
    if ended.code == 0 and "--json" in arguments and not prints_help:
        json.loads(ended.out, parse_constant=_no_json)


def _no_json(name: str) -> None:
    raise Difference(f"{name} in JSON")


def case(rng: Rng, folder: Path) -> None:
    commands = (
        _generate, _generate, _score, _score, _info, _block, _explain, _profile, _other, _map
    )  # fmt: skip
    (_subprocess if rng.chance(SUBPROCESSES) else rng.pick(*commands))(rng, folder)


def _model(rng: Rng, folder: Path) -> str:
    """Return the tiny model's name, or a wrong one."""
    if rng.chance(0.8):
        return str(model_folder())
    damaged = folder / "damaged"
    damaged.mkdir()
    for file in model_folder().iterdir():
        data = bytearray(file.read_bytes())
        for _ in range(rng.whole(0, 3)):
            data[rng.whole(len(data))] = rng.whole(256)
        (damaged / file.name).write_bytes(data)
    return str(
        rng.pick(
            damaged, damaged, folder, "/dev/null", "/proc/self", "nobody/nothing", "no-such",
            "shakespeare", folder / "no\x1b[2J\nsuch", folder / ("x" * 300), *_texts(),
        )
    )  # fmt: skip


def _texts() -> list[str]:
    """Return the texts that can be an argument of a process."""
    return [text for text in TEXTS if "\0" not in text]


def _some(rng: Rng, options: dict[str, tuple[str, ...]]) -> tuple[list[str], bool]:
    """Return some options, and whether all of their values are valid."""
    chosen: list[str] = []
    right = True
    for name, values in options.items():
        if rng.chance(0.25):
            value = rng.pick(*values)
            if rng.chance(0.15):
                value, right = str(rng.pick(*NUMBERS, *_texts())), False
            chosen.append(f"{name}={value}")
    if rng.chance(0.04):
        right = False
        chosen.append(
            str(rng.pick("--help", "-h", "--version", "--no-such", "--samples", "-", "--", ""))
        )
    return chosen, right


def _generate(rng: Rng, folder: Path) -> None:
    options, right = _some(
        rng,
        {
            "--temperature": ("0", "0.8", "2"), "--top-k": ("0", "5"), "--top-p": ("0.5", "1"),
            "--min-p": ("0", "0.2"), "--repetition-penalty": ("1.2",), "--seed": ("0", "7"),
            "--samples": ("1", "2", "10000000"), "--overflow": ("error", "truncate"),
            "--stop": ("e", "xyz"), "--stop-id": ("3",), "--dtype": ("float32", "float16"),
            "--device": ("cpu",), "--kv-dtype": ("float8_e5m2", "float8_e4m3fn"),
        },
    )  # fmt: skip
    name, prompt = _model(rng, folder), (odd_text(rng) or "a").replace("\0", "").lstrip("-") or "a"
    right = right and name == str(model_folder()) and len(prompt.encode()) <= 20
    right = right and "--samples=10000000" not in options
    narrow = any(option.startswith("--kv-dtype") for option in options)
    right = right and (not narrow or "--dtype=float16" in options)
    arguments = ["generate", "--model", name, "--max-new-tokens=3", *options]
    from_stdin = rng.chance(0.3)
    stdin = prompt.encode() if rng.chance(0.8) else rng.bytes(9)
    right = right and not (from_stdin and stdin != prompt.encode())
    arguments += [] if from_stdin else ["--", prompt] if "--" not in options else [prompt]
    if rng.chance(0.6):
        arguments.insert(1, "--json")
    ended = run(arguments, stdin, right)
    if right and "--json" in arguments and not any("dtype=" in option for option in options):
        _same_as_api(json.loads(ended.out), options)


def _same_as_api(report: dict[str, Any], options: Sequence[str]) -> None:
    """Check that the API returns the same text with the same options."""
    kinds = {"--samples": int, "--top-k": int, "--seed": int, "--overflow": str, "--stop": str}
    keywords: dict[str, Any] = {"seed": report["seed"]}  # other defaults are the same
    for option in options:
        name, _, value = option.partition("=")
        if name == "--stop-id":
            keywords["stop_ids"] = [int(value)]
        elif name != "--device":
            keywords[name[2:].replace("-", "_")] = kinds.get(name, float)(value)
    generated = model().generate(report["prompt"], max_new_tokens=3, **keywords)
    rows = generated if isinstance(generated, list) else [generated]
    check_equal(
        "tokens", [row["tokens"] for row in report["samples"]], [list(row.tokens) for row in rows]
    )
    check_equal("text", [row["text"] for row in report["samples"]], [row.text for row in rows])


def _score(rng: Rng, folder: Path) -> None:
    text = odd_text(rng) * int(rng.pick(1, 1, 5))
    file, right = _input(rng, folder, text)
    options, plain_options = _some(
        rng,
        {
            "--stride": ("1", "5", "12"), "--dtype": ("float32", "float16"), "--device": ("cpu",),
        },
    )  # fmt: skip
    name = _model(rng, folder)
    right = right and plain_options and name == str(model_folder()) and len(text.encode()) >= 2
    arguments = ["score", *options, "--model", name]
    arguments += [str(rng.pick("--text", "--tokens"))] if not right and rng.chance(0.3) else []
    arguments += ["--json"] if rng.chance(0.5) else []
    arguments += ["--", file] if "--" not in options else [file]
    ended = run(arguments, text.encode(), right)
    if right and "--json" in arguments and not any("=float16" in option for option in options):
        stride = next((int(o.partition("=")[2]) for o in options if "--stride" in o), None)
        truth = model().score(text, stride).log_likelihood
        found = json.loads(ended.out)["log_likelihood"]
        check(np.isclose(found, truth, rtol=1e-4), f"score {found}, by the API {truth}")


def _input(rng: Rng, folder: Path, text: str) -> tuple[str, bool]:
    """Return a file's name, and whether the file contains that text."""
    path = folder / rng.pick("text.txt", "no\x1b[2Jname", "tokens.bin", "tokens.npy", "a.gguf")
    plain = path.suffix not in (".bin", ".npy")
    path.write_bytes(text.encode())
    kind = rng.random()
    if kind < 0.4:
        return str(path), plain
    if kind < 0.5:
        return "-", True
    if kind < 0.6:
        names = "/dev/zero", "/dev/null", "/proc/self/mem", "x" * 300, *_texts()
        return rng.pick(*names), False
    replace(rng, path)
    return str(path), False


def _info(rng: Rng, folder: Path) -> None:
    name = _model(rng, folder)
    options, right = _some(rng, {})
    arguments = ["info", *options, *(["--json"] if rng.chance(0.5) else []), "--", name]
    run(arguments, valid=right and name == str(model_folder()))


def _block(rng: Rng, folder: Path) -> None:
    options, _ = _some(
        rng,
        {
            "--layer": ("0", "1", "-1"), "--text": ("to be", "x"), "--seq-len": ("1", "4", "99"),
            "--batch": ("1", "2", "0"), "--dtype": ("float32", "float16"),
            "--kernels": ("auto", "fused", "none"), "--device": ("cpu", "cuda", "tpu"),
        },
    )  # fmt: skip
    arguments = ["block", "--weights", _model(rng, folder), "--text=ab", *options]
    arguments += ["--json"] if rng.chance(0.5) else []
    run(arguments)


def _explain(rng: Rng, folder: Path) -> None:
    """A page of any text and model holds the ids of the text, and two scripts."""
    options, _ = _some(rng, {"--layer": ("0", "1", "-1"), "--dtype": ("float32", "float8_e5m2")})
    name, text, page = _model(rng, folder), str(rng.pick(*_texts())), folder / "page.html"
    arguments = ["explain", "-o", str(page), "--model", name, *options, "--", text]
    run(arguments)
    if not page.exists():  # --help
        raise Refused
    html = page.read_text(encoding="utf-8")
    start, end = '<script type="application/json" id="data">', "</script>"
    scripts = html.count("<script"), html.count(end)
    check(scripts == (2, 2), f"expected two scripts in the page of {text!a}")
    data = json.loads(html.partition(start)[2].partition(end)[0], parse_constant=_no_json)
    if name == str(model_folder()):
        ids = [token["id"] for token in data["tokens"]]
        check_equal("ids", ids, model().tokenizer.encode_ordinary(text))


def _profile(rng: Rng, folder: Path) -> None:
    """A trace of any sizes and model has a slice for each kernel that the table counts."""
    options, _ = _some(
        rng,
        {
            "--rows": ("1", "3"), "--tokens": ("2", "4"), "--steps": ("1", "2"),
            "--dtype": ("float32", "float16"), "--kv-dtype": ("float8_e5m2",), "--size": ("gpt9",),
        },
    )  # fmt: skip
    what, trace = rng.pick("generate", "score", "block", "train"), folder / "trace.json"
    arguments = ["profile", str(what), "-o", str(trace), "--model", _model(rng, folder)]
    ended = run([*arguments, "--device=cpu", "--tokens=3", "--json", *options])
    if not trace.exists():  # --help
        raise Refused
    events = json.loads(trace.read_text(encoding="utf-8"), parse_constant=_no_json)["traceEvents"]
    kernels = [event for event in events if event["ph"] == "X" and "kernel" in event["args"]]
    check(all(event["dur"] >= 0 for event in kernels), "a kernel of negative time")
    counted = sum(row["kernels"] * row["count"] for row in json.loads(ended.out)["passes"])
    check_equal("kernels", len(kernels), round(counted))


def _other(rng: Rng, folder: Path) -> None:
    """Commands that only print descriptions or need a GPU, and unknown commands."""
    arguments = list(
        rng.pick(
            [], ["--help"], ["-h"], ["--version"], ["check"], ["check", "--json"],
            ["kernels"], ["kernels", "--json"], ["kernels", "softmax", "--json"],
            ["kernels", "nothing"],
            ["kernels", "layernorm",
             "--shape", str(rng.pick(*_texts(), "B=1", "B=-1,T=x"))],
            ["kernels", "gemm", "--dtype", str(rng.pick(*_texts()))],
            ["kernels", "softmax", "--template"], ["kernels", "softmax", "--grid", "3"],
            ["kernels", "softmax", "--source", str(rng.pick(*_texts(), "1", "rows"))],
            ["kernels", "softmax", "--solution", str(rng.pick(*_texts(), "3", "3.4", "../3"))],
            ["kernels", "softmax", "--mine", str(rng.pick(*_texts(), str(folder)))],
            ["kernels", "softmax", "--device", str(rng.pick(*_texts(), "tpu"))],
            ["convert"], ["embed"], ["nothing"],
            [str(rng.pick(*_texts()))],
        )
    )  # fmt: skip
    run(arguments)


def _map(rng: Rng, folder: Path) -> None:
    """Jobs that must be refused at the start, without output."""
    lines = folder / "in.jsonl"
    lines.write_text('{"text": "ab"}\n')
    output = folder / "out"
    task = str(rng.pick("score", "generate", "embed"))
    wrong = rng.pick(
        [str(folder / "missing.jsonl")],
        [str(lines), "--model", str(folder / "no-model")],
        [str(lines), "--format", "xml"],
        [str(lines), "--device", "tpu"],
        [str(lines), "--keep", "index"],
        [str(lines), "--batch-tokens", "0"],
        [str(lines), "--shard-size", "-3"],
        [str(lines), "--workers", "0"],
        [str(lines), "--tokenizer", str(folder)],
        [str(folder / "a.csv")],
        ["~nosuchuser/x.jsonl"],
        ["x" * 300 + ".jsonl"],
        [str(lines), "--dtype", "int3"],
    )
    target = rng.pick(str(output), str(output), str(lines / "below"), str(folder / ("y" * 300)))
    model_option = [] if "--model" in wrong else ["--model", str(model_folder())]
    arguments = ["map", task, "--output", target, *model_option, *wrong]
    try:
        run(arguments)
    except Refused:
        check(not output.exists(), f"output: {wrong!a}")
        raise
    raise Difference(f"accepted {wrong!a}"[:200])


def _subprocess(rng: Rng, folder: Path) -> None:
    """A real process whose stdout is full, closed, or no longer read."""
    text = folder / "text.txt"
    text.write_text("to be or not to be")
    arguments = rng.pick(
        ["generate", "--model", str(model_folder()), "--max-new-tokens", "3", "ab"],
        ["score", "--model", str(model_folder()), str(text)],
        ["info", str(model_folder())],
        ["block", "--text", "ab"],
        ["--help"],
    )
    command = " ".join([sys.executable, "-m", "gpt2block", *arguments])
    redirection = rng.pick("> /dev/full", ">&-", "| true", "> /dev/full 2>&1", "< /dev/null")
    script = f"set -o pipefail; {command} {redirection}"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, check=False)
    found = Ended(ended.returncode, "", ended.stderr.decode(errors="replace"))
    check("Exception ignored" not in found.err, f"{redirection}: {found.err.strip()[-100:]}")
    check_ended(found, arguments)
    full = "/dev/full" in redirection
    check(not full or found.code != 0, "exit code 0 though nothing could be written")
    if found.code != 0:
        raise Refused


AREA = Area("command_line", 1, case)
