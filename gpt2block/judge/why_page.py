"""Create the HTML page that shows the steps of the threads of a problem next to the source."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

from gpt2block.engine.explain.page import DataTemplate, json_of_script
from gpt2block.errors import printable
from gpt2block.files.writing import write_file
from gpt2block.judge.finding import headline
from gpt2block.judge.verdict import Verdict
from gpt2block.judge.why import ThreadStep, Why

MOST_STEPS = 5_000  # maximum number of steps on the page; of more, the last ones are shown


class WhyPage:
    """An HTML page in one file, which needs no network, for a verdict with `why`."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._why = verdict.why or Why()
        self._first = max(0, len(self._why.steps) - MOST_STEPS)

    @property
    def html(self) -> str:
        """The HTML text of the whole page."""
        source, problem = self.verdict.kernel.source, self.verdict.problem
        said = headline(source, problem) if problem else ""
        steps = list(enumerate(self._why.steps[self._first :], self._first + 1))
        left = f"The first {self._first:,} steps are left out." if self._first else ""
        columns = "".join(
            f'<th scope="col" class="c{i % 2}">{escape(thread)}</th>'
            for i, thread in enumerate(self._why.threads)
        )
        template = (files("gpt2block.judge") / "why_page.html").read_text(encoding="utf-8")
        return DataTemplate(template).substitute(
            title=escape(printable(f"{source.name} of {source.file}, step by step")),
            problem=escape(said),
            at=escape(problem.at if problem else ""),
            note=escape(" ".join(filter(None, (self._why.note, left)))),
            count=max(1, len(steps)),
            file=escape(printable(source.file)),
            source="\n".join(self._source_lines()),
            threads=columns,
            steps="\n".join(self._row(number, step) for number, step in steps),
            data=json_of_script([self._data(number, step) for number, step in steps]),
        )

    def save(self, path: str | Path) -> Path:
        """Write the page to a file and return the file's path. Raises InputError."""
        write_file(Path(path), self.html.encode())
        return Path(path)

    def _source_lines(self) -> list[str]:
        problem = self.verdict.problem
        marked = problem.lines if problem else ()
        return [
            f'<li{" class=marked" if i in marked else ""}><span class="number">{i}</span>'
            f"<code>{escape(printable(line.expandtabs(4)))}</code>"
            '<span class="who"></span></li>'
            for i, line in enumerate(self.verdict.kernel.source.text.splitlines(), 1)
        ]

    def _row(self, number: int, step: ThreadStep) -> str:
        line = step.line or step.place
        text = escape(f"{line}: {step.event}" if line else step.event)
        kind = ' class="problem"' if step.problem else ""
        shown = "".join(
            f"<td>{text if thread == step.thread else ''}</td>" for thread in self._why.threads
        )
        return f'<tr{kind}><td class="step">{number}</td>{shown}</tr>'

    def _data(self, number: int, step: ThreadStep) -> dict[str, object]:
        column = self._why.threads.index(step.thread)
        return {"number": number, "column": column, "values": step.values} | step.as_dict()
