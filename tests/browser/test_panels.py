"""What the panels Cache, Position and Proof claim is what the API says."""

import json

import httpx

REASON = "the position is part of every stored key and value"


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


def test_appending_changes_no_checksum_and_moving_only_those_of_rope(panel, family):
    page = panel("proof")
    press(page, "proof-1", "proof-2")
    page.wait_for_selector('[data-act="proof-2"]:disabled')  # or more than 100 would be appended
    press(page, "proof-3", "proof-move")
    moved = ".experiment:nth-of-type(2) [data-model='ropewalk-{}']"
    page.wait_for_selector(".experiment:nth-of-type(2) [data-model]:nth-of-type(6)")
    for encoding in ("alibi", "learned", "nope", "rope", "sinusoidal", "t5"):
        model = f"ropewalk-{encoding}"
        shown = attributes(
            page,
            f"[data-model='{model}'] >> nth=0 >> li",
            "data-before",
            "data-after",
            "data-state",
        )
        sums = kept(family, model)[-1]["checksums"]
        assert len(shown) == 6 and shown == [[sums[i], sums[i], "equal"] for i in range(6)]
    for encoding, state in (("rope", "changed"), ("t5", "equal"), ("alibi", "equal")):
        found = attributes(page, f"{moved.format(encoding)} .prints li", "data-state")
        assert [each for [each] in found] == ["equal"] * 2 + ["dropped"] * 2 + [state] * 2
    for encoding in ("learned", "sinusoidal"):
        assert REASON in page.text_content(f"{moved.format(encoding)} .refused")


def test_the_counter_example_shows_the_blocks_that_the_audit_found_changed(panel, family):
    page, asked = panel("proof"), []
    page.on(
        "request", lambda sent: sent.url.endswith("audit") and asked.append(sent.post_data_json)
    )
    press(page, "proof-counter")
    page.wait_for_selector('[data-arm="own"] .prints')
    assert [body["arm"] for body in asked] == ["rope:dynamic-rewrite", "own"]
    told = httpx.post(f"{family}/v1/positions/audit", json=asked[0], timeout=60).json()
    expected = [[block["before"], block["after"], "changed"] for block in told["blocks"]]
    names = ("data-before", "data-after", "data-state")
    assert attributes(page, "[data-arm='rope:dynamic-rewrite'] li", *names) == expected
    served = attributes(page, "[data-arm='own'] li", *names)
    assert served == [[before, before, "equal"] for before, *_ in served] and len(served) == 7


def test_a_fork_shows_the_shared_blocks_of_the_api(panel, family):
    page = panel("cache", "t5")
    press(page, "cache-keep", "cache-fork", "cache-do")
    page.wait_for_selector("#panel-cache .sequence:nth-of-type(2)")
    page.wait_for_selector(".chip.shared")
    page.wait_for_selector(".told:not(:empty)")
    (entry,) = httpx.get(f"{family}/v1/cache", params={"model": "ropewalk-t5"}).json()["data"]
    shown = attributes(page, ".chip.shared", "data-block")
    assert sorted(int(each) for [each] in shown) == sorted(
        each["block"] for each in entry["shared"] for _ in each["holders"]
    )
    assert page.text_content('[data-count="s"]') == str(len(entry["shared"]))
    forked, parent = (each["blocks"] for each in kept(family, "ropewalk-t5")[-1:-3:-1])
    assert forked == parent[:4] and set(forked) <= {each["block"] for each in entry["shared"]}
    page.focus(".chip.shared")
    lit = attributes(page, ".chip.lit", "data-block")
    assert len(lit) > 1 and lit == lit[:1] * len(lit), "one block is lit wherever it is held"


