"""Checks what an encoding's hooks return, before kernels and a cache rely on it.

An encoding class may come from anywhere. Its mistakes are reported at startup in one sentence;
kernels, which read memory by address, would silently compute wrong results.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.cache.types import BLOCK_SIZE, Capability, KeyStorage, Op
from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    BIASES,
    EncodingError,
    ForgetGates,
    KeyBias,
    LinearBias,
    PairBias,
    PositionalEncoding,
    ScoreBias,
    Scored,
    asks_keys,
    asks_query,
    forgets,
)
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.model.encodings.common.rotary import Far, Rotation
from ropewalk.model.formatting import where

ROWS = 3  # tested at either end of the context
HALF = torch.bfloat16  # hooks are tested in it, too, and must preserve it
EXACT = 1e-3  # relative to the largest coordinate: far above float32's rounding error

Given = TypeVar("Given")


def check_hooks(
    encoding: PositionalEncoding, config: ModelConfig, context: int, device: torch.device
) -> None:
    """Call each hook of a frozen encoding as a server of `context` tokens would.

    Raises EncodingError for a hook that raises, returns a wrong type or shape, or makes a false
    claim about stored keys.
    """
    with torch.inference_mode():
        whole = _Hooks(encoding, config, context, device)
        for own in whole.of_layers():
            _Hooks(own, config, context, device).check_layer()
        whole.check_whole()


class _Hooks:
    def __init__(
        self, encoding: PositionalEncoding, config: ModelConfig, context: int, device: torch.device
    ) -> None:
        self._encoding, self._config, self._device = encoding, config, device
        self._context = min(context, encoding.max_positions or context)
        ends = {*range(self._context)[:ROWS], *range(self._context)[-ROWS:]}
        self._positions = torch.tensor(sorted(ends), device=device)
        drawn, rows = torch.Generator().manual_seed(0), len(ends)
        self._x, self._q, self._k = (
            torch.randn(rows, *size, generator=drawn).to(device)
            for size in (
                (config.hidden_size,),
                (config.num_heads, config.head_dim),
                (config.num_kv_heads, config.head_dim),
            )
        )

    def of_layers(self) -> list[PositionalEncoding]:
        """Every layer's encoding, once."""
        layers = range(self._config.num_layers)
        return list(
            dict.fromkeys(self._ask("for_layer", PositionalEncoding, layer) for layer in layers)
        )

    def check_layer(self) -> None:
        self._check_rows("rotate", lambda rows: torch.cat(self._rotated(rows), dim=1))
        self._rotated(slice(None), dtype=HALF)
        self._check_query_scales()
        self._check_bias()
        if forgets(self._encoding):
            self._check_forget_gates()
            self._check_rows("gates", self._gates)
            self._gates(slice(None), dtype=HALF)
        if asks_query(self._encoding):
            if self._encoding.score_bias() is not None:
                raise self._error("query_bias takes the place of score_bias, so return None there")
            self._check_rows("query_bias", self._query_bias)
            self._query_bias(slice(None), dtype=HALF)
        if asks_keys(self._encoding):
            self._check_content_bias()
        self._check_rotation()
        self._check_fixed()
        for op in Op:
            self._capability(op)
        if self._movable(Capability.FREE, Capability.REWRITE):
            self._check_move()

    def check_whole(self) -> None:
        """Check the hooks that a model calls once, not per layer."""
        self._check_rows("embed", self._embedded)
        self._embedded(slice(None), dtype=HALF)
        first = slice(0, ROWS)
        if self._movable(Capability.FREE) and not _alike(
            self._embedded(first), self._embedded(first, BLOCK_SIZE)
        ):
            raise self._error(
                "embed puts positions into keys and values, which then cannot be moved: set "
                "WHY_FIXED to a sentence that says so"
            )
        self._check_fixed()
        for context in (1, self._context):
            self._ask("work", PositionalWork, self._config, context, BLOCK_SIZE)

    def _check_fixed(self) -> None:
        for name, fixed in self._ask("fixed_tensors", dict).items():
            self._need_kind(f"fixed_tensors, for {name!r},", fixed, Tensor)

    def _check_rows(self, hook: str, call: Callable[[slice], Tensor]) -> None:
        """Tokens come in chunks, packed with others': a row may depend on its own position only."""
        whole = call(slice(None))
        if not whole.isfinite().all():
            raise self._error(f"{hook} returns numbers that are not finite")
        for rows in (slice(0, ROWS), slice(-ROWS, None)):
            if not _alike(call(rows), whole[rows]):
                raise self._error(
                    f"{hook} returns something else for a token when other tokens are computed "
                    "with it; the result must depend on the token and its position alone"
                )

    def _check_query_scales(self) -> None:
        scales = self._ask("query_scales", object)
        if scales is None:
            return
        scales, heads = self._need_kind("query_scales", scales, Tensor), self._config.num_heads
        if (
            scales.dtype is not torch.float32
            or scales.dim() != 2
            or scales.shape[1] not in (1, heads)
        ):
            raise self._error(
                f"query_scales returns {_sizes([scales])}, and must return float32 [positions, 1] "
                f"or [positions, {heads}]"
            )
        if len(scales) < self._context:
            raise self._error(
                f"query_scales has {len(scales)} positions for a context of {self._context}; set "
                "max_positions, or make the table longer"
            )
        if not scales.isfinite().all():
            raise self._error("query_scales holds numbers that are not finite")

    def _check_forget_gates(self) -> None:
        """Kernels read them by these sizes, where torch would repeat what is smaller."""
        found = self._ask("forget_gates", object)
        if found is None:
            return
        found = self._need_kind("forget_gates", found, ForgetGates)
        heads, width = self._config.num_heads, self._config.hidden_size
        sizes = [list(each.shape) for each in (found.weight, found.bias)]
        if sizes != [[heads, width], [heads]]:
            raise self._error(
                f"forget_gates has a weight of {sizes[0]} and a bias of {sizes[1]}, not of "
                f"{[heads, width]} and {[heads]}"
            )

    def _check_bias(self) -> None:
        bias = self._ask("score_bias", object)
        if bias is None:
            return
        if not isinstance(bias, BIASES) or type(bias) not in BIASES:  # a subclass may differ
            known = ", ".join(kind.__name__ for kind in BIASES)
            raise self._error(
                f"score_bias returns {type(bias).__name__}; it must return None or one of {known}"
            )
        heads = self._config.num_heads
        values = self._values(bias)
        if len(values) not in (1, heads):
            raise self._error(f"score_bias has {len(values)} heads, but must have {heads} or 1")
        if isinstance(bias, KeyBias) and bias.table.shape[1] < self._context:
            raise self._error(
                f"score_bias has {bias.table.shape[1]} key positions for a context of "
                f"{self._context}; set max_positions, or make the table longer"
            )
        if values.isnan().any():
            raise self._error("score_bias holds NaN")

    def _check_rotation(self) -> None:
        rotation = self._ask("rotation", object)
        if rotation is None:
            return
        rotation = self._need_kind("rotation", rotation, Rotation)
        positions, pairs = rotation.cos.shape
        if rotation.sin.shape != rotation.cos.shape or 2 * pairs > self._config.head_dim:
            raise self._error(
                f"rotation has tables {list(rotation.cos.shape)} and {list(rotation.sin.shape)}; "
                "both must be [positions, pairs], with at most "
                f"{self._config.head_dim // 2} pairs"
            )
        if positions < self._context:
            raise self._error(
                f"rotation has {positions} positions for a context of {self._context}; set "
                "max_positions, or make the tables longer"
            )
        if rotation.far is not None:
            self._check_far(rotation.far, rotation, positions)

    def _check_far(self, far: Far, rotation: Rotation, positions: int) -> None:
        """Kernels read rows of tables that it names."""
        if rotation.storage is not KeyStorage.RAW:
            raise self._error("rotation rotates far keys otherwise, which only raw keys can be")
        for rows in (far.queries, far.keys):
            if rows.dtype is not torch.int64 or rows.shape != (positions,) or far.start < 1:
                raise self._error(
                    "rotation.far must start at a distance of 1 or more and have an int64 for each "
                    f"of {positions} positions"
                )
            if not 0 <= int(rows.min()) <= int(rows.max()) < positions:
                raise self._error(
                    f"rotation.far has positions that are not in a table of {positions}"
                )

    def _check_move(self) -> None:
        """Keys moved by an operation must equal keys rotated at the new positions."""
        first = slice(0, ROWS)
        _, keys = self._rotated(first)
        _, moved = self._rotated(first, BLOCK_SIZE)
        if self._capability(Op.EVICT_RENUMBER) is Capability.REWRITE:
            keys = self._ask("shift", Tensor, keys, BLOCK_SIZE)
        if keys.shape != moved.shape or not _alike(keys, moved):
            raise self._error(
                "moved keys would differ from those that rotate makes at their new positions: "
                "override capability and shift, or set WHY_FIXED to a sentence that says why keys "
                "cannot move"
            )

    def _movable(self, *how: Capability) -> bool:
        """Whether a move has one of these capabilities, and the context has room to try it."""
        room = self._context >= BLOCK_SIZE + ROWS
        return room and self._capability(Op.EVICT_RENUMBER) in how

    def _capability(self, op: Op) -> Capability:
        found = self._ask("capability", Capability, op, torch.float32)
        if found is Capability.IMPOSSIBLE and not self._encoding.WHY_FIXED:
            raise self._error(
                f"capability says that {op.value} is impossible; say why in WHY_FIXED"
            )
        return found

    def _rotated(
        self, rows: slice, later: int = 0, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys of these rows, `later` positions after their own."""
        positions = self._positions[rows] + later
        given = (self._q[rows].to(dtype), self._k[rows].to(dtype))
        copies = [each.clone() for each in given]
        found = self._ask("rotate", tuple, *copies, positions, positions % BLOCK_SIZE)
        if _sizes(found) != _sizes(given):
            raise self._error(f"rotate returns {_sizes(found)} for {_sizes(given)}")
        return found

    def _embedded(self, rows: slice, later: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        x = self._x[rows].to(dtype)
        found = self._ask("embed", Tensor, x.clone(), self._positions[rows] + later)
        if _sizes([found]) != _sizes([x]):
            raise self._error(f"embed returns {_sizes([found])} for {_sizes([x])}")
        return found

    def _gates(self, rows: slice, dtype: torch.dtype = torch.float32) -> Tensor:
        x = self._x[rows].to(dtype)
        found = self._ask("gates", Tensor, x.clone())
        if found.shape != (len(x), self._config.num_heads) or not found.is_floating_point():
            raise self._error(
                f"gates returns {_sizes([found])} for {_sizes([x])}, and must return a float for "
                f"each of {self._config.num_heads} heads"
            )
        return found

    def _query_bias(self, rows: slice, dtype: torch.dtype = torch.float32) -> Tensor:
        x, q = self._x[rows].to(dtype), self._q[rows].to(dtype)
        found = self._ask("query_bias", Tensor, x.clone(), q.clone())
        if found.dim() != 3 or found.shape[:2] != q.shape[:2] or not found.is_floating_point():
            raise self._error(
                f"query_bias returns {_sizes([found])} for {_sizes([x, q])}, and must return "
                f"floats [{len(q)}, {self._config.num_heads}, span]"
            )
        return found

    def _check_content_bias(self) -> None:
        """Requests come padded and in chunks, beside others or alone."""
        others = asks_query(self._encoding) or forgets(self._encoding)
        if others or self._ask("score_bias", object) is not None:
            raise self._error("content_bias takes the place of any other bias and of gates")
        if self._ask("rotation", object) is not None:
            raise self._error(
                "content_bias is given queries and keys as they are stored, so rotation must "
                "return None; rotate them there, or in rotate"
            )
        at = self._positions
        whole = self._scored(self._q, self._k, at)
        found = self._content_bias(whole)
        if not found[whole.scores.isfinite()].isfinite().all():
            raise self._error("content_bias returns numbers that are not finite")
        for row in range(len(at)):  # by itself, when no key after it is there
            upto = slice(row + 1)
            alone = self._scored(self._q[row : row + 1], self._k[upto], at[upto])
            self._compare(self._content_bias(alone), found[:, row : row + 1, upto])
        # Beside one whose last two of three tokens are new, as are their vectors.
        rows, keys = min(2, len(at)), min(3, len(at))
        short = self._scored(self._q.flip(0)[:rows], self._k.flip(0)[:keys], at[:keys])
        both = self._content_bias(_together(whole, _padded(short, len(at))))
        self._compare(both[0], found, whole.scores.isfinite())
        seen = short.scores.isfinite()
        self._compare(both[1][:, :rows, :keys], self._content_bias(short), seen)

    def _scored(self, q: Tensor, k: Tensor, at: Tensor) -> Scored:
        """The last of the keys' tokens are the queries'. at: the keys' positions."""
        q, k, of_q = q.transpose(0, 1), k.transpose(0, 1), at[-len(q) :]
        by_group = q.reshape(len(k), -1, q.shape[-1]) @ k.mT * self._config.head_dim**-0.5
        scores = by_group.view(*q.shape[:2], -1).masked_fill(of_q[:, None] < at, -torch.inf)
        return Scored(scores, q, k, of_q, at)

    def _content_bias(self, seen: Scored) -> Tensor:
        given = Scored(*(getattr(seen, each.name).clone() for each in fields(Scored)))
        found = self._ask("content_bias", Tensor, given)
        if found.shape != seen.scores.shape or not found.is_floating_point():
            raise self._error(
                f"content_bias returns {_sizes([found])} for scores {_sizes([seen.scores])}"
            )
        for each in fields(Scored):
            if not torch.equal(getattr(given, each.name), getattr(seen, each.name)):
                raise self._error(f"content_bias changes the {each.name} that it is given")
        return found

    def _compare(self, found: Tensor, whole: Tensor, seen: Tensor | None = None) -> None:
        if seen is not None:
            found, whole = found[seen], whole[seen]
        if not _alike(found, whole):
            raise self._error(
                "content_bias returns something else for a query and a key when other queries, "
                "later keys or other requests are computed with them"
            )

    def _values(self, bias: ScoreBias) -> Tensor:
        """[heads, ...]: a whole table, or a sample of a function's values."""
        if isinstance(bias, LinearBias):
            return bias.slopes
        if not isinstance(bias, PairBias):
            return bias.table
        rows, at = len(self._positions), self._positions
        values = self._pairs(bias, at, at, (rows, rows))
        if not _alike(
            self._pairs(bias, at[:, None], at.expand(rows, rows), (rows, 1, rows))[:, :, 0], values
        ):
            raise self._error(
                "score_bias gives a pair of positions another bias when queries come one per row"
            )
        return values

    def _pairs(
        self, bias: PairBias, queries: Tensor, keys: Tensor, size: tuple[int, ...]
    ) -> Tensor:
        values = self._answer("score_bias", bias.between, queries, keys)
        values = self._need_kind("score_bias", values, Tensor)
        if values.shape[1:] != size:
            raise self._error(
                f"score_bias returns {list(values.shape)} for queries {list(queries.shape)} and "
                f"keys {list(keys.shape)}, not [heads, {', '.join(map(str, size))}]"
            )
        return values

    def _ask(self, hook: str, kind: type[Given], *arguments: object) -> Given:
        found = self._answer(hook, getattr(self._encoding, hook), *arguments)
        return self._need_kind(hook, found, kind)

    def _answer(self, hook: str, call: Callable[..., object], *arguments: object) -> object:
        try:
            return call(*arguments)
        except Exception as error:  # foreign code may raise anything
            raise self._error(f"{hook} fails ({where(error)})") from error

    def _need_kind(self, hook: str, found: object, kind: type[Given]) -> Given:
        if not isinstance(found, kind):
            raise self._error(f"{hook} returns {type(found).__name__}, not {kind.__name__}")
        return found

    def _error(self, what: str) -> EncodingError:
        name = type(self._encoding).__name__
        return EncodingError(f"{name}: {what}. docs/encodings.md says what a class must keep to.")


def _padded(seen: Scored, keys: int) -> Scored:
    """With so many keys and queries, as attention pads them: unseen, at position 0."""
    more, rows = keys - seen.scores.shape[-1], keys - seen.scores.shape[-2]
    first = [0] * rows
    return Scored(
        F.pad(torch.cat((seen.scores, seen.scores[:, first]), dim=1), (0, more), value=-torch.inf),
        torch.cat((seen.q, seen.q[:, first]), dim=1),
        F.pad(seen.keys, (0, 0, 0, more)),
        torch.cat((seen.positions, seen.positions[first])),
        F.pad(seen.key_positions, (0, more)),
    )


def _together(one: Scored, other: Scored) -> Scored:
    """Of two requests."""
    pairs = ((getattr(one, each.name), getattr(other, each.name)) for each in fields(Scored))
    return Scored(*map(torch.stack, pairs))


def _sizes(tensors: Iterable[object]) -> str:
    """For example "float32 [3, 4, 8] and float32 [3, 2, 8]"."""
    said = (
        f"{each.dtype} {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
        for each in tensors
    )
    return " and ".join(said).replace("torch.", "")


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= EXACT * b.abs().max()).all())
