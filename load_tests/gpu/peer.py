"""`transformers` on the same shape, device and work, in its fastest ways.

One stream is a decoder's pass with a static cache, compiled on a GPU; many are the steps of its
continuous batching, with scheduling and sampling, in wall time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from ropewalk.load_tests.gpu.parts import (
    NO_TIME,
    STEPS,
    Budget,
    Cell,
    Found,
    LeftOut,
    Setting,
    figure,
    sampled,
)
from ropewalk.model.config import ModelConfig

PEER = "transformers"
MISSING = f"{PEER} is not installed; pip install {PEER} brings it"
WARM = 3  # calls until a compiled pass is a recorded CUDA graph
STEP_TOKENS = 8192  # of prompts in one step of continuous batching: its default
PAGE = 256  # tokens of a page of its cache: its default


def missing() -> bool:
    return find_spec(PEER) is None


def model_of(config: ModelConfig, setting: Setting) -> Any:
    """A Llama of that shape with random weights."""
    library = import_module(PEER)
    described = library.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    with setting.device:
        model = library.LlamaForCausalLM(described)
    return model.to(setting.dtype).eval()


def passes_of(
    shape: str, model: Any, cells: Sequence[Cell], setting: Setting, budget: Budget
) -> Iterator[Found]:
    """One stream's pass at each context, compiled separately for each."""
    for cell in sorted({Cell(1, cell.context) for cell in cells}, key=lambda cell: cell.context):
        if budget.over:
            yield LeftOut("pass", PEER, shape, cell, NO_TIME)
            continue
        with torch.no_grad():
            call = _one_stream(model, cell.context, setting)
            for _ in range(WARM):
                call()
            samples = sampled(call, setting, budget)
        how = "static cache, compiled" if setting.device.type == "cuda" else "static cache"
        yield figure("pass", PEER, shape, cell, samples, how=how)


def prefill_of(
    shape: str, model: Any, tokens: int, setting: Setting, budget: Budget
) -> Iterator[Found]:
    """The pass over one whole prompt, not compiled, since real prompts differ in length."""
    prompt = torch.zeros(1, tokens, dtype=torch.int64, device=setting.device)
    with torch.no_grad():
        call = partial(model, prompt, use_cache=True, logits_to_keep=1)
        samples = sampled(call, setting, budget)
    yield figure("prefill", PEER, shape, Cell(1, tokens), samples)


def steps_of(
    shape: str, model: Any, cells: Sequence[Cell], setting: Setting, budget: Budget
) -> Iterator[Found]:
    """The step in each cell while all its requests decode."""
    for cell in sorted(cells, key=lambda cell: cell.tokens):
        if budget.over:
            yield LeftOut("step", PEER, shape, cell, NO_TIME)
            continue
        try:
            times, attention = _continuous(model, cell, budget)
        except torch.AcceleratorError:  # the device is lost
            raise
        except (RuntimeError, MemoryError, ValueError) as error:  # ValueError: it refuses the sizes
            yield LeftOut("step", PEER, shape, cell, str(error).partition("\n")[0])
            continue
        if len(times) < cell.batch:
            yield LeftOut("step", PEER, shape, cell, NO_TIME if budget.over else "it stopped")
        elif taken := steady_steps(times):
            how = f"continuous batching, {attention}"
            yield figure("step", PEER, shape, cell, taken, how=how)
        else:
            yield LeftOut("step", PEER, shape, cell, "its requests did not decode side by side")


def steady_steps(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds from step to step while all decode: from the last request's start to the first end.

    `times` has the times of each request's tokens. Every request gets one token in each such step.
    """
    ended = min(each[-1] for each in times)
    last = max(times, key=lambda each: each[0])
    return [later - at for at, later in pairwise(at for at in last if at <= ended)]


def _one_stream(model: Any, context: int, setting: Setting) -> Callable[[], object]:
    """A call that computes the next token after `context` - 1 others; each call adds one."""
    library = import_module(PEER)
    calls = WARM + 1 + setting.rounds
    cache = library.StaticCache(config=model.config, max_cache_len=context + calls)
    prompt = torch.zeros(1, context - 1, dtype=torch.int64, device=setting.device)
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = torch.zeros(1, 1, dtype=torch.int64, device=setting.device)
    forward = model
    if setting.device.type == "cuda":
        torch.compiler.reset()  # else a second length would compile it for any length
        forward = torch.compile(model, mode="reduce-overhead")  # as its `generate` does
    return partial(forward, token, past_key_values=cache, use_cache=True)


def _continuous(model: Any, cell: Cell, budget: Budget) -> tuple[list[Sequence[float]], str]:
    """Token times of each request that ended within the budget, and the attention's name."""
    library = import_module(PEER)
    new_tokens = -(-cell.tokens // STEP_TOKENS) + STEPS  # the first decode while others wait
    pages = cell.batch * -(-(cell.context + new_tokens) // PAGE)
    settings = library.ContinuousBatchingConfig(
        num_blocks=pages + pages // 4 + 8,  # it keeps a share free
        max_batch_tokens=max(min(STEP_TOKENS, cell.tokens), cell.batch),
    )
    greedy = library.GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1)
    draw = random.Random(0)
    words = range(model.config.vocab_size)
    prompts = [draw.choices(words, k=cell.context) for _ in range(cell.batch)]
    times: list[Sequence[float]] = []
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=settings
    ) as manager:
        names = manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True)
        try:
            while len(times) < cell.batch and not budget.over and manager.is_running():
                answer = manager.get_result(timeout=1)
                if answer is None or not answer.is_finished():
                    continue
                if answer.error is not None:
                    raise RuntimeError(answer.error)
                times.append(answer.timestamps)
        finally:  # otherwise leaving the context would wait for all requests
            for name in names if len(times) < cell.batch else ():
                manager.cancel_request(name)
        return times, model.config._attn_implementation