def test_a_shift_under_rope_turns_exactly_the_keys_that_were_counted(panel, family):
    page = panel("cache")
    press(page, "cache-keep", "cache-evict_renumber")
    own = "tr.own [data-rewritten]"
    predicted = int(page.get_attribute(own, "data-rewritten"))
    (before,) = kept(family, "ropewalk-rope")[-1:]
    press(page, "cache-do")
    page.wait_for_selector(".told:not(:empty)")
    (after,) = kept(family, "ropewalk-rope")[-1:]
    keys = 4 * 4 * (after["tokens"] - 32)  # layers, heads, and the tokens after the first 32
    assert keys == predicted
    assert f"{keys:,} keys rotated and written again" in page.text_content(".told")
    shown = attributes(page, ".sequence:first-of-type .chip", "data-block", "class")
    rotated = [int(block) for block, kind in shown if "rotated" in kind]
    assert rotated == after["blocks"][2:]
    was = dict(zip(before["blocks"], before["checksums"], strict=True))
    same = [
        was[block] == now for block, now in zip(after["blocks"], after["checksums"], strict=True)
    ]
    assert same[:-1] == [True] * 2 + [False] * (len(same) - 3)


def test_what_happened_stays_when_few_blocks_are_left(panel):
    page = panel("cache")
    page.fill('[data-act="cache-prompt"]', "the river and the old king went down " * 9)
    press(page, "cache-keep", "cache-evict_renumber")
    while page.locator('[data-act="cache-do"]').count():
        press(page, "cache-do")
        page.wait_for_selector("#panel-cache .inside:not([inert])")
        assert "rotated and written again" in page.inner_text(".told")
    assert "No full block is left" in page.inner_text(".actions")
    left = page.locator(".sequence").first.locator("header .figure").inner_text()
    assert int(left.split()[0]) < 16


def test_a_selection_is_named_by_its_positions(panel):
    page = panel("cache", "t5")
    press(page, "cache-keep", "cache-evict_keep", "cache-do")
    page.wait_for_selector(".hole")
    boxes = page.locator(".sequence").first.locator(".chip")
    boxes.nth(2).click()
    boxes.nth(3).click()
    bases = [int(boxes.nth(i).get_attribute("data-base")) for i in (2, 3)]
    assert bases == [64, 80]
    page.wait_for_selector(".why:has-text('at positions 64 to 95.')")
    press(page, "cache-append")
    page.wait_for_selector(".why:has-text('has a hole, so it cannot be continued')")
    assert page.is_disabled('[data-act="cache-do"]')


def test_blocks_move_onto_the_chosen_sequence(panel, family):
    page = panel("cache", "t5")
    press(page, "cache-keep", "cache-fork", "cache-do")  # the fork ends with a full block
    boxes = page.locator(".sequence").nth(1).locator(".chip")
    boxes.nth(5).click()
    boxes.nth(6).click()
    press(page, "cache-move_span")
    bases = {each["id"]: each["bases"] for each in kept(family, "ropewalk-t5")}
    forked = next(reversed(bases))
    offered = attributes(page, '[data-act="cache-onto"] option', "value")
    assert [forked] in offered and [""] in offered
    page.select_option('[data-act="cache-onto"]', "")
    press(page, "cache-do")
    page.wait_for_selector(".told:not(:empty)")
    now = {each["id"]: each["bases"] for each in kept(family, "ropewalk-t5")}
    assert now.items() > bases.items()
    assert [now[each] for each in now if each not in bases] == [[0, 16, 32]]
    page.select_option('[data-act="cache-onto"]', forked)
    press(page, "cache-do")
    page.wait_for_selector(f".sequence[data-sequence={forked}] .chip >> nth=5")
    now = {each["id"]: each["bases"] for each in kept(family, "ropewalk-t5")}
    assert now[forked] == [*bases[forked], 64, 80]


def test_learned_refuses_to_move_and_says_why(panel, family):
    page = panel("cache", "learned")
    press(page, "cache-keep", "cache-evict_renumber", "cache-do")
    page.wait_for_selector("#panel-cache .told:not(:empty)")
    assert page.text_content("#panel-cache .told") == f"Impossible: {REASON}."
    assert REASON in page.text_content("tr.own .verdict")
    before = len(kept(family, "ropewalk-learned"))
    press(page, "cache-move_span", "cache-do")
    page.wait_for_selector("#panel-cache .told:text('Impossible')")
    assert len(kept(family, "ropewalk-learned")) == before  # no fork of it is left


