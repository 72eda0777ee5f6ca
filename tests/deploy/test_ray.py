"""deploy/ray/ropewalk.yaml: what it names is there, and Ray, where it is installed, takes it."""

import re
from importlib import import_module

import pytest

from ropewalk.server.config import HttpOptions
from tests.deploy.files import DEPLOY, read

FILE = DEPLOY / "ray" / "ropewalk.yaml"
CONFIG = read(FILE)
(APPLICATION,) = CONFIG["applications"]
(DEPLOYMENT,) = APPLICATION["deployments"]


def test_what_the_file_names_is_there():
    policy = DEPLOYMENT["autoscaling_config"]["policy"]
    (callback,) = re.findall(r"CALLBACK_IMPORT_PATH=(\S+)", FILE.read_text())
    for path, options in ((callback, {}), (policy["policy_function"], policy["policy_kwargs"])):
        module, _, name = path.partition(":")
        assert getattr(import_module(module), name)(**options)


def test_streams_outlast_neither_ray_s_patience_nor_a_replica_s_end():
    longest = APPLICATION["args"].get("request_timeout", HttpOptions().request_timeout_s)
    assert CONFIG["http_options"]["request_timeout_s"] > longest
    assert DEPLOYMENT["graceful_shutdown_timeout_s"] > longest


def test_only_names_of_this_machine_are_served_where_only_it_can_ask():
    assert CONFIG["http_options"]["host"] in APPLICATION["args"]["allowed_host"]


def test_ray_takes_the_file():
    schema = pytest.importorskip("ray.serve.schema")
    config = pytest.importorskip("ray.serve.config")
    taken = schema.ServeDeploySchema.model_validate(CONFIG).model_dump(exclude_unset=True)
    assert taken["applications"] == CONFIG["applications"]  # it drops what it does not know
    config.AutoscalingConfig(**DEPLOYMENT["autoscaling_config"])
    router = config.RequestRouterConfig(**DEPLOYMENT["request_router_config"])
    assert router.get_request_router_class().__name__ == "ConsistentHashRouter"
    application = import_module(APPLICATION["import_path"].partition(":")[0]).application
    assert application(APPLICATION["args"])._bound_deployment.name == DEPLOYMENT["name"]
