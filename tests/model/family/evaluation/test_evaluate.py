"""All parts of all models in a folder: what is there, and that nothing is done twice."""

import math
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from pathlib import Path

import pytest
import torch

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.evaluation import evaluate as module
from ropewalk.model.family.evaluation import results, samples, shortened
from ropewalk.model.family.evaluation.evaluate import Task, evaluate
from ropewalk.model.family.evaluation.losses import token_losses
from ropewalk.model.family.evaluation.members import find_members
from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.evaluation.results import Sizes
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.family.training.pack import pack
from ropewalk.model.tokenizers.spm import SpmModel, SpmTokenizer
from ropewalk.report.statistics import Estimate
from tests.model.family.evaluation.trained import (
    CPU,
    ENCODINGS,
    corpus,
    random_decoder,
    save,
    write_log,
)
from tests.model.tiny import parameters_of

SIZES = Sizes(
    context=128, texts=3, short_texts=2, served_texts=2, trials=2, lengths=(192,), distances=(32,)
)


@contextmanager
def no_bars(title, total, unit):
    yield Counter(total)


class Counter:
    """As many updates as were promised, or fewer."""

    def __init__(self, total):
        self.left = total

    def update(self, n):
        self.left -= n
        assert self.left >= 0


def told(folder, dtype, context, prompts):
    """What a server would say that computes as offline, but for one token."""
    encoding = ENCODINGS[folder.name.removeprefix("ropewalk-").removesuffix("/model")]
    reader = Reader(random_decoder(encoding), context)
    answers = [(-token_losses(reader, prompt)).tolist() for prompt in prompts]
    answers[0][0] -= 0.25
    assert all(len(prompt) + 1 <= context for prompt in prompts)
    return answers


TASK = Task(corpus(length=1500), SIZES, CPU, told, no_bars, Path("nowhere"))


@pytest.fixture(autouse=True, scope="module")
def few_slides():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortened, "SLIDES", (1, 2))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("learned", "rope"):
        save(folder / f"ropewalk-{name}", ENCODINGS[name])
    seed = folder / "ropewalk-rope.seed1"
    save(seed / "model", ENCODINGS["rope"], log=False)
    write_log(seed, end=3.2)
    return folder


