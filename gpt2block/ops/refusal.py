"""Refusals: the reason why a kernel does not support a call, or facts that a call may have.

A kernel has a function that plans its launch from facts: sizes, dtypes, and the GPU. The launch and
the code that predicts kernels ask for the same plan.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from gpt2block.cuda.cards import gpu

Plan = TypeVar("Plan")
# The compute capability with each of `cards.Properties`
LEAST = {
    "has_mma": "7.5 or newer", "has_bf16": "8.0 or newer", "has_clusters": "9.0 or newer",
    "has_wgmma": "9.0 (Hopper)",
}  # fmt: skip


class UnsupportedCall(Exception):  # noqa: N818  (a reason to take another variant)
    """A variant does not support a call's dtypes, sizes, alignment or compute capability."""


class Refused(NamedTuple):
    """The reason why a kernel does not support the facts of a call, in place of a plan."""

    reason: str

    @classmethod
    def first(cls, *reasons: tuple[object, str] | Refused | None) -> Refused | None:
        """Return the first refusal, of refusals and of pairs (condition, reason), or None."""
        for each in reasons:
            if each and each[0]:
                return cls(each[-1])
        return None


def accept(plan: Plan | Refused) -> Plan:
    """Return a plan. Raises UnsupportedCall with the reason if the kernel refused."""
    if isinstance(plan, Refused):
        raise UnsupportedCall(plan.reason)
    return plan


def refuse(condition: object, reason: str) -> None:
    """Raise UnsupportedCall with a reason if a condition is true."""
    accept(Refused.first((condition, reason)))


def supports(plan: object) -> bool:
    """Return whether a kernel has a plan, or no reason to refuse."""
    return not isinstance(plan, Refused)


def needs(feature: str, instead: str = "") -> Refused | None:
    """Return a refusal on a GPU without a feature, one of LEAST. instead: advice."""
    if getattr(gpu(), feature):
        return None
    return Refused(f"needs a GPU of compute capability {LEAST[feature]}{instead}")
