"""What the explorer shows is what the API says; text is text; a visit can be replayed."""

import json

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.real import serving, standalone
from tests.browser.visit import FOLDER

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
KEY = "open-sesame"


def act(page: Page, name: str):
    return page.locator(f'[data-act="{name}"]')


def ask(address: str, path: str, **body) -> dict:
    answer = httpx.post(f"{address}/{path}", json=body, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()


def counted(address: str, name: str, model: str) -> float:
    """A counter of a model, all its series together."""
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    wanted = f'model_name="{model}"'
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and wanted in line
    )


def lane(page: Page, model: str):
    return page.locator(f'.race-lane[data-model="{model}"]')


def shown(page: Page, model: str, caption: str) -> str:
    """A figure of a lane."""
    return lane(page, model).locator("tr", has_text=caption).locator(".figure").inner_text()


def cells(page: Page, run: int) -> list[str]:
    return page.locator(f'[data-act^="talk-cell-{run}-"]').all_inner_texts()


def press(page: Page, name: str) -> None:
    """Presses a button that starts something, and waits for its end."""
    act(page, name).click()
    panel = page.locator(f"#panel-{name.split('-')[0]} .inside")
    expect(panel).to_have_attribute("aria-busy", "false", timeout=60_000)


def test_lanes_write_what_the_api_answers(family, opened):
    page = opened(f"{family}/#race")
    act(page, "race-temperature").fill("0")
    act(page, "race-tokens").fill("24")
    prompt = act(page, "race-prompt").input_value()
    press(page, "race-go")
    for model in ("ropewalk-rope", "ropewalk-t5", "ropewalk-learned"):
        told = ask(
            family, "v1/completions", model=model, prompt=prompt, max_tokens=24, temperature=0
        )
        assert lane(page, model).locator(".race-text").text_content() == told["choices"][0]["text"]
        tokens = told["usage"]["total_tokens"]
        plan = ask(family, "v1/cache/plan", model=model, operation="append", tokens=tokens - 1)
        (own,) = [each for each in plan["data"] if each["own"]]
        flops = own["work"]["flops"]
        number = f"{flops} FLOP" if flops < 1000 else f"{float(f'{flops / 1000:.3g}'):g} kFLOP"
        assert shown(page, model, "positional work") == number
        assert shown(page, model, "keys rewritten") == "0"
    assert "No lane rewrote a key" in page.locator(".race-verdict").inner_text()


def test_past_the_limit_rope_turns_keys_t5_none_and_learned_refuses(family, opened):
    page = opened(f"{family}/#race")
    name = "ropewalk_kv_rewritten_entries_total"
    models = ("ropewalk-rope", "ropewalk-t5")
    before = {model: counted(family, name, model) for model in models}
    press(page, "race-past")
    for model in models:
        rotated = counted(family, name, model) - before[model]
        assert shown(page, model, "keys rewritten") == f"{rotated:,.0f}"
        assert (rotated > 0) == (model == "ropewalk-rope")
    body = {"model": "ropewalk-learned", "prompt": "a", "max_tokens": 600, "overflow": "shift"}
    reason = httpx.post(f"{family}/v1/completions", json=body).json()["error"]["message"]
    told = lane(page, "ropewalk-learned").locator(".race-text").text_content()
    assert told == f"Refused: {reason}"


