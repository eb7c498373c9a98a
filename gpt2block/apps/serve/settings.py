"""Settings of a server, and the facts about its model that answers need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.grammars.trials import SECONDS
from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.embedding_files import Pooling
from gpt2block.models.config import ModelConfig

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server: model names, API keys, hosts, limits, and request defaults.

    names: names of the model for clients; answers have the first name. keys: name → API key;
    clients must send one of the keys. Without keys, clients are on this machine or use a proxy on
    this machine, and are distinguished by their addresses.

    hosts: names of this server; without keys, a request's host must be one of these names.
    allowed_hosts: further names. With keys and without allowed_hosts, any host is accepted.

    rows: continuations computed together. queue: continuations that may wait. reuse_prefixes:
    `reuse` of Batch. seconds: time limit of a request from its arrival; None: no limit. origins:
    origins of web pages that may send requests and read answers; "*": all. speculate: as in
    `GPT2.generate`, for all requests. chat_template_kwargs: defaults of a request's variables.
    pooling: as for `Model.embed`. tool_form: name of the form in which the model writes calls of
    tools; None: the form that its chat template shows, or "general" if it reads no tools.
    rule_seconds: CPU time in which a rule must be compiled. receipts: whether clients can request
    receipts.

    processes: number of processes for HTTP; 0: HTTP in the engine's process. connections: most open
    connections of all processes. proxies: addresses and networks; for their requests, the client's
    address is the last one in X-Forwarded-For that is not a proxy's. log_level: as for
    `set_up_log`. grace: seconds that running requests get to finish when the server stops.
    """

    names: tuple[str, ...]
    rows: int = 64
    queue: int = 512
    keys: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = LOOPBACK
    reuse_prefixes: bool = False
    seconds: float | None = None
    origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    speculate: bool = False
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    pooling: Pooling = "mean"
    tool_form: str | None = None
    rule_seconds: float = SECONDS
    receipts: bool = True
    processes: int = 0
    connections: int = 1024
    proxies: tuple[str, ...] = ()
    log_level: str = "warning"
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
    receipts.
    """

    config: ModelConfig
    template: ChatTemplate | CheckpointError
    sampling: Mapping[str, float] | CheckpointError
    device: str
    dtype: str
    slots: int
    reuses: bool
    receipts: bool = True

    @classmethod
    def of(cls, model: Any, slots: int, reuses: bool, receipts: bool = True) -> ServedModel:
        """Return the facts about a loaded Model."""
        template = _result_or_error(lambda: model.chat_template)
        sampling = _result_or_error(lambda: model.chat_sampling)
        engine = model.engine
        device, dtype = engine.describe(), engine.formats.dtype
        receipts = receipts and (slots == 1 or not device.startswith("CPU"))
        return cls(model.config, template, sampling, device, dtype, slots, reuses, receipts)

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
