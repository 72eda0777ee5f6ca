"""The loss that a server tells is the loss that was computed without one."""

import pytest

from ropewalk.model.family.evaluation import served
from ropewalk.model.family.evaluation.members import Member, load, opened
from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.evaluation.texts import texts_of
from ropewalk.server.errors import CommandError
from ropewalk.server.studies.family_serving import served_logprobs
from tests.model.family.evaluation.trained import CPU, ENCODINGS, TRAINED, corpus, save

TEXTS = texts_of(corpus().held_out, 2 * TRAINED, 2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("encoding", "reach"), [("rope", 2 * TRAINED), ("learned", TRAINED)])
def test_served_and_offline_loss_are_one(encoding, reach, tmp_path) -> None:
    folder = save(tmp_path / "model", ENCODINGS[encoding])
    member = Member("model", "model", None, folder, folder / "log.jsonl")
    reader = Reader(load(opened(member), 2 * TRAINED, CPU), 2 * TRAINED)
    exact, rounded = served.measure(
        reader, TEXTS, served_logprobs, folder, reach, done=lambda _: None
    )
    assert (exact.length, exact.texts, exact.dtype) == (reach - 1, 2, "float32")
    assert exact.largest < 1e-4 and exact.served == pytest.approx(exact.offline, abs=1e-5)
    assert 1e-4 < rounded.largest < 0.2 and rounded.served == pytest.approx(exact.offline, abs=0.01)


def test_a_refusal_is_one_sentence(tmp_path) -> None:
    folder = save(tmp_path / "model", ENCODINGS["rope"])
    with pytest.raises(CommandError, match=r"answered 400: .* context"):
        served_logprobs(folder, "float32", TRAINED, [TEXTS.tokens[0][: TRAINED + 1]])
