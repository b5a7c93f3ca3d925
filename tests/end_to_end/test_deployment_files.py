"""The files of docs/deployment name flags, paths and arguments that exist."""

import re
import tomllib

import yaml

from paxkv.config.command_line import config_from_arguments
from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.cli.arguments import parse_arguments
from paxkv.entrypoints.engine_flags import engine_config_from_arguments
from paxkv.ray.settings import read_settings
from paxkv.serve import make_parser
from paxkv.server.app import create_app
from tests.end_to_end.real_server import ROOT
from tests.paxkv.server.fake_engine import FakeEngine

FOLDER = ROOT / "docs" / "deployment"


def kubernetes_objects() -> dict[str, dict]:
    objects = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    return {each["kind"]: each for each in objects}


def pod_spec() -> dict:
    return kubernetes_objects()["Deployment"]["spec"]["template"]["spec"]


def test_container_has_flags_probes_and_time_that_fit_together() -> None:
    (container,) = pod_spec()["containers"]
    namespace = parse_arguments(make_parser(), container["args"])
    server = config_from_arguments(ServerConfig, namespace)
    engine = engine_config_from_arguments(namespace)
    assert server.host == "0.0.0.0" and server.max_engine_restarts == 0
    # Kubernetes puts the address in place of the variable.
    assert engine.cache.kv_events.topic == "kv@$(POD_IP)@Qwen/Qwen3-8B"
    assert engine.model.model == "Qwen/Qwen3-8B"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == server.port
    assert engine.cache.kv_events.endpoint.endswith(f":{ports['kv-events']}")
    paths = {route.path for route in create_app(FakeEngine(), ServerConfig()).routes}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
    (_, pre_stop_s) = container["lifecycle"]["preStop"]["exec"]["command"]
    grace_s = pod_spec()["terminationGracePeriodSeconds"]
    assert grace_s > int(pre_stop_s) + server.shutdown_timeout_s


def test_service_finds_the_pods() -> None:
    objects = kubernetes_objects()
    template = objects["Deployment"]["spec"]["template"]
    assert objects["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert (
        objects["Deployment"]["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    )


def test_arguments_of_the_ray_application_are_valid() -> None:
    (application,) = yaml.safe_load((FOLDER / "ray.yaml").read_text())["applications"]
    settings = read_settings(application["args"])
    assert (settings.ray.max_replicas, settings.ray.num_gpus) == (8, 1)
    assert application["import_path"] == "paxkv.ray:app"


def test_service_of_systemd_waits_longer_than_the_server_drains() -> None:
    text = (FOLDER / "paxkv.service").read_text()
    stop_s = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)[1])
    assert stop_s > ServerConfig().shutdown_timeout_s + 10
    command = re.search(r"^ExecStart=\S+/paxkv serve (.+)$", text, re.M)[1]
    assert command.split()[0] in make_parser()._option_string_actions


def test_proxy_accepts_bodies_of_the_servers_size_and_closes_connections_first() -> None:
    text = (FOLDER / "nginx.conf").read_text()
    megabytes = int(re.search(r"client_max_body_size (\d+)m;", text)[1])
    assert megabytes * 2**20 == ServerConfig().max_body_bytes
    assert int(re.search(r"keepalive_timeout (\d+)s;", text)[1]) < 75


def test_image_has_all_packages() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    for package in packages:
        folder = package.removesuffix("*")
        assert f"COPY {folder} {folder}\n" in text
    extras = re.search(r"EXTRAS=(\w+),(\w+)", text).groups()
    assert set(extras) <= set(project["project"]["optional-dependencies"])
