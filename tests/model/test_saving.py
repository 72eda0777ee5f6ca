"""Ropewalk's own checkpoints: what is written is read back, whatever the shape and encoding."""

import json
import shutil
import stat
from dataclasses import MISSING, asdict, fields, replace

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ropewalk.model.architectures.ropewalk import FORMER
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.config import EncoderDecoderConfig, EncodingSpec, Experts, ModelConfig
from ropewalk.model.encodings.base import (
    PositionalEncoding,
    TableBias,
    create,
    find,
    freeze_all,
    names,
)
from ropewalk.model.loading import checkpoints as opening
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.loading.save import save_checkpoint
from ropewalk.model.program import encoding_parameters
from ropewalk.model.recipes import allocate, program
from tests.model import checkpoints, tiny
from tests.model.architectures.descriptions import ABSENT
from tests.model.checkpoints import CPU
from tests.model.refusals import refused
from tests.model.running import run_uncached
from tests.model.test_parity import greedy
from tests.model.tiny import ROPE, in_torch, parameters_of, program_of
from tests.server.fake_engine import loaded_app
from tests.server.toy import running, spelled_apart

CONTEXT = 96
TOKENS = [(7 * index) % 200 for index in range(70)]
CONFIG = replace(tiny.CONFIG, vocab_size=260, trained_context=CONTEXT)
PLAIN = {"norm": "layer", "gated": False, "activation": "gelu"}
EXPERTS = {"count": 4, "used": 2, "normalized": True}
FIELDS = {  # ModelConfig's: another value, with what it needs to have an effect
    "vocab_size": {"vocab_size": 301},
    "hidden_size": {"hidden_size": 17},
    "num_layers": {"num_layers": 1, "windows": (None,)},
    "num_heads": {"num_heads": 10},
    "num_kv_heads": {"num_kv_heads": 6},
    "head_dim": {"head_dim": 14},
    "intermediate_size": {"intermediate_size": 5},
    "norm_eps": {"norm_eps": 0.1},
    "trained_context": {"trained_context": 1234},
    "encoding": {"encoding": EncodingSpec("rope", ROPE | {"base": 300.5, "layers": [0, 2]})},
    "windows": {"windows": (None, 5, 9)},
    "tied_embeddings": {"tied_embeddings": True},
    "qkv_bias": {"qkv_bias": True},
    "out_bias": {"out_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "head_bias": {"head_bias": True},
    "qk_norm": {"qk_norm": True},
    "qk_norm_whole": {"qk_norm": True, "qk_norm_whole": True},
    "norm": {"norm": "layer"},
    "norm_bias": {"norm": "layer", "norm_bias": True},
    "activation": {"activation": "relu"},
    "gated": {"gated": False},
    "experts": {"experts": Experts(7, 3, normalized=False)},
    "block": {"block": "parallel"},
    "embed_scale": {"embed_scale": 2.5},
    "embed_norm": {"embed_norm": True},
    "embed_width": {"embed_width": 11},
    "attention_scale": {"attention_scale": 0.1},
    "qkv_clip": {"qkv_clip": 0.3},
    "score_cap": {"score_cap": 0.3},
    "logit_scale": {"logit_scale": 0.4},
    "logit_cap": {"logit_cap": 0.5},
}


class Curve(PositionalEncoding):
    """From outside the package, with weights of its own, one of them a number."""

    def __init__(self, heads, steps, device):
        super().__init__()
        self.height = nn.Parameter(torch.empty(heads, device=device), requires_grad=False)
        self.gain = nn.Parameter(torch.empty((), device=device), requires_grad=False)
        self.steps = steps
        self.table = torch.empty(heads, steps, device=device)

    @classmethod
    def create(cls, options, config, context, device):
        return cls(config.num_heads, options["steps"], device)

    def freeze(self):
        self.table.copy_(self.gain * self.height[:, None] * torch.arange(self.steps).sqrt())

    def score_bias(self):
        return TableBias(self.table)


ENCODINGS = {name: EncodingSpec(name, find(name).usual_options(CONFIG)) for name in names()} | {
    "rope-by-layer": tiny.ENCODINGS["rope-by-layer"],
    "rope-scaled": EncodingSpec(
        "rope", ROPE | {"scaling": {"type": "yarn", "factor": 4.0, "original_context": 24}}
    ),
    "t5-per-layer": EncodingSpec("t5", {"buckets": 12, "max_distance": 20, "per_layer": True}),
    "learned-offset": EncodingSpec("learned", {"positions": CONTEXT, "offset": 2, "scale": 32.0}),
    "alibi-exact": EncodingSpec("alibi", {"hf_exact": True, "scaled": True}),
    "outside": EncodingSpec(f"{__name__}:Curve", {"steps": 33}),
}
WEIGHTS = {  # of the encodings that have some
    "t5": ["encoding.weight"],
    "t5-per-layer": [f"encoding.layers.{layer}.weight" for layer in range(3)],
    "cope": [f"encoding.layers.{layer}.vector" for layer in range(3)],
    "forgetting": [
        f"encoding.layers.{layer}.{name}" for layer in range(3) for name in ("bias", "weight")
    ],
    "learned": ["encoding.table"],
    "learned-offset": ["encoding.table"],
    "outside": ["encoding.gain", "encoding.height"],
}


def decoder_of(config, dtype=torch.float32):
    """With random weights that all matter."""
    encoding = create(config.encoding, config, CONTEXT, CPU)
    weights = allocate(config, encoding, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in (weights | dict(encoding_parameters(encoding))).items():
        values = torch.randn(parameter.shape, generator=generator)
        norm = name.endswith("norm.weight")
        parameter.copy_(1 + 0.2 * values if norm else 0.35 * values)
    freeze_all(encoding)
    return in_torch(program(config, weights, encoding), SdpaAttention)


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "of" / "tokenizer.json"
    path.parent.mkdir()
    checkpoints.tiny_tokenizer().save(str(path))
    return path


@pytest.fixture
def save(tmp_path, tokenizer):
    def save(decoder, state=None, folder=tmp_path / "saved", **options):
        options = {"tokenizer": [tokenizer]} | options
        state = parameters_of(decoder) if state is None else state
        save_checkpoint(state, decoder.config, folder, **options)
        return folder

    return save


def loaded(folder, dtype=torch.float32):
    trusted = {ENCODINGS["outside"].name}
    return checkpoints.loaded(open_checkpoint(folder, trusted), dtype, CONTEXT)


def check_same(decoder, folder, dtype=torch.float32):
    """The same config, the same weights to the last bit, and so the same logits."""
    other = loaded(folder, dtype)
    assert other.config == decoder.config
    theirs = parameters_of(other)
    for name, parameter in parameters_of(decoder).items():
        assert theirs.pop(name).equal(parameter), name
    assert not theirs
    logits = run_uncached(other, TOKENS)
    assert logits.float().std() > 0.1
    assert logits.equal(run_uncached(decoder, TOKENS))


# ------------------------------------------------------------------------------ round trips


def test_every_field_is_tried():
    assert set(FIELDS) == {field.name for field in fields(ModelConfig)}


def test_experts_of_all_layers_are_bounded(save, monkeypatch):
    """Before a list of their weights is made."""
    folder = save(decoder_of(replace(CONFIG, experts=Experts(**EXPERTS))))
    monkeypatch.setattr(opening, "MAX_EXPERTS", 11)
    refused("tells of 12 experts in all layers, more than the 11 allowed", open_checkpoint, folder)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field(field, save):
    config = replace(CONFIG, **FIELDS[field])
    assert getattr(config, field) != getattr(CONFIG, field)
    decoder = decoder_of(config)
    folder = save(decoder)
    stored = json.loads((folder / "config.json").read_text())
    assert stored[field] == json.loads(json.dumps(asdict(config)[field]))
    check_same(decoder, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"block": block, "norm": norm, "gated": gated, "norm_bias": norm == "layer"}
        for block in ("pre_norm", "post_norm", "parallel", "parallel_one_norm")
        for norm, gated in (("rms", True), ("layer", False))
    ],
    ids=str,
)
def test_every_block(changes, save):
    decoder = decoder_of(replace(CONFIG, **changes))
    check_same(decoder, save(decoder))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding(encoding, save):
    decoder = decoder_of(replace(CONFIG, encoding=ENCODINGS[encoding]))
    folder = save(decoder)
    check_same(decoder, folder)
    stored = load_file(folder / "model.safetensors")
    found = sorted(name for name in stored if name.startswith("encoding."))
    assert found == WEIGHTS.get(encoding, [])
    for name in found:
        # Other weights than these are other answers: they are not stored in vain.
        save_file(stored | {name: -stored[name]}, folder / "model.safetensors")
        assert not run_uncached(loaded(folder), TOKENS).equal(run_uncached(decoder, TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(dtype, save):
    """Of the decoder; an encoding's own weights stay in float32."""
    decoder = decoder_of(replace(CONFIG, encoding=ENCODINGS["t5"]), dtype)
    folder = save(decoder)
    stored = load_file(folder / "model.safetensors")
    assert stored["head.weight"].dtype is dtype
    assert stored["encoding.weight"].dtype is torch.float32
    check_same(decoder, folder, dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_may_be_named_too(tied, save):
    decoder = decoder_of(replace(CONFIG, encoding=ENCODINGS["t5"], tied_embeddings=tied))
    state = {**program_of(decoder).weights, **parameters_of(decoder)}
    assert "head.weight" in state
    folder = save(decoder, state)
    assert load_file(folder / "model.safetensors").keys() == parameters_of(decoder).keys()
    check_same(decoder, folder)


def test_views_of_one_memory_are_stored_apart(save):
    decoder = decoder_of(CONFIG)
    state = parameters_of(decoder)
    state["head.weight"] = state["embed.weight"]
    folder = save(decoder, state)
    stored = load_file(folder / "model.safetensors")
    assert stored["head.weight"].equal(stored["embed.weight"])


def test_what_ends_an_answer_and_the_files_beside_it(save, tokenizer):
    beside = tokenizer.with_name("chat_template.jinja")
    beside.write_text("{{ messages[0].content }}")
    folder = save(decoder_of(CONFIG), tokenizer=[tokenizer, beside], stop_ids={9, 7})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.architecture == "ropewalk"
    assert checkpoint.stop_ids == {7, 9}
    assert checkpoint.chat_template is not None
    assert checkpoint.tokenizer.encode("th", bos=False) == [257]


def test_it_is_served(save, tmp_path):
    """A decoder-only model with T5's bias, which no published family has, answers over HTTP."""
    shape = replace(CONFIG, norm="layer")
    made = {name: decoder_of(replace(shape, encoding=ENCODINGS[name])) for name in ("t5", "alibi")}
    sources = [f"{name}={save(made[name], folder=tmp_path / name)}" for name in made]
    flags = ("--dtype", "float32", "--kv-memory", "16M", "--max-model-len", str(CONTEXT))
    app = loaded_app(*sources, *flags)
    tokenizer = open_checkpoint(tmp_path / "t5").tokenizer
    prompt = list(b"To be or not, and so on: the rope is longer than the walk")
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    with running(app) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        for name, decoder in made.items():
            answer = client.post("/v1/completions", json={"model": name} | body)
            assert answer.status_code == 200, answer.text
            expected = greedy(decoder, prompt, 32)
            assert len(set(expected)) > 9  # one token again and again would agree too easily
            shown = answer.json()["choices"][0]["logprobs"]["tokens"]
            assert shown == spelled_apart(tokenizer, expected)


# ---------------------------------------------------------------------------- all or nothing


def test_others_may_read_it_as_far_as_the_umask_says(save, tmp_path):
    folder = save(decoder_of(CONFIG))
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    new = tmp_path / "new"
    new.touch()
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(new.stat().st_mode)


def test_nothing_is_replaced(save, tmp_path):
    folder = save(decoder_of(CONFIG))
    before = (folder / "model.safetensors").read_bytes()
    refused("already exists", save, decoder_of(replace(CONFIG, num_layers=1, windows=(None,))))
    assert (folder / "model.safetensors").read_bytes() == before


def without(state, name):
    return {key: tensor for key, tensor in state.items() if key != name}


def nan(state):
    return state | {"norm.weight": torch.full_like(state["norm.weight"], torch.nan)}


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        (lambda state: without(state, "norm.weight"), "saved lacks tensor 'norm.weight'"),
        (lambda state: state | {"spare": torch.ones(1)}, "saved holds tensor 'spare'"),
        (lambda state: state | {"norm.weight": torch.ones(3)}, r"'?norm.weight'? should have"),
        (nan, "'norm.weight' holds weights that are not finite"),
        (
            lambda state: state | {"norm.weight": torch.ones(24).int()},
            "cannot be stored as torch.int32",
        ),
    ],
)
def test_weights_that_are_not_the_decoders(change, saying, save, tmp_path):
    decoder = decoder_of(CONFIG)
    refused(saying, save, decoder, change(parameters_of(decoder)))
    assert [path.name for path in tmp_path.iterdir()] == ["of"]


def test_a_tied_head_that_differs(save):
    decoder = decoder_of(replace(CONFIG, tied_embeddings=True))
    state = parameters_of(decoder)
    state["head.weight"] = state["embed.weight"] + 1
    refused("head.weight should be tied to embed.weight, but differs", save, decoder, state)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"encoding": EncodingSpec("rope", ROPE | {"layers": (0, 2)})}, "lists instead of tuples"),
        ({"encoding": EncodingSpec("rope", ROPE | {"layers": {0}})}, "cannot be written as JSON"),
        ({"norm_eps": float("inf")}, "cannot be written as JSON"),
        ({"norm_bias": True}, "norm_bias has no effect where norm is rms"),
    ],
)
def test_configs_that_would_not_be_read_back(changes, saying, save, tmp_path):
    decoder = decoder_of(CONFIG)
    decoder.config = replace(CONFIG, **changes)
    refused(saying, save, decoder)
    assert [path.name for path in tmp_path.iterdir()] == ["of"]


