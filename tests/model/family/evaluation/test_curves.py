"""Curves out of a training's log."""

import json

import pytest

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.evaluation import curves
from ropewalk.model.family.evaluation.curves import Point


def written(folder, rows):
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(step, **values):
    usual = {"step": step, "tokens": 10 * step, "seconds": step, "loss": 10.0 - step, "rate": 1.0}
    return usual | values


def test_a_step_that_was_held_up_counts_as_the_median(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(curves, "STEPS", 1)
    seconds = (1.0, 2.0, 3.5, 603.5, 604.5)  # stopped for ten minutes in the fourth
    rows = [row(n, seconds=at) for n, at in enumerate(seconds, start=1)]
    rows[-1]["held_out_loss"] = 5.0
    found = curves.read(written(tmp_path, rows))
    assert [point.seconds for point in found.trained] == [1.0, 2.0, 3.5, 4.5, 5.5]
    assert found.held_out == (Point(50, 5.5, 5.0),)


def test_points_are_means_of_steps_and_held_out_ones_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(curves, "STEPS", 3)
    rows = [row(n, seconds=n / 2) for n in range(1, 9)]
    rows[3]["held_out_loss"] = 6.5
    found = curves.read(written(tmp_path, rows))
    assert found.trained == (Point(30, 1.5, 8.0), Point(60, 3.0, 5.0), Point(80, 4.0, 2.5))
    assert found.held_out == (Point(40, 2.0, 6.5),)
    assert (found.steps, found.tokens) == (8, 80)


def test_a_line_that_is_no_step_is_named(tmp_path) -> None:
    path = written(tmp_path, [row(1), {"loss": 1.0}])
    with pytest.raises(FamilyError, match="line 2, is not a training step"):
        curves.read(path)
