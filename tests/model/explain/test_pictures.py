"""Which pictures an encoding has, what their captions say, and what the files hold."""

import io
import re
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
from matplotlib.image import imread

from ropewalk.model.encodings.base import (
    LinearBias,
    PositionalEncoding,
    PositionVectors,
    TableBias,
    names,
)
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.inspect.explain.page import to_html, to_png
from ropewalk.model.inspect.explain.pictures import pictures
from ropewalk.model.inspect.explain.subject import from_checkpoint, from_name, shape
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.report.figure import Omitted, Picture
from tests.model.checkpoints import random_model, save

CONFIG = shape(heads=3, head_dim=16, context=300)
SVG = "{http://www.w3.org/2000/svg}"


def parts(name, config=CONFIG, **options):
    return pictures(from_name(name, config, options))


def by_key(found, kind):
    return {part.key: part for part in found if isinstance(part, kind)}


def page(found, **more):
    return to_html("title", "summary", {"fact": "text"} | more, found, lambda: None)


@pytest.mark.parametrize(
    ("name", "drawn", "left_out"),
    [
        ("rope", ["angle", "score", "codes"], ["bias"]),
        ("alibi", ["bias", "score", "codes"], ["angle"]),
        ("t5", ["bias"], ["angle", "score", "codes"]),
        ("sinusoidal", ["vector", "score"], ["angle", "bias", "codes"]),
        ("learned", [], ["angle", "vector", "bias", "score", "codes"]),
        ("nope", [], ["angle", "bias", "score", "codes"]),
    ],
)
def test_each_encoding_has_the_pictures_that_apply(name, drawn, left_out) -> None:
    found = parts(name)
    assert [part.key for part in found] == drawn + left_out
    assert list(by_key(found, Picture)) == drawn
    for part in by_key(found, Omitted).values():
        assert part.reason.endswith(".") and len(part.reason) > 30


def test_every_encoding_of_the_folder_can_be_explained() -> None:
    for name in names():
        assert parts(name)


def test_page_is_whole_and_asks_for_nothing() -> None:
    text = page(parts("rope"), odd="<&>")
    assert "&lt;&amp;&gt;" in text
    # Namespaces are names; everything else that a browser would fetch is in the page.
    for reference in re.findall(r'(?:href|src)="([^"]*)"', text):
        assert reference.startswith(("#", "data:image/png;base64,"))
    assert "<script" not in text and "@import" not in text and "url(http" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for used in re.findall(r'(?:href="|url\()#([^")]+)', text):
        assert used in ids


def test_pictures_in_a_page_are_svg_with_text() -> None:
    text = page(parts("alibi"))
    images = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(images) == 3
    written = []
    for image in images:
        root = ElementTree.fromstring(image)
        assert root.get("role") == "img" and root.get("aria-label")
        written += ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]
    assert {"head 0", "head 2", "distance (tokens), query − key", "by key: bf16"} <= set(written)
    assert not any("-" in one and one.strip("-−0123456789.") == "" for one in written)


def test_png_is_one_image_with_all_pictures_below_one_another() -> None:
    found = parts("alibi")
    drawn = []
    whole = imread(io.BytesIO(to_png("t", "s", {"a": "b"}, found, lambda: drawn.append(1))))
    assert len(drawn) == 3
    assert whole.shape[1] == 1440
    texts = [part for part in found if isinstance(part, Omitted)]
    short = imread(io.BytesIO(to_png("t", "s", {"a": "b"}, texts, lambda: None)))
    heights = sum(part.height for part in found if isinstance(part, Picture))
    assert whole.shape[0] - short.shape[0] > heights * 150
    assert whole[..., :3].std() > 0.05


def test_the_same_subject_gives_the_same_files_whatever_the_users_settings(monkeypatch) -> None:
    def files():
        return page(parts("t5")), to_png("t", "s", {}, parts("t5"), lambda: None)

    before = files()
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "black")
    assert files() == before
    assert matplotlib.rcParams["font.size"] == 30


# ---- what captions say ----


def caption(found, key):
    return by_key(found, Picture)[key].caption


def test_rope_is_not_said_to_score_closer_words_higher() -> None:
    found = parts("rope", shape(heads=1, head_dim=64, context=2048))
    score = caption(found, "score")
    assert "closer words do not in general score higher" in score
    assert "it falls on the whole, but rises in" in score
    assert "That it falls on the whole is seen, not proved" in score
    rises = [int(number) for number in re.findall(r"rises in (\d+)% of", score)]
    assert "proves" not in score
    ends = [float(share) for share in re.findall(r"([\d.]+)%(?: score highest)? within the", score)]
    nearest, farthest = ends
    assert nearest == pytest.approx(farthest, abs=1.5)  # percent; two deviations
    assert len(rises) == 2 and all(45 <= number <= 52 for number in rises)
    angle = caption(found, "angle")
    assert "6.28 for the fastest pair and 47,117 for the slowest" in angle
    assert "Pair 0 is coordinates 0 and 32, pair 31 is 31 and 63" in angle
    assert "11 of 32 pairs make no full turn within the context of 2,048" in angle
    assert "17 at position 1,023, 5 at position 4,095, 1 at position 32,767" in caption(
        found, "codes"
    )


