import pytest

from load_tests.prompts import WORDS, PromptMaker


def test_ids_have_the_length_and_stay_inside_the_vocabulary():
    maker = PromptMaker("s", "ids", vocab_size=100)
    request = maker.request(64, 8)
    assert (len(request.prompt), request.prompt_tokens, request.output_tokens) == (64, 64, 8)
    assert set(request.prompt) <= set(range(10, 90))


def test_text_has_one_word_a_token():
    request = PromptMaker("s", "text").request(64, 8)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split(" ")) == 64


def test_the_words_differ():
    assert len(set(WORDS)) == len(WORDS) > 150


@pytest.mark.parametrize("form", ["ids", "text"])
def test_the_seed_decides_and_nothing_repeats(form):
    first, second, other = (PromptMaker(seed, form) for seed in ("a", "a", "b"))
    made = [first.request(16, 1).prompt for _ in range(200)]
    assert made == [second.request(16, 1).prompt for _ in range(200)]
    assert not set(made) & {other.request(16, 1).prompt for _ in range(200)}
    assert len(set(made)) == 200


def test_short_prompts_are_still_distinct():
    maker = PromptMaker("s", "ids", vocab_size=10)  # ids 1 to 8
    assert len({maker.request(1, 1).prompt for _ in range(8)}) == 8
    with pytest.raises(ValueError, match="no more distinct prompts of 1 tokens"):
        maker.request(1, 1)


def test_a_prefix_is_part_of_the_length():
    maker = PromptMaker("s", "ids")
    prefix = maker.pieces(6)
    one, two = maker.request(10, 1, prefix).prompt, maker.request(10, 1, prefix).prompt
    assert list(one[:6]) == list(two[:6]) == list(prefix)
    assert len(one) == len(two) == 10
    assert one != two
