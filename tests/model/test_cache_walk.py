"""Random walks over the cache's operations with a real decoder, its ledger watching every byte.

After each operation every stored entry is compared with its shadow, and every row of logits with
one that is computed from the shadow alone. With STATEFUL_EXAMPLES=100 there are 100 walks
for each encoding, at random, of 50 steps each: more than 20,000 operations that were not refused.
"""

import os
import random
from collections import Counter
from types import MappingProxyType

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.operations import Operations
from ropewalk.cache.prefix import keyed_digest
from ropewalk.cache.types import Audit, Evict, Fork, Move, NoRoom, Op, Truncate, Unsupported
from ropewalk.model.batch import ForwardBatch
from tests.model.running import new_cache, run_uncached
from tests.model.shadow import Shadow, compute, moved, stored
from tests.model.tiny import CONTEXT, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = int(os.environ.get("STATEFUL_EXAMPLES", "4"))
BLOCK, BLOCKS, NAMES = 4, 26, 4
LAYERS = 2
LONGEST = 40  # tokens of one sequence
VOCABULARY = 61
STEMS = [random.Random(n).choices(range(VOCABULARY), k=LONGEST) for n in range(2)]


class Walk(RuleBasedStateMachine):
    """Up to four sequences over 25 blocks, in float64."""

    encoding = "nope"
    options = MappingProxyType({})
    done: Counter[type]  # operations that were not refused, over all walks

    @initialize()
    def start(self):
        self.exact = 1e-5 if self.encoding.startswith("rope") else 1e-10
        windows = (None,) * LAYERS
        self.decoder = tiny(self.encoding, num_layers=LAYERS, windows=windows, options=self.options)
        # Shadows have absolute storage, whatever the cache keeps.
        plain = {name: value for name, value in self.options.items() if name != "storage"}
        self.reader = tiny(self.encoding, num_layers=LAYERS, windows=windows, options=plain)
        self.kv = new_cache(self.decoder, BLOCKS, BLOCK)
        self.kv._keys.fill_(torch.nan)
        self.kv._values.fill_(torch.nan)
        self.manager = CacheManager(BLOCKS, BLOCK, digest=keyed_digest(b"fixed"))
        self.ledger = Ledger(self.kv, Audit.FULL)
        rules = [self.decoder.encoding.for_layer(layer) for layer in range(LAYERS)]
        self.operations = Operations(self.manager, self.kv, rules, self.ledger)
        self.shadows: dict[str, Shadow] = {}
        self.names = iter(range(10**6))

    # ------------------------------------------------------------------------------- operations

    @precondition(lambda self: len(self.shadows) < NAMES)
    @rule(stem=st.integers(0, 1), length=st.integers(1, 24), other=st.integers(0, 60))
    def begin(self, stem, length, other):
        """A beginning that others may share, and one token of its own."""
        tokens = [*STEMS[stem][: length - 1], other]
        name = f"s{next(self.names)}"
        found = self.manager.reserve(name, tokens, length)
        if found is None:
            return
        shadow = self.shadows[name] = Shadow()
        expected = compute(self.reader, shadow, tokens)
        self.forward(name, tokens[found:], expected[found:])

    @precondition(lambda self: self.shadows)
    @rule(which=st.integers(0, 9), count=st.integers(1, 12), seed=st.integers(0, 9))
    def append(self, which, count, seed):
        name, shadow = self.pick(which)
        length = len(shadow.tokens) + count
        if length > LONGEST or shadow.next_position + count > CONTEXT:
            return
        tokens = random.Random(seed).choices(range(VOCABULARY), k=count)
        if self.manager.reserve(name, [*shadow.tokens, *tokens], length) is None:
            return
        expected = compute(self.reader, shadow, tokens)
        self.forward(name, tokens, expected)
        if shadow.plain:
            whole = run_uncached(self.reader, shadow.tokens)[-count:]
            assert float((whole - expected).abs().max()) <= self.exact

    @precondition(lambda self: self.shadows and len(self.shadows) < NAMES)
    @rule(which=st.integers(0, 9), share=st.integers(1, 8))
    def fork(self, which, share):
        name, shadow = self.pick(which)
        length = max(1, len(shadow.tokens) * share // 8)
        child = f"s{next(self.names)}"
        if self.apply(Fork(name, child, length)):
            self.shadows[child] = shadow.part(0, length)

    @precondition(lambda self: self.shadows)
    @rule(which=st.integers(0, 9), share=st.integers(4, 8))
    def truncate(self, which, share):
        name, shadow = self.pick(which)
        length = max(1, len(shadow.tokens) * share // 8)
        if self.apply(Truncate(name, length)):
            self.shadows[name] = shadow.part(0, length)

    @precondition(lambda self: self.shadows)
    @rule(
        which=st.integers(0, 9),
        first=st.integers(0, 5),
        count=st.integers(1, 4),
        close=st.booleans(),
    )
    def evict(self, which, first, count, close):
        name, shadow = self.pick(which)
        full = len(shadow.tokens) // BLOCK
        if not full:
            return
        first %= full
        count = min(count, full - first)
        if count * BLOCK == len(shadow.tokens):
            return
        if self.apply(Evict(name, first, count, renumber=close)):
            kept = shadow.part(0, first * BLOCK)
            later = shadow.part((first + count) * BLOCK, len(shadow.tokens))
            kept.extend(moved(self.reader, later, -count * BLOCK) if close else later)
            kept.plain = False
            self.shadows[name] = kept

    @precondition(lambda self: len(self.shadows) > 1)
    @rule(
        which=st.integers(0, 9),
        onto=st.integers(0, 9),
        first=st.integers(0, 5),
        count=st.integers(1, 4),
    )
    def move(self, which, onto, first, count):
        """A span of one sequence after the last full block of another."""
        (origin, source), (goal, target) = self.pick(which), self.pick(onto)
        full = len(source.tokens) // BLOCK
        ending = len(target.tokens) // BLOCK * BLOCK
        if origin == goal or not full or not ending:
            return
        first %= full
        count = min(count, full - first)
        moving = self.manager.table(origin).blocks[first : first + count]
        if (
            set(moving) & set(self.manager.table(goal).blocks)
            or ending + count * BLOCK > LONGEST
            or target.next_position + count * BLOCK > CONTEXT
            or not self.apply(Truncate(goal, ending))
        ):
            return
        target = self.shadows[goal] = target.part(0, ending)
        if self.apply(Move(origin, first, count, goal)):
            for index in range(first, first + count):
                block = source.part(index * BLOCK, (index + 1) * BLOCK)
                delta = target.next_position - block.positions[0]
                target.extend(moved(self.reader, block, delta))
            target.plain = False

    @precondition(lambda self: self.shadows)
    @rule(which=st.integers(0, 9))
    def release(self, which):
        name, _ = self.pick(which)
        self.manager.release(name)
        del self.shadows[name]

    @precondition(lambda self: self.ledger.sealed)
    @rule(which=st.integers(0, 99), layer=st.integers(0, LAYERS - 1), bit=st.integers(0, 10**6))
    def flip(self, which, layer, bit):
        """One bit of any sealed block, held or not, is found by the next look at it."""
        blocks = sorted(self.ledger.sealed)
        block = blocks[which % len(blocks)]
        parts = [*self.kv.layer(layer)]
        part = parts[bit % len(parts)]
        content = part[block].view(torch.uint8).view(-1)
        byte = bit // 2 % len(content)
        content[byte] ^= 1 << bit % 8
        self.ledger.sample()
        (fault,) = self.ledger.drain().faults
        assert fault.block == block
        assert [place.layer for place in fault.places] == [layer]
        content[byte] ^= 1 << bit % 8
        self.ledger.seal([block])
        self.done[Ledger] += 1

    # ---------------------------------------------------------------------------------- checks

    def pick(self, which):
        names = list(self.shadows)
        return names[which % len(names)], self.shadows[names[which % len(names)]]

    def apply(self, operation):
        """Whether it was done; what it then reports is what the dry run foretold."""
        try:
            foretold = self.operations.dry_run(operation)
        except Unsupported:
            assert operation.op in (Op.EVICT_RENUMBER, Op.MOVE_SPAN)
            assert self.decoder.encoding.WHY_FIXED
            return False
        before = self.snapshot()
        try:
            report = self.operations.apply(operation)
        except NoRoom:
            assert self.snapshot() == before
            return False
        assert report == foretold
        self.done[type(operation)] += 1
        return True

    def snapshot(self):
        tables = {name: self.manager.table(name) for name in self.manager.sequences}
        return {name: (list(table.blocks), list(table.bases)) for name, table in tables.items()}

    def forward(self, name, tokens, expected):
        """Compute tokens through the table of a sequence whose shadow has them already."""
        self.ledger.observe(self.manager.drain_events())
        shadow, table = self.shadows[name], self.manager.table(name)
        length = len(shadow.tokens)
        index = torch.arange(length - len(tokens), length)
        blocks, bases = torch.tensor(table.blocks), torch.tensor(table.bases)
        offsets = index % BLOCK
        logits = self.decoder(
            ForwardBatch(
                tokens=torch.tensor(tokens),
                positions=bases[index // BLOCK] + offsets,
                offsets=offsets,
                slots=blocks[index // BLOCK] * BLOCK + offsets,
                query_starts=torch.tensor([0, len(tokens)]),
                context_lens=torch.tensor([length]),
                block_tables=blocks[None],
                block_bases=bases[None],
                output_rows=torch.arange(len(tokens)),
                max_query=len(tokens),
                max_context=length,
            ),
            self.kv,
        )
        self.manager.commit(name, shadow.tokens, length)
        assert float((logits - expected).abs().max()) <= self.exact

    @invariant()
    def watch(self):
        """Books, checksums, positions and every stored entry."""
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        self.ledger.observe(self.manager.drain_events())
        self.ledger.sample()
        counts = self.ledger.drain()
        assert (counts.mutated, counts.faults) == (0, ())
        assert self.manager.sequences == self.shadows.keys()
        for name, shadow in self.shadows.items():
            table, length = self.manager.table(name), len(shadow.tokens)
            assert self.manager.computed(name) == length
            positions = [base + offset for base in table.bases for offset in range(BLOCK)]
            assert positions[:length] == shadow.positions
            assert set(table.blocks[: length // BLOCK]) <= self.ledger.sealed
            where = torch.tensor(table.blocks)
            parts = [self.kv._keys, self.kv._values]
            if self.kv._gates is not None:
                parts.append(self.kv._gates.transpose(2, 3))
            for part, wanted in zip(parts, stored(self.decoder, shadow, BLOCK), strict=True):
                found = part[:, where].flatten(1, 2)[:, :length]
                assert float((found - wanted).abs().max()) <= self.exact


WALKS = {
    "nope": ("nope", {}),
    "rope": ("rope", {}),
    "rope-raw": ("rope", {"storage": "raw"}),
    "rope-block": ("rope-interleaved", {"storage": "block"}),
    "rope-scaled": ("rope-scaled", {"layers": [1]}),
    "t5": ("t5", {}),
    "alibi": ("alibi", {}),
    "cope": ("cope", {}),
    "forgetting": ("forgetting", {}),
    "learned": ("learned", {}),
    "sinusoidal": ("sinusoidal", {}),
}


# Which walks are drawn at random depends on all modules that are loaded; a usual run has few.
EVERY_OPERATION = (
    ("begin", {"stem": 0, "length": 14, "other": 3}),
    ("begin", {"stem": 1, "length": 10, "other": 5}),
    ("append", {"which": 0, "count": 7, "seed": 1}),
    ("move", {"which": 0, "onto": 1, "first": 1, "count": 2}),
    ("append", {"which": 1, "count": 3, "seed": 2}),
    ("fork", {"which": 0, "share": 7}),
    ("evict", {"which": 0, "first": 1, "count": 2, "close": True}),
    ("evict", {"which": 2, "first": 0, "count": 1, "close": False}),
    ("append", {"which": 2, "count": 5, "seed": 3}),
    ("truncate", {"which": 0, "share": 6}),
    ("append", {"which": 0, "count": 4, "seed": 4}),
    ("flip", {"which": 1, "layer": 1, "bit": 999}),
)


def walk_once(machine):
    """Every operation at least once, on what the others left."""
    walk = machine()
    walk.start()
    for name, arguments in EVERY_OPERATION:
        getattr(walk, name)(**arguments)
        walk.watch()


@pytest.mark.parametrize("walk", WALKS)
def test_every_operation_equals_recomputation(walk):
    encoding, options = WALKS[walk]
    done: Counter[type] = Counter()
    machine = type("Walk", (Walk,), {"encoding": encoding, "options": options, "done": done})
    walk_once(machine)
    fixed = walk in ("learned", "sinusoidal")
    wanted = {Fork, Truncate, Evict, Ledger} if fixed else {Fork, Truncate, Evict, Move, Ledger}
    assert done.keys() == wanted
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=50,
            derandomize="STATEFUL_EXAMPLES" not in os.environ,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
