"""The few fields of SentencePiece's model file that are needed here, as protobuf.

Reading gives what the sentencepiece library does not expose (dummy prefix, denormaliser, text of
the unknown token); writing turns GGUF's vocabulary into a model that the library loads.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

# Field numbers of ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNK_SURFACE = 3, 35, 44
_NAME, _CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES = 1, 2, 3, 4

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class PieceType(IntEnum):
    """The values are the same in SentencePiece's model file and in GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    """TrainerSpec.model_type: how text is split into pieces."""

    UNIGRAM = 1
    BPE = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of the vocabulary; its id is its index there."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, slots=True)
class Settings:
    """What determines how a model encodes text, besides its pieces."""

    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    charsmap: bytes = b""  # compiled normalisation rules; empty: text is not normalised
    denormalizes: bool = False
    unknown: str = " ⁇ "  # text of an unknown token


def read_settings(model: bytes) -> Settings:
    """Settings of a model file that the sentencepiece library has accepted."""
    top = dict(_fields(model))
    trainer = dict(_fields(_message(top, _TRAINER)))
    normalizer = dict(_fields(_message(top, _NORMALIZER)))
    denormalizer = dict(_fields(_message(top, _DENORMALIZER)))
    default = Settings()
    surface = trainer.get(_UNK_SURFACE)
    return Settings(
        add_dummy_prefix=bool(normalizer.get(_ADD_DUMMY_PREFIX, True)),
        remove_extra_whitespaces=bool(normalizer.get(_REMOVE_EXTRA_WHITESPACES, True)),
        charsmap=_message(normalizer, _CHARSMAP),
        denormalizes=bool(denormalizer.get(_CHARSMAP)),
        unknown=surface.decode() if isinstance(surface, bytes) else default.unknown,
    )


def longest_replacement(charsmap: bytes) -> int:
    """Bytes of the longest text by which compiled normalisation rules replace another."""
    # The size of an index, the index, and texts that each end in a null character.
    index = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + index :].split(b"\0")))


def write_model(kind: ModelType, pieces: Sequence[Piece], settings: Settings) -> bytes:
    """A model file; the sentencepiece library still validates it on loading."""
    fallback = any(piece.type is PieceType.BYTE for piece in pieces)
    trainer = (
        _number(_MODEL_TYPE, kind)
        + _number(_BYTE_FALLBACK, fallback)
        + _text(_UNK_SURFACE, settings.unknown.encode())
    )
    normalizer = (
        _text(_NAME, b"custom" if settings.charsmap else b"identity")
        + _text(_CHARSMAP, settings.charsmap)
        + _number(_ADD_DUMMY_PREFIX, settings.add_dummy_prefix)
        + _number(_REMOVE_EXTRA_WHITESPACES, settings.remove_extra_whitespaces)
    )
    body = b"".join(_text(_PIECES, _piece(piece)) for piece in pieces)
    return body + _text(_TRAINER, trainer) + _text(_NORMALIZER, normalizer)


def without_prefix(model: bytes) -> bytes:
    """The same model, but it adds no space before a text."""
    # Of a field that is given twice, the last one counts.
    return model + _text(_NORMALIZER, _number(_ADD_DUMMY_PREFIX, False))


def _piece(piece: Piece) -> bytes:
    score = _tag(_PIECE_SCORE, _FIXED32) + struct.pack("<f", piece.score)
    return _text(_PIECE_TEXT, piece.text.encode()) + score + _number(_PIECE_TYPE, piece.type)


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _tag(field, _VARINT) + _varint(value)


def _text(field: int, value: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _message(fields: dict[int, int | bytes], field: int) -> bytes:
    value = fields.get(field, b"")
    return value if isinstance(value, bytes) else b""


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Each field's number and raw value; fixed-width numbers stay bytes."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _read_varint(message, at)
            yield tag >> 3, value
            continue
        if wire == _BYTES:
            size, at = _read_varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"protobuf wire type {wire} is not used by SentencePiece models")
        yield tag >> 3, message[at : at + size]
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
