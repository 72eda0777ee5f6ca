"""docs/architecture.md: its map of rooms is made from what each room says of itself."""

import ast
from pathlib import Path

from tests.test_layers import PACKAGES, SOURCES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def rooms_table() -> str:
    """A row for each room, its sentence taken from its __init__.py."""
    rows = ["|room|is for|", "|---|---|"]
    for package in PACKAGES:
        inits = [path for path in SOURCES if path.startswith(f"{package}/")]
        for path in sorted(path for path in inits if path.endswith("/__init__.py")):
            room = path.removesuffix("/__init__.py")
            room = room if (ROOT / room).is_dir() else f"ropewalk/{room}"
            said = ast.get_docstring(ast.parse(SOURCES[path]))
            rows.append(f"|[`{room}`](../{room})|{said}|")
    return "\n".join(rows) + "\n"


def test_the_map_is_what_the_rooms_say() -> None:
    assert rooms_table() in PAGE, f"the map should be:\n{rooms_table()}"
