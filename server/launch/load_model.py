"""Makes decoders from configured models: encoding, dtype, attention, kernels and weights.

Knows no cache, engine or HTTP.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any

import torch

from ropewalk.model.attention.base import AttentionBackend, choose, spec_for
from ropewalk.model.catalogue import Place
from ropewalk.model.config import EncoderDecoderConfig, EncodingSpec, ModelConfig
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import PositionalEncoding, create, find
from ropewalk.model.encodings.common.validate import check_hooks
from ropewalk.model.formatting import listed
from ropewalk.model.kernels.backends import all_backends, decoder_on
from ropewalk.model.kernels.cpu.bindings import SUFFIXES, Kernels
from ropewalk.model.kernels.cpu.bindings import load as load_kernels
from ropewalk.model.kernels.cpu.library import NoKernels
from ropewalk.model.loading.checkpoints import (
    RANDOM,
    Checkpoint,
    CheckpointError,
    load_program,
    open_checkpoint,
)
from ropewalk.model.program import Program, quantized
from ropewalk.model.weights.quantize import Int4, Int8
from ropewalk.server import download, hardware
from ropewalk.server.config import ModelOptions, ModelSource
from ropewalk.server.errors import CommandError
from ropewalk.server.terminal import bar_if_long, said_if_long

log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """One model whose weights are in place and which has no cache yet."""

    name: str
    aliases: tuple[str, ...]
    checkpoint: Checkpoint
    decoder: Decoder
    backend: AttentionBackend
    dtype: torch.dtype
    context: int
    place: Place
    quantize: str | None  # type that linear layers' weights are rounded to, as far as it holds them


def find_kernels(device: torch.device) -> Kernels | str:
    """The compiled CPU kernels, or why there are none."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    try:
        with said_if_long("compiling the CPU kernels, once for this machine"):
            return load_kernels(download.home() / "kernels")
    except NoKernels as error:
        log.warning("there are no CPU kernels, so computing is several times slower: %s", error)
        return str(error)


def prepare(
    loading: ModelOptions,
    source: ModelSource,
    device: torch.device,
    kernels: Kernels | str,
    check: Callable[[], None] = lambda: None,
) -> Prepared:
    """Raises CheckpointError, EncodingError, NoBackend, or CommandError for unusable options.

    check: called after every tensor; loading ends with what it raises.
    """
    checkpoint = open_source(loading, source)
    if loading.encoding is not None and loading.encoding != checkpoint.config.encoding.name:
        checkpoint = _replace_encoding(checkpoint, loading.encoding)
    checkpoint = _add_options(checkpoint, dict(loading.encoding_option))
    shape = checkpoint.config
    if (more := checkpoint.tokenizer.vocab_size - shape.vocab_size) > 0:
        log.info(
            "%s: the tokenizer has %d tokens more than the model embeds; prompts with one of them "
            "are refused",
            source.name,
            more,
        )
    dtype = hardware.pick_dtype(loading.dtype, device)
    if isinstance(shape, EncoderDecoderConfig) and dtype is torch.float16:
        raise CheckpointError(
            f"{checkpoint.path}: activations of {checkpoint.architecture} models exceed the range "
            "of float16; use --dtype bfloat16 or float32."
        )
    context = loading.max_model_len or shape.trained_context
    encoding = _create(shape.encoding, dict(loading.encoding_option), shape, context, device)
    if encoding.max_positions is not None and context > encoding.max_positions:
        raise CommandError(
            f"{source.name} has positions for only {encoding.max_positions} tokens, so it cannot "
            f"be served with --max-model-len {context}; use at most {encoding.max_positions}"
        )
    if loading.encoding is not None:
        _refuse_missing_weights(checkpoint, encoding)
    backends = all_backends(kernels)
    if loading.attention is not None:
        backends = [backend for backend in backends if backend.name == loading.attention]
    choose(backends, spec_for(shape, dtype, device))  # before the weights are waited for
    lacking = _lacking_for_int4(kernels, dtype)
    if loading.quantize == "int4" and lacking is not None:
        raise CommandError(f"--quantize int4 needs {lacking}; use int8")
    of_encoder = None
    if isinstance(shape, EncoderDecoderConfig):
        of_encoder = create(shape.encoder.encoding, shape.encoder, context, device)
    program = _load(checkpoint, source.name, encoding, of_encoder, dtype, device, check)
    if of_encoder is None:  # encoder-decoders have no foreign encodings
        check_hooks(encoding, shape, context, device)
    backend = choose(backends, spec_for(shape, dtype, device, encoding))
    quantize = loading.quantize
    if quantize is not None:
        program = quantized(program, 8 if quantize == "int8" else 4)
    if quantize == "int4" and not _some_in_4_bits(source.name, program):
        quantize = "int8"
    if quantize is None and lacking is None and checkpoint.weights.in_4_bits:
        log.info(
            "%s: the file's weights are in 4 bits; --quantize int4 keeps them in 4 bits, which is "
            "faster and changes answers a little",
            source.name,
        )
    decoder = decoder_on(backend, program, kernels)
    place = Place(all_backends(kernels), dtype, device)
    return Prepared(
        *(source.name, source.aliases, checkpoint, decoder, backend, dtype, context, place),
        quantize,
    )


