"""docker-compose.yml: valid for every profile, made of flags that the programs take, and of files that are there."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moot.config import load_config
from services.router.peers.discovery import parse_drafters, parse_source
from tests.deploy.charts import CHART, CONFIGS, ROOT, tool
from tests.programs import output

CPU, GPU = (), ("--profile", "gpu")
"""The arguments of either profile; the first is the one in .env."""


@functools.cache
def composed(*profile: str) -> dict[str, Any]:
    """The services that Compose makes of the file."""
    compose = tool("venv/bin/docker-compose")
    return dict(json.loads(output(compose, *profile, "config", "--format", "json", cwd=ROOT))["services"])


def programs(services: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Role and config of every service that runs one of ours."""
    found = {}
    for name, service in services.items():
        dockerfile = service.get("build", {}).get("dockerfile", "")
        if match := re.fullmatch(r"services/(\w+)/Dockerfile", dockerfile):
            found[name] = (match[1], load_config(CONFIGS[match[1]], service["command"], {}))
    return found


@pytest.mark.parametrize(("profile", "verifier"), [(CPU, "verifier"), (GPU, "verifier-gpu")])
def test_a_profile_is_a_whole_system(profile: tuple[str, ...], verifier: str) -> None:
    """Each profile has one verifier, found under one name; every flag is known, every peer is a service."""
    services = composed(*profile)
    found = programs(services)
    assert sorted(role for role, _ in found.values()) == ["drafter", "drafter", "router", "verifier"]
    assert found[verifier][0] == "verifier"
    _, router = found["router"]
    parse_source(router.verifiers, 1, 1)
    assert router.verifiers == ("dns:///verifier:7100",)
    assert services[verifier]["networks"]["default"]["aliases"] == ["verifier"]
    for drafter_id, (address,) in parse_drafters(router.drafters).items():
        name = address.removeprefix("dns:///").removesuffix(":7200")
        assert found[name][1].drafter_id == drafter_id
    for _, config in found.values():
        assert config.service.host == "0.0.0.0"
    assert router.store.url == "redis://redis:6379/0"
    assert "redis" in services


@pytest.mark.parametrize("profile", [CPU, GPU])
def test_programs_are_confined_and_probed(profile: tuple[str, ...]) -> None:
    """No capabilities, no writable root, models read only; health is asked where the program answers."""
    services = composed(*profile)
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name
    for name, (_, config) in programs(services).items():
        service = services[name]
        assert service["read_only"] is True
        assert f":{config.service.metrics_port}/readyz" in service["healthcheck"]["test"][-1]
        (models,) = service["volumes"]
        assert models["read_only"] is True
        seconds = re.fullmatch(r"(?:(\d+)m)?(\d+)s", service["stop_grace_period"])
        assert seconds is not None
        grace_s = config.service.drain_grace_s + getattr(config.service, "stop_timeout_s", 5)
        assert 60 * int(seconds[1] or 0) + int(seconds[2]) > grace_s


@pytest.mark.parametrize(("profile", "name", "device"), [(CPU, "verifier", "cpu"), (GPU, "verifier-gpu", "cuda")])
def test_a_gpu_is_asked_for_where_a_program_computes_on_one(profile: tuple[str, ...], name: str, device: str) -> None:
    """The GPU profile's image has CUDA, its flag says so, and a device is reserved; the other has none of it."""
    service = composed(*profile)[name]
    assert service["build"]["args"]["TORCH"] == device
    assert service["image"].endswith(f"-{device}")
    assert f"--device={device}" in service["command"]
    assert ("deploy" in service) == (device == "cuda")


def test_what_is_mounted_is_there() -> None:
    """Every file and folder of this repository that a service mounts exists."""
    for service in composed().values():
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), volume["source"]


def test_prometheus_scrapes_every_program() -> None:
    """Each program's metrics port is in the scrape config, under the name it has on the network."""
    scraped: dict[str, int] = {}
    config = yaml.safe_load((ROOT / "deploy" / "compose" / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    for source in job["dns_sd_configs"]:
        scraped |= dict.fromkeys(source["names"], source["port"])
    expected = {name: config.service.metrics_port for name, (_, config) in programs(composed()).items()}
    assert scraped == expected
    assert (CHART / "files" / "rules").is_dir()
