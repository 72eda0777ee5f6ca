"""promtool plays series to the rules: each alert fires when it should and otherwise is quiet."""

import subprocess

import pytest
import yaml

from tests.deploy.files import ALERTS, PROMETHEUS
from tests.deploy.programs import program
from tests.server.test_metrics import metrics_of_toy

# name of the scenario: (alerts that fire after 20 minutes, {series: a sample each minute})
SCENARIOS = {
    "sound": (
        [],
        {
            "kv_mutated_entries_total": "0x30",
            "kv_stale_entries_total": "0x30",
            "weights_changed_total": "0x30",
            "kv_blocks{state='quarantined'}": "0x30",
            "kv_rewritten_entries_total{cause='context_shift'}": "0x30",
            "cache_parity_max_abs_error": "0.00007x30",
            "cache_parity_tolerance": "0.0035x30",
            "up": "1x30",
        },
    ),
    "mutated": (["RopewalkEntriesMutated"], {"kv_mutated_entries_total": "0x12 64x20"}),
    "weights changed": (["RopewalkWeightsChanged"], {"weights_changed_total": "0x12 1x20"}),
    "stale": (["RopewalkStaleEntries"], {"kv_stale_entries_total": "0x12 64x20"}),
    "rewritten": (
        ["RopewalkRewrittenInPlainDecoding"],
        {
            "kv_rewritten_entries_total{cause='context_shift'}": "0x17 90x20",
            "context_shifts_total{outcome='rerotated'}": "0x30",
        },
    ),
    "rewritten though the shift was free": (
        ["RopewalkRewrittenInPlainDecoding"],
        {
            "kv_rewritten_entries_total{cause='context_shift'}": "0x17 90x20",
            "context_shifts_total{outcome='rerotated'}": "0x30",
            "context_shifts_total{outcome='reindexed'}": "0x17 1x20",
        },
    ),
    "rewritten by a shift": (
        [],
        {
            "kv_rewritten_entries_total{cause='context_shift'}": "0x17 90x20",
            "context_shifts_total{outcome='rerotated'}": "0x17 1x20",
        },
    ),
    "rewritten by a shift that was seen a scrape before": (
        [],
        {
            "kv_rewritten_entries_total{cause='context_shift'}": "0x15 90x20",
            "context_shifts_total{outcome='rerotated'}": "0x14 1x20",
        },
    ),
    "decoding differs": (
        ["RopewalkDecodingDiffers"],
        {"cache_parity_max_abs_error": "0.5x30", "cache_parity_tolerance": "0.0035x30"},
    ),
    "quarantined": (["RopewalkBlocksQuarantined"], {"kv_blocks{state='quarantined'}": "0x5 2x20"}),
    "down": (["RopewalkDown"], {"up": "1x10 0x20"}),
    "down for a moment": ([], {"up": "1x19 0x20"}),
    "stuck": (["RopewalkStuck"], {"requests_running": "3x30", "kv_written_entries_total": "5x30"}),
    "slow": ([], {"requests_running": "3x30", "kv_written_entries_total": "0+1x30"}),
    "idle": ([], {"requests_running": "0x30", "kv_written_entries_total": "5x30"}),
    "errors": (
        ["RopewalkErrors"],
        {
            "requests_total{finish_reason='error'}": "0+1x30",
            "requests_total{finish_reason='stop'}": "0+9x30",
        },
    ),
    "a rare error": (
        [],
        {
            "requests_total{finish_reason='error'}": "0+1x30",
            "requests_total{finish_reason='stop'}": "0+200x30",
        },
    ),
    "growing": (["RopewalkQueueGrowing"], {"requests_waiting": "0+2x30"}),
    "a steady queue": ([], {"requests_waiting": "40x30"}),
    "a falling queue": ([], {"requests_waiting": "90-2x30"}),
    "refusing": (
        ["RopewalkRefusing"],
        {"request_rejections_total{reason='queue_full'}": "0+1x30"},
    ),
    "nonsense refused": (
        [],
        {"request_rejections_total{reason='invalid_request'}": "0+1x30"},
    ),
    "full": (["RopewalkCacheFull"], {"kv_cache_usage_ratio": "0.99x30"}),
    "busy": ([], {"kv_cache_usage_ratio": "0.9x30"}),
}


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
    assert {name for fired, _ in SCENARIOS.values() for name in fired} == ALERTS.keys()


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
    fired, inputs = SCENARIOS[scenario]
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
