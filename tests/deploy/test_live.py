"""A real Prometheus reads a server of two tiny models; every rule and query is asked of it."""

import contextlib
import math
import shutil
import socket
import subprocess

import httpx
import pytest
import yaml

from tests.deploy.files import ALERTS, PROMETHEUS, RECORDED, queries, read, selectors
from tests.deploy.programs import program
from tests.model import checkpoints, plain
from tests.server.fake_engine import loaded_app
from tests.server.toy import running, wait_for

CONTEXT = 60
REQUESTS = 3  # per model


class Asking:
    """Prometheus' query API."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=10)

    def get(self, path: str, **parameters: str) -> dict:
        answer = self.http.get(path, params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of every series that has a number."""
        found = self.get("/api/v1/query", query=expression)["result"]
        values = [(each["metric"], float(each["value"][1])) for each in found]
        return [(labels, value) for labels, value in values if not math.isnan(value)]

    def encodings(self, expression: str) -> set[str]:
        return {labels.get("encoding", "") for labels, _ in self.query(expression)}

    def ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def command():
    return program("prometheus")


@pytest.fixture(scope="module")
def server(command, tmp_path_factory):
    """RoPE, whose shifts turn keys, and ALiBi, whose shifts are free."""
    made = {
        "turning": checkpoints.random_model(checkpoints.llama()),
        "sloping": plain.random_model(plain.bloom(tie_word_embeddings=False)),
    }
    sources = [
        f"{name}={checkpoints.save(model, tmp_path_factory.mktemp(name))}"
        for name, model in made.items()
    ]
    flags = ("--dtype", "float32", "--kv-memory", "4M", "--max-model-len", str(CONTEXT))
    app = loaded_app(*sources, *flags, "--block-size", "4")
    with running(app) as (url, _):
        yield url


@pytest.fixture(scope="module")
def prometheus(command, server, tmp_path_factory):
    """As deploy/ configures it, but faster and with the server's address."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = read(PROMETHEUS / "prometheus.yaml")
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.removeprefix("http://")]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    for name in config["rule_files"]:
        shutil.copy(PROMETHEUS / name, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [
        command,
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    asking = Asking(f"http://{address}")
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            wait_for(lambda: asking.ready() or process.poll() is not None, 30)
            assert process.poll() is None, (folder / "log").read_text()
            work(server, asking)
            yield asking
    finally:
        asking.http.close()


def work(server: str, asking: Asking) -> None:
    """Prompts that repeat, answers past the context, and clients refused, between two scrapes."""
    # What is not there at zero first has no rate.
    wait_for(lambda: asking.query("count_over_time(ropewalk_requests_running[1m]) > 1"), 30)
    with httpx.Client(base_url=server, timeout=30) as client:
        for name in ("turning", "sloping"):
            for _ in range(REQUESTS):
                body = {
                    "model": name,
                    "prompt": "the rope is long, and the walk",
                    "max_tokens": 2 * CONTEXT,
                    "ignore_eos": True,
                    "overflow": "shift",
                }
                answer = client.post("/v1/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 2 * CONTEXT, answer.text
            assert client.post("/v1/completions", json={"model": name}).status_code == 400
    wait_for(lambda: asking.query(f"sum(ropewalk_requests_total) == {2 * REQUESTS}"), 30)


def wanted(expression: str) -> set[str]:
    """ALiBi's work is attention's and has no time of its own; some refusals are for no model."""
    if "position_time_ratio" in expression:
        return {"rope"}
    return {"rope", "alibi"} if "encoding" in expression else {""}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_rule_records_both_encodings(name, prometheus):
    expected = wanted(f"{name} by encoding")
    wait_for(lambda: prometheus.encodings(name) == expected, 20)


@pytest.mark.parametrize("panel", queries())
def test_a_query_of_the_dashboard_returns_both_encodings(panel, prometheus):
    query = queries()[panel]
    wait_for(lambda: wanted(query) <= prometheus.encodings(query), 20)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_reads_what_is_there_and_is_quiet(alert, prometheus):
    expression = ALERTS[alert]["expr"]
    for name, matchers in selectors(expression):
        wait_for(lambda series=f"{name}{{{matchers}}}": prometheus.query(series), 20)
    # A scrape that a busy machine missed passes; entries counted by mistake do not.
    wait_for(lambda: prometheus.query(expression) == [], 20)


def test_every_rule_is_healthy(prometheus):
    def evaluated() -> list[dict]:
        groups = prometheus.get("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_for(lambda: all(rule["health"] != "unknown" for rule in evaluated()), 20)
    found = {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in evaluated()}
    assert found == dict.fromkeys(RECORDED | ALERTS, ("ok", ""))


def test_only_rope_rewrites_and_only_in_shifts(prometheus):
    def of(name: str) -> dict[str, float]:
        return {labels["encoding"]: value for labels, value in prometheus.query(name)}

    wait_for(lambda: len(of("ropewalk:kv_rewritten_entries_per_shift")) == 2, 20)
    per_shift = of("ropewalk:kv_rewritten_entries_per_shift")
    assert per_shift["alibi"] == 0 < per_shift["rope"]
    shifts = "ropewalk_context_shifts_total"
    assert of(f'{shifts}{{outcome="rerotated"}} > 0').keys() == {"rope"}
    assert of(f'{shifts}{{outcome="reindexed"}} > 0').keys() == {"alibi"}
