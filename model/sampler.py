"""From rows of logits to tokens: biases, penalties, truncation, one draw.

Order: logit bias, repetition, presence and frequency penalties, forbidden tokens and those that a
grammar does not allow, temperature, top_k, top_p, min_p. Log-probabilities are the model's own,
before all of these.

On a device, all rows are processed together, and no result is read until all work is queued: one
copy brings everything back. Meanwhile the tokens can already be used on the device. A row's
result does not depend on other rows, except for how a GPU breaks ties between equal logits.

A row is sorted only by `begin` in torch; a GPU's kernel and `pick` find what they need otherwise.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor

from ropewalk.cache.kv import sent, tensor_on
from ropewalk.model.kernels.cpu.bindings import SUFFIXES, Kernels
from ropewalk.model.sampling import Ask, Picked

FIRST_CANDIDATES = 64
SCORED_AT_ONCE = 512  # rows of a prompt; each takes room for its vocabulary, twice, in float32
WIDER = 8  # factor on candidates when those did not hold all that top_p and min_p keep

K = TypeVar("K", bound=Hashable)
Drawn = tuple[Tensor, Tensor]  # tokens [S], and whether the candidates sufficed [S]


class Sampler:
    """Picks tokens on any device; `KernelSampler` is faster on a CPU."""

    def pick(
        self, rows: Tensor, asks: Sequence[Ask], candidates: int = FIRST_CANDIDATES
    ) -> list[Picked]:
        """One token for each row of logits [S, vocab].

        `candidates`: how many of the most likely tokens are tried first where top_p or min_p
        truncates; more are tried where these do not suffice.
        """
        picked, held = self.begin(rows, asks, candidates=candidates).read()
        short = [i for i, holds in enumerate(held) if picked[i].finite and not holds]
        if short:
            again = [asks[i] for i in short]
            more = self.pick(taken(rows, short), again, candidates * WIDER)
            for i, each in zip(short, more, strict=True):
                picked[i] = each
        return picked

    def scores(self, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
        """As `token_scores`."""
        return token_scores(rows, tokens, count)

    def scores_of(
        self, rows: Tensor, tokens: Tensor, asks: Sequence[Ask]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """For each number of log-probabilities requested: the rows that want it, their `scores`."""
        for count, members in _grouped(asks, lambda ask: ask.params.logprobs):
            if count is not None:
                yield members, self.scores(taken(rows, members), taken(tokens, members), count)

    def begin(
        self,
        rows: Tensor,
        asks: Sequence[Ask],
        coming: Tensor | None = None,
        candidates: int | None = None,
    ) -> "Picking":
        """Like `pick`, without waiting.

        coming: as for `adjusted`. candidates: None for as many as may be needed.
        """
        largest, tokens = self.largest(rows)
        enough = None
        drawing = [i for i, ask in enumerate(asks) if not ask.takes_largest]
        if drawing:
            asked = [asks[i] for i in drawing]
            before = None if coming is None else taken(coming, drawing)
            wide = self.allow(adjusted(taken(rows, drawing), asked, before), asked)
            parts = [(drawing, self.draw(wide, asked, candidates))]
            others = [i for i, ask in enumerate(asks) if ask.takes_largest]
            if others:
                known = taken(tokens, others)
                parts.append((others, (known, torch.ones_like(known, dtype=torch.bool))))
            tokens, enough = _joined(parts)
        scores = list(self.scores_of(rows, tokens, asks))
        return Picking(largest, tokens, enough, scores)

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """For each row of logits [S, vocab]: its maximum [S], NaN if it has one, and token [S]."""
        values, tokens = rows.max(dim=-1)
        return values, tokens

    def allow(self, rows: Tensor, asks: Sequence[Ask]) -> Tensor:
        """Rows [S, vocab] with the logits of tokens that are not `allowed` at -inf."""
        masks = masks_of(asks, rows.shape[-1])
        if masks is None:
            return rows
        bits = 1 << torch.arange(8, dtype=torch.uint8, device=rows.device)
        found = (sent(masks, rows.device)[:, :, None] & bits).flatten(1)
        return rows.masked_fill(found[:, : rows.shape[-1]] == 0, -torch.inf)

    def draw(self, rows: Tensor, asks: Sequence[Ask], candidates: int | None) -> Drawn:
        """Tokens of adjusted rows [S, vocab], and whether the candidates sufficed [S]."""
        parts = []
        for (top_k, truncated), members in _grouped(asks, _truncation):
            some, rule = taken(rows, members), Rule.of([asks[i] for i in members], rows.device)
            if truncated:
                parts.append((members, self.among_best(some, rule, top_k, candidates)))
            else:
                parts.append((members, _among_all(some, rule)))
        return _joined(parts)

    def among_best(self, rows: Tensor, rule: "Rule", top_k: int, candidates: int | None) -> Drawn:
        """`draw`, for rows truncated by `top_k`, or by top_p and min_p alone where that is 0."""
        vocab = rows.shape[-1]
        return among_best(rows, rule, min(top_k or candidates or vocab, vocab), top_k > 0)


class KernelSampler(Sampler):
    """Picks tokens with the CPU kernels; what it picks differs only by rounding."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def pick(
        self, rows: Tensor, asks: Sequence[Ask], candidates: int = FIRST_CANDIDATES
    ) -> list[Picked]:
        """Like Sampler.pick, but moves to Python numbers as early as possible.

        Once a step's weights have passed through the processor's caches, a torch operation on a few
        numbers takes longer than a kernel on a whole row. Candidates always suffice.
        """
        if rows.dtype not in SUFFIXES:
            return super().pick(rows, asks, candidates)
        largest, tokens = self._kernels.largest(rows)
        drawing = [i for i, ask in enumerate(asks) if not _takes(ask, tokens[i])]
        if drawing:
            asked = [asks[i] for i in drawing]
            wide = adjusted(taken(rows, drawing), asked)
            held = [at for at, ask in enumerate(asked) if ask.allowed is not None]
            for at, token in zip(held, self._allowed(wide, asked, held), strict=True):
                tokens[drawing[at]] = token
            for at, ask in enumerate(asked):
                if ask.allowed is None:
                    tokens[drawing[at]] = self._drawn(wide[at], ask)
        picked = [
            Picked(token, isfinite(value)) for token, value in zip(tokens, largest, strict=True)
        ]
        if any(ask.params.logprobs is not None for ask in asks):
            for members, scores in self.scores_of(rows, torch.tensor(tokens), asks):
                note(picked, members, scores.tolist())
        return picked

    def scores(self, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
        if rows.dtype not in SUFFIXES:
            return super().scores(rows, tokens, count)
        return self._kernels.scores(rows, tokens, count)

    def _allowed(self, wide: Tensor, asks: Sequence[Ask], held: Sequence[int]) -> list[int]:
        """Tokens for those of the rows that `allowed` restricts."""
        some = [asks[at] for at in held]
        masks = masks_of(some, wide.shape[-1])
        if masks is None:
            return []
        return self._kernels.pick_allowed(wide, held, masks, [_kernel_rule(ask) for ask in some])

    def _drawn(self, row: Tensor, ask: Ask) -> int:
        if ask.params.greedy:
            return int(row.argmax())
        return self._kernels.draw(row, ask.params, ask.uniform)


def _takes(ask: Ask, largest: int) -> bool:
    """Whether the row's largest logit is what is picked: what a grammar allows is most often."""
    if ask.changes_logits or not ask.params.greedy:
        return False
    return ask.allowed is None or ask.allowed.includes(largest)


def _kernel_rule(ask: Ask) -> tuple[float, ...]:
    params = ask.params
    temperature = 0.0 if params.greedy else params.temperature
    return temperature, params.top_k, params.top_p, params.min_p, ask.uniform


def masks_of(asks: Sequence[Ask], vocab: int) -> Tensor | None:
    """[S, bytes] uint8: a bit for each token that may be picked; None if all may be, everywhere."""
    if all(ask.allowed is None for ask in asks):
        return None
    size = -(-vocab // 8)
    every = b"\xff" * size
    masks = [
        every if ask.allowed is None else ask.allowed.bits().ljust(size, b"\0")[:size]
        for ask in asks
    ]
    return torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(asks), size)


def _joined(parts: Sequence[tuple[list[int], Drawn]]) -> Drawn:
    """What was drawn for the members of each part, in the order of all rows."""
    if len(parts) == 1:
        return parts[0][1]
    order = [i for members, _ in parts for i in members]
    places = sorted(range(len(order)), key=order.__getitem__)
    back = tensor_on(parts[0][1][0].device, places)
    tokens, enough = (
        torch.cat(each)[back] for each in zip(*(drawn for _, drawn in parts), strict=True)
    )
    return tokens, enough


def adjusted(rows: Tensor, asks: Sequence[Ask], coming: Tensor | None = None) -> Tensor:
    """Rows [S, vocab] as float32 or wider, with biases, penalties and forbidden tokens applied.

    coming: the tokens [S] before those to be picked, where only the device knows them.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    if not any(ask.changes_logits for ask in asks):
        return rows.to(wide)
    rows = rows.to(wide, copy=True)
    vocab = rows.shape[-1]  # tokens without a logit are never picked anyway
    biases = [
        (index, token, bias)
        for index, ask in enumerate(asks)
        for token, bias in ask.params.logit_bias.items()
        if token < vocab
    ]
    if biases:
        row, token, bias = tensor_on(rows.device, biases, torch.float64).unbind(1)
        rows[row.long(), token.long()] += bias.to(wide)
    if any(ask.params.penalises for ask in asks):
        _penalise(rows, asks, coming)
    forbidden = [
        (index, token) for index, ask in enumerate(asks) for token in ask.forbidden if token < vocab
    ]
    if forbidden:
        row, token = tensor_on(rows.device, forbidden).unbind(1)
        rows[row, token] = -torch.inf
    return rows


def _penalise(rows: Tensor, asks: Sequence[Ask], coming: Tensor | None) -> None:
    """Applies penalties for all preceding tokens to rows [S, vocab].

    The repetition penalty considers prompt and answer, the other two only the answer.
    """
    parts = [torch.empty(3, 0, dtype=torch.int64)]
    for index, ask in enumerate(asks):
        if ask.params.penalises and ask.tokens:
            ask.history.follow(ask.tokens, ask.num_prompt)
            both = ask.history.tokens, ask.history.counts
            own = torch.stack([torch.frombuffer(each, dtype=torch.int64) for each in both])
            parts.append(torch.cat((torch.full_like(own[:1], index), own)))
    known = torch.cat(parts, dim=1)
    row, token, count = sent(known[:, known[1] < rows.shape[-1]], rows.device)
    rules = [
        (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
        for each in (ask.params for ask in asks)
    ]
    rule = tensor_on(rows.device, rules, torch.float64).to(rows.dtype)
    if coming is not None:
        again = token == coming[row]
        count = count + again
        seen = torch.zeros_like(coming).index_add_(0, row, again.long())
    rows[row, token] = _penalised(rows[row, token], count, rule[row])
    if coming is not None:
        every = torch.arange(len(rows), device=rows.device)
        last = rows[every, coming]
        rows[every, coming] = torch.where(seen > 0, last, _penalised(last, seen + 1, rule))


def _penalised(logits: Tensor, counts: Tensor, rule: Tensor) -> Tensor:
    """Logits [n] of tokens that an answer has `counts` times [n], by their rules [n, 3]."""
    repetition, presence, frequency = rule.unbind(1)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    # A tiny penalty makes a logit infinite, which softmax cannot handle.
    logits = logits.clamp(max=torch.finfo(logits.dtype).max)
    return logits - presence * (counts > 0) - frequency * counts


def _truncation(ask: Ask) -> tuple[int, bool]:
    """top_k, and whether to draw only from the most likely tokens. Greedy is top_k 1."""
    params = ask.params
    if params.greedy:
        return 1, True
    return params.top_k, bool(params.top_k or params.top_p < 1 or params.min_p)


@dataclass(frozen=True, slots=True)
class Rule:
    """How rows are truncated and drawn from: a column [S, 1] each, in float64."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, asks: Sequence[Ask], device: torch.device) -> "Rule":
        rows = [
            (
                1.0 if ask.params.greedy else ask.params.temperature,
                ask.params.top_p,
                ask.params.min_p,
                ask.uniform,
            )
            for ask in asks
        ]
        return cls(*torch.split(tensor_on(device, rows, torch.float64), 1, dim=1))


def _among_all(rows: Tensor, rule: Rule) -> Drawn:
    scaled = rows.double() / rule.temperature
    drawn = _at(torch.exp(scaled - scaled.amax(dim=-1, keepdim=True)), rule.uniform)
    return drawn, torch.ones_like(drawn, dtype=torch.bool)


def among_best(rows: Tensor, rule: Rule, count: int, whole: bool) -> Drawn:
    """Tokens among the `count` most likely ones, which suffice if they hold all that is kept.

    whole: the candidates are the whole distribution. Otherwise the tokens outside count towards
    the total of which top_p takes its share.
    """
    values, tokens = rows.topk(count)
    best = values.double() / rule.temperature
    weights = torch.exp(best - best[:, :1])
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    if not whole:
        scaled = rows.double() / rule.temperature
        total = torch.exp(scaled.logsumexp(dim=-1, keepdim=True) - best[:, :1])
    keep = (sums - weights < rule.top_p * total) & (weights >= rule.min_p * weights[:, :1])
    keep[:, :1].fill_(True)
    drawn = tokens.gather(1, _at(weights * keep, rule.uniform)[:, None])[:, 0]
    if whole or count == rows.shape[-1]:
        return drawn, torch.ones_like(drawn, dtype=torch.bool)
    beyond = weights[:, -1:] < rule.min_p * weights[:, :1]  # all others are less likely still
    return drawn, ((sums[:, -1:] >= rule.top_p * total) | beyond)[:, 0]


def _at(weights: Tensor, uniform: Tensor) -> Tensor:
    """[S]: the index where `uniform` [S, 1] falls in each row's normalised cumulative weights."""
    edges = weights.cumsum(dim=-1)
    index = torch.searchsorted(edges, edges[:, -1:] * uniform, right=True)
    return index[:, 0].clamp(max=weights.shape[-1] - 1)


def token_scores(rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Rows of logits [S, vocab], tokens [S] → [S, 2 + 2 · count] float64.

    Per row: its largest logit, the token's log-probability, the `count` most likely tokens, best
    first, and their log-probabilities.
    """
    parts = zip(torch.split(rows, SCORED_AT_ONCE), torch.split(tokens, SCORED_AT_ONCE), strict=True)
    return torch.cat([_scores(some, chosen, count) for some, chosen in parts])


def _scores(rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    logprobs = rows.float().log_softmax(dim=-1)
    values, best = logprobs.topk(count)
    own = logprobs.gather(1, tokens[:, None])
    largest = rows.amax(dim=-1, keepdim=True)
    return torch.cat([each.double() for each in (largest, own, best, values)], dim=1)


class Picking:
    """Tokens [S] being picked on a device, and a copy of all results on its way to the host."""

    def __init__(
        self,
        largest: Tensor,
        tokens: Tensor,
        enough: Tensor | None,
        scores: Sequence[tuple[list[int], Tensor]],
    ) -> None:
        """`largest`: as from Sampler. `enough`: whether candidates sufficed; None: everywhere."""
        self.tokens = tokens  # on the device
        self._scored = [(members, each.shape[1]) for members, each in scores]
        self._drawn = enough is not None
        flat = [largest, tokens, *([] if enough is None else [enough])]
        flat += [each.flatten() for _, each in scores]
        self._numbers = _sent(torch.cat([each.double() for each in flat]))

    def read(self) -> tuple[list[Picked], list[float]]:
        """What was picked, and whether candidates sufficed, [S] each. Waits for the device."""
        count, numbers = len(self.tokens), iter(_back(*self._numbers))
        largest, found = (list(islice(numbers, count)) for _ in range(2))
        held = list(islice(numbers, count)) if self._drawn else [1.0] * count
        picked = [
            Picked(int(token), isfinite(value)) for token, value in zip(found, largest, strict=True)
        ]
        for members, width in self._scored:
            note(picked, members, [list(islice(numbers, width)) for _ in members])
        return picked, held


def _sent(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy to the host asynchronously; the event marks the copy's end, None if none was needed."""
    if numbers.device.type != "cuda":
        return numbers, None
    host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    return host, torch.cuda.current_stream(numbers.device).record_event()


def note(picked: list[Picked], members: list[int], scores: Sequence[Sequence[float]]) -> None:
    """Store rows of `token_scores` in the picks of `members`."""
    for i, (_, own, *top) in zip(members, scores, strict=True):
        picked[i] = replace(picked[i], logprob=own, top=ranked(top))


def ranked(numbers: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """A `token_scores` row without its first two values → (token, log-probability), best first."""
    count = len(numbers) // 2
    return tuple(zip(map(int, numbers[:count]), numbers[count:], strict=True))


def _grouped(asks: Sequence[Ask], key: Callable[[Ask], K]) -> list[tuple[K, list[int]]]:
    """Indices of asks with an equal key: each group is processed without regard to the others."""
    groups: dict[K, list[int]] = {}
    for index, ask in enumerate(asks):
        groups.setdefault(key(ask), []).append(index)
    return list(groups.items())


def taken(rows: Tensor, members: list[int]) -> Tensor:
    """The selected rows; not copied if they are all of them."""
    return rows if len(members) == len(rows) else rows[tensor_on(rows.device, members)]


def _back(numbers: Tensor, arrived: torch.cuda.Event | None) -> list[float]:
    """The only place where a sampler waits for a device, and only for work queued before."""
    if arrived is not None:
        arrived.synchronize()
    found: list[float] = numbers.tolist()
    return found
