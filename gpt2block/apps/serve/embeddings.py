"""Embedding vectors for /v1/embeddings, in OpenAI's format.

Source: OpenAI, "API reference" (Embeddings).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from gpt2block.apps.serve.protocol import EmbeddingRequest, JsonObject, named
from gpt2block.engine.generation import scoring
from gpt2block.engine.model import Floats, Ids, ModelEngine
from gpt2block.files.checkpoints.embedding_files import Pooling

TOKENS_AT_ONCE = 1024  # most tokens of inputs that are embedded in one pass


def inputs_of(request: EmbeddingRequest, n_embd: int) -> list[tuple[object, str]]:
    """Return pairs (text or token ids, its name in errors). Texts include the instruction.

    Raises InputError for more dimensions than the model has, and for token ids with an instruction.
    """
    scoring.check_dimensions(request.dimensions, n_embd)
    if request.instruction is None:
        return named("input", request.input)
    return named("input", scoring.instructed(request.instruction, request.input))


def vectors_of(
    engine: ModelEngine, pooling: Pooling, dimensions: int | None, inputs: Sequence[Ids]
) -> Floats:
    """Return the embeddings of token ids, normalized to length 1, (B, C) or (B, dimensions)."""
    return scoring.embed(engine, None, [*inputs], pooling, dimensions=dimensions, normalize=True)


def embedding_list(vectors: Floats, form: str | None, model: str, prompt_tokens: int) -> JsonObject:
    """Return the response object. form: "base64" for text of little-endian float32, or "float"."""
    shown: list[object] = vectors.tolist()
    if form == "base64":
        shown = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
    data = [
        {"object": "embedding", "index": index, "embedding": each}
        for index, each in enumerate(shown)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