def test_an_encoder_decoder_has_no_room(save):
    decoder = decoder_of(CONFIG)
    shape = {field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)}
    decoder.config = EncoderDecoderConfig(**shape, encoder=CONFIG, start_token=0, end_token=1)
    refused("holds a decoder alone", save, decoder)


def test_a_tokenizer_that_cannot_be_used(save, tokenizer, tmp_path):
    decoder = decoder_of(CONFIG)
    saying = refused("neither tokenizer.json nor", save, decoder, tokenizer=[])
    assert str(tmp_path / "saved") in saying
    assert ".saved." not in saying  # no name that is gone by now
    refused("is not a tokenizer file", save, decoder, tokenizer=[tokenizer.parent / "absent.json"])
    refused(
        "is not a tokenizer file", save, decoder, tokenizer=[tokenizer, tmp_path / "merges.txt"]
    )
    small = decoder_of(replace(CONFIG, vocab_size=100))
    refused("has 258 tokens, but the model embeds only 100", save, small)
    assert [path.name for path in tmp_path.iterdir()] == ["of"]


def test_where_nothing_can_be_written(save, tmp_path):
    (tmp_path / "file").touch()
    refused("cannot be written", save, decoder_of(CONFIG), folder=tmp_path / "file" / "saved")


def test_interrupted_writing_leaves_nothing(save, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropewalk.model.loading.save.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(decoder_of(CONFIG))
    assert [path.name for path in tmp_path.iterdir()] == ["of"]


# ------------------------------------------------------------------------------ strict reading


def edited(folder, **changes):
    """Another value in config.json, or none for ABSENT."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in values.items() if v is not ABSENT}))
    return folder


def encoding(name, **options):
    return {"encoding": {"name": name, "options": options}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint, written once for those that change copies of it."""
    tokenizer = tmp_path_factory.mktemp("of") / "tokenizer.json"
    checkpoints.tiny_tokenizer().save(str(tokenizer))
    decoder = decoder_of(replace(CONFIG, encoding=ENCODINGS["t5"]))
    folder = tmp_path_factory.mktemp("written") / "saved"
    state = parameters_of(decoder)
    save_checkpoint(state, decoder.config, folder, tokenizer=[tokenizer])
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "saved")


