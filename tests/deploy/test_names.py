"""Rules, dashboard and docs name what the server exports, and each other. No Prometheus needed."""

import re

import pytest

from tests.deploy.files import (
    ALERTS,
    DASHBOARD,
    GRAFANA,
    PAGE,
    PANELS,
    PROMETHEUS,
    RECORDED,
    ROOT,
    SCRIPT,
    expressions,
    queries,
    read,
    selectors,
)
from tests.server.test_metrics import families, metrics_of_toy

BY_PROMETHEUS = {"instance", "job"}


def exported() -> dict[str, list[dict[str, str]]]:
    """{sample: the label sets that exist from the start}."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in families(metrics_of_toy()).values():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found | {"up": [{"job": "ropewalk", "instance": "x"}]}


EXPORTED = exported()


@pytest.mark.parametrize("where", expressions())
def test_an_expression_reads_series_that_exist(where):
    read_here = selectors(expressions()[where])
    recorded = set(re.findall(r"ropewalk:[a-z0-9_:]+", expressions()[where]))
    assert read_here or recorded
    assert recorded <= RECORDED.keys()
    for name, matchers in read_here:
        assert name in EXPORTED
        for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]*)"', matchers):
            wanted = re.compile(value if operator == "=~" else re.escape(value))
            assert any(wanted.fullmatch(labels.get(label, "")) for labels in EXPORTED[name]), label


@pytest.mark.parametrize("where", expressions())
def test_an_expression_groups_by_labels_that_exist(where):
    expression = expressions()[where]
    named = re.findall(r"(?:by|ignoring|on) \(([^)]*)\)", expression)
    labels = {label.strip() for group in named for label in group.split(",")}
    known = {"model_name", "encoding", *BY_PROMETHEUS}
    for name, _ in selectors(expression):
        known |= {label for sample in EXPORTED[name] for label in sample}
    assert labels <= known


def test_every_recorded_series_is_used():
    """By the dashboard, another rule or an alert, or it is said what it is for."""
    used = " ".join(expressions().values())
    unused = [name for name in RECORDED if not re.search(rf"{name}(?![a-z0-9_:])", used)]
    assert unused == ["ropewalk:kv_mutated_entries:rate5m"]


def test_an_alert_says_what_to_do():
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        summary = rule["annotations"]["summary"]
        assert re.search(r"[;,] (and )?\w+", summary), name
        assert summary.endswith("."), name
        shown = set(re.findall(r"\$labels\.(\w+)", summary))
        aggregated = "ropewalk:" in rule["expr"]
        known = {"model_name", "encoding"} | (set() if aggregated else BY_PROMETHEUS)
        assert shown
        assert shown <= known, name


def test_the_page_tells_of_every_alert_and_panel_and_of_no_other():
    assert re.findall(r"^### (Ropewalk\w+)$", PAGE, re.MULTILINE) == list(ALERTS)
    rows = re.findall(r"^\|(?!---|panel\|)([^`|]+)\|[^|]+\|$", PAGE, re.MULTILINE)
    assert rows == [panel["title"] for panel in PANELS]


def test_the_page_names_metrics_that_exist():
    named = set(re.findall(r"\bropewalk_[a-z0-9_]+", PAGE))
    assert named <= EXPORTED.keys()
    assert set(re.findall(r"ropewalk:[a-z0-9_:]+", PAGE)) <= RECORDED.keys()


def test_the_dashboard_is_what_the_script_makes():
    made = SCRIPT["as_json"]()
    assert (GRAFANA / "dashboards" / "ropewalk.json").read_text() == made


def test_the_dashboard_shows_the_cache_first_and_encodings_apart():
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Cache behaviour", "Serving"]
    assert len(PANELS) == len({panel["title"] for panel in PANELS})
    for panel in PANELS:
        assert all("{{" in target["legendFormat"] for target in panel["targets"])
    apart = [query for query in queries().values() if "encoding" in query]
    assert len(apart) == len(queries()) - 2  # refusals may be for no model at all, nor are paths


def test_panels_do_not_overlap():
    cells = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells, panel["title"]
        cells |= own


def test_grafana_finds_its_dashboard_and_its_source():
    (source,) = read(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    used = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert used == {source["uid"]}
    (provider,) = read(GRAFANA / "provisioning/dashboards/ropewalk.yaml")["providers"]
    compose = read(ROOT / "deploy/compose.yaml")
    mounts = dict(each.split(":")[:2] for each in compose["services"]["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]


def test_prometheus_reads_these_rules_and_knows_the_job():
    config = read(PROMETHEUS / "prometheus.yaml")
    assert config["rule_files"] == ["recording.yaml", "alerts.yaml"]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "ropewalk"
    assert '{job="ropewalk"}' in ALERTS["RopewalkDown"]["expr"]