def open_source(loading: ModelOptions, source: ModelSource) -> Checkpoint:
    """What its files say, weights not yet read. Raises CheckpointError or CommandError."""
    if source.source.startswith(RANDOM):
        if loading.chat_template is not None:
            raise CommandError(
                f"--chat-template: {source.source} has random weights and answers no chats; leave "
                "the option out"
            )
        from ropewalk.model.loading.random_weights import random_checkpoint

        return random_checkpoint(source.source, loading.encoding, loading.max_model_len)
    trusted = {*loading.trust_encoding, loading.encoding or ""}
    return open_checkpoint(download.locate(source.source), trusted, loading.chat_template)


def require(source: ModelSource) -> None:
    """Fetches a model that is to be fetched. Raises CommandError where there is none."""
    if not source.source.startswith(RANDOM):
        download.locate(source.source)


def _replace_encoding(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Replace the encoding that the weights were trained with: an experiment."""
    if isinstance(checkpoint.config, EncoderDecoderConfig):
        raise CommandError(
            f"--encoding {name}: an encoder-decoder such as {checkpoint.architecture} has an "
            "encoding on each side, which cannot be replaced; leave the option out"
        )
    options = find(name).usual_options(checkpoint.config)
    kept = {
        parameter: pieces
        for parameter, pieces in checkpoint.parameters.items()
        if not parameter.startswith("encoding.")
    }
    config = replace(checkpoint.config, encoding=EncodingSpec(name, options))
    return replace(checkpoint, config=config, parameters=kept)


def _add_options(checkpoint: Checkpoint, given: Mapping[str, Any]) -> Checkpoint:
    """Add options to the decoder's encoding, on top of its own."""
    spec = checkpoint.config.encoding
    known = tuple(find(spec.name).OPTIONS)
    for name, value in given.items():
        if name not in known:
            taken = f"only {listed(known)}" if known else "no options"
            raise CommandError(
                f"--encoding-option {name}={value}: {checkpoint.path} has the encoding "
                f"{spec.name}, which takes {taken}; leave the option out"
            )
    spec = EncodingSpec(spec.name, {**spec.options, **given})
    return replace(checkpoint, config=replace(checkpoint.config, encoding=spec))


def _create(
    spec: EncodingSpec,
    given: Mapping[str, Any],
    shape: ModelConfig,
    context: int,
    device: torch.device,
) -> PositionalEncoding:
    try:
        return create(spec, shape, context, device)
    except (ArithmeticError, TypeError) as error:
        if not given:
            raise
        told = " ".join(f"{name}={value}" for name, value in given.items())
        raise CommandError(
            f"--encoding-option {told}: {spec.name} cannot be made with it ({error}); correct the "
            "value or leave the option out"
        ) from error


def _refuse_missing_weights(checkpoint: Checkpoint, encoding: PositionalEncoding) -> None:
    for name, _ in encoding.named_parameters():
        if f"encoding.{name}" not in checkpoint.parameters:
            raise CommandError(
                f"--encoding {checkpoint.config.encoding.name} has trained weights, which "
                f"{checkpoint.path} lacks; serve a model that was trained with it"
            )


def _lacking_for_int4(kernels: Kernels | str, dtype: torch.dtype) -> str | None:
    """Without kernels that multiply 4-bit weights, they would only be slower than 8-bit ones."""
    if isinstance(kernels, str):
        return f"the CPU kernels, but {kernels}"
    if not kernels.multiplies_int4():
        return "a processor that multiplies 8-bit integers (AVX2)"
    if dtype not in SUFFIXES:
        return "--dtype bfloat16 or float32"
    return None


def _some_in_4_bits(name: str, program: Program) -> bool:
    """Where 4 bits were asked for; says how many."""
    in_4 = sum(isinstance(weight, Int4) for weight in program.weights.values())
    in_8 = sum(isinstance(weight, Int8) for weight in program.weights.values())
    if in_4 == 0:
        log.warning(
            "%s: 4 bits would lose accuracy in every layer, so all are in 8 bits; use a GGUF file "
            "in Q4_0 or Q4_1, whose weights are in 4 bits",
            name,
        )
    else:
        log.info("%s: %d linear layers in 4 bits, %d in 8", name, in_4, in_8)
    return in_4 > 0


def _load(
    checkpoint: Checkpoint,
    name: str,
    encoding: PositionalEncoding,
    of_encoder: PositionalEncoding | None,
    dtype: torch.dtype,
    device: torch.device,
    check: Callable[[], None],
) -> Program:
    with bar_if_long(f"loading {name}", 0, "tensor") as bar:

        def report(done: int, total: int) -> None:
            check()
            bar.total = total
            bar.update(done - bar.n)

        return load_program(
            checkpoint, encoding, of_encoder, dtype=dtype, device=device, progress=report
        )
