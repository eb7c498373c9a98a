"""`gpt2block serve`: run an HTTP server that speaks OpenAI's protocol."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path

import typer

from gpt2block.apps.cli.codes import FAILED
from gpt2block.apps.cli.display import on_each_gpu, say
from gpt2block.apps.cli.model import (
    AdapterOptions,
    ChatModelOptions,
    load_draft,
    load_model,
    require_for,
)
from gpt2block.apps.cli.options import option, path_option
from gpt2block.apps.cli.texts import BYTE_ORDER_MARK, read_text
from gpt2block.apps.serve.log import log, set_up_log
from gpt2block.apps.serve.settings import LOOPBACK, ServerSettings
from gpt2block.checks import check_count, check_integer
from gpt2block.errors import InputError, printable

NEEDED = ("jinja2", "starlette", "uvicorn", "pydantic", "prometheus_client")
HOST, PORT = "127.0.0.1", 8000
MAX_KEYS = 2**20  # maximum bytes of the file of API keys
MIN_KEY = 16  # minimum characters of an API key
MAX_ALONE = 2  # number of cores up to which one process does everything
MAX_OWN = 8  # most processes for HTTP unless --processes is given
MAX_PROCESSES = 256
ONLY_KEY = "default"  # name of a file's only key if the file does not name the key


def serve(
    *,
    model: ChatModelOptions,
    adapters: AdapterOptions,
    host: str = option(
        "Address to listen at. Without a key only an address of this machine, such as 127.0.0.1.",
        HOST,
    ),
    port: int = option("Port to listen at; 0 for any that is free.", PORT),
    uds: Path | None = path_option(
        "Unix socket to listen at, in place of --host and --port. Whoever may write to the socket "
        "may send requests."
    ),
    name: list[str] | None = option(
        "Name of the model for clients, by default the name of --model; repeat for more. Answers "
        "contain the first name."
    ),
    api_key_file: Path | None = path_option(
        "File with API keys, of which clients must send one: lines NAME KEY, or one key alone. "
        "SIGHUP reads the file again."
    ),
    allowed_host: list[str] | None = option(
        "Further host name that requests may use for this server, such as a proxy's; repeat for "
        "more. With a key, this option refuses all other hosts."
    ),
    trusted_proxy: list[str] | None = option(
        "Address or network of a proxy whose X-Forwarded-For tells clients apart; repeat for more."
    ),
    cors_origin: list[str] | None = option(
        "Origin of web pages that may send requests, such as https://example.com; repeat for more. "
        "With a key, * allows any origin."
    ),
    settings: ServerSettings,
) -> None:
    """Serve a model over HTTP: for clients of OpenAI's protocol, and as a page for a browser.

    The page is at /. For clients there are /v1/models, /v1/completions, /v1/chat/completions,
    /v1/responses, /v1/messages, /v1/embeddings, /v1/rerank, /tokenize, /detokenize, /version,
    /health and /metrics. On SIGTERM or Ctrl-C the server finishes running requests, for up to 25 s,
    and exits.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    require_for("serve", model.model, *NEEDED)
    from gpt2block.apps.serve.engine_host import EngineHost  # noqa: PLC0415
    from gpt2block.apps.serve.engine_server import EngineServer  # noqa: PLC0415
    from gpt2block.apps.serve.listening import allow_files, settle  # noqa: PLC0415

    set_up_log(settings.log_level)
    if os.name != "nt":
        problem = "SIGHUP: ignored while the model is loaded"
        signal.signal(signal.SIGHUP, lambda *_: log.warning(problem))
    keys = {} if api_key_file is None else _keys(api_key_file)
    proxies = [*map(_network, trusted_proxy or ())]
    if uds and ((host, port) != (HOST, PORT) or proxies):
        raise InputError("--uds: expected without --host, --port and --trusted-proxy")
    if not keys and not _loopback(host):
        raise InputError(
            f"--host {host}: others can reach this address: expected --api-key-file, or 127.0.0.1"
        )
    origins = tuple(map(_origin, cors_origin or ()))
    allowed = tuple(map(_host, allowed_host or ()))
    if "*" in origins and not keys:
        raise InputError(
            "--cors-origin *: any page in a browser could use the model of this machine: expected "
            "--api-key-file with it, or origins such as https://example.com"
        )
    if not 0 <= port < 2**16:
        raise InputError(f"--port: expected 0 to 65535, got {port}")
    for each in ("rows", "queue", "connections"):
        check_count(each, getattr(settings, each))
    processes = _processes(settings.processes)
    for each, value in (("timeout", settings.seconds), ("rule-seconds", settings.rule_seconds)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"--{each}: expected a positive number of seconds, got {value}")
    allow_files(settings.connections)
    listening = _socket(host, port) if uds is None else _bound_file(uds)
    names = tuple(filter(None, dict.fromkeys(name or ()))) or (_name(model.model),)
    if both := {*names} & {*adapters.folders}:
        raise InputError(f"--adapter {min(both)}: expected another name than the model's")
    loaded, encoding = load_model(model, "this server needs text", adapters)
    assert encoding is not None
    load_draft(loaded, model, settings.draft_model, settings.speculate)
    if settings.chat_template_kwargs:
        loaded.chat_template.check_variables(settings.chat_template_kwargs)
    address = f"[{host}]" if ":" in host else host
    settings = replace(
        settings, processes=processes, names=names, keys=keys, hosts=(*LOOPBACK, address),
        allowed_hosts=allowed, origins=origins, proxies=tuple(proxies),
        pooling=settings.pooling or loaded.embedding_defaults.pooling,
    )  # fmt: skip
    address = f"http://{address}:{listening.getsockname()[1]}" if uds is None else f"unix:{uds}"
    at = f"{address}/v1, page {address}/" if uds is None else address
    host_ = EngineHost(loaded, encoding, settings)
    line = f"{settings.name}, {loaded.dtypes}, {loaded.device}{_memory(loaded.engine)}: {at}"
    server = EngineServer(host_, partial(say, line), partial(_reload, api_key_file))
    settle()
    server.run(listening)
    if uds is not None:
        uds.unlink(missing_ok=True)
    if server.failed:
        raise typer.Exit(FAILED)


