"""What cannot be trained or measured is known before the first step, in one sentence."""

import sys
from itertools import count

import pytest
import torch

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.training.recipe import ENCODINGS
from ropewalk.model.family.training.rehearsal import rehearse

OWN = """
import torch
from torch import nn
from ropewalk.model.encodings.base import EncodingError, PositionalEncoding, TableBias


class {name}(PositionalEncoding):
    @classmethod
    def create(cls, options, config, context, device):
        encoding = cls()
        encoding.context = context
        encoding.slopes = nn.Parameter(torch.zeros(config.num_heads), requires_grad=False)
        encoding.register_buffer("table", torch.zeros(config.num_heads, context))
        {create}
        return encoding

    def first_values(self, generator):
        self.slopes.fill_(0.1)

    def freeze(self):
        {freeze}

    def score_bias(self):
        return TableBias(self.table)
"""
LEARNS = "self.table.copy_(-self.slopes[:, None] * torch.arange(self.context))"
names = (f"own{number}" for number in count())


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A class with these bodies, by its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def write(freeze: str, create: str = "pass", name: str = "Own") -> str:
        module = next(names)
        (tmp_path / f"{module}.py").write_text(OWN.format(name=name, create=create, freeze=freeze))
        made.append(module)
        return f"{module}:{name}"

    yield write
    for module in made:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_six_can_be_trained(encoding) -> None:
    rehearse(encoding, 4096)


def test_an_own_one_may_write_into_a_buffer(own) -> None:
    rehearse(own(LEARNS), 4096)


def refused(encoding: str) -> str:
    with pytest.raises(FamilyError) as caught:
        rehearse(encoding, 4096)
    return str(caught.value)


def test_a_name_that_is_none(own) -> None:
    assert "kerpel" in refused("kerpel")
    assert "cannot be imported" in refused("kerpel:Kerple")


def test_a_bundled_ones_name_is_not_taken(own) -> None:
    encoding = own(LEARNS, name="Rope")
    assert f"{encoding} would overwrite ropewalk-rope" in refused(encoding)


def test_its_own_errors_are_one_sentence_with_their_place(own) -> None:
    said = refused(encoding := own("self.missing.copy_(self.slopes)"))
    assert said.startswith(f"{encoding} cannot be trained (")
    assert "AttributeError" in said and "\n" not in said


def test_what_fails_at_length_is_found_out(own) -> None:
    create = 'if context > 512: raise EncodingError("512 is all there is.")'
    assert refused(own(LEARNS, create)) == "512 is all there is."


def test_a_table_made_for_the_trained_length_alone_is_found_out(own) -> None:
    said = refused(own(LEARNS.replace("self.context", "512")))
    assert "cannot be trained" in said and "RuntimeError" in said


def test_scales_that_begin_with_freeze_are_found_out(own) -> None:
    create = "encoding.scales = None; cls.query_scales = lambda self: self.scales"
    freeze = f"{LEARNS}; self.scales = 1 + torch.arange(self.context)[:, None] / 100"
    assert "query_scales returns a table only after `freeze`" in refused(own(freeze, create))
    create = create.replace("None", "torch.ones(context, 1)")
    rehearse(own(freeze, create), 4096)


def test_a_parameter_that_would_not_be_trained_is_named(own) -> None:
    freeze = LEARNS.replace("self.slopes", "self.slopes.detach()", 1)
    assert "no gradient reaches encoding.slopes" in refused(own(freeze))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_torch_compile_sees_otherwise_is_found_out(own) -> None:
    """While it traces, the bias is 0."""
    seen = "TableBias(encoding.table * (not torch.compiler.is_compiling()))"
    encoding = own(LEARNS, f"encoding.score_bias = lambda: {seen}")
    rehearse(encoding, 4096)
    with pytest.raises(FamilyError, match=r"something else where torch\.compile traces it"):
        rehearse(encoding, 4096, compiled=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_are_not_left_to_the_caller() -> None:
    rehearse("t5", 4096, compiled=True)
    assert torch.is_grad_enabled()
