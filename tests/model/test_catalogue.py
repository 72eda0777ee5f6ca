"""The list of encodings: what it says is what the classes and backends say."""

import json
import re
from dataclasses import fields, replace
from typing import ClassVar

import pytest
import torch

from ropewalk.cache.types import Capability, KeyStorage, Op
from ropewalk.model import catalogue as module
from ropewalk.model.catalogue import (
    HOOKS,
    LENGTHS,
    SHAPE,
    Place,
    as_json,
    catalogue,
    example,
    facts,
    hooks,
    measured,
    timed_trial,
)
from ropewalk.model.encodings.base import (
    EncodingError,
    LinearBias,
    PairBias,
    PositionalEncoding,
    find,
    names,
)
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.model.kernels.backends import all_backends

PLACE = Place(all_backends("no compiler"), torch.float32, torch.device("cpu"))


class Outside(PositionalEncoding):
    """Lowers every score alike, which softmax ignores.

    Not part of the first line.
    """

    OPTIONS: ClassVar = {"amount": "by how much"}
    LIMIT = "a limit"
    BEYOND_TRAINED = "the same"

    @classmethod
    def create(cls, options, config, context, device):
        if options.get("amount") == -1:
            raise EncodingError("the amount must not be -1.")
        return cls()

    def score_bias(self):
        return LinearBias(torch.zeros(12))

    def work(self, config, context, block_size):
        return PositionalWork(flops=context)


class Unknown(Outside):
    """Does by code of its own what kernels do by data."""

    def embed(self, x, positions):
        return x

    def rotate(self, q, k, positions, offsets):
        return q, k

    def score_bias(self):
        return PairBias(lambda queries, keys: torch.zeros(12, *queries.shape, keys.shape[-1]))


class Difficult(PositionalEncoding):
    @classmethod
    def create(cls, options, config, context, device):
        raise EncodingError("difficult needs an option.")


class Failing(PositionalEncoding):
    @classmethod
    def create(cls, options, config, context, device):
        return cls(options["size"])


OUTSIDE = f"{__name__}:Outside"


def test_every_encoding_of_the_folder_is_listed_once_and_tells_all() -> None:
    entries = catalogue(PLACE)
    assert [entry.name for entry in entries] == names()
    assert {"alibi", "learned", "nope", "rope", "sinusoidal", "t5"} <= set(names())
    for entry in entries:
        assert entry.unbuilt is None
        assert entry.summary.endswith(".")
        assert entry.limit and entry.beyond_trained != PositionalEncoding.BEYOND_TRAINED
        assert list(entry.work) == list(LENGTHS)
        assert all(len(meaning) > 5 for meaning in entry.options.values())


@pytest.mark.parametrize(
    ("name", "used", "bias"),
    [
        ("rope", {"query_scales", "rotate", "rotation", "for_layer"}, None),
        ("alibi", {"score_bias"}, "linear"),
        ("t5", {"score_bias", "for_layer"}, "table"),
        ("learned", {"embed"}, None),
        ("sinusoidal", {"embed"}, None),
        ("cope", {"content_bias", "for_layer"}, None),
        ("forgetting", {"gates", "for_layer"}, None),
        ("nope", set(), None),
    ],
)
def test_hooks_are_those_that_a_class_overrides(name, used, bias) -> None:
    entry = facts(name, PLACE)
    assert set(entry.hooks) == used
    assert entry.bias == bias
    # An encoding that gives its vectors has `embed` add them, and gates likewise.
    through = {"vectors": "embed", "forget_gates": "gates"}
    own = {through.get(each, each) for each in vars(find(name))}
    for hook in HOOKS:
        assert (hook in own) == (hook in used)


def test_what_kernels_know_no_data_for_is_left_to_python() -> None:
    left = {f"{__name__}:Unknown": ("embed", "rotate", "score_bias"), "cope": ("content_bias",)}
    for entry in catalogue(PLACE, [OUTSIDE, f"{__name__}:Unknown"]):
        assert entry.in_python == left.get(entry.name, ())


def test_an_inherited_override_counts() -> None:
    class Below(Outside):
        pass

    assert hooks(Below) == ("score_bias",)


def test_summary_is_the_first_line_and_never_the_base_classes() -> None:
    assert facts(OUTSIDE, PLACE).summary == "Lowers every score alike, which softmax ignores."
    assert facts("nope", PLACE).summary.startswith("No positional encoding")
    assert module.summary(Difficult) == (__doc__ or "").splitlines()[0]


def test_others_are_listed_after_ours_and_once() -> None:
    listed = [entry.name for entry in catalogue(PLACE, ["rope", OUTSIDE, OUTSIDE])]
    assert listed == [*names(), OUTSIDE]


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(EncodingError, match="no encoding 'none'"):
        catalogue(PLACE, ["none"])


def test_backends_answer_for_the_place() -> None:
    asked = []

    class Picky:
        name = "picky"

        def why_not(self, spec):
            asked.append(spec)
            return "it knows no bfloat16" if spec.dtype is torch.bfloat16 else None

        def __call__(self, spec):
            raise AssertionError("the list runs no attention")

    place = Place([Picky(), *PLACE.backends], torch.bfloat16, torch.device("cpu"))
    picky, triton, cpu, *others = facts("alibi", place).backends
    assert (picky.takes, picky.reason) == (False, "it knows no bfloat16")
    assert (triton.backend, triton.takes, triton.reason) == ("triton", False, "the device is cpu")
    assert (cpu.backend, cpu.takes, cpu.reason) == ("cpu", False, "no compiler")
    assert all(support.takes and support.reason is None for support in others)
    assert facts("alibi", replace(place, dtype=torch.float32)).backends[0].takes
    assert [(spec.dtype, spec.num_heads) for spec in asked] == [
        (torch.bfloat16, SHAPE.num_heads),
        (torch.float32, SHAPE.num_heads),
    ]


