"""Renders a chat template in a process of its own, which `gpt2block.text.chat` starts as a file.

A template comes from a checkpoint. It cannot reach Python objects (jinja2's sandbox), and this
process has limits of memory and output; its parent ends it after a time. It reads and writes lines
of JSON: first the source of the template, then the variables of each rendering.
"""

from __future__ import annotations

import os
import signal
import sys

# Without the folder of this file, whose modules are not those of the standard library.
sys.path[:] = [each for each in sys.path if each != os.path.dirname(__file__)]

import json  # noqa: E402
from contextlib import suppress  # noqa: E402
from datetime import datetime  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

import jinja2  # noqa: E402
from jinja2 import nodes  # noqa: E402
from jinja2.ext import Extension, loopcontrols  # noqa: E402
from jinja2.parser import Parser  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

MEMORY = 2**30  # bytes of address space, where the system has such a limit
MOST = 2**22  # characters of a rendering


class Generation(Extension):
    """The tags `{% generation %}` and `{% endgeneration %}`, which leave their text as it is."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(message: str) -> NoReturn:
    """`raise_exception` of templates: what they say of messages that they do not take."""
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` of templates, which escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> jinja2.Environment:
    """That in which transformers renders chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    parts, length = [], 0
    for part in template.generate(**variables):
        parts.append(part)
        length += len(part)
        if length > MOST:
            raise jinja2.TemplateError(f"it writes more than {MOST:,} characters")
    return "".join(parts)


def main() -> None:
    with suppress(ImportError, ValueError):  # Windows has no such limits
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    template: jinja2.Template | None = None
    for line in sys.stdin:
        try:
            given = json.loads(line)
            if template is None:
                template = environment().from_string(given)
                answer = {"text": ""}
            else:
                answer = {"text": rendered(template, given)}
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY >> 20:,} MiB of memory"}
        except RecursionError:
            answer = {"error": "it calls itself too often"}
        except Exception as error:  # whatever a template does wrong
            place = (
                f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            answer = {"error": f"{place}{error or type(error).__name__}"[:1000]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