def test_scores_are_split_as_the_api_says(panel, family):
    for encoding in ("rope", "t5"):
        page = panel("position", encoding)
        page.click('[data-act="position-token-8"]')
        page.wait_for_selector('.word.query[data-index="8"]')
        page.hover('[data-act="position-token-3"]')
        curve = page.wait_for_selector(".chart[data-at]")
        text = page.input_value('[data-act="position-text"]')
        body = {"model": f"ropewalk-{encoding}", "input": text, "query": 8}
        told = httpx.post(f"{family}/v1/positions/explain", json=body).json()
        shown = page.eval_on_selector_all(
            "tr[data-head] [data-number]:not([data-number=weights])",
            "nodes => nodes.map(node => node.textContent)",
        )
        numbers = [float(each.replace("−", "-")) for each in shown]
        expected = [
            [head[name][3] for name in ("content", "position", "scores")] for head in told["heads"]
        ]
        for row, head in enumerate(expected):
            assert numbers[3 * row : 3 * row + 3] == [round(each, 2) for each in head]
        assert abs(float(curve.get_attribute("data-at")) - expected[0][1]) < 1e-3


def test_a_press_counts_although_an_answer_comes_before_the_button_is_released(panel):
    page = panel("position")
    page.wait_for_selector(".clock[data-pair]")
    page.hover('[data-act="position-token-8"]')
    with page.expect_response("**/v1/positions/explain"):  # what each pair adds for this key
        page.mouse.down()
    page.wait_for_timeout(200)  # for it to be shown
    page.mouse.up()
    page.wait_for_selector('.word.query[data-index="8"]')
    page.hover('[data-act="position-token-3"]')
    page.wait_for_selector(".clock[data-adds]")


def test_a_press_counts_although_another_model_has_not_answered_yet(panel):
    page = panel("position")
    page.wait_for_selector(".clock[data-pair]")
    held = []
    page.route("**/v1/positions/explain", lambda route: held.append(route))
    page.select_option("#model", "ropewalk-alibi")
    page.click('[data-act="position-token-8"]')  # the text as the model before saw it
    while len(held) < 2:
        page.wait_for_timeout(20)
    for each in held:
        each.continue_()
    page.wait_for_selector('.word.query[data-index="8"]')


def test_a_key_is_moved_as_if_text_lay_between(panel, family):
    page = panel("position")
    page.wait_for_selector(".clock[data-pair]")
    page.hover('[data-act="position-token-8"]')
    page.wait_for_selector('.word.key[data-index="8"]')
    page.wait_for_selector(
        ".clock[data-adds]"
    )  # what each pair adds for this key, which comes later
    press(page, *["position-move"] * 3)
    shown = page.eval_on_selector_all(
        "tr[data-head] [data-number]", "nodes => nodes.map(node => node.textContent)"
    )
    rows = [[float(each.replace("−", "-")) for each in shown[i : i + 3]] for i in range(0, 16, 4)]
    assert shown[3::4] == ["–"] * 4  # the shares of attention would need every other key
    model = {"model": "ropewalk-rope"}
    text = page.input_value('[data-act="position-text"]')
    ids = httpx.post(f"{family}/tokenize", json=model | {"prompt": text}).json()["tokens"]
    # In layer 0 neither vector depends on the text, so three tokens between move them apart.
    apart = model | {"input": [*ids[:9], *ids[1:4], *ids[9:]]}
    told = httpx.post(f"{family}/v1/positions/explain", json=apart).json()
    assert rows == [
        [round(head[name][8], 2) for name in ("content", "position", "scores")]
        for head in told["heads"]
    ]
    sentence = page.inner_text("#panel-position .told")
    assert f"at position {len(ids) - 1}, key “,” at 5, {len(ids) - 6} tokens back" in sentence


