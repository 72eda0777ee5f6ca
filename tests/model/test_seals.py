"""Checksums of weights: what they cover, that any change is seen, and that nothing else is."""

import ctypes
import random
from dataclasses import fields, is_dataclass

import pytest
import torch

from ropewalk.cache.ledger import fold_sums
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import Audit
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.encodings.t5 import T5
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.program import quantized
from ropewalk.model.sampler import KernelSampler
from ropewalk.model.weights import checksums
from ropewalk.model.weights.checksums import CHUNK, PORTIONS, STEPS, Seals
from ropewalk.server.engine.assemble import ledger_of, wired
from ropewalk.server.engine.statistics import PositionMeter
from ropewalk.server.scheduling.request import Limits, Overflow
from tests.model.checkpoints import save
from tests.model.encoder_decoders import loaded, random_model, t5
from tests.model.running import new_cache
from tests.model.tiny import ENCODINGS, IN_KERNELS, in_torch, program_of, tiny
from tests.model.tiny import on_kernels as tiny_on_kernels
from tests.server.fake_engine import make_request


def flip(tensor, byte=0, bit=0):
    """One bit of the memory that the tensor occupies, wherever its strides lead."""
    ctypes.c_uint8.from_address(tensor.data_ptr() + byte).value ^= 1 << bit


def found(sealed):
    """What turns up when each portion is looked at once."""
    return list(sealed.verify(sealed.portions)[1])


def on_kernels(encoding, kernels, bits, dtype=torch.float32):
    """A tiny decoder as the server computes it on a CPU, with weights of so many bits."""
    return tiny_on_kernels(tiny(encoding, dtype=dtype), kernels, bits)


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    return save(random_model(t5()), tmp_path_factory.mktemp("t5"))


def encoder_decoder(folder, kernels=None):
    checkpoint = open_checkpoint(folder)
    if kernels is None:
        return loaded(checkpoint)
    return tiny_on_kernels(loaded(checkpoint), kernels)


# ----------------------------------------------------------------- any change of any tensor


