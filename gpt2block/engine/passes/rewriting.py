"""Rules that rewrite the steps of a forward pass, and the list of steps that they change.

A forward pass is a list of plain steps, each one operation of `gpt2block.reference`. A rule
replaces neighbouring steps by one step whose kernel computes all of them, or chooses the kernel or
the format of a result. `rewritten` applies rules in the order of their list, and notes for each
rule where it fired and why it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from gpt2block.engine.passes.executor import Executor, Step
from gpt2block.models.architectures.architecture import Value

Plan = TypeVar("Plan")
ROPE = "rope_qkv", "rope_packed"


class Steps:
    """The steps of a pass in their order. A step has the name of its result.

    parts: the operations of the plain steps that each step computes, by its name.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self.parts: dict[str, tuple[str, ...]] = {}
        self._steps: dict[str, Step] = {}
        self._at: dict[str, float] = {}  # position of each step
        self._readers: dict[str, dict[str, None]] = {}  # name of a result: names of its readers
        for n, step in enumerate(steps):
            self._put(n, step)
            self.parts[step.name] = (step.op,)

    def _put(self, at: float, step: Step) -> None:
        self._steps[step.name], self._at[step.name] = step, at
        for name in step.inputs:
            self._readers.setdefault(name, {})[step.name] = None

    def _take(self, name: str) -> float:
        for given in self._steps.pop(name).inputs:
            self._readers[given].pop(name, None)
        return self._at.pop(name)

    def __iter__(self) -> Iterator[Step]:
        return iter([self._steps[name] for name in sorted(self._steps, key=self._at.__getitem__)])

    def __contains__(self, name: str) -> bool:
        return name in self._steps

    def __getitem__(self, name: str) -> Step:
        return self._steps[name]

    def readers(self, name: str) -> list[Step]:
        """Return the steps that read a result or a tensor, in their order."""
        names = sorted(self._readers.get(name, ()), key=self._at.__getitem__)
        return [self._steps[each] for each in names]

    def replace(self, name: str, by: Step, *dropped: str) -> None:
        """Replace a step by another, whose result later steps then read; drop further steps."""
        together = sorted((name, *dropped), key=self._at.__getitem__)
        parts = tuple(part for each in together for part in self.parts.pop(each))
        for each in dropped:
            self._take(each)
        self._put(self._take(name), by)
        self.parts[by.name] = parts
        if by.name != name:
            self.rename(name, by.name)

    def drop(self, name: str, instead: str, fused: Sequence[Step] = ()) -> None:
        """Drop a step; later steps read the result `instead`. fused: the steps that compute it."""
        at, parts = self._take(name), self.parts.pop(name)
        self.rename(name, instead)
        for own in (each.name for each in fused):
            before = at < self._at[own]
            self.parts[own] = parts + self.parts[own] if before else self.parts[own] + parts

    def insert(self, step: Step, after: str) -> None:
        """Insert a step directly after another, or before its other insertions."""
        at = self._at[after]
        later = [each for each in self._at.values() if each > at]
        self._put((at + min(later, default=at + 1)) / 2, step)
        self.parts[step.name] = (step.op,)

    def rename(self, name: str, to: str) -> None:
        """Let the readers of a result or a tensor read `to` instead."""
        for step in self.readers(name):
            inputs = tuple(to if each == name else each for each in step.inputs)
            self._put(self._take(step.name), step._replace(inputs=inputs))


class Rule(NamedTuple, Generic[Plan]):
    """A rule of a list of rules.

    name: of the function. ops: the operations of the steps to which `apply` is called in turn.
    apply: changes the steps and returns "", or returns the reason why the rule does not fire. text:
    what the rule does.
    """

    name: str
    ops: tuple[str, ...]
    apply: Callable[[Steps, Step, Plan], str]
    text: str


def rule(*ops: str) -> Callable[[Callable[[Steps, Step, Plan], str]], Rule[Plan]]:
    """Decorator that turns a function into a Rule for steps of these operations."""

    def decorate(apply: Callable[[Steps, Step, Plan], str]) -> Rule[Plan]:
        return Rule(apply.__name__, ops, apply, (apply.__doc__ or "").partition("\n")[0])

    return decorate


class Tried(NamedTuple):
    """A rule that was tried on a step. why: the reason why it did not fire, or ""."""

    rule: str
    step: str
    why: str


class Log:
    """The work of rules: `tried` has each step of each rule. parts: as in Steps, in the end."""

    def __init__(self) -> None:
        self.tried: list[Tried] = []
        self.parts: dict[str, tuple[str, ...]] = {}


def rewritten(
    steps: Iterable[Step], rules: Sequence[Rule[Plan]], plan: Plan, log: Log | None = None
) -> list[Step]:
    """Return the steps after all rules. log: receives what the rules did."""
    found, log = Steps(steps), log or Log()
    for each in rules:
        for step in [step for step in found if step.op in each.ops]:
            if step.name in found:
                why = each.apply(found, found[step.name], plan)
                log.tried.append(Tried(each.name, step.name, why))
    log.parts |= found.parts
    return list(found)


def layer_of(name: str) -> str:
    """Return the prefix of a layer's names: "h.3." for "h.3.attn"."""
    return name[: name.rfind(".") + 1]


def changed(step: Step, *removed: str, **attrs: Any) -> Step:
    """Return a step without the attributes `removed`, and with `attrs`."""
    kept = {name: value for name, value in step.attrs.items() if name not in removed}
    return step._replace(attrs=kept | attrs)


def kept(step: Step, *names: str) -> dict[str, Any]:
    """Return the named attributes of a step that it has."""
    return {name: step.attrs[name] for name in names if name in step.attrs}


def end_of_product(steps: Steps, step: Step) -> tuple[Step, str]:
    """Return the gelu or the add that alone reads a product's result, or else the product.

    The second result is the residual to which the add adds, or "".
    """
    readers = steps.readers(step.name)
    end = readers[0] if len(readers) == 1 else step
    if end.op == "add" and end.inputs[1] == step.name:
        return end, end.inputs[0]
    return (end if end.op == "gelu" else step), ""


def overwriting(step: Step, places: Mapping[str, int]) -> Step:
    """Return a step that overwrites one of its inputs, if `places` has its operation."""
    place = places.get(step.op)
    if place is None or len(step.inputs) <= place:
        return step
    return step._replace(into=step.inputs[0 if step.attrs.get("sigmoid") else place])


def renamed(steps: Iterable[Step], prefix: str, known: Mapping[str, str]) -> list[Step]:
    """Return steps with a prefix before the names of results and tensors, except `known` ones.

    known: other names of tensors.
    """

    def name_of(name: str) -> str:
        return known.get(name, prefix + name if name else "")

    return [
        step._replace(
            name=prefix + step.name,
            inputs=tuple(map(name_of, step.inputs)),
            into=name_of(step.into),
        )
        for step in steps
    ]


def run(steps: Sequence[Step], do: Executor, out: str = "") -> Value:
    """Run steps on an executor. A result is dropped after its last reader.

    The inputs of the steps are names of results or tensors. Return the result named `out`, which
    may be a tensor; None for "".
    """
    last = {name: n for n, step in enumerate(steps) for name in step.inputs}
    values: dict[str, Any] = {}
    for n, step in enumerate(steps):
        inputs = tuple(values.get(name, name) for name in step.inputs)
        into = values[step.into] if step.into else None
        values[step.name] = do.do(step._replace(inputs=inputs, into=""), into)
        del inputs, into
        for name in (*step.inputs, step.name):
            if last.get(name, n) == n and name != out:
                values.pop(name, None)
    return values.get(out, out) if out else None
