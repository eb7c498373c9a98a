"""Models from a Hugging Face hub, for which the tests run a local server."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from gpt2block import GPT2, BlockWeights, GPT2Config, GPT2Weights
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from gpt2block.files.checkpoints import hub as module
from gpt2block.files.tokenizers import tokenizer
from tests import refusals
from tests.tokenizer_files import PAIRS, pair

REPO = "someone/own-words"
OFFICIAL = "openai-community/gpt2"
SMALL = GPT2Config(n_layer=1, n_head=1, n_embd=4, n_ctx=16, vocab_size=50257)
PAIR = PAIRS[1]
TEXT = "abc abc"


OFFLINE = "offline mode is set (HF_HUB_OFFLINE)"
SET_OFFLINE = "huggingface_hub.constants.HF_HUB_OFFLINE"


@dataclass
class Hub:
    """The content of the server: repository → revision → commit, and commit → files."""

    url: str = ""
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)  # file name → status

    def put(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Add a folder's files as a commit; return its hash."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.revisions.setdefault(repo, {}).update({revision: commit, commit: commit})
        self.commits[commit] = files
        return commit

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body, like the real hub."""
        self.requests.append(path)
        repo, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo not in self.revisions:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        commit = self.revisions[repo].get(revision.replace("%2F", "/"))
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        headers = {"X-Repo-Commit": commit}
        if name in self.broken:
            return self.broken[name], headers | {"X-Error-Code": "GatedRepo"}, b""
        if name not in self.commits[commit]:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        body = self.commits[commit][name]
        return 200, headers | {"ETag": f'"{hashlib.sha256(body).hexdigest()}"'}, body


def use_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> str:
    """Use a local server as the hub; return its address."""
    url = f"http://127.0.0.1:{port}"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    return url


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run an empty hub, with an empty cache."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, body: bool = True) -> None:
            status, headers, content = state.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    state.url = use_hub(monkeypatch, server.server_port)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(SET_OFFLINE, False)
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a model with GPT-2's vocabulary size, and a pair of tokenizer files with other ids."""
    path = save_pretrained(tmp_path / "folder", GPT2Weights.random(1, SMALL), "float16")
    pair(path, ["a b", "ab c"])
    return path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def ids(name: str | Path, revision: str | None = None) -> list[int]:
    model = GPT2.from_pretrained(name, device="cpu", revision=revision)
    return tokenizer.encode(model.tokenizer, TEXT)


def refused(name: str, *words: str, revision: str | None = None) -> str:
    return refusals.refused(name, name, *words, read=partial(Checkpoint.open, revision=revision))


def without_pair(folder: Path) -> Path:
    """Remove the tokenizer's files."""
    for name in PAIR:
        (folder / name).unlink()
    return folder


def forget(opened: Checkpoint) -> Path:
    """Remove the cache's records of files that the repository lacks."""
    shutil.rmtree(opened.directory.parent.parent / ".no_exist")
    return opened.directory


def test_all_files_of_a_model_are_downloaded(hub: Hub, folder: Path) -> None:
    """Tokenizer files, their settings and the generation config are downloaded, but no others."""
    more = ("tokenizer_config.json", "spiece.model")
    for name in (*more, "chat_template.jinja"):
        (folder / name).write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "top_p": 0.9}')
    (folder / "README.md").write_text("not downloaded")
    hub.put(REPO, folder)
    opened = Checkpoint.open(REPO)
    assert set(opened.tokenizer_files()) == {*more, *PAIR, "chat_template.jinja"}
    assert opened.config.eos_token_ids == (7,)
    assert opened.generation_config() == {"eos_token_id": 7, "top_p": 0.9}
    assert names_in(opened.directory) == names_in(folder) - {"README.md"}
    requests = len(hub.requests)
    assert ids(REPO) == ids(folder) == [257, 32, 257]  # cached files need no network
    assert len(hub.requests) == requests
    assert logging.getLogger("huggingface_hub").level == logging.ERROR  # retries are not logged


