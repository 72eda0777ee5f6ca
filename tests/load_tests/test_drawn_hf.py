import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.model.loading.checkpoints import open_checkpoint
from tests.model import checkpoints


@pytest.mark.parametrize(
    ("family", "encoding", "block"),
    [
        ("gpt2", "learned", "pre_norm"),
        ("bloom", "alibi", "pre_norm"),
        ("gpt_neox", "rope", "parallel"),
    ],
)
def test_each_family_is_served_as_what_it_is(tmp_path, capsys, family, encoding, block):
    from ropewalk.load_tests.peers.drawn_hf import main  # which imports much of transformers

    tiny = checkpoints.tiny_tokenizer()
    words = PreTrainedTokenizerFast(tokenizer_object=tiny, eos_token=checkpoints.END)
    words.save_pretrained(tmp_path / "words")
    sizes = ["--heads", "1", "--layers", "2"]
    assert main([family, str(tmp_path / "words"), str(tmp_path / "drawn"), *sizes]) == 0
    checkpoint = open_checkpoint(tmp_path / "drawn" / "bf16")
    config = checkpoint.config
    assert (config.encoding.name, config.block) == (encoding, block)
    assert (config.heads, config.layers, config.trained_context) == (1, 2, 2048)
    assert checkpoint.tokenizer.encode("that", bos=False) == words.encode("that")
