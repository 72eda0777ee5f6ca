"""The audit: appending changes nothing, frequencies that follow the length do, and it notices."""

import random

import pytest
import torch

from ropewalk.cache.kv import KVCache
from ropewalk.model.batch import in_order, of_one
from ropewalk.model.encodings.base import EncodingError, names
from ropewalk.model.inspect import audit_arms, path
from ropewalk.model.inspect.audit import Arm, Audit, Entry, Touched, Watch, audit, entries
from ropewalk.model.layers.executor import Pass
from ropewalk.model.program import Attend, Forget, Place, Rotate, Store
from tests.model.tiny import CONFIG, CPU, ENCODINGS, program_of, tiny

STEPS = 4
LAYERS, KV_HEADS, HEADS = 2, 2, 4  # of audit_arms.tiny
PROMPT = random.Random(3).choices(range(CONFIG.vocab_size), k=20)


pytestmark = pytest.mark.usefixtures("one_thread")


def ran(name: str, prompt: int = 20, steps: int = STEPS, trained: int = 22) -> Audit:
    """An arm of the audit's own tiny decoder."""
    drawn = random.Random(3)
    decoder = audit_arms.tiny(prompt + steps)
    tokens = [drawn.randrange(decoder.config.vocab_size) for _ in range(prompt)]
    return audit(audit_arms.arm(name, decoder, prompt + steps, trained), tokens, steps)


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_appending_changes_nothing_and_leaves_nothing_wrong(name) -> None:
    found = audit(Arm(name, "", tiny(name)), PROMPT, STEPS)
    assert [step.length for step in found.steps] == [20, 21, 22, 23, 24]
    for step in found.steps:
        assert step.changed == step.should_change == step.stale == step.unexpected == ()


def test_every_encoding_is_an_arm() -> None:
    assert set(names()) <= set(audit_arms.ALL)


@pytest.mark.parametrize("name", audit_arms.ALL)
def test_a_step_writes_its_own_tokens_once(name) -> None:
    found = ran(name)
    each = (LAYERS * KV_HEADS, LAYERS * KV_HEADS)
    assert found.steps[0].written == tuple(Touched(position, *each) for position in range(20))
    for step in found.steps[1:]:
        assert step.written == (Touched(step.length - 1, *each),)


def test_following_the_length_leaves_every_earlier_entry_wrong_that_a_turn_has_touched() -> None:
    """All keys but the first, which no angle turns; and values, but those of layer 0."""
    steps = {step.length: step for step in ran("rope:dynamic").steps}
    for length in (20, 21, 22):
        assert steps[length].should_change == steps[length].stale == ()
    for length in (23, 24):
        wrong = tuple(
            Touched(position, LAYERS * KV_HEADS, (LAYERS - 1) * KV_HEADS)
            for position in range(1, length - 1)
        )
        assert steps[length].should_change == steps[length].stale == wrong
        assert steps[length].changed == ()


def test_turning_stored_keys_anew_repairs_those_of_the_first_layer_alone() -> None:
    found = ran("rope:dynamic-rewrite")
    steps = {step.length: step for step in found.steps}
    assert steps[22].changed == () and steps[22].first_term == 21
    for length in (23, 24):
        earlier = range(1, length - 1)
        step, keys = steps[length], LAYERS * KV_HEADS
        deep = (LAYERS - 1) * KV_HEADS
        assert step.changed == tuple(Touched(position, keys, 0) for position in earlier)
        assert step.stale == tuple(Touched(position, deep, deep) for position in earlier)
        assert step.first_term == 0
        assert step.rotations == LAYERS * ((length - 1) * KV_HEADS + HEADS + KV_HEADS)
    assert found.unexpected == 0


def test_under_path_each_token_rewrites_the_keys_of_all_before_it() -> None:
    found = ran("path")
    assert found.unexpected == 0
    for step in found.steps[1:]:
        earlier = tuple(
            Touched(position, LAYERS * KV_HEADS, 0) for position in range(step.length - 1)
        )
        assert step.changed == step.should_change == earlier
        assert step.stale == ()
        assert step.rotations == (step.length - 1) * LAYERS * KV_HEADS