def _socket(host: str, port: int) -> socket.socket:
    """Bind a socket to reserve the port while the model is loaded. The socket does not listen yet.

    On Linux, two sockets with SO_REUSEADDR can have the same port until one listens. Therefore this
    option is set only if binding without it fails, as after closed connections of another server.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if held.family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        with suppress(OSError):
            held.bind((host, port))
            return held
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, os.name != "nt")
        held.bind((host, port))
    except OSError as error:
        held.close()
        ours = error.errno in (errno.EADDRINUSE, errno.EACCES)
        wrong = f"--port {port}" if ours else f"--host {host}"
        more = ": expected a free port, or 0 for any" if ours else ""
        raise InputError(f"{wrong}: {error.strerror}{more}") from None
    return held


def _bound_file(path: Path) -> socket.socket:
    """Bind a Unix socket at a path; replace an existing socket on which no server listens."""
    if not hasattr(socket, "AF_UNIX"):
        raise InputError("--uds: this system has no Unix sockets: use --port")
    held = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as other, suppress(ConnectionRefusedError):
                other.connect(str(path))
                raise InputError(f"--uds {path}: another server listens there")
            path.unlink()
        held.bind(str(path))
    except (OSError, InputError) as error:
        held.close()
        if isinstance(error, InputError):
            raise
        raise InputError(f"--uds {path}: {error.strerror or error}") from None
    return held


def _processes(count: int | None) -> int:
    """Return the number of processes for HTTP. count: value of --processes."""
    if count is None:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return 0 if cores <= MAX_ALONE or sys.platform == "win32" else min(MAX_OWN, cores // 2)
    if count and sys.platform == "win32":
        raise InputError(f"--processes: expected 0 on Windows, got {count}")
    return check_integer("processes", count, 0, MAX_PROCESSES, f"0 to {MAX_PROCESSES}")


def _reload(file: Path | None) -> dict[str, str] | None:
    """Read the file of API keys again; return None if it cannot be read."""
    if file is None or str(file) == "-":
        log.warning("SIGHUP: ignored, as no --api-key-file can be read again")
        return None
    try:
        keys = _keys(file)
    except (InputError, OSError) as error:
        log.error("SIGHUP: the keys of before stay: %s", printable(str(error)))
        return None
    log.warning("SIGHUP: %d keys were read", len(keys))
    return keys


def _memory(engine: object) -> str:
    """Return words about the bytes on each GPU for a model on several GPUs, else ""."""
    if not hasattr(engine, "bytes_by_gpu"):
        return ""
    weights, of_token = on_each_gpu(*engine.bytes_by_gpu)
    return f", on each GPU {weights} of weights and {of_token} for a token's keys and values"


def _host(host: str) -> str:
    if not re.fullmatch(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]", host.lower()):
        raise InputError(
            f"--allowed-host: expected a name without a port, such as example.com, got {host!r}"
        )
    return host.lower()


def _name(model: str) -> str:
    """Return the model's default name for clients: the last part of a path, or the hub id."""
    path = Path(model)
    return path.resolve().name or model if path.exists() else model


def _keys(file: Path) -> dict[str, str]:
    """Read API keys from a file: name → key. Error messages never contain a key."""
    text = read_text(str(file), MAX_KEYS).removeprefix(BYTE_ORDER_MARK)
    lines = [line.split() for line in text.splitlines()]
    lines = [line for line in lines if line and not line[0].startswith("#")]
    if len(lines) == 1 and len(lines[0]) == 1:
        lines = [[ONLY_KEY, *lines[0]]]
    keys = {line[0].removesuffix(":"): line[-1] for line in lines}
    good = [len(key) >= MIN_KEY and key.isascii() and key.isprintable() for key in keys.values()]
    if not lines or not all(good) or not all(len(line) == 2 for line in lines):
        raise InputError(
            f"{file}: expected a key of at least {MIN_KEY} ASCII characters without white space, "
            "or a line NAME KEY for each"
        )
    if len({*keys.values()}) < len(lines):
        raise InputError(f"{file}: expected each name and each key once")
    if os.name != "nt" and str(file) != "-" and file.stat().st_mode & 0o004:
        log.warning("%s: all users can read the keys: chmod o-r", printable(str(file)))
    return keys


def _network(proxy: str) -> str:
    try:
        return str(ip_network(proxy, strict=False))
    except ValueError:
        raise InputError(
            f"--trusted-proxy: expected an address, or a network such as 10.0.0.0/8, got {proxy!r}"
        ) from None


def _origin(origin: str) -> str:
    """Return an origin in lower case, as browsers send it. Raises InputError if it has a path."""
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+", origin.lower()):
        raise InputError(
            "--cors-origin: expected an origin without a path, such as https://example.com, or "
            f"http://localhost:3000, got {origin!r}"
        )
    return origin.lower()


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