def test_a_talk_shows_the_apis_tokens_and_goes_on_from_any(family, opened):
    page = opened(f"{family}/#talk")
    page.select_option("#model", "ropewalk-t5")
    act(page, "talk-temperature").fill("0")
    press(page, "talk-go")
    prompt = act(page, "talk-prompt").input_value()
    body = {"model": "ropewalk-t5", "prompt": prompt, "temperature": 0, "logprobs": 5}
    told = ask(family, "v1/completions", max_tokens=48, return_token_ids=True, **body)
    (choice,) = told["choices"]
    sent = len(choice["prompt_token_ids"])
    plain = [each.replace("·", " ").replace("⏎", "\n") for each in cells(page, 1)[sent:]]
    assert "".join(plain) == choice["text"]
    act(page, f"talk-cell-1-{sent + 9}").click()
    detail = page.locator(".talk-detail")
    assert f"\n{choice['token_ids'][9]}\n" in detail.inner_text()
    press(page, "talk-continue")
    again = [each.replace("·", " ").replace("⏎", "\n") for each in cells(page, 2)[sent:]]
    assert "".join(again).startswith(choice["text"])  # greedy: the same way once more
    ids = choice["prompt_token_ids"] + choice["token_ids"][:10]
    usage = ask(family, "v1/completions", **body | {"prompt": ids}, max_tokens=1)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert page.locator(".talk-run").first.locator(".cell.shared").count() == cached > 0


def test_what_was_not_answered_is_no_run(family, opened):
    page = opened(f"{family}/#talk")
    act(page, "talk-temperature").fill("9")  # the browser itself refuses that, beside the field
    act(page, "talk-go").click()
    act(page, "talk-temperature").fill("0")
    prompt = act(page, "talk-prompt").input_value()
    act(page, "talk-prompt").fill(prompt * 50)
    press(page, "talk-go")
    expect(page.locator("#status.error")).to_contain_text("tokens")
    assert page.locator(".talk-run").count() == 0
    act(page, "talk-prompt").fill(prompt)
    page.route("**/v1/completions", lambda route: route.fulfill(body=token_event("so", 7)))
    press(page, "talk-go")
    facts = page.locator(".talk-run .note").first
    expect(facts).to_contain_text("1 token came")
    expect(facts).to_contain_text("and then the stream ended before its time.")
    page.unroute("**/v1/completions")
    press(page, "talk-go")
    expect(page.locator(".talk-run .number").first).to_have_text("2")
    act(page, "talk-form").evaluate("node => node.value = 'chat'")
    assert act(page, "talk-form").locator("option[value=chat]").is_disabled()  # no template


def test_an_unlikely_token_is_replaced_by_what_is_shown(family, opened):
    page = opened(f"{family}/#talk")
    act(page, "talk-temperature").fill("2")
    press(page, "talk-go")
    sent = page.locator(".cell.sent").count()
    for index in range(sent, sent + 40):
        act(page, f"talk-cell-1-{index}").click()
        if page.locator(".talk-others tr").count() == 6:  # it came, but is not among the five
            break
    for rank, run in ((5, 2), (3, 3)):
        act(page, f"talk-cell-1-{index}").click()
        chosen = act(page, f"talk-take-{rank}").inner_text()
        press(page, f"talk-take-{rank}")
        assert cells(page, run)[index] == chosen
        act(page, f"talk-cell-{run}-{index}").click()
        sent_id = int(page.locator(".talk-detail dd").first.inner_text())
        text = ask(family, "detokenize", model=page.input_value("#model"), tokens=[sent_id])
        assert text["prompt"].strip() == chosen.strip("·")


def test_a_load_that_is_refused_stops_as_a_whole(family, opened):
    page, asked = opened(f"{family}/#load"), []

    def answer(route):
        asked.append(route)
        error = json.dumps({"error": {"message": "Full.", "code": "x"}})
        route.fulfill(status=429, body=error) if len(asked) == 6 else route.continue_()

    page.route("**/v1/completions", answer)
    act(page, "load-go").click()
    expect(page.locator("#status.error")).to_have_text("Full.")
    before = len(asked)
    page.wait_for_timeout(1000)
    assert len(asked) == before
    expect(act(page, "load-go")).to_be_focused()


def test_a_race_without_an_answer_concludes_nothing(family, opened):
    page = opened(f"{family}/#race")
    act(page, "race-prompt").fill("down to the river " * 300)
    press(page, "race-go")
    assert page.locator(".race-lane.refused").count() == 6
    assert "nothing to compare" in page.locator(".race-verdict").inner_text()
    for box in page.locator('[data-act^="race-lane-"]').all():
        box.uncheck()
    press(page, "race-go")
    expect(page.locator("#status.error")).to_contain_text("tick at least one")


