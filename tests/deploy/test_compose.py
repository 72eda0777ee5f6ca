"""deploy/compose.yaml, read as text: nothing runs as root, follows a moving tag or is exposed."""

import re

import pytest

from tests.command_line import understood as told
from tests.deploy.files import DEPLOY, PROMETHEUS, read

COMPOSE = read(DEPLOY / "compose.yaml")
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_held_short(name):
    service = SERVICES[name]
    assert int(service["user"].split(":")[0]) > 0
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "privileged" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_built_here_or_pinned(name):
    service = SERVICES[name]
    if "build" in service:
        assert (DEPLOY / service["build"] / "Dockerfile").exists()
    else:
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_mount_is_a_folder_here_or_a_volume(name):
    for mount in SERVICES[name]["volumes"]:
        source, _, *mode = mount.split(":")
        if source.startswith("."):
            assert (DEPLOY / source).is_dir()
            assert mode == ["ro"]
        else:
            assert source in COMPOSE["volumes"]


def test_the_server_is_started_by_words_it_understands():
    assert told(*SERVICES["ropewalk"]["command"]).info_name == "serve"


def test_services_find_one_another():
    (job,) = read(PROMETHEUS / "prometheus.yaml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in SERVICES
    sources = read(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= SERVICES.keys()
