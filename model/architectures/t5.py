"""T5 and its relatives: encoder-decoders with relative biases, RMS norms and unscaled scores.

T5 v1.0 ties its embeddings, scales the decoder's output and has plain feed-forward layers; v1.1,
Flan and ByT5 do none of these.
"""

import dataclasses
import re
from typing import Any, ClassVar

from ropewalk.model.architectures.base import Architecture
from ropewalk.model.architectures.common import (
    ACTIVATIONS,
    LLAMA_CPP,
    TRANSFORMERS,
    Most,
    harmless_in_gguf,
    harmless_in_hf,
    refuse_foreign,
    refuse_foreign_gguf,
    vocab_size_of_gguf,
)
from ropewalk.model.architectures.fields import Absent, Default, Fields, Like, by
from ropewalk.model.architectures.stored import Parameters
from ropewalk.model.architectures.t5_stored import GGUF, HUGGING_FACE, encoder_decoder
from ropewalk.model.config import Activation, EncoderDecoderConfig, EncodingSpec, ModelConfig
from ropewalk.model.weights.base import WeightFile, shown

MAX_BUCKETS = 1024
MAX_DISTANCE = 128  # GGUF has no key for it

# In config.json: training settings, and what the flags read here imply.
HARMLESS_HERE = ("dropout_rate", "initializer_factor", "output_past")


class T5(Architecture):
    """A relative's own file states only the differences."""

    model_type = "t5"
    model_class = "T5ForConditionalGeneration"
    former_class: str | None = "T5WithLMHeadModel"
    gguf_name: str | None = "t5"
    # Old files hold a bias for cross-attention, which no version has ever read.
    derived = re.compile(
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
        r"|dec\.blk\.0\.cross_attn_rel_b\.weight"
    )
    absent: ClassVar[Absent] = {
        **by(
            TRANSFORMERS,
            vocab_size=32128,
            d_model=512,
            d_kv=64,
            d_ff=2048,
            num_layers=6,
            num_decoder_layers=Like("num_layers"),
            num_heads=8,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=128,
            layer_norm_epsilon=1e-6,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=Like("pad_token_id"),
        ),
        **by("arXiv 1910.10683", n_positions=512),  # section 3.1.2: tokens a side
    }
    absent_in_gguf: ClassVar[Absent] = {
        "decoder_block_count": Default(Like("block_count"), LLAMA_CPP)
    }
    feed_forward = "relu"  # where config.json states none
    per_layer = False  # whether every layer has its own bias
    harmless: tuple[str, ...] = ()  # further keys of config.json that change nothing

    def scales_output(self, fields: Fields, tied: bool) -> bool:
        """Whether logits are multiplied by width^-0.5; `tied`: what config.json says or implies."""
        # transformers ties by what is stored, and keeps the file's original flag in a new key.
        scales = fields.flag("scale_decoder_outputs")
        return tied if scales is None else scales

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        refuse_foreign(fields, self.model_type, self.model_class, former=self.former_class)
        if fields.flag("is_encoder_decoder") is False:
            raise fields.error("is_encoder_decoder is false, but only the whole model is served")
        num_layers = fields.integer("num_layers", Most.LAYERS)
        activation, gated = self._feed_forward(fields)
        claims_tied = fields.flag("tie_word_embeddings") is not False
        hidden_size = fields.integer("d_model", Most.WIDTH)
        encoder = _encoder(
            fields,
            vocab_size=fields.integer("vocab_size", Most.VOCAB),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=fields.integer("num_heads", Most.HEADS),
            head_dim=fields.integer("d_kv", Most.HEAD_DIM),
            intermediate_size=fields.integer("d_ff", Most.FFN_WIDTH),
            norm_eps=fields.number("layer_norm_epsilon"),
            trained_context=fields.integer("n_positions", Most.CONTEXT),
            buckets=fields.integer("relative_attention_num_buckets", MAX_BUCKETS),
            max_distance=fields.integer("relative_attention_max_distance", Most.CONTEXT),
            per_layer=self.per_layer,
            tied_embeddings=claims_tied and "lm_head.weight" not in weights.names(),
            activation=activation,
            gated=gated,
        )
        config = _with_decoder(
            encoder,
            num_layers=fields.integer("num_decoder_layers", Most.LAYERS, null=num_layers),
            start_token=_one_id(fields, "decoder_start_token_id", encoder),
            end_token=_one_id(fields, "eos_token_id", encoder),
            output_scale=hidden_size**-0.5 if self.scales_output(fields, claims_tied) else 1.0,
        )
        fields.finish(harmless_in_hf(*HARMLESS_HERE, *self.harmless))
        return config

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_gguf(fields)
        names, own = weights.names(), f"{self.gguf_name}."
        refuse_foreign_gguf(fields, own)
        num_layers = fields.integer(own + "block_count", Most.LAYERS)
        hidden_size = fields.integer(own + "embedding_length", Most.WIDTH)
        head_dim = fields.integer(own + "attention.key_length", Most.HEAD_DIM)
        if fields.integer(own + "attention.value_length", Most.HEAD_DIM) != head_dim:
            raise fields.error("attention.value_length differs from attention.key_length")
        fields.get(own + "attention.layer_norm_epsilon")  # the same value under another name
        # The metadata say nothing about these, so the tensors decide.
        gated, tied = "dec.blk.0.ffn_gate.weight" in names, "output.weight" not in names
        encoder = _encoder(
            fields,
            vocab_size=vocab_size_of_gguf(fields, own, weights),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=fields.integer(own + "attention.head_count", Most.HEADS),
            head_dim=head_dim,
            intermediate_size=fields.integer(own + "feed_forward_length", Most.FFN_WIDTH),
            norm_eps=fields.number(own + "attention.layer_norm_rms_epsilon"),
            trained_context=fields.integer(own + "context_length", Most.CONTEXT),
            buckets=fields.integer(own + "attention.relative_buckets_count", MAX_BUCKETS),
            max_distance=MAX_DISTANCE,
            per_layer="dec.blk.1.attn_rel_b.weight" in names,
            tied_embeddings=tied,
            activation="gelu_tanh" if gated else "relu",
            gated=gated,
        )
        config = _with_decoder(
            encoder,
            num_layers=fields.integer(own + "decoder_block_count", Most.LAYERS),
            start_token=_one_id(fields, own + "decoder_start_token_id", encoder),
            end_token=_one_id(fields, "tokenizer.ggml.eos_token_id", encoder),
            output_scale=hidden_size**-0.5 if tied else 1.0,
        )
        fields.finish(harmless_in_gguf(own))
        return config

    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> Parameters:
        return encoder_decoder(config, HUGGING_FACE)

    def parameters_in_gguf(self, config: ModelConfig) -> Parameters:
        return encoder_decoder(config, GGUF)

    def copies(self, config: ModelConfig, names: frozenset[str]) -> dict[str, str]:
        sides = ("encoder", "decoder")
        return {f"{side}.embed_tokens.weight": "shared.weight" for side in sides}

    def _feed_forward(self, fields: Fields) -> tuple[Activation, bool]:
        """An activation, or "gated-" and an activation; in "gated-gelu" this is the tanh form."""
        said = fields.text("feed_forward_proj") or self.feed_forward
        gate, _, name = said.rpartition("-")
        name = "gelu_new" if said == "gated-gelu" else name
        if name not in ACTIVATIONS or gate not in ("", "gated"):
            raise fields.error(f"feed_forward_proj {shown(said)} is not supported")
        gated = gate == "gated"
        # Newer versions write these besides.
        if fields.text("dense_act_fn") not in (None, name):
            raise fields.error(f"dense_act_fn contradicts feed_forward_proj {shown(said)}")
        if fields.flag("is_gated_act") not in (None, gated):
            raise fields.error(f"is_gated_act contradicts feed_forward_proj {shown(said)}")
        return ACTIVATIONS[name], gated


