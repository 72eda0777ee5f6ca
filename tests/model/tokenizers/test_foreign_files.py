"""Tokenizer files that would take all memory or time, or crash the library: one sentence."""

import json
import struct
import time
from base64 import b64encode

import pytest

from ropewalk.model.tokenizers.base import InvalidText, TokenizerError
from ropewalk.model.tokenizers.hf import HfTokenizer, read_tokenizer_json
from ropewalk.model.tokenizers.loading import tokenizer_from_directory
from ropewalk.model.tokenizers.spm import read_model
from ropewalk.model.tokenizers.spm_proto import (
    Piece,
    PieceType,
    Settings,
    longest_replacement,
    write_model,
)
from tests.model.tokenizers.samples import byte_level, train_spm


def file(**changes):
    """The text of a byte-level tokenizer.json."""
    return json.dumps(json.loads(byte_level()._tokenizer.to_str()) | changes)


def bpe(**changes):
    return json.loads(file())["model"] | changes


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern or {"Regex": "."}, "content": content}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


def split(regex):
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def unigram(*pieces):
    vocabulary = [["<unk>", 0.0], *([piece, -1.0] for piece in pieces)]
    return {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": vocabulary}


PANICS = file(pre_tokenizer=split("(a+)+$"), added_tokens=[])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": sequence(*[replace("x" * 1000)] * 3)}, "cannot be read"),
        ({"normalizer": sequence(*[replace("x" * 1000, String="z")] * 3)}, "texts .* as long"),
        ({"normalizer": sequence(*[replace("xx", String="z")] * 7)}, "texts 128 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 1000}}, "texts 1001 times as long"),
        ({"normalizer": replace("x" * 99, Regex="z")}, "texts 100 times as long"),
        ({"model": bpe(continuing_subword_prefix="x" * 1000)}, "texts 1000 times as long"),
        ({"model": bpe(end_of_word_suffix="x" * 1000)}, "texts 1000 times as long"),
        ({"model": unigram("x" * 30_000_000)}, "cannot be read"),
        ({"model": unigram("x" * 1_000_000)}, "cannot be read"),  # its memory, or the stack
    ],
)
def test_a_file_that_explodes_is_refused(changes, message):
    begun = time.process_time()
    with pytest.raises(TokenizerError, match=message) as caught:
        read_tokenizer_json(file(added_tokens=[], **changes))
    assert "\n" not in str(caught.value)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("steps", [["NFC"], ["NFKC", "Lowercase"], ["Prepend", "Replace"]])
def test_usual_normalizers_are_not(steps):
    known = {"Prepend": {"type": "Prepend", "prepend": "▁"}, "Replace": replace("▁", String=" ")}
    normalizer = sequence(*(known.get(step, {"type": step}) for step in steps))
    read_tokenizer_json(file(added_tokens=[], normalizer=normalizer))


@pytest.mark.parametrize("highest", [10**9, 2**32 - 1, 1 << 20])
def test_ids_are_bounded(tmp_path, highest):
    vocabulary = {"a": 0, "b": highest}
    (tmp_path / "tokenizer.json").write_text(
        file(added_tokens=[], pre_tokenizer=None, model=bpe(vocab=vocabulary, merges=[]))
    )
    with pytest.raises(TokenizerError, match=f"has the id {highest}, but at most 1048576"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("number", ["999999999", "1048576"])
def test_ids_of_added_tokens_are_bounded(tmp_path, number):
    (tmp_path / "tokenizer.model").write_bytes(train_spm("llama"))
    config = {"added_tokens_decoder": {number: {"content": "<x>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=f"has the id {number}"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "٣", ""])
def test_ids_of_added_tokens_are_numbers(tmp_path, number):
    (tmp_path / "tokenizer.model").write_bytes(train_spm("llama"))
    config = {"added_tokens_decoder": {number: {"content": "<x>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="added_tokens_decoder must be an object of tokens"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("text", ["a" * 39 + "!", ("a" * 50 + "!") * 3, "b " + "a" * 99 + "?"])
def test_a_panic_is_an_error_of_the_text(text, capfd):
    tokenizer = HfTokenizer(read_tokenizer_json(PANICS))
    with pytest.raises(InvalidText, match=r"fails on this text \(Onig: .*\): send another one"):
        tokenizer.encode(text, bos=False)
    assert tokenizer.encode("ab", bos=False) == tokenizer.encode("ab", bos=True)
    capfd.readouterr()  # the library writes a trace of its own


def test_so_is_any_other_exception_of_the_library():
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "none"}
    tokenizer = byte_level()
    tokenizer._tokenizer = type(tokenizer._tokenizer).from_str(file(model=model, added_tokens=[]))
    with pytest.raises(InvalidText, match="fails on this text"):
        tokenizer.encode("zzz", bos=False)


def rules(longest):
    """Compiled normalisation rules that replace nothing, with a text of that length."""
    return struct.pack("<I", 1024) + bytes(1024) + b"x" * longest + b"\0"


def test_replacements_of_sentencepiece_are_bounded():
    pieces = [
        Piece("<unk>", 0.0, PieceType.UNKNOWN),
        Piece("▁a", 0.0, PieceType.NORMAL),
        *(Piece(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)),
    ]
    assert longest_replacement(rules(100)) == 100
    assert longest_replacement(b"") == 0
    with pytest.raises(TokenizerError, match=r"replaces a text by 100 bytes|cannot be read"):
        read_model(write_model(1, pieces, Settings(charsmap=rules(100))))
    read_model(train_spm("unigram"))  # with the rules of nmt_nfkc


def test_replacements_of_tokenizers_are_bounded():
    charsmap = b64encode(rules(100)).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    with pytest.raises(TokenizerError, match=r"texts 100 times as long|cannot be read"):
        read_tokenizer_json(file(added_tokens=[], normalizer=normalizer))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_that_crashes_the_library_crashes_nothing(tmp_path, name):
    content = file(added_tokens=[], model=unigram("x" * 300_000)).encode()
    if name == "tokenizer.model":
        content = train_spm("llama") + b"\x0a\xff\xff\xff\xff\x0f"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match="cannot be read"):
        tokenizer_from_directory(tmp_path)
