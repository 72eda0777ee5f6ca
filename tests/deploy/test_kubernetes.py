"""deploy/kubernetes/ against Kubernetes' own schemas, and against the server it starts. No cluster.

The models of the Python client refuse wrong types and unknown fields. They also take a field in
Python's spelling, which comes back in the right one.
"""

import json

import pytest
import yaml

from tests.command_line import understood as told
from tests.deploy.files import DEPLOY, PROMETHEUS, read
from tests.server.test_metrics import families, metrics_of_toy
from tests.server.toy import ask, toy_app

FOLDER = DEPLOY / "kubernetes"
DEPLOYMENT = read(FOLDER / "deployment.yaml")
SERVICE = read(FOLDER / "service.yaml")
MONITOR = read(FOLDER / "servicemonitor.yaml")
SCALER = read(FOLDER / "autoscaler.yaml")
SCHEMAS = {
    "deployment.yaml": "V1Deployment",
    "service.yaml": "V1Service",
    "autoscaler.yaml": "V2HorizontalPodAutoscaler",
}
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def understood(schema, manifest) -> bool:
    """Whether it has the right types and no field that the schema does not know."""
    from kubernetes.client import models  # hundreds of modules, for whoever runs these tests

    try:
        return json.loads(getattr(models, schema).from_dict(manifest).to_json()) == manifest
    except ValueError:
        return False


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_manifest_fits_its_schema(name):
    assert understood(SCHEMAS[name], read(FOLDER / name))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("failureThreshold: 120", "failureTreshold: 120"),
        ("containerPort: 8000", "containerPort: eight"),
        ("containerPort: 8000", "container_port: 8000"),
        ("runAsNonRoot: true", "runAsNotRoot: true"),
        ("- name: ropewalk", "- image: ropewalk"),
    ],
)
def test_a_mistake_does_not_fit(old, new):
    text = (FOLDER / "deployment.yaml").read_text()
    assert old in text
    assert not understood("V1Deployment", yaml.safe_load(text.replace(old, new, 1)))


def test_every_manifest_is_checked():
    """A ServiceMonitor is no part of Kubernetes; what it may hold is said here."""
    assert {path.name for path in FOLDER.iterdir()} == {*SCHEMAS, "servicemonitor.yaml"}
    assert MONITOR["apiVersion"] == "monitoring.coreos.com/v1"
    assert MONITOR["kind"] == "ServiceMonitor"
    assert MONITOR["spec"].keys() == {"jobLabel", "selector", "endpoints"}
    (endpoint,) = MONITOR["spec"]["endpoints"]
    assert endpoint.keys() == {"port", "path", "interval"}


def test_the_pods_are_found():
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    assert SERVICE["spec"]["selector"] == labels
    assert MONITOR["spec"]["selector"]["matchLabels"] == SERVICE["metadata"]["labels"]
    ports = {port["name"] for port in CONTAINER["ports"]}
    (port,) = SERVICE["spec"]["ports"]
    assert port["targetPort"] in ports
    assert MONITOR["spec"]["endpoints"][0]["port"] == port["name"]
    target = SCALER["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", DEPLOYMENT["metadata"]["name"])


def test_the_job_is_called_as_the_alerts_ask():
    label = SERVICE["metadata"]["labels"][MONITOR["spec"]["jobLabel"]]
    assert f'job="{label}"' in (PROMETHEUS / "alerts.yaml").read_text()


def test_probes_ask_paths_that_answer():
    app = toy_app()
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert ask(app, "GET", CONTAINER[name]["httpGet"]["path"]).status_code in (200, 503)
    assert ask(app, "GET", MONITOR["spec"]["endpoints"][0]["path"]).status_code == 200


def test_nothing_runs_as_root_or_may_become_it():
    assert POD["securityContext"]["runAsNonRoot"]
    user = f"USER {POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
    assert user in (DEPLOY.parent / "Dockerfile").read_text()
    own = CONTAINER["securityContext"]
    assert not own["allowPrivilegeEscalation"]
    assert own["readOnlyRootFilesystem"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert CONTAINER["resources"].keys() == {"requests", "limits"}


def test_the_server_starts_and_reads_no_service_as_its_port():
    assert told(*CONTAINER["args"]).info_name == "serve"
    assert POD["enableServiceLinks"] is False


def test_the_autoscaler_counts_what_is_exported():
    (metric,) = SCALER["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in families(metrics_of_toy())
    assert "replicas" not in DEPLOYMENT["spec"]