def token_event(text: str, id_: int, finish: str | None = None) -> str:
    """A server-sent event of a completion with one token."""
    logprobs = {"text_offset": [0], "token_logprobs": [-1.0], "tokens": [text]}
    choice = {"index": 0, "text": text, "token_ids": [id_], "finish_reason": finish}
    choice["logprobs"] = logprobs | {"top_logprobs": [{text: -1.0}]}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def test_only_what_would_be_refused_again_is_called_refused(family, opened):
    page = opened(f"{family}/#race")
    event = token_event("so", 7)
    broken = 'data: {"error": {"message": "It fell over", "code": "x"}}\n\n'
    answers = {
        "ropewalk-rope": (200, event),
        "ropewalk-alibi": (200, event + broken),
        "ropewalk-t5": (200, event + 'data: {"error": "rate limited"}\n\n'),
        "ropewalk-nope": (503, "null"),
        "ropewalk-learned": (400, '{"error": {"message": "No."}}'),
        "ropewalk-sinusoidal": (429, '{"error": "rate limited"}'),
    }

    def answer(route):
        status, body = answers[route.request.post_data_json["model"]]
        route.fulfill(status=status, body=body)

    moved = iter(range(10, 99, 10))  # keys of kept sequences, which no race moves
    name = 'ropewalk_kv_rewritten_entries_total{cause="kept_sequence",model_name="ropewalk-rope"}'
    page.route("**/metrics", lambda route: route.fulfill(body=f"{name} {next(moved)}\n"))
    page.route("**/v1/completions", answer)
    press(page, "race-past")
    assert shown(page, "ropewalk-rope", "keys rewritten") == "0" and next(moved) == 30
    told = {model: lane(page, model).inner_text() for model in answers}
    assert page.locator(".race-lane.refused").count() == 1
    assert "Refused: No." in told["ropewalk-learned"]
    assert "Failed: the stream ended before its time." in told["ropewalk-rope"]
    assert "Failed: It fell over." in told["ropewalk-alibi"]
    for model, status in (("nope", 503), ("sinusoidal", 429)):
        assert f"Failed: the server answered {status}" in told[f"ropewalk-{model}"]
    assert lane(page, "ropewalk-t5").locator(".race-text").inner_text().endswith("so")
    verdict = page.locator(".race-verdict").inner_text()
    assert "learned: refused." in verdict and "failed, which says nothing" in verdict


def models_as(page, address: str, change) -> None:
    """Opens a panel of the page for other models: `change` makes them of those that there are."""

    def answer(route):
        found = route.fetch().json()
        route.fulfill(json=found | {"data": change(found["data"])})

    page.route("**/v1/models", answer)
    page.goto(address)


def test_lanes_are_as_many_as_can_be_and_name_a_limit_that_all_have(family, opened):
    page = opened(f"{family}/version")

    def seven(data):
        return [*data, data[0] | {"id": "seventh", "root": "seventh", "trained_context": 300}]

    models_as(page, f"{family}/#race", seven)
    last = act(page, "race-lane-seventh")
    expect(last).to_be_disabled()
    expect(act(page, "race-past")).to_have_text("Go past 512")
    act(page, "race-lane-ropewalk-rope").uncheck()
    last.check()
    expect(act(page, "race-lane-ropewalk-rope")).to_be_disabled()
    expect(act(page, "race-past")).to_have_text("Go past the limit")


def test_nothing_continues_the_answer_of_an_encoder_decoder(family, opened):
    page = opened(f"{family}/version")
    models_as(page, f"{family}/#talk", lambda data: [data[0] | {"encoder_decoder": True}])
    act(page, "talk-tokens").fill("3")
    press(page, "talk-go")
    expect(page.locator(".talk-detail")).to_contain_text("an answer is a text of its own")
    assert page.locator(".talk-others tr").count() and act(page, "talk-continue").count() == 0
    assert page.locator('[data-act^="talk-take-"]').count() == 0
    act(page, "tab-race").click()
    press(page, "race-past")
    expect(page.locator(".race-lane")).to_contain_text("Not tried: an encoder-decoder's")


