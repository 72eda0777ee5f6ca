"""Tables as text: aligned for a terminal, or in Markdown. The first row is the header."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int, *, rule: bool = False) -> list[str]:
    """Lines of columns as wide as their widest entry; the first `left` are left-aligned.

    With a `rule`, dashes below the header.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * left + ">" * (len(widths) - left)
    dashes = [["-" * width for width in widths]] if rule else []
    lines = []
    for row in (rows[0], *dashes, *rows[1:]):
        cells = zip(row, sides, widths, strict=True)
        lines.append("  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip())
    return lines


def markdown(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The first `left` columns are left-aligned."""
    header, *rest = rows
    rule = [":--" if column < left else "--:" for column in range(len(header))]
    return "\n".join(f"|{'|'.join(row)}|" for row in (header, rule, *rest))
