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


decode, encode = msgspec.msgpack.Decoder(Batch).decode, msgspec.msgpack.encode


class Consumer:
    """A router's index of one server: each block's whole prefix and salt, by hash."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.begun = False

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
        operations += [self.cache.save_ahead, self.move, self.move]
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
        if self.cache.rearranger.fork(name, child, length) is None:
            return False
        self.tokens[child] = self.tokens[name][:length]

    def truncate(self):
        if (name := self.pick()) is None or not self.cache.computed(name):
            return False
        length = self.random.randint(1, self.cache.computed(name))
        if self.cache.rearranger.truncate(name, length) is None:
            return False
        self.tokens[name] = self.tokens[name][:length]

    def evict(self):
        name = self.pick()
        full = 0 if name is None else self.cache.computed(name) // SIZE
        if full < 2:
            return False
        first, count = self.random.randrange(full - 1), 1
        choices = {"renumber": self.random.random() < 0.5, "rewrite": self.random.random() < 0.5}
        if self.cache.rearranger.evict(name, first, count, **choices) is None:
            return False
        del self.tokens[name][first * SIZE : (first + count) * SIZE]

    def move(self):
        source, target = self.pick(), self.pick()
        if None in (source, target) or source == target or not self.cache.computed(source) // SIZE:
            return False
        whole = self.cache.computed(target) // SIZE * SIZE
        if not whole or self.cache.rearranger.truncate(target, whole) is None:
            return False
        self.tokens[target] = self.tokens[target][:whole]
        if self.cache.table(source).blocks[0] in self.cache.table(target).blocks:
            return False
        if (
            self.cache.rearranger.move(source, 0, 1, target, rewrite=self.random.random() < 0.5)
            is None
        ):
            return False
        self.tokens[target] += self.tokens[source][:SIZE]

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
    "operations", [1_500, pytest.param(50_000, marks=(pytest.mark.full, pytest.mark.timeout(900)))]
)
def test_a_consumer_knows_what_the_cache_can_share(slots, operations):
    done: Counter[str] = Counter()
    for seed in range(operations // 500):  # anew now and then, as blocks are quarantined
        walk, told, consumer = Walk(seed, slots), Told(SIZE), Consumer()
        while walk.done.total() < 500:
            walk.step()
            if walk.random.random() < 0.5:
                consumer.take(encode([0.0, told.update(*walk.changes.take()), 0]))
                assert Counter(consumer.known.values()) == shareable(walk.cache)
            if walk.random.random() < 0.02:
                late = Consumer()
                late.take(encode([0.0, told.everything(), 0]))
                assert late.known == consumer.known
        walk.cache.check()
        done += walk.done
    wanted = {"begin", "append", "fork", "truncate", "evict", "move", "release", "flush", "spoil"}
    assert done.keys() >= wanted | ({"park", "resume", "save_ahead"} if slots else set())


class Wire:
    """A publisher for a cache of 40 blocks, and what subscribes to it."""

    def __init__(self, folder, **options) -> None:
        self.pub, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.publisher = Publisher(self.pub, SIZE, replay=self.replay, **options)
        self.cache = CacheManager(41, SIZE, observer=self.publisher.changes)
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket] = []

    def open(self, kind: int, endpoint: str) -> zmq.Socket:
        self.sockets.append(self.context.socket(kind))
        self.sockets[-1].connect(endpoint)
        return self.sockets[-1]

    def subscribed(self) -> zmq.Socket:
        found = self.open(zmq.SUB, self.pub)
        found.subscribe(b"")
        return found

    def request(self, first: int) -> list[list[bytes]]:
        """The answer to a request for the batches from a number on, without its end."""
        client = self.open(zmq.DEALER, self.replay)
        client.send_multipart([b"", number(first)])
        frames = []
        while client.poll(5_000):
            frames.append(client.recv_multipart())
            assert frames[-1][0] == b""
            if frames[-1][2] == number(-1):
                assert frames.pop()[1:] == [b"", number(-1), b""]
                return [each[1:] for each in frames]
        raise AssertionError("the replay has no end")

    def fill(self, name: str, *tokens: int) -> None:
        """Publish a block that begins with these tokens, and have that told."""
        store(self.cache, name, [*tokens, *[0] * (SIZE + 1 - len(tokens))])
        time.sleep(2 * publishing.PAUSE_S)  # a batch of its own

    def close(self) -> None:
        self.publisher.close()
        assert not self.publisher._thread.is_alive()
        self.context.destroy(linger=0)


@pytest.fixture
def wire(tmp_path):
    made = Wire(tmp_path)
    yield made
    made.close()


def number(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


def receive(subscriber, consumer, until) -> list[int]:
    """Take batches until the consumer knows so many blocks; their numbers."""
    numbers = []
    while not consumer.begun or len(consumer.known) != until:
        assert subscriber.poll(5_000), f"knows {len(consumer.known)} blocks, not {until}"
        topic, place, payload = subscriber.recv_multipart()
        assert topic == b""
        numbers.append(int.from_bytes(place, "big"))
        # Changes may come before what a subscriber is told first, which is everything.
        consumer.begun |= isinstance(decode(payload).events[0], Cleared)
        if consumer.begun:
            consumer.take(payload)
    return numbers


@pytest.mark.parametrize("most", [500, 1])
def test_a_subscriber_is_told_everything_and_then_each_change(wire, monkeypatch, most):
    monkeypatch.setattr(publishing, "MOST_EVENTS", most)
    wire.fill("a", 1)
    consumer, subscriber = Consumer(), wire.subscribed()
    receive(subscriber, consumer, 1)
    wire.fill("b", 2)
    wire.fill("c", 3)
    numbers = receive(subscriber, consumer, 3)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert Counter(consumer.known.values()) == shareable(wire.cache)
    late = Consumer()
    receive(wire.subscribed(), late, 3)
    assert late.known == consumer.known
    wire.cache.flush()
    receive(subscriber, consumer, 0)


def test_missed_batches_show_in_the_numbers_and_are_replayed(wire):
    consumer, subscriber = Consumer(), wire.subscribed()
    wire.fill("a", 1)
    (*_, last) = receive(subscriber, consumer, 1)
    for index in range(5):
        wire.fill(f"b{index}", 2, index)
    for _ in range(3):  # lost on the way
        assert subscriber.poll(5_000)
        subscriber.recv_multipart()
    assert subscriber.poll(5_000)
    _, place, payload = subscriber.recv_multipart()
    assert int.from_bytes(place, "big") > last + 1
    for topic, missed, content in wire.request(last + 1):
        assert topic == b""
        if last < int.from_bytes(missed, "big") < int.from_bytes(place, "big"):
            consumer.take(content)
    consumer.take(payload)
    receive(subscriber, consumer, 6)
    assert Counter(consumer.known.values()) == shareable(wire.cache)


@pytest.mark.parametrize("most", [500, 2])
def test_what_is_no_longer_kept_is_replayed_as_everything(wire, monkeypatch, most):
    monkeypatch.setattr(publishing, "KEPT_BATCHES", 2)
    monkeypatch.setattr(publishing, "MOST_EVENTS", most)
    for index in range(6):
        wire.fill(f"a{index}", index)
    for first in range(4):
        batches = wire.request(first)
        assert first <= int.from_bytes(batches[0][1], "big") <= 5
        assert batches[-1][1] == number(5)
        consumer = Consumer()
        for _, _, payload in batches:
            consumer.take(payload)
        assert Counter(consumer.known.values()) == shareable(wire.cache)
    assert [each[1] for each in wire.request(5)] == [number(5)]
    assert wire.request(1 << 40) == []


def test_malformed_requests_get_no_answer_and_harm_nobody(wire):
    wire.fill("a", 1)
    client = wire.open(zmq.DEALER, wire.replay)
    for frames in ([b""], [b"", b"1", b"2"], [b"x" * 1000], [b"", b""], [b"", b"\xff" * 99]):
        client.send_multipart(frames)
    assert len(wire.request(0)) == 1


@pytest.mark.parametrize("kind", ["absent", "stuck"])
def test_consumers_never_delay_the_cache(wire, kind):
    """However much happens, what is kept for others is bounded by the cache's size."""
    stuck = wire.subscribed() if kind == "stuck" else None
    for index in range(3_000):
        store(wire.cache, "a", [index, *range(39)])
        wire.cache.release("a")
        changes = wire.publisher.changes
        assert len(changes._stored) <= 40 and len(changes._removed) <= 40 + 10
    consumer = Consumer()
    receive(wire.subscribed(), consumer, len(shareable(wire.cache)))
    assert Counter(consumer.known.values()) == shareable(wire.cache)
    assert stuck is None or not stuck.closed