def test_the_settings_of_a_cached_tokenizer_are_requested(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings are requested once, with a message; then the cache records whether they exist."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    hub.put(REPO, folder)
    opened = Checkpoint.open(REPO)
    (opened.directory / "tokenizer_config.json").unlink()
    requests, asked = len(hub.requests), f"asking the Hugging Face hub for {REPO} …\n"
    assert capsys.readouterr().err.count(asked) == 1
    for expected in (1, 0):
        assert "tokenizer_config.json" in opened.tokenizer_files()
        assert capsys.readouterr().err.count(asked) == expected
    assert 1 <= len(hub.requests) - requests <= 2


def test_a_cached_model_without_its_tokenizer(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing tokenizer is downloaded from the hub; offline, GPT-2's does not replace it."""
    hub.put(REPO, folder)
    opened = Checkpoint.open(REPO)
    without_pair(forget(opened))
    monkeypatch.setattr(SET_OFFLINE, True)
    checkpoint = Checkpoint.open(REPO)
    assert len(list(checkpoint.tensors())) == 16
    model = GPT2.from_pretrained(checkpoint, device="cpu")
    assert model([1, 2, 3]).shape == (3, 50257)
    assert len(model.generate([1, 2, 3], max_new_tokens=2).tokens) == 2
    words = REPO, "not in the Hugging Face cache", "HF_HUB_OFFLINE", "--tokenizer"
    for use in (lambda _: model.tokenizer, lambda _: model.generate("abc"), model.save_pretrained):
        refusals.refused(folder.parent / "saved", *words, read=use)
    assert not (folder.parent / "saved").exists()
    monkeypatch.setattr(SET_OFFLINE, False)
    assert ids(REPO) == ids(folder)


@pytest.mark.parametrize("repo", [REPO, OFFICIAL, "124M"])
def test_a_repository_known_to_have_no_tokenizer(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, repo: str
) -> None:
    """The cache records it, or it is OpenAI's: `tokenizer.load` decides as for a local folder."""
    hub.put(repo.replace("124M", "gpt2"), without_pair(folder))
    opened = Checkpoint.open(repo)
    if repo != REPO:
        forget(opened)
    monkeypatch.setattr(SET_OFFLINE, True)
    opened = Checkpoint.open(repo)
    assert opened.tokenizer_source() == opened.directory
    assert opened.tokenizer_files() == {}


def test_a_commit_is_downloaded_as_a_whole(hub: Hub, folder: Path) -> None:
    """The tokenizer is from the commit of the cached weights, not from a later one."""
    hub.put(REPO, folder)
    first = Checkpoint.open(REPO).directory
    without_pair(first)
    (folder / "vocab.json").write_text("{}")
    second = hub.put(REPO, folder)
    assert ids(REPO) == [257, 32, 257]
    assert not (first.parent / second).exists()


def test_revisions(hub: Hub, folder: Path, tmp_path: Path) -> None:
    old = hub.put(REPO, folder, "v1")
    save_pretrained(folder, GPT2Weights.random(2, SMALL), overwrite=True)
    hub.put(REPO, folder, "refs/pr/1")
    hub.put(REPO, folder)
    one, two = (GPT2Weights.random(seed, SMALL).wte for seed in (1, 2))
    for revision, wte in (("v1", one), (old, one), ("refs/pr/1", two), (None, two), ("main", two)):
        found = GPT2Weights.from_pretrained(REPO, revision=revision).wte
        np.testing.assert_array_equal(found, wte.astype(np.float16) if wte is one else wte)
    assert BlockWeights.from_pretrained(REPO, revision="v1").b_fc.dtype == np.float32
    assert ids(REPO, "v1") == [257, 32, 257]
    refused(REPO, "at revision v3: not in the Hugging Face cache", "no such rev", revision="v3")


def test_shards_are_downloaded(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model-00001-of-00001.safetensors").write_bytes(whole)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.put(REPO, folder)
    assert len(list(Checkpoint.open(REPO).tensors())) == 16
    shard = Checkpoint.open(REPO).directory / "model-00001-of-00001.safetensors"
    shard.unlink()  # as after an interrupted download
    with monkeypatch.context() as patch:
        patch.setattr(SET_OFFLINE, True)
        refused(REPO, OFFLINE, "does not have model-00001-of-00001.safetensors")
    assert len(list(Checkpoint.open(REPO).tensors())) == 16
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.put("someone/in-parts", folder)
    refused("someone/in-parts", "does not have model-00001-of-00002.safetensors")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pickle_is_downloaded_without_safetensors(hub: Hub, folder: Path, sharded: bool) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    if sharded:
        (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00001.bin")
        index = {"weight_map": {"x": "pytorch_model-00001-of-00001.bin"}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    commit = hub.put(REPO, folder)
    found = module.fetch(REPO)
    assert found.name == ("pytorch_model.bin.index.json" if sharded else "pytorch_model.bin")
    assert found.parent.name == commit
    assert names_in(found.parent) == names_in(folder)


def test_repositories_without_a_model(hub: Hub, folder: Path) -> None:
    refused("someone/nobody", "the hub has no such repository: check the name", "set HF_TOKEN")
    (folder / "model.safetensors").unlink()
    hub.put(REPO, folder)
    refused(REPO, "does not have any of model.safetensors, model.safetensors.index.json, pytorch")
    (folder / "config.json").unlink()
    hub.put(REPO, folder)
    refused(REPO, "does not have config.json")
    refused("a--b/c", "not a name of a repository on the hub (HFValidationError: ")
    hub.put("someone/restricted", folder)
    hub.broken["config.json"] = 403
    refused("someone/restricted", "the hub restricts access to it")


def test_the_offline_error_lists_files_that_are_not_cached(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(REPO, folder)
    (Checkpoint.open(REPO).directory / "model.safetensors").unlink()
    monkeypatch.setattr(SET_OFFLINE, True)
    refused(REPO, OFFLINE, "does not have any of model.safetensors")
    refused("someone/else", OFFLINE, "does not have config.json")
    refused(REPO, f"{REPO} at revision v2: offline", "does not have config.json", revision="v2")


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    def no_network(*_: object, **__: object) -> str:
        try:
            raise ConnectionError("[Errno 101] Network is unreachable")
        except ConnectionError as error:
            raise LocalEntryNotFoundError("please check your connection\nor so") from error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", no_network)
    refused(REPO, "cannot be reached or does not answer", "Network is unreachable", "check the net")


@pytest.fixture
def black_hole(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Run a hub that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        use_hub(monkeypatch, listening.getsockname()[1])
        yield monkeypatch


@pytest.mark.parametrize("own", [None, "1"])
def test_a_hub_that_never_answers(
    black_hole: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: str | None
) -> None:
    """The package makes one request, with a short timeout or the user's, and with a message."""
    black_hole.setattr(module, "_FIRST_ANSWER", 600 if own else 1)
    black_hole.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
    if own:
        black_hole.setenv("HF_HUB_ETAG_TIMEOUT", own)
        black_hole.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", int(own))
    started = perf_counter()
    refused(REPO, "the hub cannot be reached or does not answer (ReadTimeout")
    assert 1 <= perf_counter() - started < 10
    assert capsys.readouterr().err == f"asking the Hugging Face hub for {REPO} …\n"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("shakespere", "shakespeare"), ("Shakespeare", "shakespeare"),
        ("shakespeare-lama", "shakespeare-llama"),
    ],
)  # fmt: skip
def test_a_bundled_model_s_name_misspelt_needs_no_network(
    hub: Hub, capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    refused(name, f"no model has this name: did you mean '{meant}'?")
    assert not hub.requests
    assert not capsys.readouterr().err


def test_other_names_are_looked_up_before_one_is_suggested(hub: Hub, folder: Path) -> None:
    refused("gpt2-larg", "the hub has no such repository", "did you mean 'gpt2-large'?")
    assert "did you mean" not in refused("someone/nobody")
    for name in ("gpt2-larg", "someone/shakespere"):
        hub.put(name, folder)
        assert Checkpoint.open(name).repo == name


def test_a_cached_model_may_have_a_similar_name(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("shakespeares", folder)
    with monkeypatch.context() as patch:
        patch.setattr(module, "nearest", lambda name: None)
        Checkpoint.open("shakespeares")
    assert Checkpoint.open("shakespeares").repo == "shakespeares"
