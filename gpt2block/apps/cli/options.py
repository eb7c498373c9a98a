"""Declare options in dataclasses and signatures, and add commands with these options.

    @dataclass(frozen=True)
    class ModelOptions:
        model: str = option("A hub id, a directory or a file.", "shakespeare")
        device: str | None = option("cuda or cpu; by default the GPU if there is one.")

    def score(file: str = argument("A text.", ...), *, model: ModelOptions) -> None: ...

    add_command(app, score, "score LICENSE --device cpu")

A parameter whose type is a dataclass stands for the options that are its fields, so that commands
can share them; so does a field of this kind. Other parameters are options themselves. The help
shows options in this order. A field of a library's dataclass, such as FormatOptions, is an option
if its metadata contain a help.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import typer

from gpt2block.apps.cli.complete import one_of
from gpt2block.errors import Argument, PrintableError

FLAG = "--"  # stands for the name of a flag until its field is known
OTHER_NAMES = {"weights": "model"}  # argument of the library → option with a different name


def option(
    text: str, default: Any = None, *names: str, complete: Any = None, **settings: Any
) -> Any:
    """Declare a field or parameter as an option; the default `...` makes the option required.

    text: the help. names: the option's names, by default the field's name. complete: a function
    that completes values in the shell. settings: other arguments of typer.Option.
    """
    info = typer.Option(default, *names, help=text, autocompletion=complete, **settings)
    return field(default=default, metadata={"info": info})


def flag(text: str, **settings: Any) -> Any:
    """Declare a field or parameter as an option without a value, which has the field's name."""
    return option(text, False, FLAG, **settings)


def argument(text: str, default: Any = None, complete: Any = None, **settings: Any) -> Any:
    """Declare a field or parameter as a positional argument of the command; see `option`."""
    info = typer.Argument(default, help=text, autocompletion=complete, **settings)
    return field(default=default, metadata={"info": info})


def path_option(text: str, default: object = None, *names: str, **settings: object) -> Any:
    """Declare a field or parameter as an option with a path; `~` is the home directory."""
    return option(text, default, *names, **{"parser": path_of, "metavar": "PATH"} | settings)


json_option = partial(option, "Print JSON.", False, "--json")


def json_object(text: str) -> dict[str, object]:
    """Parse the value of an option that takes a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f'expected a JSON object such as {{"name": true}}, got {text!r}')
    return value


def path_of(text: str) -> Path:
    """Parse the value of a path option: `~` and `~user` become home directories."""
    if not text:  # Path("") would be the working directory
        raise typer.BadParameter("expected a path, got an empty string")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"there is no user {Path(text).parts[0]!r}") from None


def add_command(app: typer.Typer, function: Callable[..., None], example: str) -> None:
    """Add `function` as a command, whose help is the function's docstring and an example.

    Errors of the library then name the command's options instead of the library's arguments.
    """
    groups: dict[str, object] = {}  # parameter of `function` → dataclass of options
    infos: dict[str, object] = {}  # name of an option or argument → its Typer declaration
    types: dict[str, object] = {}
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            groups[name] = kind
            for option_, info, type_ in _options_of(kind):
                infos[option_], types[option_] = info, type_
        else:
            infos[name], types[name] = _info_of(parameter.default, name), kind

    def run(**options: object) -> None:
        values = dict(options)
        try:
            for name, group in groups.items():
                values[name] = _build(group, values)
            function(**values)
        except PrintableError as error:
            raise type(error)(*error.texts(_spelling(infos, options))) from error

    run.__annotations__ = types  # Typer reads the annotations with the signature
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = [keyword(name, default=infos[name], annotation=types[name]) for name in infos]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(each.split()) for each in paragraphs)  # removes line breaks
    app.command(function.__name__, help=text, epilog=f"Example: gpt2block {example}")(run)


def _options_of(kind: Any) -> Iterator[tuple[str, object, object]]:
    """Yield (name, declaration, type) of each option in a dataclass and nested dataclasses."""
    types = get_type_hints(kind)
    for each in fields(kind):
        if is_dataclass(types[each.name]):
            yield from _options_of(types[each.name])
        elif (info := _info_of(each, each.name)) is not None:
            yield each.name, info, types[each.name]


def _build(kind: Any, values: dict[str, object]) -> object:
    """Build a dataclass from `values` of its options, and remove these from `values`."""
    types, keywords = get_type_hints(kind), {}
    for each in fields(kind):
        if is_dataclass(types[each.name]):
            keywords[each.name] = _build(types[each.name], values)
        elif each.name in values:
            keywords[each.name] = values.pop(each.name)
    return kind(**keywords)


def _info_of(each: Field[Any], name: str) -> Any:
    """Return the Typer declaration of a field; None for a field that is not an option.

    The metadata of a library's field contain its help and its possible values.
    """
    told = each.metadata
    if "help" in told:
        completed = one_of(*told["values"])
        return typer.Option(each.default, help=told["help"], autocompletion=completed)
    info: Any = told.get("info")
    if getattr(info, "param_decls", None) == (FLAG,):
        info.param_decls = (f"--{name.replace('_', '-')}",)
    return info


def option_of(kind: Any, name: str) -> Any:
    """Declare a parameter as an option like the option `name` of a library's dataclass."""
    (found,) = (each for each in fields(kind) if each.name == name)
    return field(default=found.default, metadata={"info": _info_of(found, name)})


def _spelling(infos: dict[str, object], given: Mapping[str, object]) -> Callable[[Argument], str]:
    """Return a function that converts argument names to option names: "top_k" to "--top-k".

    given: values of the command's options. An argument named like one of these values, such as a
    file's name, is not changed.
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
