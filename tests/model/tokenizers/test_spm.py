"""Against the sentencepiece library on models trained here: same ids, same text, exact bytes."""

import re

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model.tokenizers.base import Detokenizer, InvalidText, TokenizerError, decode
from ropewalk.model.tokenizers.spm import AddedToken, SpmModel, SpmTokenizer
from ropewalk.model.tokenizers.spm_proto import (
    ModelType,
    Piece,
    PieceType,
    Settings,
    read_settings,
    write_model,
)
from tests.model.tokenizers.samples import SPM_KINDS, TRICKY, texts, train_spm


@pytest.fixture(scope="module")
def models():
    trained = {kind: train_spm(kind) for kind in SPM_KINDS}
    return {
        kind: (
            sentencepiece.SentencePieceProcessor(model_proto=model),
            SpmTokenizer(SpmModel(model)),
        )
        for kind, model in trained.items()
    }


def joined(text):
    """The library writes one U+FFFD per invalid byte, Python one per invalid sequence."""
    return re.sub("\ufffd+", "\ufffd", text)


@pytest.mark.parametrize("kind", SPM_KINDS)
@pytest.mark.parametrize("text", TRICKY, ids=range(len(TRICKY)))
def test_tricky_texts(models, kind, text):
    library, tokenizer = models[kind]
    ids = library.encode(text)
    assert tokenizer.encode(text, bos=False) == ids
    assert tokenizer.encode(text, bos=True) == [library.bos_id(), *ids]
    assert decode(tokenizer, ids) == library.decode(ids)
    assert decode(tokenizer, [library.bos_id(), *ids]) == library.decode(ids)


@pytest.mark.parametrize("kind", SPM_KINDS)
@given(text=texts)
def test_any_text(models, kind, text):
    library, tokenizer = models[kind]
    ids = library.encode(text)
    assert tokenizer.encode(text, bos=False) == ids
    assert decode(tokenizer, ids) == library.decode(ids)


@pytest.mark.parametrize("kind", SPM_KINDS)
@given(data=st.data())
def test_any_ids(models, kind, data):
    library, tokenizer = models[kind]
    ids = [token for token in range(tokenizer.vocab_size) if not library.is_control(token)]
    chosen = data.draw(st.lists(st.sampled_from(ids), max_size=12))
    ours, theirs = decode(tokenizer, chosen), library.decode(chosen)
    if SPM_KINDS[kind].get("remove_extra_whitespaces", True):
        # Here the library drops a space of every leading token; no text is encoded so.
        ours, theirs = ours.lstrip(" "), theirs.lstrip(" ")
    assert joined(ours) == joined(theirs)


@pytest.mark.parametrize("kind", SPM_KINDS)
@given(text=texts)
def test_streaming_equals_decoding(models, kind, text):
    _, tokenizer = models[kind]
    ids = tokenizer.encode(text, bos=True)
    detokenizer = Detokenizer(tokenizer, first=True)
    streamed = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert streamed == decode(tokenizer, ids)


def test_a_continued_text_keeps_the_space_between_words(models):
    library, tokenizer = models["llama"]
    ids = library.encode("The rope")
    assert decode(tokenizer, ids) == "The rope"
    streamed = "".join(map(Detokenizer(tokenizer).push, ids))
    assert streamed == " The rope"


def test_bytes_of_each_kind_of_token(models):
    library, tokenizer = models["symbols"]

    def of(piece, *, first=False):
        return tokenizer.token_bytes(library.piece_to_id(piece), first=first)

    assert of("<s>") == of("</s>") == of("<mask>") == b""
    assert of("<0xE2>") == b"\xe2"
    assert of("<0x20>", first=True) == b" "
    assert of("<sep>") == b"<sep>"
    assert of("▁▁▁") == b"   "
    assert of("▁▁▁", first=True) == b"  "
    assert of("▁") == b" "
    assert of("▁", first=True) == b""
    assert of("<unk>") == " ⁇ ".encode()
    assert tokenizer.eos == {library.eos_id()}


def test_control_pieces_in_a_text_stay_text_unless_added(models):
    library, tokenizer = models["llama"]
    text = "a</s>b"
    assert library.eos_id() not in tokenizer.encode(text, bos=False)
    assert decode(tokenizer, tokenizer.encode(text, bos=False)) == text


def test_added_tokens_are_found_in_text_and_may_lie_beyond_the_model():
    model = SpmModel(train_spm("llama"))
    size = model.size
    added = [
        AddedToken(2, "</s>", special=True),
        AddedToken(size + 1, "<|im|>", special=True),
        AddedToken(size + 2, "<|im|>x", special=False),
    ]
    tokenizer = SpmTokenizer(model, added=added, eos=[size + 1])
    ids = tokenizer.encode("</s><|im|>x<|im|>", bos=False)
    assert ids == [2, size + 2, size + 1]
    assert tokenizer.token_bytes(size + 2, first=False) == b"<|im|>x"
    assert tokenizer.token_bytes(size + 1, first=False) == b""
    assert tokenizer.token_bytes(size, first=False) == b""
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.eos == {size + 1}


