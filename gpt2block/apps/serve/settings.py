"""Settings of a server, and the facts about its model that answers need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpt2block.apps.cli.model import chat_template_option, draft_option, keyword
from gpt2block.apps.cli.options import flag, option
from gpt2block.engine.adapters import Adapters
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.chat.tool_forms import FormName
from gpt2block.engine.grammars.trials import SECONDS
from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.embedding_files import Pooling
from gpt2block.models.config import ModelConfig

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server: limits, defaults of requests, model names, API keys and hosts.

    The fields from rows to log_level are options of `gpt2block serve`. seconds: time limit of a
    request from its arrival.

    names: names of the model for clients; answers have the first name. keys: name → API key;
    clients must send one of the keys. Without keys, clients are on this machine or use a proxy on
    this machine, and are distinguished by their addresses.

    hosts: names of this server; without keys, a request's host must be one of these names.
    allowed_hosts: further names. With keys and without allowed_hosts, any host is accepted.
    origins: origins of web pages that may send requests and read answers; "*": all. proxies:
    addresses and networks; for their requests, the client's address is the last one in
    X-Forwarded-For that is not a proxy's. grace: seconds that running requests get to finish when
    the server stops.
    """

    rows: int = option("Continuations computed together.", 64)
    queue: int = option("Continuations that may wait; further ones are refused.", 512)
    seconds: float | None = option(
        "Seconds in which a request has to end; by default no limit.", None, "--timeout"
    )
    connections: int = option("Connections that may be open.", 1024)
    processes: int | None = option(
        "Processes for HTTP, JSON and text, in addition to the model's process; 0: one process for "
        "all. By default half of the cores, at most 8, and 0 with two cores."
    )
    reuse_prefixes: bool = flag(
        "Also reuse keys and values of tokens that an earlier request sampled, or that other "
        "kernels computed; the last bits of results then depend on earlier requests."
    )
    speculate: bool = keyword("speculate")
    draft_model: str | None = draft_option()
    chat_template_kwargs: Mapping[str, object] | None = chat_template_option()
    pooling: Pooling | None = option(
        "Embeddings: mean, last or first (cls) of the final hidden states; by default as in the "
        "model's 1_Pooling/config.json, else the mean."
    )
    tool_form: FormName | None = option(
        "Form in which the model writes calls of tools; by default the form that its chat template "
        "shows, or general if the template reads no tools."
    )
    rule_seconds: float = option(
        "Seconds of CPU time in which a schema, regular expression, choice or grammar of a request "
        "must be compiled.",
        SECONDS,
    )
    no_receipts: bool = flag("Refuse requests for receipts, which state how a text was generated.")
    log_level: Literal["error", "warning", "info"] = option(
        "Messages on standard error; info: also a line for each request.", "warning"
    )
    names: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = LOOPBACK
    allowed_hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    grace: int = 25

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class ServedModel:
    """The facts about a model that answers need. It has no weights, and can be pickled.

    template, sampling: as Model.chat_template and Model.chat_sampling, or the error that reading
    them raises. device, dtype: descriptions for the web page. slots: continuations that run
    together. reuses: whether prompts may reuse computed tokens. receipts: whether texts can have
    receipts. adapters: the model's adapters, without their tensors.
    """

    config: ModelConfig
    template: ChatTemplate | CheckpointError
    sampling: Mapping[str, float] | CheckpointError
    device: str
    dtype: str
    slots: int
    reuses: bool
    receipts: bool = True
    adapters: Adapters = field(default_factory=Adapters.none)

    @classmethod
    def of(cls, model: Any, slots: int, reuses: bool, receipts: bool = True) -> ServedModel:
        """Return the facts about a loaded Model."""
        template = _result_or_error(lambda: model.chat_template)
        sampling = _result_or_error(lambda: model.chat_sampling)
        engine = model.engine
        device, dtype = engine.describe(), engine.formats.dtype
        receipts = receipts and (slots == 1 or not device.startswith("CPU"))
        facts = model.config, template, sampling, device, dtype, slots, reuses, receipts
        return cls(*facts, engine.adapters.without_tensors())

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template. Raises CheckpointError if the model has none."""
        if isinstance(self.template, CheckpointError):
            raise CheckpointError(*self.template.parts)
        return self.template

    @property
    def chat_sampling(self) -> Mapping[str, float]:
        """The default sampling options of chats. Raises CheckpointError for wrong values."""
        if isinstance(self.sampling, CheckpointError):
            raise CheckpointError(*self.sampling.parts)
        return self.sampling


def _result_or_error(read: Callable[[], object]) -> Any:
    try:
        return read()
    except CheckpointError as error:
        return error
