"""Options declared in dataclasses and signatures, and the commands that have them.

    @dataclass(frozen=True)
    class ModelOptions:
        model: str = option("A hub id, a directory or a file.", "shakespeare")
        device: str | None = option("cuda or cpu; by default the GPU if there is one.")

    def score(file: str = argument("A text.", ...), *, model: ModelOptions) -> None: ...

    add_command(app, score, "score hamlet.txt --device cpu")

A parameter whose type is a dataclass stands for the options that are its fields, so that commands
share them, and so does such a field; other parameters are options themselves. The help shows all in
this order. Fields of dataclasses of the library, as of Formats, are options where they say a help.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer

from gpt2block.cli.complete import one_of
from gpt2block.errors import Argument, PrintableError

OTHER_NAMES = {"weights": "model"}  # arguments of the library whose option has another name


def option(
    text: str, default: Any = None, *names: str, complete: Any = None, **settings: Any
) -> Any:
    """A field or parameter that is an option; `...` as the default makes it required.

    text: the help. names: by default that of the field. complete: a function that completes values
    in the shell. settings: other arguments of typer.Option.
    """
    info = typer.Option(default, *names, help=text, autocompletion=complete, **settings)
    return field(default=default, metadata={"info": info})


def argument(text: str, default: Any = None, complete: Any = None, **settings: Any) -> Any:
    """A field or parameter that is a positional argument of the command; see `option`."""
    info = typer.Argument(default, help=text, autocompletion=complete, **settings)
    return field(default=default, metadata={"info": info})


def path_option(text: str, default: Any = None, *names: str, **settings: Any) -> Any:
    """A field or parameter that is an option with a path, in which `~` is the home directory."""
    return option(text, default, *names, **{"parser": path_of, "metavar": "PATH"} | settings)


def json_object(text: str) -> dict[str, Any]:
    """Parse an option that takes a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f'expected a JSON object such as {{"name": true}}, got {text!r}')
    return found


def path_of(text: str) -> Path:
    """Parse an option that takes a path: `~` and `~user` become home directories."""
    if not text:  # Path("") is the working directory
        raise typer.BadParameter("expected a path, got an empty string")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"there is no user {Path(text).parts[0]!r}") from None


def add_command(app: typer.Typer, function: Callable[..., None], example: str) -> None:
    """Add a command to the application: a function, its docstring as the help, and an example.

    Errors of the library name options instead of arguments.
    """
    groups: dict[str, Any] = {}  # parameters that are dataclasses
    infos: dict[str, Any] = {}  # option or argument of the command → how Typer declares it
    types: dict[str, Any] = {}
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            groups[name] = kind
            for option_, info, type_ in _options_of(kind):
                infos[option_], types[option_] = info, type_
        else:
            infos[name], types[name] = parameter.default.metadata["info"], kind

    def run(**given: Any) -> None:
        values = dict(given)
        try:
            for name, group in groups.items():
                values[name] = _made(group, values)
            function(**values)
        except PrintableError as error:
            raise type(error)(error.message(_spelling(infos, given))) from error

    run.__annotations__ = types  # which Typer reads together with the signature
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=types[name]
            )
            for name, info in infos.items()
        ]
    )
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(each.split()) for each in paragraphs)  # without its line breaks
    app.command(function.__name__, help=text, epilog=f"Example: gpt2block {example}")(run)


def _options_of(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, declaration and type of the options in a dataclass, and in those that it has."""
    types = get_type_hints(kind)
    for each in fields(kind):
        if is_dataclass(types[each.name]):
            yield from _options_of(types[each.name])
        elif (info := _info_of(each)) is not None:
            yield each.name, info, types[each.name]


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass of its options, which are taken from the values."""
    types, given = get_type_hints(kind), {}
    for each in fields(kind):
        if is_dataclass(types[each.name]):
            given[each.name] = _made(types[each.name], values)
        elif each.name in values:
            given[each.name] = values.pop(each.name)
    return kind(**given)


def _info_of(each: Field[Any]) -> Any:
    """How Typer declares a field that is an option; None for one that is not.

    A field of the library says its help and its values.
    """
    told = each.metadata
    if "help" not in told:
        return told.get("info")
    completed = one_of(*told["values"])
    return typer.Option(each.default, help=told["help"], autocompletion=completed)


def option_of(kind: Any, name: str) -> Any:
    """A parameter that is the option of this name in a dataclass of the library."""
    (found,) = (each for each in fields(kind) if each.name == name)
    return field(default=found.default, metadata={"info": _info_of(found)})


def _spelling(infos: Mapping[str, Any], given: Mapping[str, Any]) -> Callable[[Argument], str]:
    """How a command spells an argument of the library: "--top-k" for "top_k".

    given: the values of its options; a file may have the name of an option.
    """
    names = {}
    for name, info in infos.items():
        if isinstance(info, typer.models.OptionInfo):
            first, *_ = info.param_decls or [f"--{name.replace('_', '-')}"]
            names[name] = names[first.lstrip("-").replace("-", "_")] = first

    def spelled(argument: Argument) -> str:
        name = names.get(argument.name) or names.get(OTHER_NAMES.get(argument.name, ""))
        if not name or argument.name in map(str, given.values()):
            return str(argument)
        return f"{name} {argument.value}" if argument.value else name

    return spelled
