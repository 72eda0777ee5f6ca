"""Checks in a second whether an encoding can be trained and evaluated, before hours of training."""

import math

import torch
from torch import Tensor

from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import EncodingError, PositionalEncoding, create, freeze_all
from ropewalk.model.encodings.common.validate import check_hooks
from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.training.dense import refreeze
from ropewalk.model.family.training.losses import token_losses
from ropewalk.model.family.training.recipe import ENCODINGS, model_name, new_decoder, shape
from ropewalk.model.formatting import where

TOKENS = 32


def rehearse(encoding: str, context: int, *, compiled: bool = False) -> None:
    """Run two training steps on a few tokens, then check the hooks near position `context`.

    compiled: also as torch.compile traces a step, which must compute the same.

    Raises FamilyError, whatever a custom class raises.
    """
    name = model_name(encoding)
    if ":" in encoding and name in map(model_name, ENCODINGS):
        raise FamilyError(f"{encoding} would overwrite {name}; give the class another name")
    cpu = torch.device("cpu")
    try:
        config = shape(encoding)
        decoder = new_decoder(config, 0, cpu)
        tokens = torch.arange(TOKENS + 1)[None]

        def loss() -> Tensor:
            return token_losses(decoder, tokens).mean()

        losses = [loss, loss]  # the second must not be disturbed by what the first leaves behind
        if compiled:
            losses.append(torch.compile(loss, backend="eager"))
        found = []
        scaled = _scaled(decoder.program.encoding, config)
        for each in losses:
            refreeze(decoder)
            value = each()
            torch.autograd.backward(value)
            found.append(value.item())
        if _scaled(decoder.program.encoding, config) != scaled:
            raise FamilyError(
                f"{encoding}: query_scales returns a table only after `freeze`, when the decoder "
                "has been built without; make one in `create`"
            )
        _at_length(config, context)
    except FamilyError:
        raise
    except EncodingError as error:
        raise FamilyError(str(error)) from error
    except Exception as error:  # foreign code may raise anything
        raise FamilyError(
            f"{encoding} cannot be trained ({where(error)}); docs/encodings.md says what a class "
            "must keep to"
        ) from error
    if compiled and not math.isclose(found[-1], found[0], rel_tol=1e-5):
        raise FamilyError(
            f"{encoding} computes something else where torch.compile traces it; train it with "
            "--no-compile"
        )
    still = [name for name, each in decoder.program.named_parameters() if each.grad is None]
    if still:
        raise FamilyError(
            f"{encoding}: no gradient reaches {', '.join(still)}; derive values from the "
            "parameter itself, not from a copy made in `freeze`"
        )


def _scaled(encoding: PositionalEncoding, config: ModelConfig) -> list[bool]:
    """Whether each layer's queries are."""
    layers = map(encoding.for_layer, range(config.num_layers))
    return [own.query_scales() is not None for own in layers]


@torch.no_grad()
def _at_length(config: ModelConfig, context: int) -> None:
    """Use the encoding as an evaluation does, up to the last positions that it has."""
    cpu = torch.device("cpu")
    encoding = create(config.encoding, config, context, cpu)
    encoding.first_values(torch.Generator().manual_seed(0))
    freeze_all(encoding)
    check_hooks(encoding, config, context, cpu)
    bias = encoding.score_bias()
    if bias is not None:
        reach = min(context, encoding.max_positions or context)
        bias.between(torch.arange(reach - TOKENS, reach), torch.arange(reach))
