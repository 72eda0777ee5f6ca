"""A decoder's forward pass in one call of the CPU kernels, with embedding, last norm and head.

Around the layers of a small model, Python and torch take as long as several layers do. The call's
arguments are reused for as long as steps update the same batch in place, as decode steps do.
"""

from dataclasses import dataclass, fields
from operator import is_
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ropewalk.cache.kv import KVCache
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import MaterialisedBias, PairBias, PositionalEncoding, inherits
from ropewalk.model.encodings.learned import Learned
from ropewalk.model.encodings.sinusoidal import Sinusoidal
from ropewalk.model.kernels.cpu.bindings import EndsArguments, Kernels, StepArguments
from ropewalk.model.kernels.cpu.layers import KernelLayers
from ropewalk.model.kernels.cpu.modules import KernelNorm, PanelLinear
from ropewalk.model.layers.decoder import Decoder


@dataclass(frozen=True, slots=True)
class _Told:
    """Kernel arguments for a batch, and what must be kept alive with them."""

    batch: list[Tensor]
    kv: ReferenceType[KVCache]  # its owner keeps it alive
    step: StepArguments
    tensors: list[Tensor]


class OneCall:
    """Called like the decoder, with that decoder as first argument."""

    def __init__(
        self,
        decoder: Decoder,
        layers: KernelLayers,
        norm: KernelNorm,
        head: PanelLinear,
        kernels: Kernels,
    ) -> None:
        self._layers = layers
        self._kernels = kernels
        self._embedding = decoder.embed.weight.contiguous()
        self._outputs = head.outputs
        vectors, scale = _vectors(decoder.encoding) or (None, 1.0)
        self._pointed_at = (norm, head, vectors)
        self._ends = EndsArguments(
            embedding=self._embedding.data_ptr(),
            vocab=len(self._embedding),
            vectors=None if vectors is None else vectors.data_ptr(),
            embed_scale=decoder.config.embed_scale,
            vector_scale=scale,
            eps=norm.eps,
            norm=norm.arguments(),
            head=head.arguments(),
        )
        encoding = decoder.encoding
        adds_nothing = inherits(encoding.embed, encoding, PositionalEncoding.embed)
        self._embeds = (adds_nothing or vectors is not None) and decoder.embed_norm is None
        self._told: _Told | None = None

    def fixed_tensors(self) -> dict[str, Tensor]:
        """See model/weights/fixed.py; the layers, the norm and the head tell of their own."""
        return {"embedding": self._embedding}

    def __call__(self, decoder: Decoder, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Raises IndexError for a token that is not in the vocabulary."""
        if batch.coming is not None:
            batch = batch.to(kv.device)
        tensors = _tensors(batch)
        told = self._told
        if told is None or kv is not told.kv() or not all(map(is_, tensors, told.batch)):
            self._told = told = None  # frees its scratch before the next is allocated
            told = self._told = self._tell(decoder, tensors, batch, kv)
        step, seconds = told.step, self._layers.seconds
        step.seconds = None if seconds is None else seconds.data_ptr()
        tokens: Tensor | None = batch.tokens
        if not self._embeds:
            with torch.inference_mode():
                x = decoder.embedded(batch)
            step.x, tokens = x.data_ptr(), None
        logits = torch.empty(step.kept_rows, self._outputs, dtype=self._embedding.dtype)
        self._kernels.decoder_pass(self._ends, self._layers.constants, step, tokens, logits)
        return logits

    @torch.inference_mode()
    def _tell(
        self, decoder: Decoder, tensors: list[Tensor], batch: ForwardBatch, kv: KVCache
    ) -> _Told:
        layers, dtype = self._layers, self._embedding.dtype
        biases, run = list(decoder.biases(batch, kv)), range(len(layers))
        step, held = layers.arguments(dtype, batch, kv, run, biases, batch.output_rows)
        return _Told(tensors, ref(kv), step, held)


def one_call(decoder: Decoder, kernels: Kernels) -> OneCall | None:
    """None if the single call would not compute exactly what the decoder's own modules do."""
    layers: nn.Module = decoder.layers
    norm: nn.Module | None = decoder.norm
    head: nn.Module = decoder.head
    if (
        not isinstance(layers, KernelLayers)
        or not isinstance(norm, KernelNorm)
        or not isinstance(head, PanelLinear)
        or decoder.project_out is not None
        or layers.turned_by_others
        or _has_dense_bias(decoder)
    ):
        return None
    return OneCall(decoder, layers, norm, head, kernels)


def _vectors(encoding: PositionalEncoding) -> tuple[Tensor, float] | None:
    """The vectors that `embed` adds, float32 [positions, width], and their factor."""
    if type(encoding) is Learned:  # a subclass may embed differently
        return encoding.table[encoding.offset :], encoding.scale
    return (encoding.table, 1.0) if type(encoding) is Sinusoidal else None


def _has_dense_bias(decoder: Decoder) -> bool:
    """Whether any layer's bias is computed anew in every step."""
    layers = range(len(decoder.layers))
    biases = [decoder.encoding.for_layer(layer).score_bias() for layer in layers]
    return any(isinstance(bias, MaterialisedBias | PairBias) for bias in biases)


_NAMES = [field.name for field in fields(ForwardBatch) if field.type is Tensor]


def _tensors(batch: ForwardBatch) -> list[Tensor]:
    return [getattr(batch, name) for name in _NAMES]