@pytest.mark.parametrize("own", ["cope", "forgetting", "learned", "alibi"])
def test_path_takes_the_place_of_any_encoding(own) -> None:
    made = path.decoder(program_of(tiny(own)))
    kinds = {type(op) for op in made.executor.program.ops}
    assert path.AttendPath in kinds
    assert not kinds & {Attend, Forget, Place, Rotate, Store}
    found = audit(Arm("path", "", made, rewrite=path.count_rewritten), [3, 1, 4, 1, 5], 4)
    assert found.unexpected == 0


def test_path_attends_over_products_of_reflections() -> None:
    """Against the formula, each query over each key by itself (arXiv 2505.16381, section 3)."""
    program = program_of(tiny("nope", windows=(None, 5, None), score_cap=0.3))
    ops = path.decoder(program).executor.program.ops
    op = next(op for op in ops if isinstance(op, path.AttendPath))
    generator = torch.Generator().manual_seed(3)
    count, dim, heads, kv_heads = 9, CONFIG.head_dim, CONFIG.num_heads, CONFIG.num_kv_heads
    sizes = (CONFIG.hidden_size, heads * dim, kv_heads * dim, kv_heads * dim)
    x, q, k, v = (
        torch.randn(count, size, generator=generator, dtype=torch.float64) for size in sizes
    )
    kv = KVCache(CONFIG, blocks=3, block_size=4, dtype=torch.float64, device=CPU)
    parts = []
    for rows in (slice(0, 5), slice(5, 9)):
        new, table = [0] * (rows.stop - rows.start), in_order(3, 4)
        batch = of_one(new, rows.start, table, 4, wanted=1, device=CPU)
        parts += path._attend(op, Pass(batch, kv), *(each[rows] for each in (x, q, k, v)))
    found = torch.cat(parts).view(count, heads, dim)

    def reflection(token, head):
        w = op.directions[head * dim : (head + 1) * dim] @ x[token]
        w = w / w.norm()
        strength = 2 / (1 + torch.exp(-(op.strengths[head] @ x[token])))
        return torch.eye(dim, dtype=torch.float64) - strength * torch.outer(w, w)

    for head in range(heads):
        of_keys = head * kv_heads // heads
        keys, values = (each.view(count, kv_heads, dim)[:, of_keys] for each in (k, v))
        for i in range(count):
            scores = []
            for j in range(i + 1):
                turned = keys[j]
                for token in range(j + 1, i + 1):
                    turned = reflection(token, of_keys) @ turned
                scores.append(q[i].view(heads, dim)[head] @ turned * dim**-0.5)
            weights = (0.3 * (torch.stack(scores) / 0.3).tanh()).softmax(0)
            assert torch.allclose(found[i, head], weights @ values[: i + 1], atol=1e-12)


@pytest.mark.parametrize(
    ("name", "first", "rotations", "bias_values"),
    [
        ("nope", 130, 0, 0),
        ("rope", 129, LAYERS * (HEADS + KV_HEADS), 0),
        ("rope:dynamic", 129, None, None),
        ("path", 0, None, None),
        ("rope:raw", 0, LAYERS * (HEADS + 130 * KV_HEADS), 0),
        ("rope:block", 129, LAYERS * (9 * HEADS + KV_HEADS), 0),  # 130 tokens are in 9 blocks
        ("learned", 129, None, None),
        ("sinusoidal", 129, None, None),
        ("t5", 130 - 113, 0, LAYERS * HEADS * 113),
        ("t5:table", 0, None, None),
        ("t5:materialised", 0, 0, LAYERS * HEADS * 130),
        ("alibi", 0, 0, LAYERS * HEADS * 130),
    ],
)
def test_which_positions_get_a_term_when_a_token_is_appended_and_what_work_that_is(
    name, first, rotations, bias_values
) -> None:
    prompt, last = ran(name, prompt=129, steps=1, trained=500).steps
    assert last.first_term == first
    assert prompt.first_term == (129 if name == "nope" else 0)
    if rotations is not None:
        assert (last.rotations, last.bias_values) == (rotations, bias_values)


