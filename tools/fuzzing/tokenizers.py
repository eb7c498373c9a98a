"""Tokenizer files: random pipelines and texts, compared with the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import tokenizers as hugging_face

from fuzzing import Area, Refused, Rng, accepted, attempt, check, check_equal
from fuzzing import gpt2 as plain
from fuzzing.values import odd_text, odd_value, spoil_json
from fuzzing.vocabularies import (
    BYTES,
    CHARACTERS,
    DECODERS,
    END,
    MODEL_OPTIONS,
    NORMALIZERS,
    PADDING,
    PRE_TOKENIZERS,
    TRUNCATION,
    Vocabulary,
    added_token,
    plain_spec,
    random_vocabulary,
    template,
)
from gpt2block import GPT2
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from gpt2block.files.tokenizers import tokenizer

_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 does not have
_TEXTS = ("b" * 300, "abc" * 90, "it's  ", "\x85\u2003\x1c", "Z é", END)
_MODEL_OPTIONS = {
    **MODEL_OPTIONS,
    "merges": ([], None),
    "type": ("WordPiece", "WordLevel", "Unigram", None),
}


def case(rng: Rng, folder: Path) -> None:
    rng.pick(*[_json] * 6, *[_pair] * 2, _saved, _settings)(rng, folder)


def _change(rng: Rng, spec: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Change one setting to a value that GPT-2's tokenizer.json does not have."""
    changes: dict[str, tuple[Any, ...]] = {
        "pre_tokenizer": PRE_TOKENIZERS,
        "normalizer": NORMALIZERS,
        "decoder": DECODERS,
        "truncation": (TRUNCATION | {"max_length": rng.whole(1, 9)},),
        "padding": (PADDING,),
        "post_processor": (None, template(END, "", token_id=256)),
        "added_tokens": ([*spec["added_tokens"], _other_token(rng, spec["model"], vocabulary)],),
    }
    name = str(rng.pick(*changes, *["model"] * 5))
    if name == "model":
        _change_model(rng, spec["model"])
    else:
        spec[name] = deepcopy(rng.pick(*changes[name]))  # a copy, as it may be damaged later