def _encoder(
    fields: Fields,
    *,
    num_layers: int,
    num_heads: int,
    buckets: int,
    max_distance: int,
    per_layer: bool,
    **others: Any,
) -> ModelConfig:
    """What both sides share, as the encoder's config; `others` are further fields of it."""
    if buckets < 4:
        raise fields.error(f"{buckets} buckets are too few for both directions; it needs 4")
    if max_distance <= buckets // 2:
        raise fields.error(
            f"relative_attention_max_distance {max_distance} is no more than the {buckets // 2} "
            "distances that have buckets of their own"
        )
    options = {"buckets": buckets, "max_distance": max_distance, "per_layer": per_layer}
    return ModelConfig(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        encoding=EncodingSpec("t5", options | {"bidirectional": True}),
        windows=(None,) * num_layers,
        attention_scale=1.0,
        **others,
    )


def _with_decoder(
    encoder: ModelConfig, *, num_layers: int, start_token: int, end_token: int, output_scale: float
) -> EncoderDecoderConfig:
    shared = {field.name: getattr(encoder, field.name) for field in dataclasses.fields(encoder)}
    own = {
        "num_layers": num_layers,
        "windows": (None,) * num_layers,
        "encoding": EncodingSpec("t5", encoder.encoding.options | {"bidirectional": False}),
    }
    return EncoderDecoderConfig(
        **shared | own,
        encoder=encoder,
        start_token=start_token,
        end_token=end_token,
        output_scale=output_scale,
    )


def _one_id(fields: Fields, key: str, config: ModelConfig) -> int:
    """Id of a token that the model embeds."""
    found = fields.token_ids(key)
    token = min(found) if found else fields.default(key)
    if type(token) is not int or len(found) > 1 or not 0 <= token < config.vocab_size:
        raise fields.error(
            f"{key} must be one token of the vocabulary, not {sorted(found) or token}"
        )
    return token