def test_what_has_a_default_may_be_left_out(folder):
    optional = {field.name: ABSENT for field in fields(ModelConfig) if field.default is not MISSING}
    assert open_checkpoint(edited(folder, **optional)).config.encoding == ENCODINGS["t5"]


@pytest.mark.parametrize(
    "field", [field.name for field in fields(ModelConfig) if field.default is MISSING]
)
def test_what_has_none_may_not(field, folder):
    refused(f"config.json: {field} is missing", open_checkpoint, edited(folder, **{field: ABSENT}))
    refused(f"config.json: {field} is missing", open_checkpoint, edited(folder, **{field: None}))


def test_fields_by_their_former_names(folder):
    before = open_checkpoint(folder).config
    values = json.loads((folder / "config.json").read_text())
    former = {FORMER.get(key, key): value for key, value in values.items()}
    assert former.keys() != values.keys()
    (folder / "config.json").write_text(json.dumps(former))
    assert open_checkpoint(folder).config == before


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"num_layers": 3.0}, "num_layers must be an integer"),
        ({"num_layers": 1 << 30}, "num_layers must be an integer from 1 to 1024"),
        ({"num_kv_heads": 4}, "num_kv_heads 4 does not divide num_heads 6"),
        ({"norm_eps": 0}, "norm_eps must be a number above 0"),
        ({"tied_embeddings": 1}, "tied_embeddings must be true or false"),
        ({"norm": "batch"}, "norm must be one of rms, layer, not 'batch'"),
        ({"activation": "swish"}, "activation must be one of silu, gelu"),
        ({"block": ["parallel"]}, "block must be a string"),
        ({"norm_bias": True}, "norm_bias has no effect where norm is rms"),
        ({"experts": 4}, "experts must be an object"),
        ({"experts": {"count": 4, "used": 2}}, "experts: normalized is missing"),
        ({"experts": EXPERTS | {"used": 5}}, "experts: used 5 is more than count 4"),
        ({"experts": EXPERTS | {"count": 0}}, "experts: count must be an integer from 1 to 1024"),
        ({"experts": EXPERTS, "mlp_bias": True}, "experts are gated and have no biases"),
        ({"experts": EXPERTS, "gated": False}, "experts are gated and have no biases"),
        ({"windows": 5}, "windows must be a list of null and integers from 1"),
        ({"windows": [None, 0, None]}, "windows must be a list of null and integers from 1"),
        ({"windows": [None, True, None]}, "windows must be a list of null and integers from 1"),
        ({"windows": [None, 5]}, "windows has 2 entries, but num_layers is 3"),
        ({"rope_theta": 10000.0}, "'rope_theta' = 10000.0 is not supported"),
        ({"auto_map": {"a": "b.C"}}, "'auto_map' = .* is not supported"),
        ({"encoding": "t5"}, "encoding must be an object"),
        ({"encoding": {"options": {}}}, "encoding: name is missing"),
        ({"encoding": {"name": "t5"}}, "encoding: options must be an object"),
        ({"encoding": {"name": "t5", "options": {}, "layer": 1}}, "'layer' = 1 is not supported"),
        (encoding("../t5"), "must be an encoding or package.module:Class, not '../t5'"),
        (encoding("os.path"), "must be an encoding or package.module:Class, not 'os.path'"),
        (encoding("xpos"), "There is no encoding 'xpos'"),
        (encoding("t5", buckets=32), "t5 takes the options buckets and max_distance"),
        (encoding("t5", buckets="32", max_distance=128), "'t5' cannot be made with the options"),
        (encoding("t5", buckets=32, max_distance=None), "'t5' cannot be made with the options"),
        (encoding("learned", positions=1 << 80, offset=0), "'learned' cannot be made with"),
        (encoding("rope", **ROPE | {"scaling": "yarn"}), "'rope' cannot be made with"),
        (encoding("rope", **ROPE | {"layers": 5}), "'rope' cannot be made with"),
    ],
)
def test_descriptions_that_are_refused(changes, saying, folder):
    refused(saying, open_checkpoint, edited(folder, **changes))


