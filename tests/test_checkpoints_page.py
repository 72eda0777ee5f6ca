"""What docs/checkpoints.md says is true: its tables are made again from the families."""

import re
from collections.abc import Iterator
from pathlib import Path

from ropewalk.model.architectures.absent import Absent, Default, Disputed, Like
from ropewalk.model.architectures.base import Architecture, architectures

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


def defaults_table() -> str:
    rows = ["|`model_type`|who says so|an absent key means|", "|---|---|---|"]
    for family in architectures():
        rows += _rows(family.model_type, family.absent)
    return "\n".join(rows)


def gguf_table() -> str:
    rows = ["|`general.architecture`|who says so|an absent key means|", "|---|---|---|"]
    for family in architectures():
        if family.gguf_name is not None:
            rows += _rows(family.gguf_name, family.absent_in_gguf)
    return "\n".join(rows)


def disputed_table() -> str:
    rows = ["|`model_type`|key|its absence means|", "|---|---|---|"]
    for family in architectures():
        for key, what in _disputed(family):
            rows.append(f"|`{family.model_type}`|`{key}`|{what.meanings}|")
    return "\n".join(rows)


def _rows(name: str, absent: Absent) -> Iterator[str]:
    defaults = {key: what for key, what in absent.items() if isinstance(what, Default)}
    for who in dict.fromkeys(what.by for what in defaults.values()):
        told = [f"`{key}` = {_shown(what)}" for key, what in defaults.items() if what.by == who]
        yield f"|`{name}`|{who}|{', '.join(told)}|"


def _shown(what: Default) -> str:
    return f"`{what.value.key}`" if isinstance(what.value, Like) else f"{what.value:.15g}"


def _disputed(family: Architecture) -> Iterator[tuple[str, Disputed]]:
    for key, what in family.absent.items():
        if isinstance(what, Disputed):
            yield key, what


def test_defaults_are_what_the_families_say() -> None:
    assert defaults_table() in PAGE


def test_disputes_are_what_the_families_say() -> None:
    assert disputed_table() in PAGE


def test_gguf_defaults_are_what_the_families_say() -> None:
    assert gguf_table() in PAGE


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_the_readme_and_the_code_lead_here() -> None:
    for name in ("README.md", "model/architectures/absent.py"):
        assert "docs/checkpoints.md" in (ROOT / name).read_text()