@pytest.fixture(scope="module")
def found(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("found") / "evaluation.json"
    return path, evaluate(runs, path, TASK)


def test_members_are_found_in_runs_and_as_they_are(runs, tmp_path) -> None:
    members = find_members(runs)
    assert [(one.name, one.label, one.seed) for one in members] == [
        ("ropewalk-rope", "rope", None),
        ("ropewalk-rope.seed1", "rope", 1),
        ("ropewalk-learned", "learned", None),
    ]
    assert members[1].folder == runs / "ropewalk-rope.seed1" / "model"
    assert members[1].log == runs / "ropewalk-rope.seed1" / "log.jsonl"
    with pytest.raises(FamilyError, match="run ropewalk family train"):
        find_members(tmp_path)


def test_a_finished_models_log_goes_before_that_of_a_longer_training(tmp_path) -> None:
    run = tmp_path / "ropewalk-rope"
    save(run / "model", ENCODINGS["rope"])
    write_log(run)
    assert find_members(tmp_path)[0].log == run / "model" / "log.jsonl"


def test_every_part_of_every_model_is_there(found) -> None:
    rope, other_seed, learned = found[1].members
    assert (rope.name, rope.encoding) == ("ropewalk-rope", "rope")
    assert rope.config["trained_context"] == 64
    decoder = random_decoder(ENCODINGS["rope"])
    assert rope.parameters == sum(each.numel() for each in parameters_of(decoder).values())
    assert rope.losses.reach == 128 and rope.losses.bins[-1].stop == 128
    assert learned.losses.reach == 64 and learned.losses.refusal.startswith("refuses")
    assert len(rope.divergences) == 4 and learned.divergences[0].refusal
    assert [cell.trials for cell in rope.recalls.cells] == [2, 2] and not learned.recalls.cells
    assert rope.served[0].dtype == "float32" and rope.served[0].length == 127
    assert rope.served[0].largest == pytest.approx(0.25, abs=1e-4)
    assert rope.served[0].served - rope.served[0].offline == pytest.approx(0.25 / 252, abs=1e-4)
    assert learned.served[0].length == 63
    assert rope.curve.steps == other_seed.curve.steps == 100
    assert other_seed.losses is not None and other_seed.recalls is None
    assert sum(rope.held_out.windows) == sum(learned.held_out.windows) == 3 * (1500 // 65)
    assert other_seed.held_out == rope.held_out  # with the same weights


def test_the_file_says_it_all_and_nothing_is_done_again(runs, found, monkeypatch) -> None:
    path, first = found
    assert results.read(path) == first
    monkeypatch.setattr(module, "Subject", None)  # which loads weights
    assert evaluate(runs, path, TASK) == first


def test_what_was_cut_off_goes_on_after_the_last_part(runs, found, tmp_path, monkeypatch) -> None:
    _, whole = found
    path = tmp_path / "evaluation.json"
    rope = replace(whole.members[0], served=None, recalls=None)
    kept = {
        name: mark
        for name, mark in rope.made_from.items()
        if name in ("curve", "held_out", "losses")
    }
    cut = replace(whole, members=(replace(rope, made_from=kept), *whole.members[2:]))
    results.write(cut, path)
    done = []
    parts = {
        name: lambda subject, task, name=name, run=run: (
            done.append((subject.member.name, name)),
            run(subject, task),
        )[1]
        for name, run in module.PARTS.items()
    }
    monkeypatch.setattr(module, "PARTS", parts)

    def stop(subject, task):
        raise KeyboardInterrupt

    monkeypatch.setitem(parts, "served", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate(runs, path, TASK)
    assert done == [("ropewalk-rope", "divergences")]
    kept, learned = results.read(path).members
    assert kept.divergences == whole.members[0].divergences and learned == whole.members[2]
    monkeypatch.setitem(parts, "served", module._served)
    assert evaluate(runs, path, TASK) == whole
    assert ("ropewalk-rope", "losses") not in done
    assert ("ropewalk-rope.seed1", "losses") in done


def test_other_weights_or_sizes_are_measured_anew(runs, found, tmp_path, monkeypatch) -> None:
    done = []
    monkeypatch.setattr(module, "PARTS", {"losses": lambda subject, task: done.append(1)})
    monkeypatch.setattr(module, "SEEDS_TOO", ("losses",))
    _, first = found
    path = tmp_path / "evaluation.json"
    results.write(first, path)
    evaluate(runs, path, replace(TASK, sizes=replace(SIZES, texts=2)))
    assert len(done) == 3
    changed = replace(first.members[0], digest="0" * 64)
    results.write(replace(first, members=(changed, *first.members[1:])), path)
    again = evaluate(runs, path, TASK).members[0]
    assert len(done) == 4 and again.served is None  # measured with other weights


def test_figures_of_other_texts_do_not_stay_in_the_file(runs, found, tmp_path, monkeypatch) -> None:
    path = tmp_path / "evaluation.json"
    results.write(found[1], path)

    def stop(subject, task):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "PARTS", {"held_out": stop})
    other = replace(TASK, corpus=replace(TASK.corpus, fingerprint="other"))
    with pytest.raises(KeyboardInterrupt):
        evaluate(runs, path, other)
    (only,) = results.read(path).members
    assert only.losses is None and only.curve is not None  # a log is of no texts


def test_what_is_not_finite_is_written_and_read(found, tmp_path) -> None:
    rope = found[1].members[0]
    lost = replace(rope.held_out, loss=Estimate(math.nan, -math.inf, math.inf))
    path = tmp_path / "evaluation.json"
    results.write(replace(found[1], members=(replace(rope, held_out=lost),)), path)
    (again,) = results.read(path).members
    assert all(map(math.isnan, astuple(again.held_out.loss)))
    assert again.losses == rope.losses


def test_own_figures_stand_beside_bundled_ones_of_the_same_label(found) -> None:
    bundled = found[1]
    mine = replace(bundled, members=(replace(bundled.members[0], name="rope"),))
    labels = [(one.name, one.label) for one in results.beside(mine, bundled).members]
    assert labels[0] == ("ropewalk-rope", "rope") and labels[-1] == ("rope", "own rope")
    again = results.beside(replace(bundled, members=bundled.members[:2]), bundled)
    assert {one.label for one in again.members} == {"rope", "learned"}
    seed = replace(bundled.members[1], name="ropewalk-rope.seed2", seed=2)
    beside = results.beside(replace(bundled, members=(seed,)), bundled)
    assert beside.members[-1].label == "rope"  # another seed of the bundled one


def test_a_damaged_file_and_another_schema_are_refused(found, tmp_path) -> None:
    path = tmp_path / "evaluation.json"
    assert results.read(path) is None
    for text, reason in [
        ("{", "is damaged"),
        (f'{{"schema": {results.SCHEMA}}}', "is damaged"),
        ('{"schema": 99}', f"has schema 99, not {results.SCHEMA}"),
        (found[0].read_text().replace('"trials": 2', '"trials": "x"'), "is damaged"),
    ]:
        path.write_text(text)
        with pytest.raises(FamilyError, match=reason):
            results.read(path)


def test_tokens_that_a_model_does_not_know_are_refused(runs, tmp_path) -> None:
    other = corpus(length=1500)
    other.held_out.tokens[7] = 60_000
    with pytest.raises(FamilyError, match="has token 60,000; evaluate it on the corpus"):
        evaluate(runs, tmp_path / "evaluation.json", replace(TASK, corpus=other))


def test_what_packing_costs_is_told_where_weights_are_shipped(runs, found, tmp_path) -> None:
    pack(runs / "ropewalk-learned", tmp_path / "ropewalk-learned")
    path = tmp_path / "evaluation.json"
    results.write(found[1], path)
    rope, _, learned = evaluate(runs, path, replace(TASK, shipped=tmp_path)).members
    assert rope.packed is None and learned.packed is not None
    assert 1e-6 < abs(learned.packed.packed - learned.packed.trained) < 0.1
    pack(runs / "ropewalk-learned", tmp_path / "ropewalk-rope")  # of somebody else's training
    rope, _, learned_ = evaluate(runs, path, replace(TASK, shipped=tmp_path)).members
    assert rope.packed is None and learned_ == learned
    (tmp_path / "ropewalk-learned" / "model.safetensors").write_text("version of a pointer")
    assert evaluate(runs, path, replace(TASK, shipped=tmp_path)).members[2].packed is None
    pack(runs / "ropewalk-learned", tmp_path / "ropewalk-learned")
    half = learned.losses.bins[-1]  # not the same texts, but as drawn as they
    assert (half.start, half.stop) == (32, 64)
    assert learned.packed.trained == pytest.approx(half.loss.value, abs=1)
    assert learned.packed.size == (tmp_path / "ropewalk-learned/model.safetensors").stat().st_size


def test_samples_go_on_from_their_prompts(found) -> None:
    samples_ = found[1].members[0].samples
    assert [one.prompt for one in samples_] == list(samples.PROMPTS)
    assert all(one.answer for one in samples_)


def test_a_sample_is_what_a_fresh_pass_would_draw() -> None:
    """A reader that knows one sentence says it, whatever was read before."""
    tokenizer = SpmTokenizer(SpmModel(SHIPPED_TOKENIZER.read_bytes()))
    said = tokenizer.encode("Call me" + " Ishmael" * 60, bos=True)

    class Parrot:
        computed = 0

        def read(self, tokens, *, wanted, start=0):
            assert start == self.computed and len(tokens) > start
            self.computed = len(tokens)
            found = torch.full((wanted, 4096), -99.0)
            found[-1, said[len(tokens)]] = 0.0
            return found

    (one,) = samples.measure(Parrot(), tokenizer, ("Call me",))
    assert one.answer.startswith(" Ishmael Ishmael") and set(one.answer.split()) >= {"Ishmael"}


def test_sizes_are_part_of_the_file(found) -> None:
    assert found[1].sizes == SIZES and asdict(found[1].sizes)["lengths"] == (192,)