@pytest.mark.parametrize(
    ("name", "saying"),
    [
        ("nowhere.to:Find", "cannot be imported"),
        ("json:JSONDecoder", "must name exactly one PositionalEncoding class"),
    ],
)
def test_trusted_code_that_is_no_encoding(name, saying, folder):
    refused(saying, open_checkpoint, edited(folder, **encoding(name)), {name})


@pytest.mark.parametrize("trusted", [(), ("payload:Other",), ("payload",), ("rope",)])
def test_a_checkpoint_decides_not_what_code_runs(trusted, folder, tmp_path, monkeypatch):
    """Its own folder lies on the path, as with PYTHONPATH=. beside it."""
    (folder / "payload.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(folder))
    asked = edited(folder, **encoding("payload:Payload"))
    refused("add --trust-encoding payload:Payload", open_checkpoint, asked, trusted)
    assert not (tmp_path / "ran").exists()


def test_what_is_trusted_may_run(folder, tmp_path, monkeypatch):
    (folder / "trusted_rope.py").write_text(
        "from ropewalk.model.encodings.rope import RoPE\nclass Own(RoPE):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    own = encoding("trusted_rope:Own", **ROPE)
    refused(
        "holds tensor 'encoding.weight'",
        open_checkpoint,
        edited(folder, **own),
        {"trusted_rope:Own"},
    )


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        (encoding("nope"), "holds tensor 'encoding.weight'"),
        (encoding("learned", positions=9, offset=0), "lacks tensor 'encoding.table'"),
        (encoding("t5", buckets=16, max_distance=128), r"encoding.weight should have .* \[16, 6\]"),
        (
            encoding("t5", buckets=32, max_distance=128, per_layer=True),
            "lacks tensor 'encoding.layers.0.weight' and 2 more",
        ),
        ({"embed_norm": True}, "lacks tensor 'embed_norm.weight'"),
        ({"tied_embeddings": True}, "holds tensor 'head.weight'"),
    ],
)
def test_weights_of_another_description(changes, saying, folder):
    refused(saying, open_checkpoint, edited(folder, **changes))
