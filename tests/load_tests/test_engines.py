import pytest
import torch

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.load_tests.micro.engines import decoding
from ropewalk.load_tests.micro.in_process import decoders

STEPS = 4


@pytest.fixture(scope="module")
def decoder():
    words = {"context": 512, "dtype": torch.float32, "device": torch.device("cpu")}
    return decoders("tiny", ("rope",), **words, kernels="not asked for")["rope"]


@pytest.mark.parametrize("ahead", [False, True])
def test_every_request_gets_a_token_in_every_step(ahead, decoder):
    """Also where the prompts are longer together than what one step of a server computes."""
    made = decoding(decoder, 4, 400, STEPS, kernels="not asked for", ahead=ahead)
    lengths = [request.context_length for request in made.scheduler.running]
    assert lengths == [401 - index for index in range(4)]
    for _ in range(STEPS):
        assert made.engine.step().stats.generated_tokens == 4


def test_as_many_fill_a_block_in_every_step(decoder):
    made = decoding(decoder, 2 * BLOCK_SIZE, 64, STEPS, kernels="not asked for")
    sealed = [made.engine.step().stats.sealed_blocks for _ in range(STEPS)]
    assert sealed == [2] * STEPS


def test_prompts_are_not_computed_and_all_else_is(decoder):
    seen = []

    def forward(batch, kv):
        seen.append(batch.max_query)
        return decoder(batch, kv)

    made = decoding(decoder, 2, 20, STEPS, kernels="not asked for", forward=forward)
    assert seen == []
    made.engine.step()
    assert seen == [1]
