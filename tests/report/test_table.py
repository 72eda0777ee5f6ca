from ropewalk.report.table import aligned, markdown


def test_columns_are_aligned():
    rows = [("name", "n"), ("a", "1"), ("longer", "1000")]
    assert aligned(rows, left=1, rule=True) == [
        "name       n",
        "------  ----",
        "a          1",
        "longer  1000",
    ]


def test_a_table_in_markdown_begins_with_its_header():
    rows = [("name", "n"), ("a", "1")]
    assert markdown(rows).splitlines() == ["|name|n|", "|:--|--:|", "|a|1|"]
