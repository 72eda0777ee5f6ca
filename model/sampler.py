"""From a row of logits to a token: biases, penalties, truncation, one draw. Never sorts a row.

Order: logit bias, repetition, presence and frequency penalties, forbidden tokens, temperature,
top_k, top_p, min_p. Log-probabilities are the model's own, before all of these.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from model.sampling import SamplingParams

FIRST_CANDIDATES = 64


def changes_logits(params: SamplingParams, generated: int) -> bool:
    """Whether `adjust` would do anything after `generated` tokens."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or (generated < params.min_tokens and params.stop_ids)
    )


def adjust(
    row: Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> Tensor:
    """row [vocab] float32 → the same with bias, penalties and forbidden tokens applied.

    The repetition penalty looks at prompt and answer, the other two at the answer alone. Stop
    tokens are forbidden while the answer is shorter than min_tokens.
    """
    row = row.clone()
    if params.logit_bias:
        row[list(params.logit_bias)] += row.new_tensor(list(params.logit_bias.values()))
    if params.repetition_penalty != 1:
        seen = list({*prompt, *generated})
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if generated and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(generated)
        often = row.new_tensor(list(counts.values()))
        row[list(counts)] -= params.presence_penalty + params.frequency_penalty * often
    if len(generated) < params.min_tokens and params.stop_ids:
        row[list(params.stop_ids)] = -torch.inf
    return row


def draw(row: Tensor, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the truncated distribution of row [vocab]."""
    scaled = row.double() / params.temperature
    if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
        return _pick(torch.softmax(scaled, dim=-1), uniform)
    values, tokens = _candidates(scaled, params)
    weights = torch.exp(values - values[0])
    if params.top_k == 0:
        # What stands outside the candidates counts towards the total that top_p cuts.
        total = torch.exp(torch.logsumexp(scaled, dim=-1) - values[0])
    else:
        total = weights.sum()
    before = weights.cumsum(dim=-1) - weights
    keep = before < params.top_p * total
    keep &= weights >= params.min_p * weights[0]
    keep[0] = True
    return int(tokens[_pick(weights[keep], uniform)])


def _candidates(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Enough of the most likely tokens to hold every one that truncation keeps, best first."""
    vocab = scaled.shape[-1]
    if params.top_k:
        return scaled.topk(min(params.top_k, vocab))
    log_total = torch.logsumexp(scaled, dim=-1)
    count = min(FIRST_CANDIDATES, vocab)
    while True:
        values, tokens = scaled.topk(count)
        mass = torch.exp(values - log_total).sum()
        too_unlikely = torch.exp(values[-1] - values[0]) < params.min_p
        if count == vocab or mass >= params.top_p or too_unlikely:
            return values, tokens
        count = min(count * 8, vocab)


def _pick(weights: Tensor, uniform: float) -> int:
    edges = weights.cumsum(dim=-1)
    index = int(torch.searchsorted(edges, edges[-1] * uniform, right=True))
    return min(index, len(weights) - 1)


def top_logprobs(row: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely tokens of a row of log-probabilities, best first."""
    values, tokens = row.topk(count)
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))


class Sampler:
    """What tokens are picked with, on any device. Faster on a CPU: model/kernels/sampler.py."""

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row of logits [S, vocab]: the largest [S], NaN if one is, and its token [S]."""
        values, tokens = rows.max(dim=-1)
        return values, tokens

    def draw(self, row: Tensor, params: SamplingParams, uniform: float) -> int:
        """As `draw` does."""
        return draw(row, params, uniform)
