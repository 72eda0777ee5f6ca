"""deploy/kubernetes/ as kustomize renders it, against published schemas and the server it starts.

No cluster. kubectl or kustomize renders; without either, only what is written is compared.
Kubernetes' own kinds are compared with its schemas. Schemas of the other kinds are their projects':
the variable CRDS names a folder of them, and without it only the names of fields are compared with
FIELDS.
"""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.command_line import configured
from tests.deploy.files import DEPLOY, PROMETHEUS, ROOT
from tests.server.test_metrics import families, metrics_of_toy
from tests.server.toy import ask, toy_app

FOLDER = DEPLOY / "kubernetes"
# What docs/scaling.md shows, with every component.
(SHOWN,) = re.findall(
    r"```yaml\n(.*?kind: Kustomization.*?)```", (ROOT / "docs/scaling.md").read_text(), re.S
)
RENDERED = ("cpu", "gpu", "shown")
both = pytest.mark.parametrize("overlay", ("cpu", "gpu"))
# Fields of kinds that are no part of Kubernetes, as their projects publish them.
FIELDS = {
    "InferencePool": (
        "spec.selector.matchLabels.* spec.targetPorts.number spec.endpointPickerRef.name "
        "spec.endpointPickerRef.port.number spec.endpointPickerRef.failureMode"
    ),
    "HTTPRoute": (
        "spec.parentRefs.name spec.rules.matches.path.type spec.rules.matches.path.value "
        "spec.rules.backendRefs.group spec.rules.backendRefs.kind spec.rules.backendRefs.name "
        "spec.rules.timeouts.request"
    ),
    "ScaledObject": (
        "spec.scaleTargetRef.name spec.minReplicaCount spec.maxReplicaCount spec.pollingInterval "
        "spec.fallback.failureThreshold spec.fallback.replicas spec.fallback.behavior "
        "spec.triggers.type spec.triggers.metricType spec.triggers.metadata.* "
        "spec.advanced.horizontalPodAutoscalerConfig.behavior.*"
    ),
    "ServiceMonitor": (
        "spec.jobLabel spec.selector.matchLabels.* spec.endpoints.port spec.endpoints.path "
        "spec.endpoints.interval"
    ),
}


