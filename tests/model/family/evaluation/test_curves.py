"""Curves out of a training's log."""

import json

import pytest

from model.family.errors import FamilyError
from model.family.evaluation import curves
from model.family.evaluation.curves import Point


def written(folder, rows):
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_points_are_means_of_steps_and_held_out_ones_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(curves, "POINTS", 3)
    rows = [{"step": n, "tokens": 10 * n, "seconds": n / 2, "loss": 10.0 - n} for n in range(1, 9)]
    rows[3]["held_out_loss"] = 6.5
    found = curves.read(written(tmp_path, rows))
    assert found.trained == (Point(30, 1.5, 8.0), Point(60, 3.0, 5.0), Point(80, 4.0, 2.5))
    assert found.held_out == (Point(40, 2.0, 6.5),)
    assert found.steps == 8
    assert curves.reached(found, 5.0) == Point(60, 3.0, 5.0)
    assert curves.reached(found, 2.0) is None


def test_a_line_that_is_no_step_is_named(tmp_path) -> None:
    path = written(tmp_path, [{"step": 1, "tokens": 1, "seconds": 1, "loss": 2.0}, {"loss": 1.0}])
    with pytest.raises(FamilyError, match="line 2, is no step"):
        curves.read(path)
