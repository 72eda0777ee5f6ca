"""What the panels Cache, Position and Proof claim is what the API says."""

import httpx


def press(page, *acts):
    for act in acts:
        page.click(f'[data-act="{act}"]:enabled')


def attributes(page, selector, *names):
    """Of all nodes, one list each."""
    return page.eval_on_selector_all(
        selector, "(nodes, names) => nodes.map(n => names.map(name => n.getAttribute(name)))", names
    )


def kept(family, model):
    """The kept sequences of a model, newest last, each with its checksums."""
    listed = httpx.get(f"{family}/v1/cache/sequences", params={"model": model}).json()["data"]
    return [httpx.get(f"{family}/v1/cache/sequences/{each['id']}").json() for each in listed]


def test_proof_shows_the_checksums_of_the_api_and_that_they_are_equal(panel, family):
    page = panel("proof")
    press(page, "proof-1", "proof-2", "proof-3")
    page.wait_for_selector('[data-act="proof-move"]:enabled')
    for encoding in ("alibi", "learned", "nope", "rope", "sinusoidal", "t5"):
        model = f"ropewalk-{encoding}"
        shown = attributes(
            page, f'[data-model="{model}"] .prints li', "data-before", "data-after", "data-state"
        )
        sums = kept(family, model)[-1]["checksums"]
        assert len(shown) == 6 and shown == [[sums[i], sums[i], "equal"] for i in range(6)]


def test_proof_moves_keys_under_rope_alone_and_where_it_is_possible(panel):
    page = panel("proof")
    press(page, "proof-1", "proof-2", "proof-3", "proof-move")
    page.wait_for_selector(".experiment:nth-of-type(2) [data-model]:nth-of-type(6)")
    moved = ".experiment:nth-of-type(2) [data-model='ropewalk-{}']"
    for encoding, states in (("rope", "changed"), ("t5", "equal"), ("alibi", "equal")):
        found = attributes(page, f"{moved.format(encoding)} .prints li", "data-state")
        assert [each for [each] in found] == ["equal"] * 2 + ["dropped"] * 2 + [states] * 2
    for encoding in ("learned", "sinusoidal"):
        assert "the position is part of every stored key and value" in page.text_content(
            f"{moved.format(encoding)} .refused"
        )
