"""Relevance of documents to a query for /v1/rerank, by models that answer "yes" or "no".

The request and the response have the fields of Jina's API and of vLLM. Sources: Zhang et al.,
"Qwen3 Embedding: Advancing Text Embedding and Reranking Through Foundation Models" (2025), and the
card of Qwen3-Reranker (prompt and score); Jina AI, "Reranker API"; vLLM, "OpenAI-Compatible Server"
(Re-rank API).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from gpt2block.apps.serve.protocol import MAX_PROMPTS, MAX_TEXT, ApiError, Body, Fields, invalid
from gpt2block.engine.generation.sequences import BAD_WEIGHTS
from gpt2block.engine.model import Ids, ModelEngine
from gpt2block.errors import InputError
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import Encoding

TASK = "Given a web search query, retrieve relevant passages that answer the query"
BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MARKS = ("<|im_start|>", "<|im_end|>")  # special tokens that the prompt needs
ANSWERS = ("no", "yes")


class DocumentFields(Fields):
    text: str


def _text_of(document: str | DocumentFields) -> str:
    return document if isinstance(document, str) else document.text


Document = Annotated[str | DocumentFields, AfterValidator(_text_of)]


class RerankRequest(Body):
    """The body of a request to /v1/rerank. instruction: the task, an addition to Jina's fields.

    top_n: number of results; null: all documents.
    """

    query: str = Field(min_length=1)
    documents: list[Document] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = True
    instruction: str | None = None


def check_size(request: RerankRequest) -> None:
    """Raise ApiError if the query, which is read once per document, is too long in total."""
    size = len(request.documents) * len((request.query + (request.instruction or "")).encode())
    if size > 4 * MAX_TEXT:
        problem = f"query: expected at most {4 * MAX_TEXT:,} bytes, counted for each document"
        raise ApiError(413, problem, "query")


def answer_ids(encoding: Encoding) -> tuple[int, int]:
    """Return the ids of the tokens "no" and "yes". Raises ApiError if the model is no reranker."""
    missing = [name for name in MARKS if name not in encoding.special_tokens_set]
    ids = [encoding.encode_ordinary(text) for text in ANSWERS]
    if missing or {*map(len, ids)} != {1}:
        lacks = missing[0] if missing else "one token for each of yes and no"
        problem = f"model: this model's tokenizer lacks {lacks}: expected a model as Qwen3-Reranker"
        raise invalid(problem, "unsupported_model")
    return ids[0][0], ids[1][0]


def prompt_ids(encoding: Encoding, request: RerankRequest, document: str) -> Ids:
    """Return the token ids of the prompt for one document.

    Names of special tokens in the query, the document and the instruction are ordinary text.
    """
    text, places = BEGIN, []
    pairs = (
        ("Instruct", request.instruction or TASK),
        ("Query", request.query),
        ("Document", document),
    )
    for name, content in pairs:
        text += f"<{name}>: "
        places.append((len(text), len(text) + len(content)))
        text += content if name == "Document" else f"{content}\n"
    return np.array(tokenizer.encode_chat(encoding, text + END, places), np.int32)


def scores_of(engine: ModelEngine, answers: tuple[int, int], prompts: Sequence[Ids]) -> list[float]:
    """Return the probability of "yes" against "no" after each prompt, by one forward pass."""
    logits = np.stack(engine.forward(prompts, "last"))[:, list(answers)].astype(np.float64)
    if not np.isfinite(logits).all():
        raise InputError("the logits are NaN or infinite: ", *BAD_WEIGHTS)
    odds = logits[:, 1] - logits[:, 0]
    found: list[float] = (0.5 * (1 + np.tanh(odds / 2))).tolist()  # never overflows
    return found


def ranking(
    request: RerankRequest, scores: Sequence[float], model: str, prompt_tokens: int
) -> dict[str, object]:
    """Return the response object: the `top_n` results, by descending score."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order[: request.top_n]
    ]
    if request.return_documents is not False:
        for each in results:
            each["document"] = {"text": request.documents[each["index"]]}
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    id = f"rerank-{random.getrandbits(128):032x}"
    return {"id": id, "object": "list", "model": model, "usage": usage, "results": results}