def test_the_chosen_arm_is_tried_with_another_model_too(family, opened):
    page, asked = opened(f"{family}/version"), []

    def refuse(route):
        asked.append(route.request.post_data_json)
        route.fulfill(status=400, body='{"error": {"message": "No."}}')

    def two(data):
        return [each for each in data if each["encoding"] in ("alibi", "t5")]

    page.route("**/v1/positions/audit", refuse)
    page.route(
        "**/tokenize", lambda route: route.fulfill(body=json.dumps({"tokens": [*range(400)]}))
    )
    models_as(page, f"{family}/#proof", two)
    arms = act(page, "proof-arm")
    expect(arms.locator("option", has_text="rope:dynamic-rewrite")).to_be_attached()
    arms.select_option("nope")
    page.select_option("#model", "ropewalk-t5")
    act(page, "proof-counter").click()
    expect(page.locator("#status.error")).to_have_text("No.")
    ((model, arm, prompt),) = [(each["model"], each["arm"], each["prompt"]) for each in asked]
    assert (model, arm) == ("ropewalk-t5", "nope") and 96 <= len(prompt) < 128


def test_text_is_never_html(family, opened):
    page = opened(f"{family}/#talk")
    act(page, "talk-prompt").fill(HOSTILE)
    press(page, "talk-go")
    stream = f"{token_event(HOSTILE, 7, 'length')}data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(body=stream))
    act(page, "talk-go").click()
    expect(page.locator(".talk-detail .token").first).to_have_text(HOSTILE)
    page.goto(f"{family}/#race")
    press(page, "race-go")
    expect(lane(page, "ropewalk-t5").locator(".race-text")).to_have_text(HOSTILE)
    page.unroute("**/v1/completions")
    error = json.dumps({"error": {"message": HOSTILE, "code": "x"}})
    page.route("**/v1/completions", lambda route: route.fulfill(status=400, body=error))
    press(page, "race-go")
    expect(lane(page, "ropewalk-t5").locator(".race-text")).to_contain_text(HOSTILE)
    assert page.locator("main img, main script").count() == 0


