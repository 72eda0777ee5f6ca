"""promtool plays series to the rules: each alert fires when it should and otherwise is quiet."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.files import ALERTS, PROMETHEUS, read
from tests.deploy.programs import program
from tests.server.test_metrics import metrics_of_toy

SCENARIOS = read(Path(__file__).with_name("scenarios.yaml"))


def promtool(*words: str, text: bytes | None = None) -> None:
    done = subprocess.run([program("promtool"), *words], input=text, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def series(name: str) -> str:
    """With the labels that every series has."""
    own = "job='ropewalk', instance='a:8000'"
    if name == "up":
        return f"up{{{own}}}"
    metric, _, more = name.partition("{")
    labels = f"{own}, model_name='m', encoding='rope'"
    return f"ropewalk_{metric}{{{labels}{', ' + more if more else '}'}"


def test_every_alert_has_a_scenario():
    assert {name for each in SCENARIOS.values() for name in each["fires"]} == ALERTS.keys()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What promtool says of each scenario: all are played by one process."""
    folder = tmp_path_factory.mktemp("scenarios")
    rules = [str(PROMETHEUS / name) for name in ("recording.yaml", "alerts.yaml")]
    files = {scenario: folder / f"{index}.yaml" for index, scenario in enumerate(SCENARIOS)}
    for scenario, file in files.items():
        file.write_text(yaml.safe_dump({"rule_files": rules, "tests": [played(scenario)]}))
    words = [program("promtool"), "test", "rules", *map(str, files.values())]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    answers = done.stdout.split("Unit Testing:")[1:]
    by_file = {answer.split()[0]: answer for answer in answers}
    return {scenario: by_file[str(file)] for scenario, file in files.items()}


def played(scenario: str) -> dict:
    """A test of promtool's: the series, and the alerts that must fire."""
    fired, inputs = SCENARIOS[scenario]["fires"], SCENARIOS[scenario]["series"]
    asked = {
        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "20m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fired],
    }
    given = [{"series": series(name), "values": values} for name, values in inputs.items()]
    return {"interval": "1m", "input_series": given, "promql_expr_test": [asked]}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_alerts_fire_when_they_should(scenario, told):
    assert told[scenario].split()[1:] == ["SUCCESS"], told[scenario]


def test_promtool_finds_nothing_to_complain_of():
    promtool("check", "rules", str(PROMETHEUS / "recording.yaml"), str(PROMETHEUS / "alerts.yaml"))
    promtool("check", "config", str(PROMETHEUS / "prometheus.yaml"))
    promtool("check", "metrics", text=b"".join(metrics_of_toy().render()))