def test_hashes_are_the_same_in_every_process_and_tell_tenants_apart():
    hashes = []
    for salt in ("", "", "t"):
        changes = Changes()
        cache = CacheManager(9, SIZE, observer=changes)
        store(cache, "a", range(9), salt=salt)
        (event,) = Told(SIZE).update(*changes.take())
        hashes.append(event["block_hashes"])
    assert hashes[0] == hashes[1] == [88996838559875080, 3873743495497411240]
    assert not set(hashes[0]) & set(hashes[2])


@pytest.mark.parametrize(
    "endpoint, own",
    {
        "tcp://*:1": True,
        "tcp://0.0.0.0:1": True,
        "tcp://[::]:1": True,
        "tcp://127.0.0.1:1": True,
        "ipc:///tmp/x": True,
        "tcp://10.0.0.7:1": False,
        "tcp://router:1": False,
    }.items(),
)
def test_a_server_waits_at_its_own_addresses_and_calls_others(endpoint, own):
    assert publishing._is_own(endpoint) is own


def test_a_taken_address_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CommandError, match="Address already in use"):
            Publisher(endpoint, SIZE)


def test_a_model_tells_of_its_prompts_and_answers(tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    options = {"kv_memory": "1M", "block_size": SIZE, "kv_events": endpoint}
    context, consumer = zmq.Context(), Consumer()
    with ropewalk.load("ropewalk-rope", **options) as model, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(endpoint)
        answer = model.generate(list(range(5, 15)), max_tokens=8, temperature=0)
        receive(subscriber, consumer, (10 + len(answer.tokens) - 1) // SIZE)
    told = max(tokens for _, tokens in consumer.known.values())
    whole = (*range(5, 15), *answer.tokens)
    assert told == whole[: len(told)]
    with ropewalk.load("ropewalk-rope", **options):  # the address is free again
        context.destroy(linger=0)
