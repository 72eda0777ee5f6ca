"""The subject of an explanation: one layer's encoding, in some shape, with its weights.

Knows no pictures and no commands.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ropewalk.model.catalogue import SHAPE, example
from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    EncodingError,
    PositionalEncoding,
    by_content,
    create,
    embeds,
    find,
    rotates,
)
from ropewalk.model.encodings.common.validate import check_hooks
from ropewalk.model.loading.checkpoints import Checkpoint, load_encoding

# drawn: random, because no checkpoint was named.
Weights = Literal["none", "drawn", "trained"]


@dataclass(frozen=True, slots=True)
class Subject:
    """`encoding` is what layer `layer` uses; `whole` is what the embeddings go through."""

    title: str
    whole: PositionalEncoding
    config: ModelConfig
    options: Mapping[str, Any]
    context: int
    layer: int
    weights: Weights

    @property
    def encoding(self) -> PositionalEncoding:
        return self.whole.for_layer(self.layer)

    @property
    def rotates(self) -> bool:
        """Whether this layer's queries and keys are changed, before keys are stored or after."""
        return rotates(self.encoding) or self.encoding.rotation() is not None

    @property
    def by_content(self) -> bool:
        """Whether what is added to scores depends on the text."""
        return by_content(self.encoding)

    @property
    def embeds(self) -> bool:
        """Whether something is added to the embeddings."""
        return embeds(self.whole)


def shape(*, heads: int, head_dim: int, context: int) -> ModelConfig:
    """A decoder of that shape; fields that encodings do not use are as in SHAPE."""
    return replace(
        SHAPE,
        hidden_size=heads * head_dim,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        trained_context=context,
        windows=(None,),
    )


def from_name(name: str, config: ModelConfig, options: Mapping[str, Any]) -> Subject:
    """A file of model/encodings or "package.module:Class", with the usual options and these.

    Raises EncodingError.
    """
    kind = find(name)
    whole = example(kind, config, config.trained_context, options)
    check_hooks(whole, config, config.trained_context, torch.device("cpu"))
    drawn = any(True for _ in whole.parameters())
    return Subject(
        name,
        whole,
        config,
        kind.usual_options(config) | dict(options),
        context=min(config.trained_context, whole.max_positions or config.trained_context),
        layer=0,
        weights="drawn" if drawn else "none",
    )


def from_checkpoint(checkpoint: Checkpoint, context: int | None, layer: int) -> Subject:
    """The decoder's encoding with its trained weights. Raises EncodingError, CheckpointError."""
    config = checkpoint.config
    if not 0 <= layer < config.num_layers:
        raise EncodingError(
            f"{checkpoint.path} has the layers 0 to {config.num_layers - 1}, but not {layer}."
        )
    served = context or config.trained_context
    whole = create(config.encoding, config, served, torch.device("cpu"))
    load_encoding(checkpoint, whole)
    check_hooks(whole, config, served, torch.device("cpu"))
    trained = any(True for _ in whole.parameters())
    return Subject(
        f"{config.encoding.name} in {checkpoint.path.name}",
        whole,
        config,
        config.encoding.options,
        context=min(served, whole.max_positions or served),
        layer=layer,
        weights="trained" if trained else "none",
    )
