import pytest

from load_tests.prompts import PromptMaker
from load_tests.scenarios import WORKLOADS, Scenario, Sizes, requests, scenarios


def shapes(scenario: Scenario, sizes: Sizes | None = None) -> list[tuple[int, int]]:
    made = requests(scenario, sizes or Sizes(), PromptMaker("s", "ids"))
    assert len({request.prompt for request in made}) == len(made)
    assert all(len(request.prompt) == request.prompt_tokens for request in made)
    return [(request.prompt_tokens, request.output_tokens) for request in made]


def test_closed_has_a_line_for_every_concurrency():
    lines = scenarios(["stream", "prefill", "closed", "shared-prefix", "poisson"], [8, 32], 2.5)
    assert [(line.label, line.concurrency, line.rate) for line in lines] == [
        ("stream", 1, 0.0),
        ("prefill", 1, 0.0),
        ("closed c=8", 8, 0.0),
        ("closed c=32", 32, 0.0),
        ("shared-prefix", 8, 0.0),
        ("poisson 2.5/s", 0, 2.5),
    ]


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (Scenario("stream", 1), [(128, 128)]),
        (Scenario("prefill", 1), [(1024, 1)]),
        (Scenario("closed", 32), [(128, 128)] * 64),
        (Scenario("shared-prefix", 8), [(800, 32)] * 16),
        (Scenario("poisson", 0, 1.0), [(128, 128)] * 32),
    ],
)
def test_the_documented_sizes(scenario, expected):
    assert shapes(scenario) == expected


def test_sizes_can_change():
    sizes = Sizes(4, 5, 6, 7, 3, 1.0, 2)
    assert shapes(Scenario("closed", 2), sizes) == [(4, 5)] * 6
    assert shapes(Scenario("prefill", 1), sizes) == [(6, 1)]
    assert shapes(Scenario("poisson", 0, 1.0), sizes) == [(4, 5)] * 2
    assert shapes(Scenario("shared-prefix", 8), sizes)[0] == (39, 32)


def test_the_shared_prefix_is_shared_within_a_run_and_new_in_the_next():
    prompts = PromptMaker("s", "ids")
    scenario = Scenario("shared-prefix", 8)
    runs = [requests(scenario, Sizes(), prompts) for _ in range(2)]
    prefixes = [{request.prompt[:768] for request in run} for run in runs]
    assert [len(found) for found in prefixes] == [1, 1]
    assert prefixes[0] != prefixes[1]
    assert len({request.prompt[768:] for request in runs[0]}) == 16


def test_every_workload_can_be_made():
    for line in scenarios(list(WORKLOADS), [1], 1.0):
        assert shapes(line)
