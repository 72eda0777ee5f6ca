"""What every cached entry should be, kept apart from the cache, and a decoder that reads it.

A shadow holds each token's keys and values as the model computed them, with the position that
each should have now. Only cache/'s tensors are used: no manager, no operations, no ledger; every
entry is in a block of its own, so positions may have any gaps.
"""

from dataclasses import dataclass, field, replace

import torch

from ropewalk.cache.types import KeyStorage
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.rope import RoPE
from tests.model.running import new_cache


@dataclass
class Shadow:
    """One sequence. Keys carry the rotation of their position, whatever storage the cache keeps."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)  # [layers, kv_heads, head_dim] each
    values: list[torch.Tensor] = field(default_factory=list)
    gates: list[torch.Tensor] = field(default_factory=list)  # [layers, heads], if there are any
    plain: bool = True  # no token was ever taken out: one pass over the tokens gives the same

    @property
    def next_position(self) -> int:
        return self.positions[-1] + 1 if self.positions else 0

    def part(self, start: int, stop: int) -> "Shadow":
        span = slice(start, stop)
        return replace(
            self,
            tokens=self.tokens[span],
            positions=self.positions[span],
            keys=self.keys[span],
            values=self.values[span],
            gates=self.gates[span],
        )

    def extend(self, other: "Shadow") -> None:
        self.tokens += other.tokens
        self.positions += other.positions
        self.keys += other.keys
        self.values += other.values
        self.gates += other.gates


def compute(decoder: Decoder, shadow: Shadow, tokens: list[int]) -> torch.Tensor:
    """Append tokens to the shadow; returns their logits [T, vocab]."""
    held, count = len(shadow.tokens), len(tokens)
    kv = new_cache(decoder, held + count + 1, block_size=1)
    if held:
        kv._keys[:, 1 : 1 + held, 0] = torch.stack(shadow.keys, dim=1)
        kv._values[:, 1 : 1 + held, 0] = torch.stack(shadow.values, dim=1)
        if shadow.gates:
            kv._gates[:, 1 : 1 + held, :, 0] = torch.stack(shadow.gates, dim=1)
    positions = [shadow.next_position + n for n in range(count)]
    new = torch.arange(1 + held, 1 + held + count)
    batch = ForwardBatch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        offsets=torch.zeros(count, dtype=torch.int64),
        slots=new,
        query_starts=torch.tensor([0, count]),
        context_lens=torch.tensor([held + count]),
        block_tables=torch.arange(1, 1 + held + count)[None],
        block_bases=torch.tensor([shadow.positions + positions]),
        output_rows=torch.arange(count),
        max_query=count,
        max_context=held + count,
    )
    logits = decoder(batch, kv)
    shadow.tokens += tokens
    shadow.positions += positions
    shadow.keys += list(kv._keys[:, new, 0].transpose(0, 1).clone())
    shadow.values += list(kv._values[:, new, 0].transpose(0, 1).clone())
    if kv._gates is not None:
        shadow.gates += list(kv._gates[:, new, :, 0].transpose(0, 1).clone())
    return logits


def moved(decoder: Decoder, shadow: Shadow, delta: int) -> Shadow:
    """The same entries `delta` positions later, if there are any."""
    if not shadow.keys:
        return shadow
    keys = turned(decoder, torch.stack(shadow.keys), torch.full((len(shadow.keys),), delta))
    return replace(shadow, keys=list(keys), positions=[each + delta for each in shadow.positions])


def stored(decoder: Decoder, shadow: Shadow, block_size: int) -> list[torch.Tensor]:
    """Keys, values and perhaps gates [layers, tokens, ...] as the cache should hold them."""
    storage = decoder.encoding.key_storage
    keys, positions = torch.stack(shadow.keys), torch.tensor(shadow.positions)
    if storage is not KeyStorage.ABSOLUTE:
        carried = torch.arange(len(keys)) % (1 if storage is KeyStorage.RAW else block_size)
        keys = turned(decoder, keys, carried - positions)
    others = (shadow.values, shadow.gates) if shadow.gates else (shadow.values,)
    return [keys.transpose(0, 1), *(torch.stack(each, dim=1) for each in others)]


def turned(decoder: Decoder, keys: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """[tokens, layers, kv_heads, head_dim] rotated by complex numbers, each token by its delta."""
    encoding = decoder.encoding
    if not isinstance(encoding, RoPE):
        return keys
    width, half = encoding.width, encoding.width // 2
    first, second = (
        (slice(0, half), slice(half, width))
        if encoding.layout == "half"
        else (slice(0, width, 2), slice(1, width, 2))
    )
    angles = deltas[:, None, None] * encoding.frequencies.double()
    made = keys.clone()
    for layer in range(keys.shape[1]):
        if encoding.rotates(layer):
            pairs = torch.complex(keys[:, layer, :, first], keys[:, layer, :, second])
            pairs = pairs * torch.polar(torch.ones_like(angles), angles)
            made[:, layer, :, first], made[:, layer, :, second] = pairs.real, pairs.imag
    return made
