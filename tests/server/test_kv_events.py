"""KV events: what a consumer makes of them is what the cache can share, whatever happens to it."""

import random
import socket
import time
from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq

import ropewalk
from ropewalk.cache.manager import CacheManager
from ropewalk.server.errors import CommandError
from ropewalk.server.events import publisher as publishing
from ropewalk.server.events.changes import Changes
from ropewalk.server.events.publisher import Publisher
from ropewalk.server.events.wire import Told
from tests.cache.bookkeeping import store
from tests.cache.test_parking import Paper

SIZE = 4  # tokens of a block


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As vLLM's consumers declare it, but that unknown fields are refused."""

    ts: float
    events: list["Stored | Removed | Cleared"]
    data_parallel_rank: int | None = None


class Stored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


decode = msgspec.msgpack.Decoder(Batch).decode


class Consumer:
    """A router's index of one server: each block's whole prefix and salt, by hash."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, tuple[int, ...]]] = {}

    def take(self, payload: bytes) -> None:
        batch = decode(payload)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, Cleared):
                self.known.clear()
            elif isinstance(event, Removed):
                for number in event.block_hashes:
                    del self.known[number]
            else:
                self.store(event)

    def store(self, event: Stored) -> None:
        assert event.block_size == SIZE
        assert len(event.token_ids) == SIZE * len(event.block_hashes)
        salt, tokens = "", ()
        if event.parent_block_hash is not None:
            salt, tokens = self.known[event.parent_block_hash]
        elif event.extra_keys is not None:
            assert len(event.extra_keys) == len(event.block_hashes)
            ((salt,),) = filter(None, event.extra_keys)
        for index, number in enumerate(event.block_hashes):
            tokens += tuple(event.token_ids[index * SIZE : (index + 1) * SIZE])
            self.known[number] = (salt, tokens)


def shareable(cache: CacheManager) -> Counter:
    """The prefixes of whole blocks that a new sequence would be given, each with its salt."""
    found: Counter = Counter()
    for entry in cache._index.entries:
        tokens, link = [], entry
        while link is not None:
            tokens[:0] = memoryview(link.tokens).cast("q").tolist()
            link = link.parent
        found[entry.salt, tuple(tokens)] += 1
        assert len(cache._index.match(entry.salt, tokens, 1 << 20)) * SIZE == len(tokens)
    return found


class Walk:
    """Random operations on a cache of 24 blocks, in which sequences often begin alike."""

    def __init__(self, seed: int, slots: int) -> None:
        self.random = random.Random(seed)
        self.changes = Changes()
        place = Paper(slots, at_once=3, spoilt={2}) if slots else None
        self.cache = CacheManager(25, SIZE, place=place, observer=self.changes)
        self.tokens: dict[str, list[int]] = {}  # of those that hold blocks and those parked
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        self.cache.begin_step(alone=self.random.random() < 0.2)
        operations = [self.begin, self.begin, self.append, self.append, self.fork, self.truncate]
        operations += [self.evict, self.move, self.release, self.release, self.park, self.resume]
        operations += [self.cache.save_ahead] * 2
        if self.random.random() < 0.02:
            operations = [self.flush, self.spoil]
        operation = self.random.choice(operations)
        if operation() is not False:
            self.done[operation.__name__] += 1
        self.cache.drain_events()

    def pick(self) -> str | None:
        return self.random.choice([*self.cache.sequences, None])

    def begin(self):
        shared = [self.random.randrange(2)] * self.random.randrange(1, 24)
        tokens = [*shared, *self.random.choices(range(3), k=self.random.randrange(1, 9))]
        name = f"s{self.done.total()}"
        options = {"salt": self.random.choice(["", "", "a", "b"])}
        options["share"] = self.random.random() < 0.9
        self.cache.fetch(name, tokens, len(tokens), **options)
        if self.cache.reserve(name, tokens, len(tokens), **options) is None:
            return False
        self.tokens[name] = tokens
        self.commit(name)

    def commit(self, name: str) -> None:
        tokens = self.tokens[name]
        least = self.cache.computed(name)
        self.cache.commit(name, tokens, self.random.randint(least, len(tokens)))

    def append(self):
        if (name := self.pick()) is None:
            return False
        tokens = self.tokens[name] + self.random.choices(range(3), k=self.random.randrange(9))
        if not self.cache.grow(name, len(tokens)):
            return False
        self.tokens[name] = tokens
        self.commit(name)

    def fork(self):
        if (name := self.pick()) is None or not self.cache.computed(name):
            return False
        length = self.random.randint(1, self.cache.computed(name))
        child = f"s{self.done.total()}"
        if self.cache.fork(name, child, length) is None:
            return False
        self.tokens[child] = self.tokens[name][:length]

    def truncate(self):
        if (name := self.pick()) is None or not self.cache.computed(name):
            return False
        length = self.random.randint(1, self.cache.computed(name))
        if self.cache.truncate(name, length) is None:
            return False
        self.tokens[name] = self.tokens[name][:length]

    def evict(self):
        name = self.pick()
        full = 0 if name is None else self.cache.computed(name) // SIZE
        if full < 2:
            return False
        first, count = self.random.randrange(full - 1), 1
        choices = {"renumber": self.random.random() < 0.5, "rewrite": self.random.random() < 0.5}
        if self.cache.evict(name, first, count, **choices) is None:
            return False
        del self.tokens[name][first * SIZE : (first + count) * SIZE]

    def move(self):
        source, target = self.pick(), self.pick()
        if None in (source, target) or source == target or not self.cache.computed(source) // SIZE:
            return False
        goal = self.cache.table(target).blocks
        moved = self.cache.table(source).blocks[0]
        if self.cache.computed(target) != len(goal) * SIZE or moved in goal:
            return False
        if self.cache.move(source, 0, 1, target, rewrite=self.random.random() < 0.5) is None:
            return False
        whole = self.tokens[target][: self.cache.computed(target) - SIZE]
        self.tokens[target] = whole + self.tokens[source][:SIZE]

    def release(self):
        if (name := self.pick()) is None:
            return False
        self.cache.release(name, forget=self.random.random() < 0.1)
        del self.tokens[name]

    def park(self):
        if (name := self.pick()) is None:
            return False
        self.cache.park(name)
        if name not in self.cache.parked:
            del self.tokens[name]

    def resume(self):
        if not self.cache.parked:
            return False
        name = self.random.choice(sorted(self.cache.parked))
        tokens = self.tokens[name]
        if self.random.random() < 0.2:
            self.cache.forget(name)
            del self.tokens[name]
        elif self.cache.fetch(name, tokens, len(tokens)):
            self.cache.reserve(name, tokens, len(tokens))

    def flush(self):
        self.cache.flush()

    def spoil(self):
        """Quarantine a block, of which few may go in one walk."""
        if self.done["spoil"] > 3:
            return False
        self.cache.quarantine(self.random.randrange(1, 25))


@pytest.mark.parametrize("slots", [0, 20])
@pytest.mark.parametrize(
    "steps", [1_500, pytest.param(50_000, marks=(pytest.mark.full, pytest.mark.timeout(900)))]
)
def test_a_consumer_knows_what_the_cache_can_share(slots, steps):
    done: Counter[str] = Counter()
    for seed in range(steps // 500):  # anew now and then, as blocks are quarantined
        walk, told, consumer = Walk(seed, slots), Told(SIZE), Consumer()
        for _ in range(500):
            walk.step()
            if walk.random.random() < 0.5:
                events = told.update(*walk.changes.take())
                consumer.take(msgspec.msgpack.encode([0.0, events, 0]))
                assert Counter(consumer.known.values()) == shareable(walk.cache)
            if walk.random.random() < 0.02:
                late = Consumer()
                late.take(msgspec.msgpack.encode([0.0, told.everything(), 0]))
                assert late.known == consumer.known
        walk.cache.check()
        done += walk.done
    print(done)
    wanted = {"begin", "append", "fork", "truncate", "evict", "move", "release", "flush", "spoil"}
    assert done.keys() >= wanted | ({"park", "resume", "save_ahead"} if slots else set())
