"""The errors gpt2block raises on purpose: what was expected, what came, what to do."""

from __future__ import annotations

from reprlib import Repr

LONGEST = 500  # characters of a message
_KEPT_END = 160  # of them from the end, which says what to do


def printable(text: str, longest: int = LONGEST) -> str:
    """`text` on one line that a terminal can show: no control characters, at most `longest` long.

    Characters that `str.isprintable` refuses (escapes, newlines, lone surrogates, direction marks)
    become escape sequences; a text that is too long loses its middle.
    """
    if len(text) > 2 * longest:
        text = text[:longest] + text[-longest:]  # escaping only makes it longer
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if len(text) <= longest:
        return text
    end = min(_KEPT_END, longest // 3)
    return f"{text[: longest - end - 3]} … {text[-end:]}"


class _Values(Repr):
    """`repr` for messages: never long, never deep, and it never fails."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to write integers of more than 4,300 digits."""
        digits = self.maxlong
        return repr(x) if abs(x) < 10**digits else f"an integer of more than {digits} digits"


def shown(value: object) -> str:
    """A wrong value as an error message shows it: its `repr`, shortened where it is long."""
    return _Values().repr(value)


class PrintableError(Exception):
    """Makes an exception's message printable: names and values in it come from files and users."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class InputError(PrintableError, ValueError):
    """An array or argument has the wrong dtype, shape, device or value."""


class UnknownOption(InputError, TypeError):  # noqa: N818  (an InputError)
    """A keyword argument that a function does not have."""


class CheckpointError(PrintableError, ValueError):
    """A weights file or directory is missing, damaged or not what it should be."""


class DeviceError(PrintableError, RuntimeError):
    """The requested device cannot be used."""


class KernelError(RuntimeError):
    """A CUDA source does not compile, or a kernel is launched with the wrong arguments."""
