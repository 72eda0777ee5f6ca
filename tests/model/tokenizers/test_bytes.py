"""The byte alphabet is a bijection and agrees with the library that defines it in practice."""

from tokenizers import pre_tokenizers

from ropewalk.model.tokenizers.base import BYTE_OF, TokenTable, byte_of_fallback, from_byte_level


def test_the_alphabet_is_the_library_s():
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))
    text = "".join(map(chr, range(1, 0x250))) + "€😀"
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    written = "".join(piece for piece, _ in level.pre_tokenize_str(text))
    assert [BYTE_OF[character] for character in written] == list(text.encode())
    assert from_byte_level(written) == text.encode()


def test_a_piece_outside_the_alphabet_is_text():
    assert from_byte_level("<｜a｜>") == "<｜a｜>".encode()
    assert from_byte_level("  ") == b"  "


def test_byte_pieces():
    assert byte_of_fallback("<0x0A>") == 10
    assert byte_of_fallback("<0xff>") == 255
    for other in ["<0x0A", "0x0A", "<0xZZ>", "<0x0>", "<0x+1>", "<0x 1>", "<0x1_>", "abcdef"]:
        assert byte_of_fallback(other) is None, other


def test_ids_without_a_token_have_no_bytes():
    table = TokenTable([(b" a", b"a"), (b"b", b"b")])
    assert table.get(0, first=True) == b"a"
    assert table.get(0, first=False) == b" a"
    assert table.get(2, first=False) == b""
    assert table.get(-1, first=True) == b""