def test_a_text_stays_what_was_typed(panel, family):
    page, asked = panel("position"), []
    page.wait_for_selector(".word.query")
    page.on(
        "request", lambda sent: sent.url.endswith("explain") and asked.append(sent.post_data_json)
    )
    text, box = "Hello 😀 Grüße שלום", '[data-act="position-text"]'
    page.fill(box, text)
    page.fill('[data-act="position-layer"]', "1")  # without Show: the query was of another text
    page.press('[data-act="position-layer"]', "Tab")
    page.click('[data-act="position-token-3"]')
    page.wait_for_selector('.word.query[data-index="3"]')
    assert page.input_value(box) == text
    assert [each.get("query") for each in asked if "key" not in each] == [None, 3]
    page.click('[data-act="tab-talk"]')
    page.fill('[data-act="talk-prompt"]', text)
    page.fill('[data-act="talk-tokens"]', "1")
    press(page, "talk-go")
    page.wait_for_selector(".talk-detail .talk-others")
    page.click('[data-act="tab-position"]')
    page.wait_for_selector(".word.query:not([data-index='3'])")
    ids = [each["input"] for each in asked if "key" not in each][-1]
    said = httpx.post(f"{family}/detokenize", json={"model": "ropewalk-rope", "tokens": ids}).json()
    assert page.input_value(box) == said["prompt"] and said["prompt"].startswith(text)


def test_an_error_that_came_too_late_is_not_shown(panel):
    page, held = panel("position"), []
    page.wait_for_selector(".word.query")
    page.route("**/v1/positions/explain", lambda route: held.append(route), times=1)
    page.click('[data-act="position-token-3"]')
    page.wait_for_timeout(50)
    page.click('[data-act="position-token-4"]')
    page.wait_for_selector('.word.query[data-index="4"]')
    held[0].fulfill(status=400, body='{"error": {"message": "Late."}}')
    page.wait_for_timeout(200)
    assert page.inner_text("#status") == "" and page.locator(".word.query").count() == 1


def explained_as(page, **changes):
    """From now on explanations say what those of other models would."""

    def answer(route):
        route.fulfill(json=route.fetch().json() | changes)

    page.route("**/v1/positions/explain", answer)
    press(page, "position-show")


def test_an_encoder_sees_later_tokens_and_nothing_is_appended_to_it(panel):
    page = panel("position", "t5")
    bias = {"distances": [*range(-40, 41)], "heads": [[0.1] * 81] * 4}
    page.wait_for_selector(".word.query")
    explained_as(page, side="encoder", causal=False, bias=bias)
    page.wait_for_selector("[data-tried]:has-text('This is an encoder')")
    page.click('[data-act="position-token-8"]')
    page.wait_for_selector('.word.query[data-index="8"]')
    page.hover('[data-act="position-token-11"]')
    page.wait_for_selector(".told:has-text('3 tokens ahead')")
    assert page.locator('[data-act="position-append"], .word.unseen').count() == 0
    assert page.locator(".chart text:has-text('ahead')").count() == 2


def test_keys_outside_the_window_are_not_seen(panel):
    page = panel("position")
    page.wait_for_selector(".word.query")
    explained_as(page, window=4)
    page.wait_for_selector(".word.unseen")
    last = page.locator(".word").count() - 1
    assert page.locator(".word.unseen").count() == last - 3
    unseen = page.locator(".word.unseen").first
    assert unseen.evaluate("node => getComputedStyle(node).opacity") == "1"  # it can be read
    page.wait_for_selector(".told:has-text('sees itself and 3 tokens before it')")
    assert set(page.locator("tr[data-head] [data-number]").all_inner_texts()) == {"–"}
    page.hover(f'[data-act="position-token-{last - 2}"]')
    page.wait_for_selector(".told:has-text('of the attention')")
    press(page, "position-append")
    page.wait_for_selector(".told:has-text('3 tokens back: in head 0, score')")
    press(page, "position-append")
    page.wait_for_selector(".told:has-text('4 tokens back: not seen')")