@pytest.mark.parametrize("sums", ["defined", "compiled"])
@pytest.mark.parametrize("size", [1, 7, 8, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_the_first_the_last_and_any_byte(size, sums, kernels):
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    held = {"other": torch.zeros(3), "it": tensor}
    sealed = Seals(held, kernels.fold_sums if sums == "compiled" else fold_sums)
    assert found(sealed) == []
    for byte in {0, size // 2, size - 1}:
        tensor[byte] ^= 1 << 7
        (fault,) = found(sealed)
        assert fault.tensor == "it"
        assert fault.first <= byte <= fault.last < size
        assert fault.last - fault.first < CHUNK
        tensor[byte] ^= 1 << 7
    assert found(sealed) == []


def test_large_weights_take_no_more_steps(monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 64)
    monkeypatch.setattr(checksums, "START", 64)
    sizes = [1 << 18, 7, 50_000, 64, 1, 83_333] + [100] * 50
    sealed = Seals({str(n): torch.zeros(size, dtype=torch.int8) for n, size in enumerate(sizes)})
    assert PORTIONS // 2 < sealed.portions <= PORTIONS
    looked = [sealed.verify()[0] for _ in range(4 * sealed.portions)]
    assert sum(looked) == 4 * sum(sizes)
    assert max(looked) <= 4 * 2 * sum(sizes) / sealed.portions
    assert STEPS - PORTIONS >= checksums.TOGETHER


def test_neighbours_in_a_tensor_are_summed_at_once(monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 64)
    monkeypatch.setattr(checksums, "START", 64)
    counts = []

    def sums(stored, blocks, multipliers):
        counts.append(len(blocks))
        return fold_sums(stored, blocks, multipliers)

    sealed = Seals({"it": torch.zeros(64 * 100 + 3, dtype=torch.uint8)}, sums)
    assert sealed.portions > 10
    counts.clear()
    assert found(sealed) == []
    assert counts == [100, 1]


def test_nothing_and_empty_tensors_are_sound():
    assert Seals({}).verify() == (0, ())
    assert Seals({"empty": torch.empty(0, 4)}).verify(64) == (0, ())


@pytest.mark.parametrize(
    "of", [lambda x: x.t(), lambda x: x[:, 1:3], lambda x: x[3:], lambda x: x[0].expand(5, 8)]
)
def test_a_tensor_is_sealed_where_it_lies(of):
    base = torch.randn(8, 8)
    view = of(base)
    sealed = Seals({"view": view})
    flip(view, byte=2)
    assert [fault.tensor for fault in found(sealed)] == ["view"]


def test_other_devices_are_looked_at_less_often_and_more_at_once(monkeypatch):
    monkeypatch.setattr(checksums, "TOGETHER", checksums.TOGETHER_ELSEWHERE)
    monkeypatch.setattr(checksums, "START", 8)
    tensors = {str(n): torch.zeros(16) for n in range(500)}
    sealed = Seals(tensors)
    together = checksums.TOGETHER_ELSEWHERE
    assert sealed.portions > 2 * together
    flip(tensors["499"])
    looked = [sealed.verify() for _ in range(sealed.portions + together)]
    assert [bool(bytes_) for bytes_, _ in looked[: 2 * together]] == (
        [False] * (together - 1) + [True]
    ) * 2
    assert {fault.tensor for _, faults in looked for fault in faults} == {"499"}


# ------------------------------------------------------------------------ what a model holds

UNREAD = {(T5, "bucket")}  # by any pass: `freeze` reads it, once


def tensors_in(holder, path="", seen=None):
    """Every tensor that can be reached from an object, with what holds it: (path, tensor)."""
    seen = set() if seen is None else seen
    if id(holder) in seen or isinstance(holder, str | bytes | type):
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield path, holder
    elif isinstance(holder, dict):
        for key, value in holder.items():
            yield from tensors_in(value, f"{path}.{key}", seen)
    elif isinstance(holder, list | tuple | set | frozenset):
        for index, value in enumerate(holder):
            yield from tensors_in(value, f"{path}.{index}", seen)
    else:
        parts = dict(getattr(holder, "__dict__", {}))
        if is_dataclass(holder):
            parts |= {field.name: getattr(holder, field.name) for field in fields(holder)}
        for name, value in parts.items():
            if name in ("kernels", "_kernels"):  # not the model's: a library's
                continue
            if any(isinstance(holder, kind) and name == own for kind, own in UNREAD):
                continue
            yield from tensors_in(value, f"{path}.{name}", seen)


def unsealed(model):
    """Tensors that the model holds outside the memory of the fixed ones."""
    fixed = model.fixed_tensors().values()
    ranges = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in fixed]
    return [
        path
        for path, tensor in tensors_in(model)
        if tensor.numel() and not any(first <= tensor.data_ptr() < last for first, last in ranges)
    ]


def test_the_search_for_tensors_finds_one_that_is_not_sealed():
    decoder = tiny("rope")
    decoder.executor.scratch = [{"deep": torch.zeros(3)}]
    assert unsealed(decoder) == [".executor.scratch.0.deep"]


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("encoding", sorted(set(ENCODINGS) - {"table", "fire"}))  # foreign ones
def test_whatever_a_decoder_on_kernels_holds_is_sealed(encoding, bits, kernels):
    assert unsealed(on_kernels(encoding, kernels, bits)) == []


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_whatever_a_decoder_without_kernels_holds_is_sealed(bits):
    program = program_of(tiny("rope-block", SdpaAttention, torch.float32))
    if bits < 16:
        program = quantized(program, bits)
    assert unsealed(in_torch(program, SdpaAttention)) == []


@pytest.mark.parametrize("compiled", [False, True])
def test_whatever_an_encoder_decoder_holds_is_sealed(compiled, t5_folder, kernels):
    model = encoder_decoder(t5_folder, kernels if compiled else None)
    assert unsealed(model) == []
    names = model.fixed_tensors()
    assert "encoding.table" in names and "encoder.encoding.table" in names


def test_tied_weights_are_sealed_once():
    decoder = tiny("nope", tied_embeddings=True)
    names = decoder.fixed_tensors()
    assert "embed.weight" in names and "head.weight" not in names


# ---------------------------------------------------------------------------- no false alarm


class Twice(PositionalEncoding):
    """Computes with scratch of its own, as a foreign part of a model may."""

    def __init__(self):
        super().__init__()
        self.scratch = torch.zeros(4)
        self.register_buffer("last", torch.zeros(4))

    def embed(self, x, positions):
        self.scratch += 1
        self.last += 1
        return 2 * x


def test_scratch_and_buffers_are_not_sealed(monkeypatch):
    monkeypatch.setitem(ENCODINGS, "twice", EncodingSpec(f"{__name__}:Twice", {}))
    found = tiny("twice").fixed_tensors()
    assert found.keys() == tiny("nope").fixed_tensors().keys()


@pytest.mark.parametrize(
    ("encoding", "bits"),
    [
        *((encoding, 16) for encoding in IN_KERNELS),
        *((encoding, bits) for encoding in ("rope", "t5", "learned") for bits in (8, 4)),
    ],
)
def test_a_hundred_steps_with_shifts_change_no_weight(encoding, bits, kernels, one_thread):
    """Everything is verified in every few steps, on the path that the server takes."""
    decoder = on_kernels(encoding, kernels, bits)
    engine = an_engine(decoder, kernels)
    shifts = changed = verified = 0
    draw = random.Random(0)
    for number in range(4):
        request = make_request(str(number), draw.choices(range(61), k=20), max_tokens=60)
        request.overflow = Overflow.SHIFT if moves(decoder) else Overflow.REFUSE
        engine.submit(request)
        for _ in range(25):
            stats = engine.step().stats
            shifts += len(stats.shifts)
            changed += stats.changed_weights
            verified += stats.verified_weights
    assert changed == 0 and not engine.weights_changed
    assert verified > 10 * sum(each.nbytes for each in decoder.fixed_tensors().values())
    assert bool(shifts) == moves(decoder)


def moves(decoder):
    return not decoder.encoding.WHY_FIXED


def an_engine(decoder, kernels, context=48):
    kv = new_cache(decoder, 40, 4)
    made = wired(
        "tiny",
        decoder,
        kv,
        CacheManager(40, 4),
        [decoder.encoding.for_layer(layer) for layer in range(decoder.config.num_layers)],
        Limits(max_seqs=3, max_step_tokens=64, max_context=context, max_queue=50),
        PositionMeter(),
        kernels,
        sampler=KernelSampler(kernels),
        ledger=ledger_of(kv, kernels, Audit.FULL),
        weights=Seals(decoder.fixed_tensors(), kernels.fold_sums),
    )
    return made.engine
