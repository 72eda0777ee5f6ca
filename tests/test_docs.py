"""Tables of the docs that repeat what the code says are those that it makes today."""

import pytest

from docs.tables import DOCS, PAGES, current


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_current(page):
    assert (DOCS / page).read_text() == current(page), "scripts/docs makes them again"