def test_keys_that_are_stored_unrotated_move_for_free(panel):
    page = panel("position")
    page.wait_for_selector(".word.query")
    for storage, how in (("raw", "stores keys unrotated"), ("block", "place within their block")):
        explained_as(page, key_storage=storage)
        page.wait_for_selector(f"[data-tried]:has-text('{how}')")
        press(page, "position-move")
        page.wait_for_selector("[data-tried=move]:has-text('moving changes nothing')")
        assert "as it is still stored" not in page.inner_text("#panel-position")
        page.unroute("**/v1/positions/explain")


def test_a_button_does_what_it_says_when_no_plan_comes(panel):
    page, done = panel("cache"), []
    press(page, "cache-keep")
    page.wait_for_selector('[data-act="cache-do"]:has-text("Shift")')
    page.route("**/v1/cache/plan", lambda route: route.fulfill(status=503, body="null"))
    press(page, "cache-append")
    page.wait_for_selector("#status.error:has-text('The server answered 503')")
    page.locator(".sequence").first.locator(".chip").nth(5).click()
    page.wait_for_selector("#panel-cache .inside:not([inert])")
    page.on(
        "request", lambda sent: sent.url.endswith("operations") and done.append(sent.post_data_json)
    )
    assert page.inner_text('[data-act="cache-do"]') == "Shift these 32 tokens"
    press(page, "cache-do")
    page.wait_for_selector(".told:not(:empty)")
    assert done == [{"operation": "evict_renumber", "first": 32, "count": 32}]


def test_nothing_is_kept_while_it_could_not_be_shown(panel):
    page, kept = panel("talk"), []
    page.on("request", lambda sent: sent.url.endswith("sequences") and kept.append(sent.url))
    page.route("**/v1/cache/stream*", lambda route: None)  # no snapshot comes
    page.click('[data-act="tab-cache"]')
    press(page, "cache-keep")
    page.wait_for_selector("#status.error:has-text('could not be shown')")
    assert kept == []


def test_the_model_stays_the_same_while_any_panel_works(panel):
    page, held = panel("cache"), []
    page.wait_for_selector("svg.pool[tabindex]")
    page.route("**/v1/cache/sequences", lambda route: held.append(route))
    page.route("**/v1/positions/audit", lambda route: route.fulfill(status=503, body="null"))
    press(page, "cache-keep")
    page.click('[data-act="tab-proof"]')
    press(page, "proof-counter")
    page.wait_for_selector("#status.error")
    page.wait_for_selector("#panel-proof .inside:not([inert])")
    assert page.is_disabled("#model")
    held[0].fulfill(status=503, body="null")
    page.wait_for_selector("#model:enabled")


def test_what_was_given_up_is_marked_once(panel):
    page = panel("talk")
    entry = {
        "block_size": 16,
        "blocks": {"free": 2, "active": 2, "cached": 0, "quarantined": 1},
        "audit": {"sealed": 1, "verified": 1, "mutated": 0},
        "waiting": 0,
        "requests": [],
        "shared": [],
    }
    events = [{"type": "snapshot", "pool": "-qhhff", "entry": entry}]
    events.append({"type": "delta", "pool": [[3, "f"]]})
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
    page.route("**/v1/cache/stream*", lambda route: route.fulfill(body=body))
    page.click('[data-act="tab-cache"]')
    page.wait_for_selector(".pool .evicted")
    page.focus("svg.pool[tabindex]")
    for key, told in (("ArrowRight", "Block 1: quarantined, "), ("ArrowLeft", "Block 0: reserved")):
        page.keyboard.press(key)
        page.wait_for_selector(f".readout:has-text('{told}')")
    assert page.locator(".pool .evicted").count() == 0