def test_the_prompts_work_is_that_of_each_of_its_tokens() -> None:
    assert ran("alibi").steps[0].bias_values == LAYERS * HEADS * sum(range(1, 21))
    assert ran("rope").steps[0].rotations == 20 * LAYERS * (HEADS + KV_HEADS)


@pytest.mark.parametrize("side", [0, 1])
def test_a_flipped_bit_is_named(side) -> None:
    watch = Watch(Arm("rope", "", tiny("rope")), 24)
    watch.step(PROMPT)
    stored = watch.kv.layer(1).parts[side][0]
    bits = stored.view(torch.uint8)[1, 1, 0]  # block 1, offset 1: position 17
    bits[3] ^= 1  # far below the tolerance
    step = watch.step([5])
    kind = ("key", "value")[side]
    assert step.unexpected == (Entry(kind, 1, 0, 17),)
    assert [touched.position for touched in step.changed] == [17]
    assert step.should_change == ()
    assert watch.step([6]).changed == ()  # said once, when it happened


def test_an_entry_that_was_stored_wrong_should_change() -> None:
    watch = Watch(Arm("rope", "", tiny("rope")), 24)
    watch.step(PROMPT)
    watch.kv.layer(2).values[0, 3, 1] += 1
    watch.step([5])
    assert watch.step([6]).stale == (Touched(3, 0, 1),)


def test_a_write_outside_of_the_new_slots_is_seen() -> None:
    watch = Watch(Arm("nope", "", tiny("nope")), 24)
    watch.step(PROMPT)
    watch.kv.layer(0).keys[1, 7, 0] = 0.0  # position 23, of which nothing is known yet
    assert Touched(23, 1, 0) in watch.step([5]).written


def test_tokens_are_the_likeliest() -> None:
    decoder = tiny("rope")
    watch = Watch(Arm("rope", "", decoder), 24)
    watch.step(PROMPT)
    first = watch.likeliest
    watch.step([first])
    alone = Watch(Arm("rope", "", decoder), 24)
    alone.step([*PROMPT, first])
    assert alone.likeliest == watch.likeliest


def test_arms_share_the_decoders_weights() -> None:
    program = audit_arms.tiny(24)
    made = audit_arms.arm("t5", program, 24, 12).decoder
    assert program_of(made).weights["embed.weight"] is program.weights["embed.weight"]


def test_a_run_past_the_trained_positions_is_refused() -> None:
    decoder = tiny("learned")
    with pytest.raises(EncodingError, match="learned has positions for only 256 tokens"):
        audit_arms.arm("learned", program_of(decoder), 257, 128)


def test_the_models_own_encoding_keeps_its_weights_and_settings() -> None:
    decoder = tiny("t5")
    made = audit_arms.arm("t5:table", program_of(decoder), 24, 12)
    (weight,) = made.decoder.encoding.parameters()
    (own,) = decoder.encoding.parameters()
    assert made.note == "" and torch.equal(weight, own)
    drawn = audit_arms.arm("t5", program_of(tiny("rope")), 24, 12)
    assert drawn.note == "the encoding's weights are random"
    slowed = audit_arms.arm("rope", program_of(tiny("rope-slowed")), 24, 12).decoder.encoding
    assert torch.equal(slowed.frequencies, tiny("rope-slowed").encoding.frequencies)


def test_every_storage_of_a_model_that_rotates_far_keys_otherwise() -> None:
    program = program_of(tiny("rope-far"))
    for name, far in (
        ("rope", True),
        ("rope:raw", True),
        ("rope:block", False),
        (audit_arms.DYNAMIC, False),
    ):
        rotation = audit_arms.arm(name, program, 24, 12).decoder.encoding.rotation()
        assert (rotation is not None and rotation.far is not None) == far


def test_entries_counts_keys_and_values() -> None:
    assert entries((Touched(3, 2, 1), Touched(5, 4, 0))) == 7
