"""Hostile checkpoints, a few hundred of them, the same for the same seed.

Each is a small valid checkpoint of which one file was changed: at random, or as an attacker would.
"""

import json
import random
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from ropewalk.model.architectures.base import by_gguf_name, by_model_type
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.tokenizers.base import BYTE_OF
from ropewalk.model.weights.safetensors_dir import MAX_HEADER
from tests.model.tokenizers.samples import train_spm
from tests.model.tokenizers.test_chat_process import DOUBLE, LOOP

VOCAB = 260


@dataclass(frozen=True)
class Case:
    """`write` makes it in an empty folder and returns what to open."""

    name: str
    write: Callable[[Path], Path]


def cases(seed: int = 0) -> list[Case]:
    kinds = [valid, headers, configs, tokenizer_jsons, tokenizer_models, settings, templates, ggufs]
    return [
        Case(f"{kind.__name__}-{index}", write)
        for kind in kinds
        for index, write in enumerate(kind(random.Random(f"{seed} {kind.__name__}")))
    ]


# ------------------------------------------------------------------------ a valid checkpoint

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}
T5 = {
    "model_type": "t5",
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "n_positions": 64,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
OWN = {
    "model_type": "ropewalk",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "norm_eps": 1e-5,
    "trained_context": 64,
    "encoding": {"name": "rope", "options": {"base": 1e4, "width": 8, "layout": "half"}},
    "windows": [None],
    "tied_embeddings": True,
}
CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class _NoWeights:
    def names(self):
        return frozenset({"token_embd.weight"})

    def shape(self, name):
        return VOCAB, 16


@cache
def _tensors(config: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a config.json needs."""
    values = json.loads(config)
    architecture = by_model_type(values["model_type"], "corpus")
    made = architecture.config_from_hf(Fields("corpus", values), _NoWeights())
    pieces = architecture.parameters_in_hf(made, frozenset()).values()
    return {each.name: each.shape for of_one in pieces for each in of_one}


def _safetensors(config: dict) -> tuple[dict, bytes]:
    """The header and the data, all zeros."""
    header, at = {}, 0
    for name, shape in _tensors(json.dumps(config)).items():
        size = 4
        for each in shape:
            size *= each
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header, bytes(at)


def _joined(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _tokenizer(**changes) -> dict:
    vocabulary = dict(BYTE_OF)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    } | changes


def _folder(path: Path, config: dict | bytes = OWN, **files: object) -> Path:
    """A folder; `files` replace or add some, by name with __ for a dot. None leaves one out.

    What is large is a function, so that it is made only when it is needed.
    """
    valid = config if isinstance(config, dict) else OWN
    header, data = _safetensors(valid) if "model__safetensors" not in files else ({}, b"")
    contents = {
        "config__json": config,
        "model__safetensors": _joined(json.dumps(header).encode(), data),
        "tokenizer__json": _tokenizer(),
        **files,
    }
    for name, content in contents.items():
        if callable(content):
            content = content()
        if content is None:
            continue
        if isinstance(content, str):
            content = content.encode("utf-8", "surrogatepass")
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def _config(path: Path, valid: dict, changed: dict) -> Path:
    """A changed config.json beside the weights of the valid one."""
    return _folder(
        path,
        json.dumps(changed).encode(),
        model__safetensors=_joined(*_encoded(*_safetensors(valid))),
    )


def _encoded(header: dict, data: bytes) -> tuple[bytes, bytes]:
    return json.dumps(header).encode(), data


# ------------------------------------------------------------------------ changes

HUGE = 10**9
VALUES = (
    0,
    -1,
    1,
    3,
    255,
    65_536,
    1 << 20,
    1 << 22,
    HUGE,
    1 << 31,
    (1 << 63) - 1,
    1 << 64,
    10**400,
    0.0,
    -0.5,
    1e-300,
    1e29,
    1e300,
    True,
    False,
    None,
    "",
    "x" * 100_000,
    "\ud800",
    "../../etc/passwd",
    "os:system",
    [],
    {},
    [HUGE],
    [1] * 10_000,
    [[[[]]]],
    {"type": "yarn", "factor": HUGE},
    {"rope_type": "longrope", "short_factor": [1e300] * 4, "long_factor": [1e-300] * 4},
)


def _paths(value: object, at: tuple = ()) -> Iterator[tuple]:
    """Where a value has parts."""
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, part in items:
        yield (*at, key)
        yield from _paths(part, (*at, key))


def _put(value: object, path: tuple, new: object) -> object:
    changed = deepcopy(value)
    part = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = new
    return changed


def _flipped(rng: random.Random, data: bytes, within: int, most: int = 8) -> bytes:
    """Some bytes near the beginning changed, doubled or left out."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(min(within, len(changed)))
        match rng.randrange(4):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at : at + rng.randint(1, 16)]
            case 3:
                changed[at:at] = changed[at : at + rng.randint(1, 16)]
    return bytes(changed)


# ------------------------------------------------------------------------ kinds of files


def valid(rng: random.Random) -> Iterator[Callable[[Path], Path]]:
    """What the others were made from: these load."""
    spm = {"tokenizer__json": None, "tokenizer__model": _trained("llama")}
    yield partial(_folder, chat_template__jinja=CHATML)
    yield partial(_folder, config=LLAMA)
    yield partial(_folder, config=T5)
    yield partial(_folder, **spm)
    yield partial(_file, _gguf())


def headers(rng: random.Random) -> Iterator[Callable[[Path], Path]]:
    header, data = _safetensors(OWN)
    text = json.dumps(header).encode()
    whole = _joined(text, data)
    made: list[object] = [_flipped(rng, whole, 8) for _ in range(5)]
    made += [_flipped(rng, whole, 8 + len(text)) for _ in range(12)]
    made += [whole[: rng.randrange(len(whole))] for _ in range(4)]
    paths = list(_paths(header))
    for _ in range(14):
        changed = _put(header, rng.choice(paths), rng.choice(VALUES))
        made.append(_joined(json.dumps(changed).encode(), data))
    large = MAX_HEADER - 64
    empty = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    made += [
        struct.pack("<Q", 1 << 63) + text + data,
        struct.pack("<Q", MAX_HEADER) + text + data,
        _joined(b"{" * 100_000, b""),
        _joined(b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b""),
        lambda: _joined(b'{"__metadata__":[' + b"{}," * (large // 3) + b"{}]}", b""),
        lambda: _joined(b'{"__metadata__":[' + b"[]," * (large // 3) + b"[]]}", b""),
        lambda: _joined(b'{"__metadata__":[' + b'{"":1},' * (large // 7) + b"{}]}", b""),
        lambda: _joined(b'{"__metadata__":"' + b"\xc3\xa9" * (large // 2 - 8) + b'"}', b""),
        lambda: _joined(b'{"a":' + b"9" * 5_000_000 + b"}", b""),
        lambda: _joined(
            b"{" + b",".join(b'"%d":%s' % (n, empty) for n in range(200_000)) + b"}", b""
        ),
    ]
    for content in made:
        yield partial(_folder, model__safetensors=content)


def configs(rng: random.Random) -> Iterator[Callable[[Path], Path]]:
    for valid, count in ((OWN, 30), (LLAMA, 20), (T5, 15)):
        paths = list(_paths(valid))
        for _ in range(count):
            yield partial(
                _config, valid=valid, changed=_put(valid, rng.choice(paths), rng.choice(VALUES))
            )
    encodings = [
        ("t5", {"buckets": HUGE, "max_distance": 10**12}),
        ("t5", {"buckets": 1024, "max_distance": 1 << 22}),
        ("t5", {"buckets": 32, "max_distance": 1 << 22, "per_layer": True}),
        ("t5", {"buckets": 32.5, "max_distance": 1e300}),
        ("learned", {"positions": 1 << 40, "offset": 0}),
        ("learned", {"positions": 64, "offset": HUGE}),
        ("sinusoidal", {"layout": "split", "offset": HUGE}),
        ("sinusoidal", {"layout": "split", "offset": 10**400}),
        ("rope", {"base": 10**400, "width": 8, "layout": "half"}),
        ("rope", {"base": 1e4, "width": 8, "layout": "half", "layers": [0] * 100_000}),
        ("rope", {"base": 1e4, "width": 8, "layout": "half", "scaling": {"type": "factors"}}),
        ("alibi", {"bias_max": 10**400}),
        ("alibi", {"hf_exact": True}),
        ("nope" * 20_000, {}),
        ("../rope", {}),
    ]
    for name, options in encodings:
        encoding = {"name": name, "options": options}
        yield partial(_config, valid=OWN, changed=OWN | {"encoding": encoding})
        context = {"encoding": encoding, "trained_context": 1 << 22}
        yield partial(_config, valid=OWN, changed=OWN | context)
    for content in (
        b"",
        b"[" * 100_000,
        b'{"a":NaN}',
        b"\xff\xfe{}",
        b'{"a":1,"a":2}',
        b"9" * 900_000,
    ):
        yield partial(_folder, config=content)
    wide = {"num_layers": 1024, "windows": [None] * 1024, "num_heads": 1024, "head_dim": 1024}
    yield partial(_config, valid=OWN, changed=OWN | wide)


def tokenizer_jsons(rng: random.Random) -> Iterator[Callable[[Path], Path]]:
    valid = _tokenizer()
    text = json.dumps(valid).encode()
    made: list[object] = [_flipped(rng, text, len(text), 3) for _ in range(15)]
    paths = [path for path in _paths(valid) if "vocab" not in path]
    made += [_put(valid, rng.choice(paths), rng.choice(VALUES)) for _ in range(12)]

    def replace(content: str, **pattern: str) -> dict:
        return {"type": "Replace", "pattern": pattern or {"Regex": "."}, "content": content}

    def sequence(*steps: dict) -> dict:
        return {"type": "Sequence", "normalizers": list(steps)}

    def split(regex: str) -> dict:
        pattern = {"Regex": regex}
        return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}

    charsmap = struct.pack("<I", 4) + struct.pack("<I", 0xFFFFFFFF) + b"x" * 100_000 + b"\0"
    normalizers = [
        sequence(*[replace("x" * 1000)] * 3),
        sequence(*[replace("x" * 1000, String="z")] * 3),
        sequence(*[replace("xx")] * 30),
        sequence(*[{"type": "Prepend", "prepend": "x" * 1000}] * 3, replace("x" * 1000)),
        {"type": "Prepend", "prepend": "x" * 10_000_000},
        replace("", Regex="(?:(?:(?:a{999}){999}){999}){999}"),
        replace("", Regex="(" * 5_000 + ")" * 5_000),
        replace("x", Regex=""),
        {"type": "Precompiled", "precompiled_charsmap": b64encode(charsmap).decode()},
        {"type": "Precompiled", "precompiled_charsmap": b64encode(b"\xff" * 64).decode()},
        {"type": "Precompiled", "precompiled_charsmap": ""},
    ]
    made += [valid | {"normalizer": each} for each in normalizers]
    nested = replace("x")
    for _ in range(100):
        nested = sequence(nested)
    made.append(valid | {"normalizer": nested})
    made += [
        valid | {"pre_tokenizer": split(regex)}
        for regex in (
            "(a+)+$",
            "(.*)*",
            "(?:.|.)*$",
            "[",
            "(?<!a*)b",
            "\\p{Nope}",
            "a{99999}{99999}",
        )
    ]
    model = valid["model"]
    models = [
        {"vocab": {"a": 0, "b": HUGE}},
        {"vocab": {"a": 0, "b": (1 << 32) - 1}},
        {"vocab": {"a": 0, "b": 1 << 40}},
        {"vocab": {"a": -1}},
        {"vocab": {"a": 0, "b": 0}},
        {"vocab": {}},
        {"merges": [["a", "b"]]},
        {"merges": [["a"] * 3]},
        {"merges": ["a b c"]},
        {"continuing_subword_prefix": "x" * 1_000_000},
        {"end_of_word_suffix": "x" * 1_000_000},
        {"dropout": 2.0},
        {"unk_token": "<none>"},
    ]
    made += [valid | {"model": model | each} for each in models]
    made.append(
        lambda: valid | {"model": model | {"vocab": {f"t{n}": n for n in range(1_200_000)}}}
    )
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False}
    made += [
        lambda: valid | {"model": unigram | {"vocab": [["<u>", 0.0], ["x" * 30_000_000, -1.0]]}},
        lambda: valid | {"model": unigram | {"vocab": [["<u>", 0.0], ["x" * 300_000, -1.0]]}},
        valid | {"model": unigram | {"vocab": [["<unk>", 0.0]], "unk_id": HUGE}},
        valid | {"model": unigram | {"vocab": []}},
        valid | {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}},
        valid
        | {
            "model": {
                "type": "WordPiece",
                "unk_token": "x",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": HUGE,
                "vocab": {"x": 0},
            }
        },
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    made += [
        valid | {"added_tokens": [{"id": number, "content": content, **flags}]}
        for number, content in ((HUGE, "<a>"), (-1, "<a>"), (256, ""), (256, "x" * 5_000_000))
    ]
    made += [
        valid | {"truncation": {"max_length": 0, "stride": HUGE, "strategy": "LongestFirst"}},
        valid | {"padding": {"strategy": {"Fixed": HUGE}, "pad_id": 0, "pad_token": "a"}},
        valid
        | {"decoder": {"type": "Sequence", "decoders": [replace("x" * 1000, String="a")] * 4}},
        valid
        | {"decoder": {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 99_999}},
        valid
        | {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 99_999,
                "pair": [],
                "special_tokens": {
                    "<s>": {"id": "<s>", "ids": [HUGE] * 10, "tokens": ["<s>"] * 10}
                },
            }
        },
    ]
    made += [
        b"",
        b"[" * 200_000,
        b"\xff",
        lambda: b" " * (65 << 20),
        b"{}",
        b'"' + b"\\u0000" * 99_999,
    ]
    for content in made:
        yield partial(_folder, tokenizer__json=content)


def tokenizer_models(rng: random.Random) -> Iterator[Callable[[Path], Path]]:
    made: list[object] = []
    for kind in ("llama", "unigram"):
        model = _trained(kind)
        made += [_flipped(rng, model, len(model), 4) for _ in range(8)]
        made += [model[: rng.randrange(len(model))] for _ in range(2)]
        tail = b"\x1a\x04\x12\x02\xff\xff"  # a normaliser with broken rules, which counts
        made.append(model + tail)
        made.append(model + b"\x0a" + b"\xff\xff\xff\xff\x0f" + b"x")
        made.append(model + b"\x2b\x2c" * 10_000)
        rules = struct.pack("<I", 1024) + rng.randbytes(1024) + b"x" * 100_000 + b"\0"
        field = b"\x12" + _varint(len(rules)) + rules
        made.append(model + b"\x1a" + _varint(len(field)) + field)
    model, size = _trained("llama"), _varint(30_000_000)
    head = b"\x0a" + _varint(30_000_000 + 1 + len(size)) + b"\x0a" + size
    made.append(lambda: model + head + b"x" * 30_000_000)
    made.append(lambda: b"\x0a\x00" * 1_000_000)
    for content in made:
        yield partial(_folder, tokenizer__json=None, tokenizer__model=content)


_trained = cache(train_spm)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def settings(rng: random.Random) -> Iterator[Callable[[Path], Path]]:
    """The small files about a tokenizer, beside both kinds of it."""
    spm = {"tokenizer__json": None, "tokenizer__model": _trained("llama")}
    valid = {
        "bos_token": "a",
        "eos_token": {"content": "b"},
        "add_bos_token": False,
        "legacy": False,
        "added_tokens_decoder": {"256": {"content": "<x>", "special": True}},
        "chat_template": CHATML,
    }
    paths = list(_paths(valid))
    changed: list[object] = [_put(valid, rng.choice(paths), rng.choice(VALUES)) for _ in range(12)]
    decoders = [
        {str(number): {"content": "<y>"}}
        for number in (HUGE, -1, 10**30, "9" * 5_000, "٣", 1 << 20, 300_000)
    ]
    changed += [valid | {"added_tokens_decoder": each} for each in decoders]
    many = {str(n): {"content": f"<{n}>", "lstrip": True, "rstrip": True} for n in range(9_000)}
    changed += [valid | {"added_tokens_decoder": many}]
    changed += [b"[" * 100_000, b"{" + b'"a":{},' * 1_000_000 + b'"b":1}', lambda: b" " * (9 << 20)]
    for index, content in enumerate(changed):
        files = spm if index % 2 else {}
        yield partial(_folder, tokenizer_config__json=content, **files)
    for number in (HUGE, -5, 10**30, True, 1.5):
        yield partial(_folder, added_tokens__json={"<y>": number}, **spm)
    yield partial(_folder, special_tokens_map__json={"additional_special_tokens": ["x"] * 10**6})
    yield partial(_folder, generation_config__json={"eos_token_id": [HUGE] * 10_000})


def templates(rng: random.Random) -> Iterator[Callable[[Path], Path]]:
    made: list[object] = [
        LOOP,
        DOUBLE,
        "{{ 'a' | center(6000000000) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'a' * 9999999999 }}",
        "{{ 7 ** 99999999 % 10 }}",
        lambda: "x" * 15_000_000,
        "{{ x }}" * 140_000,
        "{{ 1 + 2 * 3 - x }}" * 50_000,
        "{{" + "(" * 50_000,
        "{{" + "-" * 100_000 + "1 }}",
        "{{" + "[" * 400 + "]" * 400 + "}}",
        "{% if a %}" * 5_000,
        "{#" * 100_000,
        "{% raw %}" * 50_000,
        "{% set x = " + "x ~ " * 50_000 + "x %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}{% import 'os' as os %}",
        "{{ raise_exception('x' * 9999999) }}",
        "{{ lipsum(9999999) }}",
        "{{ messages | tojson(indent=99999999) }}",
        "{{ range(99999) | batch(1) | list | tojson }}" * 30,
        "\ud800",
        b"\xff",
    ]
    whole = CHATML.encode()
    made += [_flipped(rng, whole, len(whole), 4) for _ in range(8)]
    for content in made:
        yield partial(_folder, chat_template__jinja=content)


# ------------------------------------------------------------------------ GGUF

U8, I8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 2, 4, 5, 6, 7, 8, 9, 10
FORMATS = {U8: "B", I8: "b", U16: "H", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}


def _text(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def _array(kind: int, items: list) -> bytes:
    body = b"".join(map(_text, items)) if kind == STRING else b""
    if kind != STRING:
        body = struct.pack(f"<{len(items)}{FORMATS[kind]}", *items)
    return struct.pack("<IQ", kind, len(items)) + body


def _metadata(changes: dict | None = None) -> dict[str, tuple[int, bytes]]:
    def number(value: int) -> tuple[int, bytes]:
        return U32, struct.pack("<I", value)

    tokens = [*BYTE_OF, "<end>", "<a>", "<b>", "<c>"]
    types = [1] * len(BYTE_OF) + [3] * 4
    return {
        "general.architecture": (STRING, _text("llama")),
        "llama.block_count": number(1),
        "llama.context_length": number(64),
        "llama.embedding_length": number(16),
        "llama.feed_forward_length": number(16),
        "llama.attention.head_count": number(2),
        "llama.attention.head_count_kv": number(1),
        "llama.attention.layer_norm_rms_epsilon": (F32, struct.pack("<f", 1e-5)),
        "llama.rope.freq_base": (F32, struct.pack("<f", 1e4)),
        "llama.vocab_size": number(VOCAB),
        "tokenizer.ggml.model": (STRING, _text("gpt2")),
        "tokenizer.ggml.pre": (STRING, _text("gpt-2")),
        "tokenizer.ggml.tokens": (ARRAY, _array(STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, _array(I32, types)),
        "tokenizer.ggml.merges": (ARRAY, _array(STRING, [])),
        "tokenizer.ggml.eos_token_id": number(256),
        "tokenizer.chat_template": (STRING, _text(CHATML)),
    } | (changes or {})


@cache
def _gguf_tensors() -> dict[str, tuple[int, ...]]:
    architecture = by_gguf_name("llama", "corpus")
    values = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e4,
        "llama.vocab_size": VOCAB,
    }
    config = architecture.config_from_gguf(Fields("corpus", values), _NoWeights())
    pieces = architecture.parameters_in_gguf(config).values()
    return {each.name: each.shape for of_one in pieces for each in of_one}


def _gguf(metadata: dict | None = None, *, version: int = 3, shape: tuple | None = None) -> bytes:
    """A file; `shape` instead of the true one of the first tensor."""
    metadata, tensors = metadata or _metadata(), _gguf_tensors()
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        out += _text(key) + struct.pack("<I", kind) + value
    at = 0
    for index, (name, true) in enumerate(tensors.items()):
        stated = shape if shape is not None and index == 0 else true
        out += _text(name) + struct.pack("<I", len(stated))
        out += b"".join(struct.pack("<Q", each) for each in reversed(stated))
        out += struct.pack("<IQ", 0, at)
        size = 4
        for each in true:
            size *= each
        at += -(-size // 32) * 32
    return out + bytes(-len(out) % 32) + bytes(at)


def _spam(kind: int, data: bytes, key: str = "x") -> dict:
    """An array of as many items as `data` has, in the metadata."""
    count = len(data) // struct.calcsize(FORMATS[kind]) if kind in FORMATS else 1 << 22
    return {key: (ARRAY, struct.pack("<IQ", kind, count) + data)}


def ggufs(rng: random.Random) -> Iterator[Callable[[Path], Path]]:
    whole = _gguf()
    header = whole.index(bytes(64))
    made: list[object] = [_flipped(rng, whole, header, 3) for _ in range(20)]
    made += [_flipped(rng, whole, 24, 2) for _ in range(4)]
    made += [whole[: rng.randrange(len(whole))] for _ in range(4)]
    keys = list(_metadata())
    for _ in range(16):
        key, number = rng.choice(keys), rng.choice((0, 1, 7, 1 << 22, 1 << 31, (1 << 63) + 1))
        kind = rng.choice((U32, U64, F32, BOOL, STRING, ARRAY))
        content = {
            U32: struct.pack("<I", number % (1 << 32)),
            U64: struct.pack("<Q", number),
            F32: struct.pack("<f", float(number)),
            BOOL: b"\1",
            STRING: _text("x" * (number % 100_000)),
            ARRAY: _array(I32, [number % (1 << 31)] * 10),
        }[kind]
        made.append(_gguf(_metadata({key: (kind, content)})))
    shapes = [(0,), (1 << 47, 16), (1 << 40, 1 << 40), (), (VOCAB, 16, 1, 1, 1), (16, VOCAB)]
    made += [_gguf(shape=each) for each in shapes]
    made += [_gguf(version=each) for each in (0, 1, 4, 1 << 24)]

    def tokens_of(texts: list[str]) -> dict:
        return {"tokenizer.ggml.tokens": (ARRAY, _array(STRING, texts))}

    def with_(change: Callable[[], dict]) -> Callable[[], bytes]:
        return lambda: _gguf(_metadata(change()))

    made += [
        with_(lambda: _spam(U16, b"\xff\xfe" * (30 << 20))),
        with_(
            lambda: {
                key: value
                for n in range(15)
                for key, value in _spam(U16, b"\xff\xfe" * 2_000_000, f"x{n}").items()
            }
        ),
        with_(lambda: _spam(STRING, struct.pack("<Q3s", 3, "éx".encode()) * (1 << 22))),
        with_(lambda: _spam(BOOL, b"\1" * (60 << 20))),
        with_(lambda: tokens_of([f"<{n}>" for n in range(1_000_000)])),
        with_(lambda: tokens_of([*(f"<{n}>" for n in range(1_000_000)), "<999999>"])),
        with_(lambda: tokens_of([f"<{n}>" for n in range(1_100_000)])),
        with_(lambda: {"tokenizer.ggml.merges": (ARRAY, _array(STRING, ["a b c"] * 100_000))}),
        with_(lambda: {"tokenizer.ggml.tokens": (ARRAY, struct.pack("<IQ", STRING, 1 << 40))}),
        with_(lambda: {"x" * 1_000_000: (U32, bytes(4))}),
        with_(lambda: {"general.alignment": (U32, struct.pack("<I", 1 << 16))}),
        with_(lambda: {"general.alignment": (U32, struct.pack("<I", 3))}),
        with_(lambda: {"llama.context_length": (U32, struct.pack("<I", 1 << 22))}),
        with_(lambda: {"tokenizer.chat_template": (STRING, _text(DOUBLE))}),
        with_(lambda: {"tokenizer.chat_template": (STRING, _text("{{ x }}" * 140_000))}),
    ]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁a"]
    spm = {
        "tokenizer.ggml.model": (STRING, _text("llama")),
        "tokenizer.ggml.tokens": (ARRAY, _array(STRING, tokens)),
        "tokenizer.ggml.scores": (ARRAY, _array(F32, [0.0] * VOCAB)),
        "tokenizer.ggml.token_type": (ARRAY, _array(I32, [2, 3, 3] + [6] * 256 + [1])),
    }
    broken = struct.pack("<I", 1024) + rng.randbytes(1024) + b"x" * 100_000 + b"\0"
    unigram = {"tokenizer.ggml.model": (STRING, _text("t5"))}
    charsmap = {"tokenizer.ggml.precompiled_charsmap": (ARRAY, _array(U8, list(broken)))}
    infinite = {"tokenizer.ggml.scores": (ARRAY, _array(F32, [float("nan")] * VOCAB))}
    types = {"tokenizer.ggml.token_type": (ARRAY, _array(I32, [rng.randint(1, 6) for _ in tokens]))}
    for change in ({}, unigram, charsmap, unigram | charsmap, infinite, types):
        made.append(_gguf(_metadata(spm | change)))
    made.append(with_(lambda: spm | tokens_of(["x" * (1 << 24), *tokens[1:]])))
    for content in made:
        yield partial(_file, content)


def _file(content: bytes | Callable[[], bytes], path: Path) -> Path:
    (path / "model.gguf").write_bytes(content() if callable(content) else content)
    return path / "model.gguf"
