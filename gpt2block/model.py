"""Language models: `from_pretrained("gpt2").generate("…")`, in classes GPT2, Llama and Model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_callable, check_count, check_flag, named_options
from gpt2block.cuda import begin
from gpt2block.cuda.devices import reads_blocks, resolve_devices
from gpt2block.cuda.formats import FILE, REMOVED, FormatOptions, Formats
from gpt2block.engine import inputs
from gpt2block.engine.adapters import MEMORY, Adapters
from gpt2block.engine.chat.conversation import Conversation
from gpt2block.engine.chat.messages import Message
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.cuda.several import SeveralCudaModels
from gpt2block.engine.explain import Page, collect
from gpt2block.engine.generation import generate, known_texts, scoring
from gpt2block.engine.generation.generate import Prompt, Prompts
from gpt2block.engine.generation.known_texts import ReceiptCheck
from gpt2block.engine.generation.options import (
    GenerateOptions,
    Options,
    Overflow,
    StreamOptions,
    with_keywords,
)
from gpt2block.engine.generation.scoring import Score, ScoredTokens, ScoreOptions
from gpt2block.engine.generation.sequences import Generation
from gpt2block.engine.inspect import lens
from gpt2block.engine.inspect.compare import Comparisons, compare
from gpt2block.engine.inspect.lens import LogitLens
from gpt2block.engine.model import Floats, KVCache, Tensors, TracedEngine
from gpt2block.engine.numpy.model import NumpyModel
from gpt2block.errors import CheckpointError, Hinted, InputError
from gpt2block.files.checkpoints import BUNDLED, Checkpoint, save_gguf, save_pretrained
from gpt2block.files.checkpoints.chat_files import chat_sampling, chat_template
from gpt2block.files.checkpoints.embedding_files import (
    EmbeddingDefaults,
    Pooling,
    chosen,
    embedding_defaults,
)
from gpt2block.files.parameters.arrays import ModelArrays
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.files.parameters.llama import LlamaWeights
from gpt2block.files.tokenizers.encoding import Encoding, bytes_of_ids
from gpt2block.files.tokenizers.lookup import Lookup, of_inputs
from gpt2block.files.tokenizers.tokenizer import token_ids
from gpt2block.models.config import GPT2Config, ModelConfig
from gpt2block.models.config.llama import LlamaConfig
from gpt2block.sampling import with_defaults

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tokens = Sequence[int] | NDArray[np.integer]  # token ids (T,); an array may also be (B, T)
Progress = Callable[[Iterable[Any]], Iterable[Any]]
Weights = TypeVar("Weights", bound=ModelArrays[Any])
Loaded = TypeVar("Loaded", bound="Model[Any]")


class Model(Hinted, Generic[Weights]):
    """A language model. `from_pretrained` returns GPT2, Llama, or Model for other architectures.

    Token ids are a sequence (T,), a batch (B, T), or a list of sequences of different lengths.
    Raises InputError for wrong arguments, DeviceError when the device cannot be used.
    """

    HINTS = "Model"
    CONFIG: ClassVar[type[ModelConfig]] = ModelConfig  # type: ignore[type-abstract]
    WEIGHTS: ClassVar[type[ModelArrays[Any]]] = ModelArrays

    @named_options(**REMOVED)
    def __init__(
        self,
        weights: Weights = None,  # type: ignore[assignment]  # the check below names it
        device: str | None = None,
        dtype: str = "float32",
        allow_nonfinite: bool = False,
        kv_dtype: str | None = None,
    ) -> None:
        if not isinstance(weights, self.WEIGHTS):
            raise InputError(
                f"weights: expected a {self.WEIGHTS.__name__}, got {type(weights).__name__}: see "
                f"{type(self).__name__}.from_pretrained"
            )
        formats = Formats(dtype, kv_dtype, allow_nonfinite)
        self._set_up(weights.config, weights.tensors(), device, formats)

    @classmethod
    @named_options(**REMOVED)
    def from_pretrained(
        cls: type[Loaded],
        name: str | Path | Checkpoint = BUNDLED,
        device: str | None = None,
        dtype: str | None = None,
        progress: Progress = iter,
        allow_nonfinite: bool = False,
        revision: str | None = None,
        kv_dtype: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        adapters_memory: float = MEMORY,
    ) -> Loaded:
        """Load a checkpoint as the class of its architecture: GPT2, Llama, or Model for others.

        The tensors are read one at a time.

        name: "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl" (or "124M" …), another hub id, a
        Hugging Face directory or .safetensors file, or a bundled model: "shakespeare", a GPT-2, or
        "shakespeare-llama". progress: wraps the tensors as they are read. dtype: as in GPT2, or
        "file" for matrices of 4 to 8 bits as they are in the file; None selects "file" if the file
        has such matrices and a GPU of compute capability 7.5 or newer reads them, else "float32".
        device, allow_nonfinite, kv_dtype: as in GPT2. revision: branch, tag or commit of a hub id.
        adapters: {name: folder} of adapters (LoRA) in the format of the package peft, one of which
        `generate` can use; adapters_memory: the GB that they may take. Raises CheckpointError, and
        InputError for weights that are not finite and for adapters that take more memory.
        """
        given = FormatOptions(dtype, kv_dtype, allow_nonfinite)
        more = adapters or {}, adapters_memory
        return load(cls, name, device, given, progress, revision, *more)

    @classmethod
    def from_tensors(
        cls: type[Loaded],
        config: ModelConfig,
        tensors: Tensors,
        device: str,
        dtype: str,
        kv_dtype: str | None = None,
    ) -> Loaded:
        """Create a model from tensors in the form that `Checkpoint.tensors` yields.

        Matrices of layout "NK" that are already in the memory of the GPU, and in the dtype, are not
        copied. Raises InputError.
        """
        if not isinstance(config, cls.CONFIG):
            raise InputError(
                f"config: expected a {cls.CONFIG.__name__}, got {type(config).__name__}"
            )
        model: Loaded = cls.__new__(cls)
        model._set_up(config, tensors, device, Formats(dtype, kv_dtype))
        return model

    _checkpoint: Checkpoint | None = None

    def _set_up(
        self, config: ModelConfig, tensors: Tensors, device: str | None, formats: Formats
    ) -> None:
        self.config, self.formats = config, formats
        indices = resolve_devices(device)
        self.engine: TracedEngine
        if not indices:
            self.engine = NumpyModel(config, tensors, formats)
        elif len(indices) > 1:
            self.engine = SeveralCudaModels(config, tensors, formats, indices)
        else:
            self.engine = CudaModel(config, tensors, formats, indices[0])
        self.engine.checkpoint = self._checkpoint
        if self._checkpoint is not None:
            self._checkpoint.check_unchanged()

    def __repr__(self) -> str:
        c = self.config
        sizes = f"n_layer={c.n_layer}, n_head={c.n_head}, n_embd={c.n_embd}, n_ctx={c.n_ctx}"
        return (
            f"{c.NAME}({self.name!r}, {sizes}, vocab_size={c.vocab_size}, "
            f"{self.formats}, {self.device}, {self.nbytes:,} bytes)"
        )

    @property
    def dtype(self) -> str:
        """The dtype of the weights' matrices."""
        return self.formats.dtype

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values in the kv_cache."""
        return self.formats.cache_dtype

    @property
    def dtypes(self) -> str:
        """The dtype of the weights, and the kv_cache's dtype if it is not the default."""
        return str(self.formats)

    @property
    def device(self) -> str:
        """A description of the device."""
        return self.engine.describe()

    @property
    def name(self) -> str:
        """The name or path that the model was loaded from."""
        return self._checkpoint.name if self._checkpoint else "weights given as arrays"

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the model's adapters."""
        return self.engine.adapters.names

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as stored; docs/dtypes.md lists further memory that prompts need."""
        return self.engine.nbytes

    @cached_property
    def lookup(self) -> Lookup:
        """The tokenizer's Lookup, which loads the tokenizer when a text first needs it."""
        return Lookup(self._checkpoint, self.config.vocab_size)

    @property
    def tokenizer(self) -> Encoding:
        """The checkpoint's tokenizer, or GPT-2's BPE. Raises CheckpointError if loading fails."""
        return self.lookup.encoding

    @property
    def draft_model(self) -> Model[Any] | None:
        """A smaller draft model that drafts the next tokens if the option `speculate` is set.

        The texts stay the same. The more draft tokens are right, the fewer steps a text takes. The
        draft model must be on the same GPU, and have the same tokens and at least the same context.
        For a model on several GPUs, it must be on one of them, and is copied to the other GPUs. At
        most 16 rows are then computed together. None: a block of the model drafts tokens, if it has
        one (Qwen3.5), or else draft tokens are copied from the text.
        Setting another model raises InputError. Source: Leviathan et al., "Fast Inference from
        Transformers via Speculative Decoding" (2023).
        """
        return self._draft_model

    @draft_model.setter
    def draft_model(self, model: Model[Any] | None) -> None:
        if model is not None:
            self._check_draft(model)
        own: Any = self.engine  # a NumpyModel has no draft
        if model is not None or hasattr(own, "draft"):
            own.draft = None if model is None else model.engine
        self._draft_model = model

    _draft_model: Model[Any] | None = None

    def _check_draft(self, model: Model[Any]) -> None:
        """Raise InputError unless `model` can be the draft model of this model."""
        if not isinstance(model, Model) or model is self:
            got = "the model itself" if model is self else type(model).__name__
            raise InputError(f"draft_model: expected another Model, got {got}")
        if model.adapters:
            raise InputError("draft_model: expected a model without adapters")
        if model.config.delta_nets is not None:
            raise InputError(
                f"draft_model: expected a model without gated delta nets, whose states cannot go "
                f"back, got {model.config.MODEL_TYPE}"
            )
        engine, place = self.engine, getattr(model.engine, "device", None)
        places = getattr(engine, "devices", (getattr(engine, "device", None),))
        if place is None or place not in places:
            raise InputError(
                "draft_model: expected both models on one GPU, as NumPy drafts nothing, or a "
                f"draft on one GPU of a model on several, got {self.device} and {model.device}"
            )
        sizes = [(each.config.vocab_size, each.config.n_ctx) for each in (self, model)]
        if sizes[0][0] != sizes[1][0] or sizes[0][1] > sizes[1][1]:
            raise InputError(
                f"draft_model: expected {sizes[0][0]:,} tokens and a context of at least "
                f"{sizes[0][1]:,}, got {sizes[1][0]:,} and {sizes[1][1]:,}"
            )
        if not self._checkpoint or not model._checkpoint:
            return  # a model without a tokenizer: tokens cannot be compared
        for token in range(self.config.vocab_size):
            own, other = (bytes_of_ids(each.tokenizer, [token]) for each in (self, model))
            if own != other:
                raise InputError(
                    f"draft_model: expected the same tokens, got {other!r} in the place of {own!r} "
                    f"at {token}"
                )

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template of the model's conversations. Raises CheckpointError if there is none."""
        template = chat_template(self._checkpoint) if self._checkpoint else None
        if template is None:
            raise CheckpointError(
                f"{self.name}: it has no chat template: expected chat_template in "
                "tokenizer_config.json, chat_template.jinja or the GGUF file, as models that were "
                "trained on conversations have: use generate"
            )
        return ChatTemplate(*template)

    @cached_property
    def chat_sampling(self) -> dict[str, float]:
        """The sampling options that chat answers use by default, as keywords of `generate`.

        Read from the model's generation_config.json, else a temperature of 0.2 and a top_p of 0.9.
        Raises CheckpointError for values out of range.
        """
        return chat_sampling(self._checkpoint)

    @cached_property
    def embedding_defaults(self) -> EmbeddingDefaults:
        """The pooling and normalization of `embed` by default, from files of sentence-transformers.

        A model without these files has the mean, which is not normalized. Raises CheckpointError
        for damaged files, and for poolings and modules that are not supported.
        """
        return embedding_defaults(self._checkpoint)

    def tensors(self) -> Tensors:
        """Yield name, array and layout of every tensor as stored, like `Checkpoint.tensors`.

        Arrays that a model on the CPU computes with are read-only views.
        """
        return self.engine.tensors()

    def save_pretrained(
        self, directory: str | Path, dtype: str | None = None, overwrite: bool = False
    ) -> Path:
        """Write a Hugging Face directory, with the tokenizer files of the checkpoint.

        dtype: "float32", "float16", "bfloat16", or None for the stored dtype (FP8 as float32).
        See `files.checkpoints.save_pretrained`.
        """
        return save_pretrained(directory, self, dtype, self._checkpoint, overwrite)

    def save_gguf(self, path: str | Path, type: str, overwrite: bool = False) -> Path:
        """Write a GGUF file, with the tokenizer of the checkpoint.

        type: GGUF type of the matrices, such as "q8_0" or "f16". See `files.checkpoints.save_gguf`.
        """
        return save_gguf(path, self, type, self._checkpoint, overwrite)

    def new_cache(self, batch: int = 1, n_ctx: int | None = None) -> KVCache:
        """Return an empty kv_cache for `batch` sequences of up to n_ctx tokens (None: the model's).

        With longrope, n_ctx selects the short or long factors for all sequences.
        """
        batch = check_count("batch", batch)
        n_ctx = check_count("n_ctx", self.config.n_ctx if n_ctx is None else n_ctx)
        if n_ctx > self.config.n_ctx:
            raise InputError(
                f"n_ctx: expected at most the model's {self.config.n_ctx}, got {n_ctx}"
            )
        return self.engine.new_cache(batch, n_ctx)

    @overload
    def __call__(self, ids: Tokens, cache: KVCache | None = None, last: bool = False) -> Floats: ...
    @overload
    def __call__(
        self, ids: Sequence[Tokens], cache: KVCache | None = None, *, last: Literal[True]
    ) -> Floats: ...
    @overload
    def __call__(
        self, ids: Sequence[Tokens], cache: KVCache | None = None, last: bool = False
    ) -> Floats | list[Floats]: ...
    def __call__(
        self, ids: Tokens | Sequence[Tokens], cache: KVCache | None = None, last: bool = False
    ) -> Floats | list[Floats]:
        """Return float32 logits: (T, V), (B, T, V), or a list of (T, V) if sequence lengths differ.

        last: return the logits of the last position only, (V,) or (B, V). cache: sequence b of
        the ids continues sequence b of the cache, to which its keys and values are appended.
        """
        check_flag("last", last)
        sequences, shape = inputs.sequences(self.engine, ids, cache)
        logits = self.engine.forward(sequences, "last" if last else "logits", cache)
        if shape is None:
            return np.stack(logits) if last else logits
        together = np.stack(logits) if len(logits) > 1 else logits[0]
        return together.reshape(*(shape[:-1] if last else shape), -1)

    @overload
    def hidden_states(self, ids: Tokens) -> Floats: ...
    @overload
    def hidden_states(self, ids: Sequence[Tokens]) -> Floats | list[Floats]: ...
    def hidden_states(self, ids: Tokens | Sequence[Tokens]) -> Floats | list[Floats]:
        """Return hidden states in float32: the embedding, each block's output, then the final norm.

        Returns (n_layer + 2, T, C), (n_layer + 2, B, T, C), or a list of (n_layer + 2, T, C).
        """
        sequences, shape = inputs.sequences(self.engine, ids)
        states = self.engine.forward(sequences, "states")
        if (unit := self.config.scales.stream) != 1:
            for each in states:
                each[:-1] *= np.float32(unit)
        if shape is None:
            return states
        return np.stack(states, axis=1).reshape(len(states[0]), *shape, -1)

    def trace(self, ids: Prompt, cached: bool = False) -> dict[str, np.ndarray]:
        """Run a forward pass; return a dict from step names to results (T, channels).

        ids: a text or token ids (T,).

        The device and the options determine which steps there are. Examples of names: "embedding",
        "h.0.ln1", "h.11.gelu", "ln_f". cached: compute the last token only, with the keys and
        values of earlier tokens in a kv_cache.
        """
        return self.engine.trace(inputs.tokens(self.engine, self.lookup, ids, cached), cached)

    def compare(self, ids: Prompt, cached: bool = False) -> Comparisons:
        """Compare all steps, in order, with a float64 forward pass of a text or token ids (T,).

        cached: compare the steps of the last token only, as decoding computes it. The float64 pass
        uses the weights as they are stored. Rows are named after their steps, such as "h.3.gelu".
        """
        return compare(self.engine, inputs.tokens(self.engine, self.lookup, ids, cached), cached)

    @named_options()
    def attention(self, text: Prompt) -> Floats:
        """Return the attention weights of a text or token ids (T,), (n_layer, n_head, T, T).

        weights[l, h, i, j], float32, is the weight of token j for token i in head h of layer l; 0
        for j > i.
        """
        return lens.attention_weights(self.engine, inputs.tokens(self.engine, self.lookup, text))

    @named_options()
    def logit_lens(self, text: Prompt, top: int = 5) -> LogitLens:
        """Apply lm_head to the residual stream after each layer; return the `top` likeliest tokens.

        Returns a LogitLens: ids and probabilities, (n_layer + 1, T, top) each. Raises InputError.
        """
        top = check_count("top", top)
        if top > self.config.vocab_size:
            raise InputError(f"top: expected at most {self.config.vocab_size} tokens, got {top}")
        ids = inputs.tokens(self.engine, self.lookup, text)
        return lens.logit_lens(self.engine, ids, top, partial(of_inputs, self.lookup, text))

    @named_options()
    def explain(self, text: Prompt, layer: int = 0) -> Page:
        """Return an HTML page about one forward pass of a text or token ids (T,), for notebooks.

        `save(path)` writes the page: tokens and their surprisal, every step with its tensor,
        formula, kernel, time and error against float64, attention, logit lens and the next token's
        distribution. layer: the block that the page opens, with finer heatmaps. T is at most 1024.
        Raises InputError.
        """
        encoding = of_inputs(self.lookup, text)
        ids = token_ids(encoding, text, self.config.vocab_size, "text")
        return Page(collect(self.engine, encoding, self.name, ids, layer))

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, *, samples: Literal[1] = 1, **options: Unpack[GenerateOptions]
    ) -> Generation: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, *, samples: int, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompts, *, samples: Literal[1] = 1, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...
    @overload
    def generate(
        self, prompts: Prompts, *, samples: int, **options: Unpack[GenerateOptions]
    ) -> list[list[Generation]]: ...
    @named_options()
    @with_keywords()
    def generate(
        self, prompts: Prompt | Prompts, **options: object
    ) -> Generation | list[Generation] | list[list[Generation]]:
        """Continue a prompt (text or token ids), or each prompt of a list.

        Returns a Generation (text, tokens, logprobs, finish_reason, seed) for one prompt, and a
        list of Generations for a list of prompts. With `samples` above 1, each prompt has a list.

        {options}

        Raises InputError for wrong arguments (UnknownOption, a TypeError as well, for an unknown
        keyword), and for logits that are NaN or infinite; CheckpointError for text when the
        tokenizer cannot be loaded; MemoryError when the GPU has no room for rows_at_once.
        """
        return generate.generate(self.engine, self.lookup, prompts, Options.of(options))

    @named_options(samples="expected one sample, got {}: use generate")
    @with_keywords("samples", "rows_at_once")
    def stream(
        self, prompt: Prompt, **options: Unpack[StreamOptions]
    ) -> Generator[str, None, Generation]:
        """Yield the continuation of one prompt in pieces of whole characters, as it is generated.

        The keywords are as in `generate`. The generator's return value is the Generation.
        Raises as `generate` does; wrong arguments raise immediately.
        """
        return generate.stream(self.engine, self.lookup, prompt, Options.of(options))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Generate the answer to a conversation.

        messages: dicts such as {"role": "user", "content": "…"}, with the roles that the model's
        template knows; the form in which OpenAI's clients send messages is also accepted. The
        template writes the messages and the beginning of the answer; names of special tokens in a
        message are ordinary text.

        add_generation_prompt: whether the template writes the beginning of an answer; by default
        True, unless the last message is continued. continue_final_message: the answer continues the
        last message. chat_template_kwargs: variables that the template reads, such as
        {"enable_thinking": False}. The other keywords are as in `generate`; sampling options
        that are not passed have the values of `chat_sampling`.

        Raises as `generate` does; InputError for messages that the template refuses and for
        variables that it does not read, and CheckpointError for a model without a template.
        """
        own = (add_generation_prompt, continue_final_message, chat_template_kwargs)
        arguments = self.chat_template.arguments(*own)
        prompt = self.chat_template.ids(self.tokenizer, messages, **arguments)
        found: Generation = self.generate(prompt, **with_defaults(options, self.chat_sampling))
        return found

    def chat_stream(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[StreamOptions],
    ) -> Generator[str, None, Generation]:
        """Yield the answer to a conversation in pieces. Arguments are as in `chat`."""
        own = (add_generation_prompt, continue_final_message, chat_template_kwargs)
        arguments = self.chat_template.arguments(*own)
        prompt = self.chat_template.ids(self.tokenizer, messages, **arguments)
        return self.stream(prompt, **with_defaults(options, self.chat_sampling))

    def conversation(
        self,
        messages: Iterable[Message] = (),
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Conversation:
        """Return a Conversation that starts with `messages` and keeps its kv_cache between answers.

        chat_template_kwargs: as in `chat`, for all answers. Raises InputError for messages of
        another form and variables that the template does not read, and CheckpointError as `chat`
        does.
        """
        own = self.engine, self.tokenizer, self.chat_template, messages, self.chat_sampling
        return Conversation(*own, chat_template_kwargs)

    @overload
    def score(  # type: ignore[overload-overlap]
        self, text: Prompt, stride: int | None = None, **options: Unpack[ScoreOptions]
    ) -> Score: ...
    @overload
    def score(
        self, text: Sequence[Prompt], stride: int | None = None, **options: Unpack[ScoreOptions]
    ) -> list[Score]: ...
    @named_options()
    def score(
        self,
        text: Prompt | Sequence[Prompt],
        stride: int | None = None,
        *,
        tokens_at_once: int = 8192,
        progress: Callable[[int, int], None] | None = None,
        likeliest: bool = False,
    ) -> Score | list[Score]:
        """Return the Score of a text or token ids: its log-likelihood, perplexity, bits per byte.

        Returns a Score, whose `tokens` hold the log-probability and surprisal of every token; for a
        list whose items are texts or sequences of ids, a list of Scores.

        Windows of n_ctx tokens slide by `stride` (None: n_ctx // 2), see `scoring.score`.
        tokens_at_once: tokens of the windows computed together; on a GPU, results do not depend on
        it.
        progress: called with the numbers of tokens scored so far and in total. likeliest: whether
        `tokens.likeliest` holds the most likely token at each position. Raises InputError.
        """
        more: Any = {"tokens_at_once": tokens_at_once, "progress": progress, "likeliest": likeliest}
        found: Score | list[Score] = scoring.score(
            self.engine, self.lookup, text, stride=stride, **more
        )
        return found

    @overload
    def score_generated(
        self, prompts: Prompt, continuations: Generation | Tokens, **options: Any
    ) -> ScoredTokens: ...
    @overload
    def score_generated(
        self, prompts: Prompts, continuations: Sequence[Generation | Tokens], **options: Any
    ) -> list[ScoredTokens]: ...
    @named_options()
    @with_keywords("samples", "receipt")
    def score_generated(
        self, prompts: object, continuations: object, **options: object
    ) -> ScoredTokens | list[ScoredTokens]:
        """Return the log-probabilities that `generate` computes for the tokens of continuations.

        The log-probabilities have the bits that `generate` has computed, or would have computed if
        it had sampled these tokens; `score` computes a text by other kernels, whose last bits
        differ. On a GPU, a step computes up to 64 tokens.

        continuations: the Generation or the token ids after a prompt, or a list of these for a list
        of prompts. options: the keywords of `generate`. Sampling changes no log-probability.
        `max_new_tokens` counts only for a model whose RoPE frequencies depend on the length of the
        text. `top_logprobs`: also report the most likely tokens, in ScoredTokens.top_logprobs. With
        NumPy, `rows_at_once` is 1 by default, because bits depend on the rows of a product.

        Raises as `generate` does, and InputError for texts that are longer than the context.
        """
        given = Options.of({**options, "receipt": True})
        engine, lookup = self.engine, self.lookup
        return known_texts.score_generated(engine, lookup, prompts, continuations, given)

    @overload
    def verify(self, receipt: list[Any]) -> list[ReceiptCheck]: ...
    @overload
    def verify(self, receipt: Mapping[str, object] | str) -> ReceiptCheck: ...
    @named_options()
    def verify(self, receipt: Any) -> ReceiptCheck | list[ReceiptCheck]:
        """Check the receipt of a generated text, an object or JSON text, or each one of a list.

        The text is generated again with the stated tokens as drafts, at a fraction of the cost of
        its generation. Returns a ReceiptCheck, whose `code` is 0 if all tokens and the bits of all
        log-probabilities are as stated, 1 if one differs, and 2 if the text cannot be compared,
        such as a text of another model. `problem` is a sentence about the difference.
        """
        several = isinstance(receipt, list)
        receipts = receipt if several else [receipt]
        checks = dict(known_texts.check_receipts(self.engine, self.lookup, receipts))
        return [checks[index] for index in range(len(receipts))] if several else checks[0]

    @named_options()
    def embed(
        self,
        texts: Prompt | Prompts,
        pooling: Pooling | None = None,
        overflow: Overflow = "error",
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
    ) -> Floats:
        """Return embeddings of texts or token ids: (C,) of one input, (B, C) of a list.

        pooling: the "mean" of the hidden states after the final norm, the "last", or the first
        ("cls"). normalize: whether vectors are scaled to length 1. For pooling and normalize, None
        stands for `embedding_defaults`. dimensions: keep the first 1 to C numbers, before the
        scaling; None: all. instruction: the task for which texts are queries, in the format of
        Qwen3-Embedding. overflow: for inputs longer than n_ctx: "truncate" keeps the last n_ctx
        tokens, "error" raises InputError.

        Raises InputError, and CheckpointError as `embedding_defaults` does.
        """
        own = chosen(pooling, normalize, lambda: self.embedding_defaults)
        given: object = texts if instruction is None else scoring.instructed(instruction, texts)
        more: Any = {"overflow": overflow, "dimensions": dimensions}
        more["normalize"] = check_flag("normalize", own.normalize)
        return scoring.embed(self.engine, self.lookup, given, own.pooling, **more)


class GPT2(Model[GPT2Weights]):
    """A GPT-2 model, computed on a GPU or with NumPy.

    weights: a GPT2Weights; see `from_pretrained` for checkpoints. device: "cuda", "cuda:1", "cpu",
    or None for the GPU where there is one. dtype: dtype of the stored matrices, "float32",
    "bfloat16", "float16", "float8_e5m2" or "float8_e4m3fn". Arithmetic is float32, except that
    operands of tensor cores have 16 bits (docs/dtypes.md). kv_dtype: dtype to which keys and values
    are rounded, "float8_e5m2" or "float8_e4m3fn" with weights of 16 bits or FP8; None for the dtype
    of the weights, or float16 if the weights are FP8. allow_nonfinite: accept
    weights that are infinite or NaN, or so large that LayerNorm may overflow float32 and return
    wrong numbers; by default they raise InputError. FP8 cannot hold infinity or NaN. `generate` and
    `score` still refuse logits that are NaN.

    Token ids are a sequence (T,), a batch (B, T), or a list of sequences of different lengths.
    Raises InputError for wrong arguments, DeviceError when the device cannot be used.
    """

    CONFIG = GPT2Config
    WEIGHTS = GPT2Weights
    config: GPT2Config


class Llama(Model[LlamaWeights]):
    """A Llama model, computed on a GPU or with NumPy.

    weights: a LlamaWeights; see `from_pretrained` for checkpoints. device, dtype, allow_nonfinite,
    kv_dtype, token ids: as in GPT2. Raises InputError for wrong arguments, DeviceError when the
    device cannot be used, MemoryError before the weights are loaded when the GPU has no room for
    them.
    """

    CONFIG = LlamaConfig
    WEIGHTS = LlamaWeights
    config: LlamaConfig


def load(
    cls: type[Loaded],
    name: str | Path | Checkpoint,
    device: str | None,
    given: FormatOptions,
    progress: Progress = iter,
    revision: str | None = None,
    adapters: Mapping[str, str | Path] = {},
    adapters_memory: float = MEMORY,
) -> Loaded:
    """Load a checkpoint as `cls.from_pretrained` does. given: the user's storage options."""
    check_callable("progress", progress)
    begin(device)
    checkpoint = Checkpoint.open(name, revision)
    config = type(checkpoint.config)
    own: tuple[type[Model[Any]], ...] = (GPT2, Llama)
    kind: type[Model[Any]] = next((each for each in own if each.CONFIG is config), Model)
    if not issubclass(kind, cls):
        raise CheckpointError(
            f"{checkpoint.name}: expected a {cls.__name__}, got a {config.NAME}: use "
            f"{kind.__name__}.from_pretrained, or gpt2block.from_pretrained for any"
        )
    formats = given.resolved(checkpoint.nbytes_in_blocks > 0 and reads_blocks(device))
    read = Adapters.read(adapters, checkpoint.config, checkpoint, adapters_memory)
    model = kind.__new__(kind)
    model._checkpoint, model.config = checkpoint, checkpoint.config
    devices = resolve_devices(device)
    if devices:  # reading the weights needs the interpreter for a part of the time only
        model.lookup.begin()
    tensors = checkpoint.tensors(formats.dtype == FILE, unread=len(devices) > 1)
    model._set_up(checkpoint.config, progress(tensors), device, formats)
    if adapters:
        model.engine.use_adapters(read)
    return model


from_pretrained = Model[Any].from_pretrained
