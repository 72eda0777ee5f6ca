"""Windows: every token in turn, nothing asked of what was cut off, the same for the same seed."""

import numpy as np
import pytest

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.texts.corpus import Split
from ropewalk.model.family.texts.windows import Windows

LENGTH = 20


def split(*lengths: int) -> Split:
    """Documents whose tokens tell document and place."""
    return Split.of(
        [(str(n), [100 * n + i for i in range(size)]) for n, size in enumerate(lengths)]
    )


def epoch(windows: Windows, count: int) -> list[list[int]]:
    return [windows.step(number, 1)[0].tolist() for number in range(count)]


def test_one_long_document_is_cut_end_to_end() -> None:
    found = sorted(epoch(Windows(split(81), LENGTH, 0), 4))
    assert found == [list(range(start, start + LENGTH + 1)) for start in (0, 20, 40, 60)]


@pytest.mark.parametrize("seed", range(8))
def test_a_document_that_fits_is_whole_in_some_window(seed) -> None:
    lengths = (7, 90, 12, 15, 70, 9, 21, 4, 60)
    windows = Windows(split(*lengths), LENGTH, seed)
    found = epoch(windows, 40)
    once = found[: next(n for n in range(1, 40) if found[n] in found[:n])]
    joined = {tuple(w[i : i + size]) for w in once for size in lengths for i in range(22 - size)}
    # The last ones may lie in what is left over for no whole window.
    whole = [n for n, size in enumerate(lengths) if size <= LENGTH + 1]
    missing = [n for n in whole if tuple(range(100 * n, 100 * n + lengths[n])) not in joined]
    assert len(missing) <= 3


def test_epochs_differ_and_repeat_nothing_within() -> None:
    windows = Windows(split(*[50] * 40), LENGTH, 3)
    first = windows.step(0, 90)
    assert len({tuple(row) for row in first.tolist()}) == 90
    assert not np.array_equal(first, windows.step(1, 90))
    assert np.array_equal(first, Windows(split(*[50] * 40), LENGTH, 3).step(0, 90))
    assert not np.array_equal(first, Windows(split(*[50] * 40), LENGTH, 4).step(0, 90))


def test_steps_of_any_size_see_the_same_order() -> None:
    windows = Windows(split(*[50] * 4), LENGTH, 3)
    by_one = np.concatenate([windows.step(number, 1) for number in range(40)])
    by_eight = np.concatenate([windows.step(number, 8) for number in range(5)])
    assert np.array_equal(by_one, by_eight)


def test_a_late_step_cuts_no_epoch_twice(monkeypatch) -> None:
    cut = []
    whole = Windows._cut

    def counted(self, epoch):
        cut.append(epoch)
        return whole(self, epoch)

    monkeypatch.setattr(Windows, "_cut", counted)
    windows = Windows(split(*[50] * 4), LENGTH, 3)
    late = [windows.step(number, 8) for number in range(20)]
    assert cut == list(range(max(cut) + 1)) and max(cut) > 10
    assert np.array_equal(Windows(split(*[50] * 4), LENGTH, 3).step(19, 8), late[-1])


def test_too_little_text_is_said() -> None:
    with pytest.raises(FamilyError, match="fewer than one window"):
        Windows(split(10, 5), LENGTH, 0)
