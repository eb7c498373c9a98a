"""Error messages of the library in the terms of the command line: `--top-k` for `top_k`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Keyword → its option and, for a flag, the option that turns it off
Options = Mapping[str, tuple[str, ...]]

_OPTION_OF = {"stop_ids": "stop_id", "name": "model", "weights": "model"}  # names that differ
_BEFORE = r"(?<![\w'\"/.-])"  # not inside a word or path, nor at the start of a quotation
_QUOTES = "'\""
_FIRST = re.compile(r"([a-z]\w*)(?=: )")  # stride: expected …
_NUMBERED = re.compile(r"(?:^|(?<=: ))([a-z]\w*)(?= -?\d)")  # layer 6 is …
_SETTING = re.compile(_BEFORE + r"([a-z]\w*)=('[^']*'|\"[^\"]*\"|[\w.+-]+)")  # dtype='float32'
_QUOTED = re.compile(_BEFORE + r"([a-z]\w*)(?= ['\"])")  # dtype 'float99'
_WORD = re.compile(_BEFORE + r"([a-z]+(?:_[a-z]+)+)(?![\w'\"/=]|\.\w)")  # use stop_ids


def in_terms_of_options(message: str, command: Any, arguments: list[str]) -> str:
    """Rewrite an error message of the library with the options of a Click command.

    "stride: expected …" becomes "--stride: expected …", "overflow='truncate'" becomes "--overflow
    truncate", "use stop_ids" becomes "use --stop-id". Quotations and paths are not changed, nor a
    name at the start that is one of the command's `arguments`.
    """
    options = _options(command)

    def option(found: re.Match[str]) -> str:
        return options.get(found[1], (found[1],))[0]

    first = _FIRST.match(message)
    if first and first[1] not in arguments:  # otherwise it is the name of a file
        message = option(first) + message[first.end() :]
    message = _SETTING.sub(lambda found: _setting(found, options), message)
    for pattern in (_NUMBERED, _QUOTED, _WORD):
        message = pattern.sub(option, message)
    return re.sub(r",? or None(?=, got )", "", message)  # not possible on a command line


def _options(command: Any) -> Options:
    options: dict[str, tuple[str, ...]] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            names = [opts for opts in (parameter.opts, parameter.secondary_opts) if opts]
            given = tuple(max(each, key=len) for each in names)
            options[given[0].lstrip("-").replace("-", "_")] = options[parameter.name] = given
    others = {name: options[known] for name, known in _OPTION_OF.items() if known in options}
    return {**others, **options}


def _setting(found: re.Match[str], options: Options) -> str:
    """The option that sets a keyword to this value."""
    if found[1] not in options:
        return found[0]
    on, *off = options[found[1]]
    if found[2] == "True":
        return on
    if found[2] == "False" and off:
        return off[0]
    return f"{on} {found[2].strip(_QUOTES)}"