def _other_token(rng: Rng, model: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """An added token that is not special."""
    content = str(rng.pick("ab", "abc", " ", "é", "1", "bdd", "\n", ""))
    options = {name: rng.chance(0.3) for name in ("single_word", "lstrip", "rstrip")}
    options |= {"special": False, "normalized": rng.chance(0.5)}
    index = len(model["vocab"])
    if rng.chance(0.3) and vocabulary.merges:
        content = "".join(rng.pick(*vocabulary.merges))
        index = vocabulary.ids[content]
    return added_token(index, content, **options)


def _change_model(rng: Rng, model: dict[str, Any]) -> None:
    vocab, merges = model["vocab"], model["merges"] or []
    option = rng.pick(*_MODEL_OPTIONS)
    names = [name for name in vocab if name != END]
    order = rng.permutation(len(names)).tolist()
    absent = {CHARACTERS[byte] for byte in rng.pick(_NEVER, {ord("Z")}, _NEVER | {4})}
    model |= rng.pick(
        {option: rng.pick(*_MODEL_OPTIONS[option])},
        {"merges": [merges[i] for i in rng.permutation(len(merges))]},
        {"merges": merges[: rng.whole(len(merges) + 1)]},
        {"vocab": {name: order[i] for i, name in enumerate(names)} | {END: len(names)}},
        {"vocab": {name: index for name, index in vocab.items() if name not in absent}},
    )


def _json(rng: Rng, folder: Path) -> None:
    """tokenizer.json: GPT-2's pipeline must be accepted; others must be obeyed or refused."""
    vocabulary = random_vocabulary(rng, proper=rng.chance(0.5))
    spec = plain_spec(vocabulary)
    if rng.chance(0.3):
        spec["model"]["merges"] = [" ".join(pair) for pair in vocabulary.merges]
    changes = int(rng.choice([0, 1, 1, 2, 3]))
    for _ in range(changes):
        _change(rng, spec, vocabulary)
    harmed = rng.chance(0.25)
    if harmed:
        spoil_json(rng, spec, 2**32, 2**63, -1, 10**30)
    text = json.dumps(spec)
    if harmed and rng.chance(0.2):
        text = text[: rng.whole(len(text))]
    path = folder / "tokenizer.json"
    path.write_text(text)
    size = len(vocabulary.ids) + 1 + 3 * bool(changes)
    _check(rng, folder, size, text, exact=not (changes or harmed) and vocabulary.proper)


def _pair(rng: Rng, folder: Path) -> None:
    """vocab.json and merges.txt, or the same with OpenAI's names."""
    vocabulary = random_vocabulary(rng, proper=rng.chance(0.7))
    spec = plain_spec(vocabulary)
    ids, merges = dict(spec["model"]["vocab"]), [" ".join(pair) for pair in vocabulary.merges]
    exact = vocabulary.proper
    kind = int(rng.choice([0, 0, 1, 2, 3, 4]))
    if kind == 1 and merges:
        rng.shuffle(merges)
        exact = merges == [" ".join(pair) for pair in vocabulary.merges] and exact
    elif kind == 2 and merges:
        merges[rng.whole(len(merges))] = str(rng.pick("a b c", "ab", "zz yy", "", " "))
        exact = False
    elif kind == 3:
        ids[rng.pick(*ids)] = odd_value(rng)
        exact = False
    elif kind == 4:
        del ids[rng.pick(*ids)]
        exact = False
    names, heading = rng.pick(*_PAIRS), ["#version: 0.2"] if rng.chance(0.8) else []
    _write_pair(folder, names, ids, [*heading, *merges])
    spec["model"] |= {"vocab": ids, "merges": [m.split(" ") for m in merges if m]}
    spec["added_tokens"] = [added_token(ids[END], END)] if END in ids else []
    _check(rng, folder, len(vocabulary.ids) + 1, json.dumps(spec), exact)


def _check(rng: Rng, folder: Path, size: int, spec: str, exact: bool) -> None:
    """Compare the ids of random texts by gpt2block and by `tokenizers`."""
    source = rng.pick(tokenizer.load, tokenizer.from_path)
    # Before `tokenizers` reads it: some files crash its process.
    encoding = attempt(exact, source, folder, size)
    truth = _truth(spec)
    encoded = False
    for _ in range(6):
        parts = [odd_text(rng) or "a", rng.pick(*_TEXTS), odd_text(rng)]
        text, special = "".join(parts[: rng.whole(1, 4)]), rng.chance(0.4)
        try:
            ids = [*map(int, attempt(exact, tokenizer.encode, encoding, text, special))]
        except Refused:
            continue
        encoded = True
        check(
            tokenizer.token_count_bound(encoding)(text) <= len(ids), f"least tokens of {text!r:.60}"
        )
        if truth is not None:
            check_equal(f"ids of {text!r:.60}", ids, _expected(truth, text, special))
        if exact:
            check_equal(f"decoded {text!r:.40}", _decoded(encoding, ids), text)
        if truth is not None and json.loads(spec).get("decoder"):
            known = sorted(truth.get_vocab(with_added_tokens=True).values())
            for row in (ids, rng.choice(known, 6).tolist()):
                theirs = truth.decode(row, skip_special_tokens=False)
                check_equal(f"decoded {row}", encoding.decode(row), theirs)
    if not encoded:
        raise Refused


def _expected(truth: Any, text: str, special: bool) -> list[int]:
    """Return ids with the post-processor's ids, but only once if the text begins with these."""
    truth.encode_special_tokens = not special
    ids: list[int] = truth.encode(text, add_special_tokens=False).ids
    whole: list[int] = truth.encode(text).ids
    before = whole[: len(whole) - len(ids)]
    return ids if special and ids[: len(before)] == before else whole


def _truth(spec: str) -> Any:
    """Return the tokenizer of the package `tokenizers`; None where it refuses the file."""
    try:
        tokenizer = hugging_face.Tokenizer.from_str(spec)
    except BaseException as error:  # its panics are not derived from Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None
    tokenizer.no_truncation()  # the default of transformers, which has neither limit nor padding
    tokenizer.no_padding()
    return tokenizer


def _decoded(encoding: Any, ids: Sequence[int]) -> str:
    return b"".join(map(encoding.decode_single_token_bytes, ids)).decode(errors="replace")


def _saved(rng: Rng, folder: Path) -> None:
    """A model saved over another one: its tokenizer replaces the other's."""
    for name in ("old", "new"):
        vocabulary = random_vocabulary(rng, proper=True)
        sizes = plain.Sizes(1, 1, 2, 4, len(vocabulary.ids) + 1)
        plain.write(folder / name, sizes, plain.random_tensors(rng, sizes, "float32"))
        _write(rng, folder / name, vocabulary)
    target, size = folder / "saved", sizes.vocab_size
    for name in ("old", "new"):
        opened = accepted(Checkpoint.open, folder / name)
        if rng.chance(0.5):
            accepted(save_pretrained, target, opened, overwrite=True)
        else:
            model = accepted(GPT2.from_pretrained, opened, device="cpu")
            accepted(model.save_pretrained, target, overwrite=True)
    original, saved = (accepted(tokenizer.load, path, size) for path in (folder / "new", target))
    for _ in range(4):
        text = odd_text(rng) or "a"
        ids = [tokenizer.encode(encoding, text) for encoding in (original, saved)]
        check_equal(f"ids of {text!r:.40} after saving", ids[1], ids[0])


def _write(rng: Rng, folder: Path, vocabulary: Vocabulary) -> None:
    """Write the tokenizer's files in one of three layouts."""
    spec = plain_spec(vocabulary)
    names = rng.pick(None, *_PAIRS)
    if names is None:
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    else:
        merges = ["#version: 0.2", *(" ".join(pair) for pair in vocabulary.merges)]
        _write_pair(folder, names, spec["model"]["vocab"], merges)


def _write_pair(
    folder: Path, names: tuple[str, str], ids: dict[str, Any], merges: list[str]
) -> None:
    (folder / names[0]).write_text(json.dumps(ids))
    (folder / names[1]).write_text("\n".join(merges) + "\n", encoding="utf-8")


def _settings(rng: Rng, folder: Path) -> None:
    """Any settings next to a tokenizer of single bytes: obeyed or refused."""
    _write(rng, folder, BYTES)
    names = ("add_prefix_space", "add_bos_token", "tokenizer_class", "eos_token")
    settings = {name: odd_value(rng) for name in names if rng.chance(0.3)}
    added = rng.pick({}, odd_value(rng), {str(rng.pick(256, 257, "x")): odd_value(rng)})
    if rng.chance(0.5):
        settings["added_tokens_decoder"] = added
    elif rng.chance(0.5):
        (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    encoding = attempt(False, tokenizer.from_path, folder, 1000)
    text = encoding.decode(accepted(tokenizer.encode, encoding, "ab c"))
    check_equal("text", text, " " * bool(settings.get("add_prefix_space")) + "ab c")


AREA = Area("tokenizers", 4, case)