@cache
def render(overlay: str) -> tuple[dict, ...]:
    """What an overlay consists of. Skips the calling test without a renderer."""
    if kustomize := shutil.which("kustomize"):
        command = [kustomize, "build"]
    elif kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize"]
    else:
        pytest.skip("kubectl and kustomize are missing")
    done = subprocess.run([*command, str(overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """{overlay: {(kind, name): object}}, the name without kustomize's hash."""
    shown = tmp_path_factory.mktemp("kustomize") / "shown"
    shown.mkdir()
    shown.with_name("ropewalk").symlink_to(ROOT)
    (shown / "kustomization.yaml").write_text(SHOWN)
    folders = {name: FOLDER / name for name in ("cpu", "gpu")} | {"shown": shown}
    return {
        name: {
            (each["kind"], re.sub("-[a-z0-9]{10}$", "", each["metadata"]["name"])): each
            for each in render(folder)
        }
        for name, folder in folders.items()
    }


@pytest.fixture
def everything(objects):
    return objects["shown"]


def pod_of(rendered, name="ropewalk"):
    pod = rendered["Deployment", name]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def fields(value, path="") -> set[str]:
    if isinstance(value, list):
        return {found for each in value for found in fields(each, path)}
    if isinstance(value, dict):
        return {found for key in value for found in fields(value[key], f"{path}.{key}".strip("."))}
    return {path}


def strict(schema):
    """The schema of a resource, with unknown fields refused instead of dropped."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: strict(each) for key, each in schema.items()}
    own = isinstance(schema.get("properties"), dict) and "type" in schema
    closed = own and not schema.get("x-kubernetes-preserve-unknown-fields")
    return {"additionalProperties": False} | inner if closed else inner


def published(kind: str, version: str) -> dict | None:
    """The schema of another project's kind, from the folder that CRDS names."""
    folder = os.environ.get("CRDS")
    for path in Path(folder).rglob("*.yaml") if folder else ():
        for crd in yaml.safe_load_all(path.read_text()):
            if crd and crd.get("kind") == "CustomResourceDefinition":
                for each in crd["spec"]["versions"]:
                    named = f"{crd['spec']['group']}/{each['name']}"
                    if (crd["spec"]["names"]["kind"], named) == (kind, version):
                        return each["schema"]["openAPIV3Schema"]
    return None


def check(manifest) -> None:
    """Raises a ValidationError or an AssertionError."""
    kind = manifest["kind"]
    if kind not in FIELDS:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
        return
    allowed = [re.escape(each).replace(r"\*", ".+") for each in FIELDS[kind].split()]
    for field in fields({"spec": manifest["spec"]}):
        assert any(re.fullmatch(each, field) for each in allowed), field
    if schema := published(kind, manifest["apiVersion"]):
        top = {"apiVersion": {}, "kind": {}, "metadata": {}}
        schema = strict(schema | {"properties": schema["properties"] | top})
        Draft202012Validator(schema).validate(manifest)
    else:
        assert not os.environ.get("CRDS"), f"CRDS has no {kind} {manifest['apiVersion']}"


def written() -> dict[str, dict]:
    """The manifests that kustomizations name as resources, by kind; needs no renderer."""
    found = {}
    for path in FOLDER.glob("*/kustomization.yaml"):
        for name in yaml.safe_load(path.read_text()).get("resources", ()):
            if name.endswith(".yaml"):
                for manifest in yaml.safe_load_all((path.parent / name).read_text()):
                    found[f"{manifest['kind']} in {path.parent.name}"] = manifest
    return found


WRITTEN = written()


@pytest.mark.parametrize("where", WRITTEN)
def test_all_that_is_written_fits_its_schema(where):
    check(WRITTEN[where])


@pytest.mark.parametrize("overlay", RENDERED)
def test_all_that_is_rendered_fits_its_schema(objects, overlay):
    for manifest in objects[overlay].values():
        check(manifest)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("Deployment", "failureThreshold: 120", "failureTreshold: 120"),
        ("Deployment", "containerPort: 8000", "containerPort: eight"),
        ("Deployment", "containerPort: 8000", "container_port: 8000"),
        ("Deployment", "runAsNonRoot: true", "runAsNotRoot: true"),
        ("Deployment", "mountPath: /tmp", "subPath: tmp"),
        ("PodDisruptionBudget", "maxUnavailable", "maxUnavailible"),
        ("InferencePool", "targetPorts", "targetPort"),
        ("ScaledObject", "minReplicaCount", "minReplicas"),
        ("HTTPRoute", "backendRefs", "backends"),
        ("ServiceMonitor", "jobLabel", "joblabel"),
    ],
)
def test_a_mistake_does_not_fit(kind, old, new):
    (manifest,) = (
        each
        for each in WRITTEN.values()
        if (each["kind"], each["metadata"]["name"]) == (kind, "ropewalk")
    )
    text = yaml.dump(manifest)
    assert old in text
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
        check(yaml.safe_load(text.replace(old, new, 1)))


def test_what_is_shown_has_every_component(everything):
    components = {path.parent.name for path in FOLDER.glob("*/kustomization.yaml")}
    named = {Path(path).name for path in yaml.safe_load(SHOWN)["components"]}
    assert components == named | {"base", "cpu", "gpu"}
    assert {kind for kind, _ in everything} >= {*FIELDS, "PersistentVolumeClaim"}


def test_the_pods_are_found(everything):
    deployment = everything["Deployment", "ropewalk"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    service = everything["Service", "ropewalk"]
    monitor = everything["ServiceMonitor", "ropewalk"]["spec"]
    assert service["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "InferencePool"):
        assert everything[kind, "ropewalk"]["spec"]["selector"]["matchLabels"] == labels
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    (own,) = pod_of(everything)[1]["ports"]
    assert port["targetPort"] == own["name"]
    assert monitor["endpoints"][0]["port"] == port["name"]
    (target,) = everything["InferencePool", "ropewalk"]["spec"]["targetPorts"]
    assert target["number"] == own["containerPort"]
    scaled = everything["ScaledObject", "ropewalk"]["spec"]["scaleTargetRef"]
    assert scaled == {"name": deployment["metadata"]["name"]}


def test_a_request_finds_the_picker_and_the_pool(everything):
    pool = everything["InferencePool", "ropewalk"]
    (rule,) = everything["HTTPRoute", "ropewalk"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend == {
        "group": pool["apiVersion"].partition("/")[0],
        "kind": pool["kind"],
        "name": pool["metadata"]["name"],
    }
    picker = pool["spec"]["endpointPickerRef"]
    ports = everything["Service", picker["name"]]["spec"]["ports"]
    assert picker["port"]["number"] in {port["port"] for port in ports}
    _, container = pod_of(everything, picker["name"])
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]
    plugins = yaml.safe_load(everything["ConfigMap", picker["name"]]["data"]["plugins.yaml"])
    (profile,) = plugins["schedulingProfiles"]
    used = {plugin["pluginRef"] for plugin in profile["plugins"]}
    assert used == {plugin["type"] for plugin in plugins["plugins"]}


def test_the_job_is_called_as_the_alerts_and_the_autoscaler_ask(everything):
    monitor = everything["ServiceMonitor", "ropewalk"]
    job = everything["Service", "ropewalk"]["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert f'job="{job}"' in (PROMETHEUS / "alerts.yaml").read_text()
    for trigger in everything["ScaledObject", "ropewalk"]["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert f'job="{job}"' in query
        (metric,) = re.findall(r"ropewalk_\w+", query)
        assert metric in families(metrics_of_toy())
    assert "replicas" not in everything["Deployment", "ropewalk"]["spec"]


def test_probes_ask_paths_that_answer(everything):
    app = toy_app()
    _, container = pod_of(everything)
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert ask(app, "GET", container[name]["httpGet"]["path"]).status_code in (200, 503)
    (endpoint,) = everything["ServiceMonitor", "ropewalk"]["spec"]["endpoints"]
    assert ask(app, "GET", endpoint["path"]).status_code == 200


@pytest.mark.parametrize("name", ["ropewalk", "ropewalk-picker"])
def test_nothing_runs_as_root_or_may_become_it(everything, name):
    pod, container = pod_of(everything, name)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    own = container["securityContext"]
    assert not own["allowPrivilegeEscalation"]
    assert own["readOnlyRootFilesystem"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"].keys() == {"requests", "limits"}


@both
def test_the_server_runs_as_the_image_expects(objects, overlay):
    pod, container = pod_of(objects[overlay])
    user = f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    image = (ROOT / "Dockerfile").read_text()
    assert user in image
    assert pod["automountServiceAccountToken"] is False
    written = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert written == {*re.findall(r"^VOLUME (.*)$", image, re.M), "/tmp"}


@both
def test_the_server_starts_and_reads_no_service_as_its_port(objects, overlay):
    pod, container = pod_of(objects[overlay])
    config = configured(
        *container["args"][1:], **{each["name"]: each["value"] for each in container["env"]}
    )
    assert container["args"][0] == "serve"
    assert config.metrics_compat == "vllm"
    assert pod["enableServiceLinks"] is False


@both
def test_an_update_ends_no_request(objects, overlay):
    """Requests stop coming, then the server drains, then it is stopped: each has its time."""
    pod, container = pod_of(objects[overlay])
    config = configured(**{each["name"]: each["value"] for each in container["env"]})
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    ready = container["readinessProbe"]
    assert waits >= ready["periodSeconds"] + ready["timeoutSeconds"]
    assert config.drain_timeout_s >= config.http.request_timeout_s
    assert pod["terminationGracePeriodSeconds"] >= waits + config.drain_timeout_s + 10
    start = container["startupProbe"]
    allowed = objects[overlay]["Deployment", "ropewalk"]["spec"]["progressDeadlineSeconds"]
    assert allowed > start["periodSeconds"] * start["failureThreshold"] + waits


def test_the_gateway_leads_to_routes_of_clients_alone(everything):
    (rule,) = everything["HTTPRoute", "ropewalk"]["spec"]["rules"]
    shown = set(ask(toy_app(), "GET", "/openapi.json").json()["paths"])
    counts = {"/v1/messages/count_tokens", "/v1/responses/input_tokens"}
    for match in rule["matches"]:
        path = match["path"]
        assert path["value"] in shown
        if path["type"] == "PathPrefix":
            reached = {each for each in shown if f"{each}/".startswith(f"{path['value']}/")}
            assert reached <= {path["value"], *counts}


def test_the_gateway_is_more_patient_than_the_server(everything):
    (rule,) = everything["HTTPRoute", "ropewalk"]["spec"]["rules"]
    timeout = configured().http.request_timeout_s
    assert int(rule["timeouts"]["request"].removesuffix("s")) > timeout
    picker, _ = pod_of(everything, "ropewalk-picker")
    assert picker["terminationGracePeriodSeconds"] > timeout