def test_added_tokens_may_take_the_white_space_around_them():
    model = SpmModel(train_spm("llama"))
    size = model.size
    added = [
        AddedToken(size, "<|left|>", special=True, lstrip=True),
        AddedToken(size + 1, "<|right|>", special=True, rstrip=True),
        AddedToken(size + 2, "<|none|>", special=True),
    ]
    tokenizer = SpmTokenizer(model, added=added)
    a, space = tokenizer.encode("a", bos=False), tokenizer.encode(" ", bos=False)
    assert tokenizer.encode("a \n<|left|>a", bos=False) == [*a, size, *a]
    assert tokenizer.encode("<|right|> \n a<|right|>", bos=False) == [size + 1, *a, size + 1]
    assert tokenizer.encode("<|none|> <|none|>", bos=False) == [size + 2, *space, size + 2]
    both = tokenizer.encode("<|right|> <|left|> <|left|><|none|> <|left|>", bos=False)
    assert both == [size + 1, size, size, size + 2, size]


def test_added_tokens_that_are_whole_words():
    model = SpmModel(train_spm("llama"))
    added = [AddedToken(model.size, "rope", special=False, single_word=True)]
    tokenizer = SpmTokenizer(model, added=added)
    assert model.size in tokenizer.encode("a rope.", bos=False)
    for text in ("ropes", "a_rope", "éropé"):
        assert model.size not in tokenizer.encode(text, bos=False)


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("x foo  bar", {"text": " foo", "rstrip": True}, {"text": "bar"}),
        ("xfoo foo", {"text": "x"}, {"text": "foo", "single_word": True}),
        ("foob foo", {"text": "fo"}, {"text": "foo", "single_word": True}),
        ("x\n<b> <b>", {"text": "\n"}, {"text": "<b>", "lstrip": True}),
        ("<b> \n<b>x", {"text": "\n"}, {"text": "<b>", "rstrip": True, "lstrip": True}),
    ],
)
def test_added_tokens_that_overlap_are_found_as_the_tokenizers_library_finds_them(
    text, first, second
):
    model = SpmModel(train_spm("llama"))
    added = [
        AddedToken(model.size + n, special=False, **flags)
        for n, flags in enumerate((first, second))
    ]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?", vocab={"?": 0}, merges=[]))
    library.add_tokens(
        [
            tokenizers.AddedToken(flags.pop("text"), normalized=False, **flags)
            for flags in (first, second)
        ]
    )
    theirs = [model.size + token - 1 for token in library.encode(text).ids if token]
    ours = SpmTokenizer(model, added=added).encode(text, bos=False)
    assert [token for token in ours if token >= model.size] == theirs


def test_long_white_space_before_tokens_that_take_it_is_read_once():
    """In quadratic time this takes a minute and holds up all other requests."""
    model = SpmModel(train_spm("llama"))
    size = model.size
    added = [AddedToken(size + n, f"<|{n}|>", special=True, lstrip=True) for n in range(100)]
    tokenizer = SpmTokenizer(model, added=added)
    tokens = tokenizer.encode("a" + " " * 20_000 + "<|7|>" + " " * 20_000 + "b", bos=False)
    assert size + 7 in tokens


def test_a_model_without_bos_or_told_not_to_add_it():
    model = SpmModel(train_spm("llama"))
    assert SpmTokenizer(model, add_bos=False).encode("", bos=True) == []
    assert SpmTokenizer(model).encode("", bos=True) == [1]
    assert SpmTokenizer(model).encode("", bos=False) == []


def test_a_lone_surrogate_is_refused(models):
    _, tokenizer = models["llama"]
    with pytest.raises(InvalidText, match="lone surrogate"):
        tokenizer.encode("a\udc00", bos=False)


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage" * 20, train_spm("bpe")[:1001]])
def test_a_broken_file_is_refused_in_one_sentence(data):
    with pytest.raises(TokenizerError, match="SentencePiece model") as caught:
        SpmModel(data)
    assert "\n" not in str(caught.value)


def test_a_model_that_rewrites_decoded_text_is_refused():
    model = train_spm("bpe")
    charsmap = read_settings(model).charsmap
    denormalizer = write_model(ModelType.BPE, [], Settings(charsmap=charsmap))
    # The message written last is field 3; the denormaliser is the same message as field 5.
    start = denormalizer.rindex(b"\x1a", 0, denormalizer.index(charsmap) - 8)
    with pytest.raises(TokenizerError, match="rewrites text after decoding"):
        SpmModel(model + b"\x2a" + denormalizer[start + 1 :])


def test_a_model_of_hand_written_pieces():
    pieces = [
        Piece("<unk>", 0.0, PieceType.UNKNOWN),
        Piece("a", -1.0, PieceType.NORMAL),
        Piece("b", -2.0, PieceType.NORMAL),
        Piece("ab", -0.5, PieceType.NORMAL),
        Piece("gone", -0.5, PieceType.UNUSED),
    ]
    settings = Settings(add_dummy_prefix=False, remove_extra_whitespaces=False, unknown="?")
    tokenizer = SpmTokenizer(SpmModel(write_model(ModelType.BPE, pieces, settings)))
    assert tokenizer.encode("abbz", bos=True) == [3, 2, 0]
    assert decode(tokenizer, [3, 2, 0]) == "abb?"
    assert tokenizer.bos is None
    assert tokenizer.eos == frozenset()
