"""Simple SVG shapes for the pictures in docs/. The generated text is the same on all machines."""

from __future__ import annotations

from html import escape

INK, GREY, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN = "#1f5fbf", "#c2570c", "#2f7d4f"
PALE = {BLUE: "#dbe7fa", ORANGE: "#fce4d1", GREEN: "#d8efe0", GREY: "#eef1f4"}
SIZE = 15  # size of text, in units of a picture 800 wide


class Picture:
    """A picture 800 wide on a white background, readable on light and dark pages."""

    def __init__(self, title: str, height: float, about: str) -> None:
        self.height = height
        self.title = title
        self.about = about
        self.parts: list[str] = []
        self.text(24, 34, title, size=18, bold=True)

    def text(
        self, x: float, y: float, text: str, *, color: str = INK, size: int = SIZE,
        at: str = "start", bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        family = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{at}"'
            f"{weight}{family}>{escape(text)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none",
        edge: str = GREY, stroke: float = 1,
    ) -> None:  # fmt: skip
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" '
            f'fill="{fill}" stroke="{edge}" stroke-width="{stroke:g}"/>'
        )

    def cell(
        self, x: float, y: float, width: float, height: float, text: str, edge: str = GREY,
        *, fill: str | None = None, color: str = INK, mono: bool = False,
    ) -> None:  # fmt: skip
        """Draw a box with a text in the middle. fill: by default the pale color of its edge."""
        self.box(x, y, width, height, PALE[edge] if fill is None else fill, edge)
        self.text(x + width / 2, y + height / 2 + 5, text, at="middle", color=color, mono=mono)

    def lines(self, x: float, y: float, *texts: str, step: float = 20, color: str = INK) -> None:
        """Draw texts below each other, the first one at y."""
        for i, text in enumerate(texts):
            self.text(x, y + step * i, text, color=color)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: str = GREY,
        width: float = 1.5, *, arrow: bool = False, dashed: bool = False,
    ) -> None:  # fmt: skip
        tip = f' marker-end="url(#{color[1:]})"' if arrow else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" '
            f'stroke="{color}" stroke-width="{width:g}"{tip}{dash}/>'
        )

    def grid(
        self, x: float, y: float, columns: int, rows: int, cell: tuple[float, float],
        fill: str = "white",
    ) -> None:  # fmt: skip
        for row in range(rows):
            for column in range(columns):
                self.box(x + column * cell[0], y + row * cell[1], *cell, fill, "#cbd2d9")

    def svg(self) -> str:
        tips = "".join(
            f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
            for color in (INK, GREY, BLUE, ORANGE, GREEN)
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {self.height:g}" '
            f'width="800" height="{self.height:g}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.about)}</desc>\n"
            f'<defs>{tips}</defs>\n<rect width="800" height="{self.height:g}" rx="8" '
            f'fill="white"/>\n{body}\n</svg>\n'
        )
