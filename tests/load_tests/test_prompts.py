import pytest

from ropewalk.load_tests.workload.prompts import WORDS, PromptMaker


def test_ids_have_the_length_and_stay_inside_the_vocabulary():
    maker = PromptMaker("s", "ids", vocab_size=100)
    prompt = maker.prompt(64)
    assert len(prompt) == 64
    assert set(prompt) <= set(range(10, 90))


def test_text_has_one_word_a_token():
    prompt = PromptMaker("s", "text").prompt(64)
    assert isinstance(prompt, str)
    assert len(prompt.split(" ")) == 64


def test_the_words_differ():
    assert len(set(WORDS)) == len(WORDS) > 150


@pytest.mark.parametrize("form", ["ids", "text"])
def test_the_seed_decides_and_nothing_repeats(form):
    first, second, other = (PromptMaker(seed, form) for seed in ("a", "a", "b"))
    made = [first.prompt(16) for _ in range(200)]
    assert made == [second.prompt(16) for _ in range(200)]
    assert not set(made) & {other.prompt(16) for _ in range(200)}
    assert len(set(made)) == 200


def test_short_prompts_are_still_distinct():
    maker = PromptMaker("s", "ids", vocab_size=10)  # ids 1 to 8
    assert len({maker.prompt(1) for _ in range(8)}) == 8
    with pytest.raises(ValueError, match="no more distinct prompts of 1 tokens"):
        maker.prompt(1)


def test_a_prefix_is_part_of_the_length():
    maker = PromptMaker("s", "ids")
    prefix = maker.pieces(6)
    one, two = maker.prompt(10, prefix), maker.prompt(10, prefix)
    assert list(one[:6]) == list(two[:6]) == list(prefix)
    assert len(one) == len(two) == 10
    assert one != two
