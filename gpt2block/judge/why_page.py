"""Create the HTML page that shows the steps of the threads of a problem next to the source."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from gpt2block.engine.explain.page import DataTemplate, json_of_script
from gpt2block.errors import printable
from gpt2block.judge.finding import headline
from gpt2block.judge.verdict import Verdict
from gpt2block.judge.why import ThreadStep, Why

MAX_STEPS = 5_000  # maximum number of steps on the page; of more, the last ones are shown


def html_of(verdict: Verdict, why: Why) -> str:
    """Return an HTML page in one file, which needs no network. why: the verdict's steps."""
    source, problem = verdict.kernel.source, verdict.problem
    first = max(0, len(why.steps) - MAX_STEPS)
    steps = list(enumerate(why.steps[first:], first + 1))
    left = f"The first {first:,} steps are left out." if first else ""
    columns = "".join(
        f'<th scope="col" class="c{i % 2}">{escape(thread)}</th>'
        for i, thread in enumerate(why.threads)
    )
    template = (files("gpt2block.judge") / "why_page.html").read_text(encoding="utf-8")
    return DataTemplate(template).substitute(
        title=escape(printable(f"{source.name} of {source.file}, step by step")),
        problem=escape(headline(source, problem) if problem else ""),
        at=escape(problem.at if problem else ""),
        note=escape(" ".join(filter(None, (why.note, left)))),
        count=max(1, len(steps)),
        file=escape(printable(source.file)),
        source="\n".join(_source_lines(source.text, problem.lines if problem else ())),
        threads=columns,
        steps="\n".join(_row(number, step, why.threads) for number, step in steps),
        data=json_of_script([_data(number, step, why.threads) for number, step in steps]),
    )


def _source_lines(text: str, marked: Sequence[int]) -> list[str]:
    return [
        f'<li{" class=marked" if i in marked else ""}><span class="number">{i}</span>'
        f"<code>{escape(printable(line.expandtabs(4)))}</code>"
        '<span class="who"></span></li>'
        for i, line in enumerate(text.splitlines(), 1)
    ]


def _row(number: int, step: ThreadStep, threads: Sequence[str]) -> str:
    line = step.line or step.place
    text = escape(f"{line}: {step.event}" if line else step.event)
    kind = ' class="problem"' if step.problem else ""
    shown = "".join(f"<td>{text if thread == step.thread else ''}</td>" for thread in threads)
    return f'<tr{kind}><td class="step">{number}</td>{shown}</tr>'


def _data(number: int, step: ThreadStep, threads: Sequence[str]) -> dict[str, object]:
    column = threads.index(step.thread)
    return {"number": number, "column": column, "values": step.values} | step.as_dict()
