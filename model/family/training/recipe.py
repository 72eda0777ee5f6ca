"""What all models of the family share: shape, initial weights, learning rates.

Two models differ only in their encoding: a parameter's initial values depend on the seed and its
name, and the order of the tokens on the seed.
"""

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.digests import of_file
from ropewalk.model.encodings.base import create, find
from ropewalk.model.family.texts.tokenizer import PIECES
from ropewalk.model.family.training.dense import DenseAttention
from ropewalk.model.layers.executor import TorchExecutor
from ropewalk.model.loading.random_weights import SHAPES
from ropewalk.model.recipes import allocate, program

ENCODINGS = ("rope", "t5", "alibi", "learned", "sinusoidal", "nope")
CONTEXT = 512  # tokens per training window
EMBED_SCALE = 32.0  # token vectors have norm 10 at first, and 80 after training
# Beside that, sines of the published size, with norm 11.3, would be drowned out, and so would a
# learned table initialised with 0.02 like the tokens but not scaled like them.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "learned": {"scale": EMBED_SCALE},
    "sinusoidal": {"scale": 4.0},
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. The schedule is warm-up, stable, decay; rates are those of the stable part."""

    tokens: int
    windows: int = 8  # of CONTEXT tokens, per step
    matrix_rate: float = 6e-3  # Muon: every matrix inside the layers
    other_rate: float = 3e-3  # AdamW: the embedding, the norms, an encoding's parameters
    weight_decay: float = 0.1  # of the matrices, multiplied by their rate
    warm_up: int = 100  # steps
    decay: float = 0.4  # fraction of the steps
    clip: float = 1.0  # limit of the gradients' total norm
    seed: int = 0
    growing: int = 0  # tokens at the start, read in eighths of a window, then quarters, then halves

    @property
    def steps(self) -> int:
        return max(self.tokens // (self.windows * CONTEXT), 1)

    @property
    def stable_steps(self) -> int:
        """Steps before the decay, the common part of trainings."""
        return round(self.steps * (1 - self.decay))

    def rate(self, step: int) -> float:
        """The fraction of the full rates at `step`, from 0: linear up, level, linear down to 0."""
        rising = min((step + 1) / self.warm_up, 1.0)
        falling = (self.steps - step) / max(self.steps - self.stable_steps, 1)
        return min(rising, falling)

    def length(self, step: int) -> int:
        """The length, in tokens, of the pieces that windows of `step` are cut into."""
        seen = step * self.windows * CONTEXT
        return CONTEXT >> max(3 - 3 * seen // self.growing, 0) if self.growing else CONTEXT


def code_digest(encoding: str) -> str:
    """Digest of a custom class's source, which may change under the same name; empty for others.

    Raises EncodingError.
    """
    if ":" not in encoding:
        return ""
    source = inspect.getsourcefile(find(encoding))
    return of_file(Path(source)) if source else ""


def model_name(encoding: str) -> str:
    """`t5` → `ropewalk-t5`, `package.module:Kerple` → `ropewalk-kerple`."""
    return f"ropewalk-{encoding.rpartition(':')[2].lower()}"


def shape(encoding: str) -> ModelConfig:
    """4.3 M parameters besides the encoding's own. Raises EncodingError."""
    config = replace(
        SHAPES["small"], vocab_size=PIECES, trained_context=CONTEXT, embed_scale=EMBED_SCALE
    )
    options = find(encoding).usual_options(config) | OPTIONS.get(encoding, {})
    return replace(config, encoding=EncodingSpec(encoding, options))


def new_decoder(config: ModelConfig, seed: int, device: torch.device) -> TorchExecutor:
    """A decoder with its initial weights, float32, with gradients. Raises EncodingError."""
    encoding = create(config.encoding, config, config.trained_context, device)
    weights = allocate(config, encoding, dtype=torch.float32, device=device)
    made = program(config, weights, encoding)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.startswith("encoding."):
                parameter.copy_(_first_values(name, parameter, config, seed))
        encoding.first_values(torch.Generator().manual_seed(_seed(seed, "encoding")))
    for _, parameter in made.named_parameters():
        parameter.requires_grad_(True)
    return TorchExecutor(made, DenseAttention)


def _first_values(
    name: str, parameter: torch.Tensor, config: ModelConfig, seed: int
) -> torch.Tensor:
    """Norms are 1; matrices preserve their input's scale; residual outputs start small.

    So does the embedding: being the head as well, it would otherwise predict the token just read.
    """
    if parameter.dim() == 1:
        return torch.ones(parameter.shape)
    deviation = 0.02 if name == "embed.weight" else parameter.shape[1] ** -0.5
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        deviation *= (2 * config.num_layers) ** -0.5
    generator = torch.Generator().manual_seed(_seed(seed, name))
    return torch.empty(parameter.shape).normal_(0, deviation, generator=generator)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7])
