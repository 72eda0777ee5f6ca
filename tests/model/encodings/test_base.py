"""How encodings are found, and what the two kinds of score bias say."""

import sys

import pytest
import torch

from ropewalk.model.encodings import base
from ropewalk.model.encodings.base import EncodingError, EncodingSpec, LinearBias, TableBias, create
from ropewalk.model.encodings.nope import NoPE
from tests.model import tiny
from tests.model.tiny import CONFIG, CPU


def made(name, **options):
    return create(EncodingSpec(name, options), CONFIG, 16, CPU)


def test_the_folder_is_the_list():
    assert {"nope", "rope"} <= set(base.names())
    assert "base" not in base.names()


def test_one_from_outside():
    assert isinstance(made("tests.model.tiny:Linear"), tiny.Linear)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t6", "There is no encoding 't6'; use one of .*nope"),
        ("base", "There is no encoding 'base'"),
        ("no.such.module:Thing", "cannot be imported: No module named 'no'"),
        ("tests.model.tiny:CONFIG", "exactly one PositionalEncoding class, but 0 were found"),
        ("tests.model.tiny:Missing", "but 0 were found"),
    ],
)
def test_names_that_lead_nowhere(name, words):
    with pytest.raises(EncodingError, match=words):
        made(name)


def test_a_broken_module_is_not_a_missing_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for number, (line, words) in enumerate(
        [("1 / 0", "ZeroDivisionError: division by zero"), ("def", "SyntaxError: .*, line 1")]
    ):
        module = f"broken_encoding{number}"
        (tmp_path / f"{module}.py").write_text(f"{line}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(EncodingError, match=rf"cannot be imported \({words}") as refused:
            made(f"{module}:Thing")
        assert str(refused.value).endswith(f"; python -c 'import {module}' shows where.")


def test_options_where_none_are_taken():
    with pytest.raises(EncodingError, match=r"NoPE takes no options, but got \['base'\]"):
        made("nope", base=1)


def test_nope_does_nothing():
    nope = NoPE()
    x = torch.randn(4, 2, 8)
    positions = torch.arange(4)
    assert nope.embed(x, positions) is x
    assert nope.rotate(x, x, positions, positions) == (x, x)
    assert nope.score_bias() is None
    assert nope.max_positions is None


def test_linear_bias_falls_with_the_distance():
    bias = LinearBias(torch.tensor([1.0, 0.5]))
    assert bias.at(torch.tensor([[0, 2], [4, 6]])).tolist() == [
        [[0, -2], [-4, -6]],
        [[0, -1], [-2, -3]],
    ]


def test_table_bias_repeats_its_ends():
    bias = TableBias(torch.tensor([[10.0, 11.0, 12.0], [20.0, 21.0, 22.0]]), zero=1)
    assert bias.at(torch.tensor([-5, -1, 0, 1, 9])).tolist() == [
        [10, 10, 11, 12, 12],
        [20, 20, 21, 22, 22],
    ]
