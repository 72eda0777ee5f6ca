"""The files of deploy/, read once: rules, the dashboard's queries, and the metrics they name."""

import json
import re
import runpy
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
DASHBOARD = json.loads((GRAFANA / "dashboards" / "ropewalk.json").read_text())
SCRIPT = runpy.run_path(str(GRAFANA / "dashboard.py"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def rules(name: str) -> list[dict]:
    return [rule for group in read(PROMETHEUS / name)["groups"] for rule in group["rules"]]


RECORDED = {rule["record"]: rule["expr"] for rule in rules("recording.yaml")}
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yaml")}


def queries() -> dict[str, str]:
    """{panel and letter: PromQL} with the dashboard's variables filled in."""
    found = {}
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m")
            query = query.replace("$model", ".*").replace("$encoding", ".*")
            assert "$" not in query
            found[f"{panel['title']} {target['refId']}"] = query
    return found


def expressions() -> dict[str, str]:
    """All PromQL expressions, by where they are used."""
    alerts = {name: rule["expr"] for name, rule in ALERTS.items()}
    return RECORDED | alerts | queries()


def selectors(expression: str) -> set[tuple[str, str]]:
    """(metric, matchers) of each series that an expression reads, without the recorded ones."""
    found = re.findall(r"\b(ropewalk_\w+|up)\b(?:\{([^}]*)\})?", expression)
    return {(name, matchers) for name, matchers in found}
