"""A model's first steps: what they leave alone, and how long they are allowed to take."""

from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ropewalk.model.attention.base import AttentionSpec
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.sampler import Sampler
from ropewalk.server.engine import warm_up
from ropewalk.server.errors import CommandError
from tests.model import encoder_decoders
from tests.model.checkpoints import save
from tests.model.running import CPU, new_cache
from tests.model.tiny import CONFIG, parameters_of, tiny


@pytest.mark.parametrize(
    ("lasting", "runs", "said"),
    [
        ([9e-2, 3e-2, 1e-2, 2e-2], 4, 2e-2),  # the first, which sets things up, does not count
        ([0.3, 0.1, 0.2], 3, 0.15),
        ([0.6], 1, 0.6),
    ],
)
def test_runs_are_few_where_they_take_long(monkeypatch, lasting, runs, said) -> None:
    """A clock that only runs while something does."""
    ends = [sum(lasting[: n + 1]) for n in range(len(lasting))]
    clock = iter(list(chain.from_iterable(zip([0.0, *ends], ends, strict=False))))
    monkeypatch.setattr(warm_up.time, "perf_counter", lambda: next(clock))
    done = []
    assert warm_up._seconds(lambda: done.append(1), CPU) == pytest.approx(said)
    assert len(done) == runs


def test_only_the_reserved_block_is_written() -> None:
    decoder = tiny(dtype=torch.float32)
    kv = new_cache(decoder, 4)
    for part in kv.whole:
        part.fill_(torch.nan)
    speed = warm_up.warm_up(decoder, Sampler(), kv, CONFIG, 256, "m")
    for part in kv.whole:
        assert part[:, 0].isfinite().all()
        assert part[:, 1:].isnan().all()
    assert min(speed.turn, speed.copy, speed.compute) > 0


def test_a_context_may_be_shorter_than_a_block() -> None:
    decoder = tiny("learned", dtype=torch.float32, options={"positions": 5, "offset": 0})
    warm_up.warm_up(decoder, Sampler(), new_cache(decoder, 2), CONFIG, 5, "m")


class Counting(SdpaAttention):
    """Remembers how many rows each kind of attention had."""

    rows: ClassVar[dict[AttentionSpec, set[int]]] = {}

    def __call__(self, q: Tensor, *others: Any) -> Tensor:
        self.rows.setdefault(self.spec, set()).add(len(q))
        return super().__call__(q, *others)


def test_a_token_by_itself_is_computed_too(tmp_path: Path) -> None:
    """By an encoder too, whose steps are not recorded."""
    model = encoder_decoders.random_model(encoder_decoders.t5())
    checkpoint = open_checkpoint(save(model, tmp_path))
    loaded = encoder_decoders.loaded(checkpoint, backend=Counting)
    for decoder, kinds in ((tiny("rope", Counting, torch.float32), 1), (loaded, 3)):
        Counting.rows.clear()
        warm_up.warm_up(decoder, Sampler(), new_cache(decoder, 4), decoder.config, 256, "m")
        assert list(Counting.rows.values()) == [{1, 16}] * kinds


def test_numbers_that_are_not_finite_are_refused() -> None:
    decoder = tiny(dtype=torch.float32)
    parameters_of(decoder)["head.weight"].fill_(torch.inf)
    with pytest.raises(CommandError, match="m computes logits that are not finite"):
        warm_up.warm_up(decoder, Sampler(), new_cache(decoder, 2), CONFIG, 256, "m")


def test_a_first_pass_that_fails_says_why_in_one_sentence() -> None:
    decoder = tiny(dtype=torch.float32)

    def fails(*given: object) -> None:
        raise RuntimeError("out of memory\nand a long report")

    decoder.executor = fails
    with pytest.raises(
        CommandError, match=r"m: the first forward pass failed \(RuntimeError: out of"
    ) as said:
        warm_up.warm_up(decoder, Sampler(), new_cache(decoder, 2), CONFIG, 256, "m")
    assert "long report" not in str(said.value)
