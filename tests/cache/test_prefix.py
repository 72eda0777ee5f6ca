import hashlib

import pytest

from ropewalk.cache.prefix import PrefixIndex, keyed_digest
from ropewalk.cache.types import InvariantError

TOKENS = [1, 2, 3, 4, 5, 6, 7]


def same_digest(parent: bytes, salt: str, tokens: bytes) -> bytes:
    return b"x"


def published(index: PrefixIndex, tokens=TOKENS, blocks=(10, 11, 12), salt="") -> list:
    entries, parent = [], None
    for i, block in enumerate(blocks):
        parent = index.publish(block, tokens, i, salt, parent)
        entries.append(parent)
    index.check()
    return entries


def hits(index: PrefixIndex, tokens, limit=None, salt="") -> list[int]:
    limit = len(tokens) // 2 if limit is None else limit
    return [entry.block for entry in index.match(salt, tokens, limit)]


def dropped(index: PrefixIndex, block) -> list[int]:
    return sorted(entry.block for entry in index.withdraw(index.entry(block)))


def test_the_longest_beginning_is_found():
    index = PrefixIndex(2)
    published(index)
    assert hits(index, TOKENS) == [10, 11, 12]
    assert hits(index, TOKENS, limit=2) == [10, 11]
    assert hits(index, [1, 2, 3, 4, 5, 9]) == [10, 11]
    assert hits(index, [1, 2, 9, 4, 5, 6]) == [10]
    assert hits(index, [9, 2, 3, 4]) == []


def test_a_block_alone_is_found_only_after_its_own_beginning():
    index = PrefixIndex(2)
    published(index)
    assert hits(index, [3, 4]) == []
    assert hits(index, [5, 6, 3, 4]) == []


def test_salts_are_apart():
    index = PrefixIndex(2)
    published(index, salt="a")
    assert hits(index, TOKENS) == []
    assert hits(index, TOKENS, salt="b") == []
    assert hits(index, TOKENS, salt="a") == [10, 11, 12]


def test_equal_tokens_keep_the_first_block():
    index = PrefixIndex(2)
    first = published(index)
    again = published(index, blocks=(20, 21, 22))
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert 20 not in index.blocks and len(index.blocks) == 3


def test_a_collision_is_no_hit_and_does_not_displace():
    index = PrefixIndex(2, digest=same_digest)
    (entry,) = published(index, tokens=[1, 2], blocks=(10,))
    assert hits(index, [3, 4]) == []
    assert hits(index, [1, 2], salt="a") == []
    assert hits(index, [1, 2, 1, 2]) == [10]  # the same block is not its own continuation
    assert index.publish(11, [3, 4], 0, "", None) is None
    assert index.publish(11, [1, 2, 1, 2], 1, "", entry) is None
    assert 11 not in index.blocks
    index.check()


def test_dropping_a_block_drops_what_continues_it():
    index = PrefixIndex(2)
    entries = published(index)
    published(index, tokens=[1, 2, 8, 8], blocks=(10, 13))
    published(index, tokens=[7, 7], blocks=(14,))
    assert dropped(index, 11) == [11, 12]
    assert hits(index, TOKENS) == [10]
    assert hits(index, [1, 2, 8, 8]) == [10, 13]
    assert dropped(index, 10) == [10, 13]
    assert index.entry(10) is None
    assert index.blocks == {14}
    assert not any(index.current(entry) for entry in entries)
    index.check()


def test_a_dropped_block_can_be_published_for_other_tokens():
    index = PrefixIndex(2)
    published(index)
    index.withdraw(index.entry(10))
    published(index, tokens=[5, 5], blocks=(10,))
    assert hits(index, [5, 5]) == [10]
    assert hits(index, TOKENS) == []


def test_a_block_is_published_for_one_beginning_only():
    index = PrefixIndex(2)
    published(index)
    with pytest.raises(InvariantError, match="twice"):
        index.publish(10, [9, 9], 0, "", None)


def test_tokens_of_64_bits_are_told_apart():
    index = PrefixIndex(1)
    published(index, tokens=[1, 2**40 + 1], blocks=(1, 2))
    assert hits(index, [2**32 + 1], limit=1) == []
    assert hits(index, [1, 2**40 + 1], limit=2) == [1, 2]


def test_the_digest_depends_on_key_and_every_part():
    digest = keyed_digest(b"key")
    seen = {
        digest(b"p", "s", b"t"),
        digest(b"", "s", b"t"),
        digest(b"p", "", b"t"),
        digest(b"p", "s", b""),
        digest(b"ps", "", b"t"),
        digest(b"p", "st", b""),
        keyed_digest(b"other")(b"p", "s", b"t"),
        hashlib.blake2b(b"pst", digest_size=16).digest(),
    }
    assert len(seen) == 8
    assert digest(b"p", "s", b"t") == keyed_digest(b"key")(b"p", "s", b"t")


def test_every_index_has_a_key_of_its_own():
    one, other = PrefixIndex(2), PrefixIndex(2)
    assert published(one)[0].digest != published(other)[0].digest
    fixed = [published(PrefixIndex(2, keyed_digest(b"k")))[0].digest for _ in range(2)]
    assert fixed[0] == fixed[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index._by_digest.popitem(),
        lambda index: index._by_block.__setitem__(13, index._by_block.pop(12)),
        lambda index: setattr(index._by_block[11], "digest", b"?"),
        lambda index: setattr(index._by_block[12], "tokens", b"short"),
        lambda index: setattr(index._by_block[12], "salt", "other"),
        lambda index: index._by_block[11].children.clear(),
        lambda index: index._by_digest.pop(index._by_block.pop(10).digest),
    ],
)
def test_check_sees_damage(damage):
    index = PrefixIndex(2)
    published(index)
    damage(index)
    with pytest.raises(InvariantError):
        index.check()
