"""Against the `tokenizers` library: same ids, same text, and refusal of what has no bytes."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from ropewalk.model.tokenizers.base import Detokenizer, InvalidText, TokenizerError, decode
from ropewalk.model.tokenizers.hf import HfTokenizer, byte_rule, read_tokenizer_json
from tests.model.tokenizers.hf_samples import HF_KINDS, byte_level
from tests.model.tokenizers.samples import TRICKY, texts

marked = st.lists(
    st.one_of(texts, st.sampled_from(["<s>", "</s>", "<|im_start|>", "<tool>", " <tool> "])),
    max_size=4,
).map("".join)


@pytest.fixture(scope="module")
def both():
    built = {kind: build() for kind, build in HF_KINDS.items()}
    return {
        kind: (library, HfTokenizer(Tokenizer.from_str(library.to_str())))
        for kind, library in built.items()
    }


@pytest.mark.parametrize("kind", HF_KINDS)
@pytest.mark.parametrize("text", TRICKY, ids=range(len(TRICKY)))
def test_tricky_texts(both, kind, text):
    library, tokenizer = both[kind]
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, bos=False) == ids
    assert decode(tokenizer, ids) == library.decode(ids)


@pytest.mark.parametrize("kind", HF_KINDS)
@given(text=marked)
def test_any_text_with_markers(both, kind, text):
    library, tokenizer = both[kind]
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, bos=False) == ids
    assert decode(tokenizer, ids) == library.decode(ids)
    detokenizer = Detokenizer(tokenizer, first=True)
    streamed = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert streamed == library.decode(ids)


@pytest.mark.parametrize("kind", HF_KINDS)
@given(data=st.data())
def test_any_ids(both, kind, data):
    library, tokenizer = both[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    if kind == "llama":
        # The library replaces every byte of a run that is invalid anywhere, and a control token
        # ends a run; Python replaces only what is invalid.
        assume("\ufffd" not in decode(tokenizer, ids))
        assume("\ufffd" not in library.decode(ids))
    assert decode(tokenizer, ids) == library.decode(ids)


def test_bytes_of_each_kind_of_token(both):
    library, tokenizer = both["byte-level"]

    def of(piece):
        return tokenizer.token_bytes(library.token_to_id(piece), first=False)

    assert of("<s>") == of("</s>") == of("<|im_start|>") == b""
    assert of("<tool>") == b"<tool>"
    assert of("  <｜wide｜>") == "  <｜wide｜>".encode()
    assert of("Ġ") == b" "
    assert of("ð") == b"\xf0"
    library, tokenizer = both["llama"]
    assert of("<0xF0>") == b"\xf0"
    assert of("▁") == b" "
    assert tokenizer.token_bytes(library.token_to_id("▁"), first=True) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7, first=False) == b""


def test_an_added_token_is_text_even_in_letters_of_the_byte_alphabet():
    library = byte_level()
    library.add_tokens(["<é>"])
    tokenizer = HfTokenizer(library)
    assert library.decode([library.token_to_id("<é>")]) != "<é>"
    assert decode(tokenizer, tokenizer.encode("<é>", bos=False)) == "<é>"


def test_bos_is_what_the_post_processor_puts_before_and_never_its_eos(both):
    _, tokenizer = both["byte-level"]
    plain = tokenizer.encode("a b", bos=False)
    assert tokenizer.encode("a b", bos=True) == [0, *plain]
    assert tokenizer.bos == 0
    _, tokenizer = both["llama"]
    assert tokenizer.encode("a b", bos=True) == tokenizer.encode("a b", bos=False)
    assert tokenizer.bos is None


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [2]), (False, []), (None, [0])])
def test_a_declared_choice_beats_the_post_processor(add_bos, expected):
    tokenizer = HfTokenizer(byte_level(), bos=2, eos=[1], add_bos=add_bos)
    assert tokenizer.encode("", bos=True) == expected
    assert tokenizer.eos == {1}


def test_truncation_and_padding_in_the_file_are_ignored():
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=50)
    tokenizer = HfTokenizer(library)
    text = "The rope runs over the walk and back again"
    assert decode(tokenizer, tokenizer.encode(text, bos=False)) == text
    assert len(tokenizer.encode("a", bos=False)) == 1


def test_ids_without_a_token_have_no_bytes():
    description = json.loads(byte_level().to_str())
    for token in description["added_tokens"]:
        if token["content"] == "<tool>":
            token["id"] += 10
    description["added_tokens"].sort(key=lambda token: token["id"])
    library = Tokenizer.from_str(json.dumps(description))
    tokenizer = HfTokenizer(library)
    missing = set(range(tokenizer.vocab_size)) - set(library.get_vocab().values())
    for token in missing:
        assert tokenizer.token_bytes(token, first=False) == b""


def test_a_lone_surrogate_is_refused(both):
    with pytest.raises(InvalidText, match="lone surrogate"):
        both["byte-level"][1].encode("\ud800", bos=False)


def described(decoder):
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    return json.loads(tokenizer.to_str())["decoder"]


REFUSED = {
    "wordpiece": decoders.WordPiece(),
    "suffix": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "strip without fuse": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    ),
    "strip two": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "strip the end": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    "replace after fuse": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
    "empty": decoders.Sequence([]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_decoder_that_is_no_rule_per_token_is_refused(name):
    library = byte_level()
    library.decoder = REFUSED[name]
    with pytest.raises(TokenizerError, match=r"does not give every token bytes.*: use a"):
        HfTokenizer(library)


def test_no_decoder_is_refused():
    with pytest.raises(TokenizerError, match=r"decoder \(none\)"):
        byte_rule(None)


def test_rules_of_the_decoders_that_are():
    gemma = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert byte_rule(described(gemma))("▁a") == (b" a", b" a")
    nested = decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])])
    assert byte_rule(described(nested))("Ġa") == (b" a", b" a")
    assert byte_rule(described(decoders.Metaspace()))("▁▁a") == (b"  a", b"a")
    assert byte_rule(described(decoders.Fuse()))("<0x41>") == (b"<0x41>", b"<0x41>")


@pytest.mark.parametrize("text", ["", "{}", "[", byte_level().to_str()[:-20]])
def test_a_broken_file_is_refused(text):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        read_tokenizer_json(text)
