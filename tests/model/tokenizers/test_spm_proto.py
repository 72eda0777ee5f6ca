"""Settings survive writing and reading, and are those that the library was trained with."""

import pytest

from ropewalk.model.tokenizers.spm_proto import (
    ModelType,
    Piece,
    PieceType,
    Settings,
    read_settings,
    write_model,
)
from tests.model.tokenizers.samples import SPM_KINDS, train_spm


@pytest.mark.parametrize("kind", SPM_KINDS)
def test_settings_of_trained_models(kind):
    options, settings = SPM_KINDS[kind], read_settings(train_spm(kind))
    assert settings.add_dummy_prefix == options.get("add_dummy_prefix", True)
    assert settings.remove_extra_whitespaces == options.get("remove_extra_whitespaces", True)
    assert bool(settings.charsmap) == ("normalization_rule_name" not in options)
    assert settings.unknown == " ⁇ "
    assert not settings.denormalizes


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(add_dummy_prefix=False, remove_extra_whitespaces=False, unknown="?"),
        Settings(charsmap=bytes(range(256)) * 3),
    ],
)
def test_what_is_written_is_read(settings):
    pieces = [Piece("é" * 100, -1.5, PieceType.NORMAL)] * 3
    assert read_settings(write_model(ModelType.BPE, pieces, settings)) == settings


def test_fields_of_every_width_are_skipped_and_others_refused():
    unused = b"\x79" + bytes(8) + b"\x7d" + bytes(4)  # field 15 as fixed64 and fixed32
    assert read_settings(unused) == Settings()
    with pytest.raises(ValueError, match="wire type 3"):
        read_settings(b"\x7b")