def test_work_is_what_the_encoding_counts() -> None:
    assert facts(OUTSIDE, PLACE).work == {n: PositionalWork(flops=n) for n in LENGTHS}
    # 12 layers of 12 heads; beyond 113 keys the bias is the same for all.
    assert {work.flops for work in facts("t5", PLACE).work.values()} == {12 * 12 * 113}
    assert facts("alibi", PLACE).work[4096].flops == 2 * 12 * 12 * 4096


def test_what_cannot_be_built_by_itself_is_listed_with_the_reason() -> None:
    entry = catalogue(PLACE, [f"{__name__}:Failing"])[-1]
    said = r"Failing cannot be made \(test_catalogue\.py, line \d+: KeyError: 'size'\); docs/encod"
    assert re.match(said, entry.unbuilt)
    difficult, short = (facts(f"{__name__}:{name}", PLACE) for name in ("Difficult", "Short"))
    assert difficult.unbuilt == "difficult needs an option."
    assert re.match(r"Short fails \(test_catalogue\.py, line \d+: IndexError: ", short.unbuilt)
    for entry in (difficult, short):
        assert (entry.backends, dict(entry.work), entry.bias) == ((), {}, None)
        assert entry.operations == ()
        assert measured(entry, timed_trial(PLACE)) is entry


class Short(PositionalEncoding):
    """Fails where a listing asks for longer contexts than are served."""

    @classmethod
    def create(cls, options, config, context, device):
        return cls()

    def work(self, config, context, block_size):
        return PositionalWork(flops=range(3000)[context])


def test_operations_are_listed_for_every_storage_that_keys_can_have() -> None:
    half = Place([], torch.bfloat16, torch.device("cpu"))
    moves = (Op.EVICT_RENUMBER, Op.MOVE_SPAN)
    found = {(one.key_storage, one.op): one for one in facts("rope", half).operations}
    assert len(found) == len(KeyStorage) * len(Op)
    for (storage, op), ability in found.items():
        turned = storage is KeyStorage.ABSOLUTE and op in moves
        expected = Capability.APPROXIMATE if turned else Capability.FREE
        assert (ability.capability, ability.reason, ability.cost) == (expected, None, None)
    learned = {one.op: one for one in facts("learned", half).operations}
    assert list(learned) == list(Op)
    for op, ability in learned.items():
        assert (ability.capability is Capability.IMPOSSIBLE) == (op in moves)
        assert (ability.reason is not None) == (op in moves)


def test_operations_are_really_run_to_be_measured(monkeypatch) -> None:
    monkeypatch.setattr("ropewalk.model.dry_run.MEASURED", 3)
    small = replace(SHAPE, num_layers=2, num_heads=3, num_kv_heads=3, head_dim=8)
    monkeypatch.setattr(module, "SHAPE", small)
    trial = timed_trial(PLACE)
    timed = {name: measured(facts(name, PLACE), trial) for name in ("rope", "learned")}
    keys = 2 * 3 * 8 * 4 * 1000  # of 1,000 tokens, in bytes
    for entry in timed.values():
        for one in entry.operations:
            if one.capability is Capability.IMPOSSIBLE:
                assert one.cost is None
                continue
            assert one.cost.seconds > 0
            # Turned keys are read and written; a moved span's keys and values are copied before.
            factor = {Op.EVICT_RENUMBER: 2, Op.MOVE_SPAN: 6}.get(one.op, 0)
            rewritten = one.capability is Capability.REWRITE
            assert one.cost.bytes == (factor * keys if rewritten else 0)
    told = as_json(timed["rope"])["operations"]
    assert told[4]["bytes_per_1000_tokens"] == 2 * keys


def test_an_example_has_finite_weights_and_follows_options() -> None:
    t5 = example(find("t5"), SHAPE, 300, {"buckets": 8, "per_layer": True})
    assert len(list(t5.parameters())) == SHAPE.num_layers
    bias = t5.for_layer(3).score_bias()
    assert bias.table.shape[0] == SHAPE.num_heads and bias.table.isfinite().all()
    assert bias.table[:, :4].std() > 0
    again = example(find("t5"), SHAPE, 300, {"buckets": 8, "per_layer": True})
    assert torch.equal(again.for_layer(3).score_bias().table, bias.table)


def test_json_holds_every_fact() -> None:
    entry = facts("t5", PLACE)
    told = json.loads(json.dumps(as_json(entry)))
    assert set(told) == {field.name for field in fields(entry)}
    assert told["work"][1] == {
        "keys": 4096,
        "rotations": 0,
        "bias_values": 16272,
        "bias_built": 0,
        "flops": 16272,
        "bytes": 5424,
        "bias_bytes": 5424,
    }
    assert told["operations"][4] == {
        "key_storage": "raw",
        "operation": "evict_renumber",
        "capability": "free",
        "reason": None,
    }
    assert told["backends"][1] == {"backend": "cpu", "takes": False, "reason": "no compiler"}
