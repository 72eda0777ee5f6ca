"""How architectures are found."""

import pytest

from ropewalk.model.architectures.base import architectures, by_gguf_name, by_model_type
from ropewalk.model.weights.base import CheckpointError


def test_the_folder_is_the_list():
    names = [found.model_type for found in architectures()]
    assert {"llama", "mistral", "qwen2", "qwen3"} < set(names)
    assert len(names) == len(set(names))


def test_a_file_has_the_name_of_its_family():
    for found in architectures():
        assert type(found).__module__.rpartition(".")[2] == found.model_type


def test_by_name():
    assert by_model_type("mistral", "x").model_type == "mistral"
    assert by_gguf_name("qwen3", "x").model_type == "qwen3"
    assert by_gguf_name("llama", "x").model_type == "llama"


@pytest.mark.parametrize("name", ["bert", "", None, "mistral", 5, ["llama"]])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(CheckpointError, match=r"supported are .*llama, .*qwen2, qwen3.*[.]$"):
        by_gguf_name(name, "x.gguf")