def test_every_control_is_reached_by_keyboard(family, opened):
    page = opened(f"{family}/#talk")
    press(page, "talk-go")
    for panel in ("talk", "race", "load", "cache", "position", "proof"):
        page.locator(f'nav a[href="#{panel}"]').focus()
        page.keyboard.press("Enter")
        expect(page.locator(f"#panel-{panel}")).to_be_visible()
        reached = set()
        for _ in range(150):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.dataset.act ?? null"))
            # Asked anew, as an answer of the server's may replace what there was.
            wanted = page.evaluate(
                """panel => [...document.querySelectorAll(`#panel-${panel} [data-act]:enabled`)]
                    .filter(each => each.tabIndex >= 0 && each.checkVisibility())
                    .map(each => each.dataset.act)""",
                panel,
            )
            if wanted and reached >= set(wanted):
                break
        assert wanted and set(wanted) <= reached, panel
    page.locator('nav a[href="#talk"]').press("Enter")
    expect(page.locator("#panel-talk")).to_be_visible()  # what is hidden takes no focus
    page.locator(".cell[tabindex='0']").press("Home")
    expect(act(page, "talk-cell-1-0")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(act(page, "talk-cell-1-1")).to_have_attribute("aria-pressed", "true")


def test_load_counts_what_the_server_counts(family, opened):
    page = opened(f"{family}/#load")
    boxes = page.locator('[data-act^="load-model-"]')
    expect(boxes).to_have_count(6)  # they come with the list of models
    for box in boxes.all()[1:]:
        box.uncheck()
    act(page, "load-seconds").fill("1")
    press(page, "load-go")
    row = page.locator(".load-table tbody tr")
    assert row.count() == 1
    counts = row.locator("td").first.inner_text().split("\n")
    assert counts[0] == counts[1] != "0"


def test_a_key_is_asked_for_and_kept_in_the_tab_below_a_root_path(opened):
    names = ("--served-model-name", "one", "--served-model-name", "two")
    flags = ("ropewalk-t5", "--api-key", KEY, "--root-path", "/llm", *names)
    with serving(*flags) as address:
        page = opened(f"{address}/llm")
        for key, reason in (("wrong", "is missing"), (KEY, "is not valid")):
            expect(page.locator("dialog")).to_contain_text(reason)
            page.fill("#key", "clé")  # no header can hold it
            page.keyboard.press("Enter")
            page.fill("#key", key)
            page.keyboard.press("Enter")
        expect(page.locator("dialog")).to_have_count(0)
        expect(page.locator("#model option")).to_have_text(["one"])  # "two" is the same model
        page.goto(f"{address}/llm/?record#talk")  # a proxy may publish both
        press(page, "talk-go")
        expect(act(page, "talk-cell-1-20")).to_be_visible()
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        expect(page.locator("footer a", has_text="API")).to_have_attribute("href", "/llm/docs")
        for name, text in (("API", "POST /v1/completions"), ("metrics", "ropewalk_requests_total")):
            with page.expect_popup() as popup:
                page.locator("footer a", has_text=name).click()
            expect(popup.value.locator("body")).to_contain_text(text)
            popup.value.close()
        with page.expect_download() as saved:
            page.locator("button", has_text="Save the visit").click()
        assert KEY not in saved.value.path().read_text()


def test_a_visit_is_replayed_from_a_file_without_a_server(family, opened, tmp_path):
    page = opened(f"{family}/?record#talk")
    press(page, "talk-go")
    act(page, "talk-cell-1-20").click()
    page.locator('nav a[href="#race"]').click()
    act(page, "race-tokens").fill("12")
    press(page, "race-go")
    with page.expect_download() as saved:
        page.locator("button", has_text="Save the visit").click()
    visit = saved.value.path().read_text()
    html = httpx.get(family, headers={"accept": "text/html"}).text
    file = tmp_path / "visit.html"
    file.write_text(standalone(html, visit))
    again = opened(file.as_uri())
    expect(again.locator("#visit[data-over]")).to_be_attached(timeout=30_000)
    for model in ("ropewalk-rope", "ropewalk-alibi"):
        text = lane(page, model).locator(".race-text").text_content()
        assert lane(again, model).locator(".race-text").text_content() == text != ""
        assert shown(again, model, "positional work") == shown(page, model, "positional work")
    assert (
        again.locator(".talk-cells").first.inner_text()
        == page.locator(".talk-cells").first.inner_text()
    )
    chosen = opened(f"{family}/?replay")
    chosen.locator("input[type=file]").set_input_files(
        {"name": "visit.json", "mimeType": "application/json", "buffer": visit.encode()}
    )
    expect(act(chosen, "race-go")).to_be_visible(timeout=30_000)


@pytest.mark.parametrize("file", ["http://", "/version", "none.json"])
def test_a_visit_that_is_not_there_is_asked_for(family, opened, file):
    page = opened(f"{family}/?replay={file}")
    expect(page.locator(".visit-bar")).to_contain_text("There is no visit of this version at that")
    expect(page.locator(".visit-bar input[type=file]")).to_be_visible()


@pytest.mark.full
def test_the_visit_of_the_docs_is_replayed_by_this_page(family, opened, tmp_path):
    visit = (FOLDER / "visit.json").read_text()
    assert len(visit) < 300_000
    html = httpx.get(family, headers={"accept": "text/html"}).text
    file = tmp_path / "visit.html"
    file.write_text(standalone(html, visit))
    page = opened(file.as_uri())
    for speed in ("1×", "2×"):
        page.locator("#visit button", has_text=speed).click()
    expect(page.locator("#visit[data-over]")).to_be_attached(timeout=60_000)
    assert page.locator("#visit").get_attribute("data-missed") is None
    expect(page.locator("#status")).to_have_text("")
