"""What values mean to an autoscaler, to sentinels and to the vote: rendered, and read by the programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moot.config import load_config
from services.router.config import RouterConfig
from services.router.generation.drafter_set import parse_priors
from tests.deploy.charts import MINIMAL, Manifest, of_kind, one, pod_templates, render, rendered

ROLES = ("router", "verifier", "drafter-pool")


def scaled_values(scaler: str, owned: str, replicas: int) -> dict[str, Any]:
    """An installation in which an autoscaler owns the pods of one role, or of all."""
    auto = {
        "enabled": True,
        "kind": scaler,
        "prometheusAddress": "http://prometheus:9090",
        "metric": "moot_num_sessions",
    }

    def role(name: str) -> dict[str, Any]:
        return {"replicas": replicas, "autoscaling": auto if owned in (name, "all") else {"enabled": False}}

    return {
        **MINIMAL,
        "router": role("router"),
        "verifier": role("verifier"),
        "drafters": {"pool": {"kind": "suffix", **role("drafter-pool")}},
    }


@pytest.mark.parametrize("owned", [*ROLES, "all"])
@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_an_upgrade_does_not_undo_an_autoscaler(scaler: str, owned: str) -> None:
    """C31: install and upgrade say nothing of the number of pods that an autoscaler owns, whatever `replicas` is in the
    values; of the others they do. So an upgrade changes only what the operator owns."""
    for replicas in (2, 3):
        deployments = of_kind(render(scaled_values(scaler, owned, replicas)), "Deployment")
        found = {one["metadata"]["name"].removeprefix("demo-moot-"): one["spec"].get("replicas") for one in deployments}
        assert found == {role: None if owned in (role, "all") else replicas for role in ROLES}


def router_config(manifests: tuple[Manifest, ...], tmp_path: Path) -> RouterConfig:
    """What a router makes of the file that it is given; secrets of its environment are the name of their key."""
    path = tmp_path / "config.yaml"
    path.write_text(one(manifests, "ConfigMap", "demo-moot-router")["data"]["config.yaml"])
    (pod,) = [pod for name, pod in pod_templates(manifests) if name.endswith("-router")]
    environ = {}
    for variable in pod["spec"]["containers"][0].get("env", []):
        source = variable.get("valueFrom", {}).get("secretKeyRef")
        environ[variable["name"]] = source["key"] if source else str(variable.get("value", ""))
    for name, value in environ.items():
        for other, secret in environ.items():
            value = value.replace(f"$({other})", secret)
        environ[name] = value
    return load_config(
        RouterConfig, [], {"MOOT_CONFIG": str(path), **{n: v for n, v in environ.items() if n[:5] == "MOOT_"}}
    )


def test_sentinels_reach_the_router(tmp_path: Path) -> None:
    """Addresses and name in the file, the password by reference, and a policy that lets routers out to their ports."""
    manifests = rendered("external-redis-tls")
    store = router_config(manifests, tmp_path).store
    assert store.keeps_records
    assert store.sentinels == tuple(f"sentinel-{index}.store:26379" for index in range(3))
    assert (store.sentinel_master, store.sentinel_password) == ("records", "password")
    policy = one(manifests, "NetworkPolicy", "demo-moot-router")
    ports = {rule["port"] for egress in policy["spec"]["egress"] for rule in egress.get("ports", [])}
    assert {6380, 26379} <= ports


def test_sentinels_need_no_url(tmp_path: Path) -> None:
    """Without a password the name and the addresses are all that there is to say."""
    sentinel = {"enabled": True, "master": "records", "nodes": ["a:26379", "b:26380"]}
    manifests = render({**MINIMAL, "externalRedis": {"sentinel": sentinel}})
    store = router_config(manifests, tmp_path).store
    assert (store.server_url, store.sentinels, store.sentinel_password) == ("redis://", ("a:26379", "b:26380"), None)
    policy = one(manifests, "NetworkPolicy", "demo-moot-router")
    ports = {rule["port"] for egress in policy["spec"]["egress"] for rule in egress.get("ports", [])}
    assert {6379, 26379, 26380} <= ports


def test_priors_of_pools_reach_the_vote(tmp_path: Path) -> None:
    """A pool's own prior, or that of all pools; none: nothing is said."""
    pools = {"a": {"kind": "suffix", "weightPrior": 0.25}, "b": {"kind": "ngram"}}
    config = router_config(render({**MINIMAL, "drafters": pools}), tmp_path)
    assert parse_priors(config.drafter_priors) == {"a": 0.25}
    everywhere = {**MINIMAL, "drafters": pools, "drafterDefaults": {"weightPrior": 2}}
    assert parse_priors(router_config(render(everywhere), tmp_path).drafter_priors) == {"a": 0.25, "b": 2}
    assert router_config(render({**MINIMAL, "drafters": {"b": {"kind": "ngram"}}}), tmp_path).drafter_priors == ()