@pytest.mark.parametrize(
    ("storage", "told"),
    [
        ("absolute", "A key is rotated once, by its own position, before it is stored"),
        ("raw", "Keys are stored unrotated"),
        ("block", "A key is rotated by its offset within its block"),
    ],
)
def test_rope_has_its_pictures_however_keys_are_stored(storage, told) -> None:
    found = parts("rope", storage=storage)
    assert list(by_key(found, Picture)) == ["angle", "score", "codes"]
    assert told in caption(found, "angle")


def test_far_keys_are_drawn_as_near_as_they_are_scored() -> None:
    far, usual = (parts("rope", near=16, **more) for more in ({}, {"group": 1}))
    angle = caption(far, "angle")
    assert "the farthest as if it were 16 positions back instead of 299" in angle
    assert "every distance" not in angle and "every distance" in caption(parts("rope"), "angle")
    assert "instead of" not in caption(usual, "angle")
    assert "instead of" not in caption(parts("rope", near=5000), "angle")
    assert "it falls on the whole, but rises in 2% of single steps" in caption(far, "score")
    assert caption(usual, "score") == caption(parts("rope"), "score")


def test_a_single_pair_is_not_said_to_fall() -> None:
    score = caption(parts("rope", shape(heads=1, head_dim=2, context=2048)), "score")
    assert "|q| |k|; it does not fall on the whole." in score
    assert "It does not fall on the whole here" in score and "falls" not in score


def test_partial_and_magnified_rotations_are_said_to_be() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context": 100}
    angle = caption(parts("rope", width=8, scaling=scaling), "angle")
    assert "8 of 16 coordinates are not rotated" in angle
    assert "scaled by 1.1386" in angle


def test_alibi_is_said_to_win_over_content_where_it_does() -> None:
    found = parts("alibi", shape(heads=8, head_dim=64, context=2048))
    # Slopes 1/2, 1/32 and 1/256; the bands are apart once the bias is below -3.29.
    assert "in head 0 from distance 7 on, in head 4 from distance 106 on" in caption(found, "score")
    assert "in head 7 from distance 843 on" in caption(found, "score")
    assert "the lowest value is −1,024" in caption(found, "bias")
    short = parts("alibi", shape(heads=8, head_dim=64, context=128))
    assert "in head 7 at no distance up to 127" in caption(short, "score")


def test_rounded_biases_are_shown_relative_to_the_query() -> None:
    found = parts("alibi", hf_exact=True, scaled=True)
    assert "bias at the query's own position, 299," in caption(found, "bias")


def test_made_up_weights_are_said_to_be() -> None:
    found = parts("t5")
    assert "these are random" in caption(found, "bias")
    assert "From distance 113 on, all keys have the same bias" in caption(found, "bias")
    assert "Shown are the heads 0 and 2" in caption(found, "bias")
    two_way = caption(parts("t5", bidirectional=True), "bias")
    assert "From distance" not in two_way


def test_sinusoids_are_said_to_depend_on_distance_alone() -> None:
    assert "depends on the distance alone" in caption(parts("sinusoidal"), "score")


class Both(RoPE):
    """Turns, and lowers the scores besides."""

    def score_bias(self):
        return LinearBias(torch.tensor([0.5, 0.25, 0.125]))


class Falling(PositionalEncoding):
    """A table that is served as it is."""

    def score_bias(self):
        return TableBias(-torch.arange(40.0).repeat(3, 1).clamp(max=20))


class Sliding(PositionalEncoding):
    """Changes queries and keys in a way of its own."""

    def rotate(self, q, k, positions, offsets):
        return q + positions[:, None, None], k


def test_encodings_from_outside_are_explained_by_what_they_do() -> None:
    both = parts(f"{__name__}:Both")
    assert [part.key for part in both if isinstance(part, Picture)] == [
        "angle",
        "bias",
        "score",
        "score",
        "codes",
    ]
    falling = parts(f"{__name__}:Falling")
    assert "32,767: 21 in bf16, fp16, fp32." in by_key(falling, Omitted)["codes"].reason
    assert "0 in head 0 from distance 4 on." in caption(falling, "score")  # all heads are alike
    sliding = by_key(parts(f"{__name__}:Sliding"), Omitted)
    assert "not by rotating pairs" in sliding["angle"].reason
    assert set(sliding) == {"angle", "score", "bias", "codes"}


class Short(PositionalEncoding):
    """Adds vectors, for fewer positions than the context has."""

    def __init__(self):
        super().__init__()
        self.max_positions, self.WHY_FIXED = 100, "positions are in the embeddings"
        self.table = torch.randn(100, 48)

    def vectors(self):
        return PositionVectors(self.table)


def test_nothing_is_asked_past_an_encodings_own_limit() -> None:
    subject = from_name(f"{__name__}:Short", CONFIG, {})
    assert subject.context == 100
    assert set(by_key(pictures(subject), Picture)) == {"vector", "score"}


# ---- from checkpoints ----


def gpt2():
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=260,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_positions=96,
        bos_token_id=1,
        eos_token_id=2,
    )


def test_trained_vectors_are_those_of_the_checkpoint(tmp_path) -> None:
    model = random_model(gpt2())
    subject = from_checkpoint(open_checkpoint(save(model, tmp_path)), None, 1)
    assert (subject.weights, subject.context, subject.layer) == ("trained", 96, 1)
    assert torch.equal(subject.whole.table, model.transformer.wpe.weight)
    found = pictures(subject)
    assert set(by_key(found, Picture)) == {"vector", "score"}
    assert "also depends on the query's position" in caption(found, "score")
