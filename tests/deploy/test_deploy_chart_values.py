"""What the chart's values mean to the programs: names and defaults of their options, in files that they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chart_values
import pytest
import yaml

from moot.core.options import flat_options, value_at
from moot.drafters.interface import parse_options
from moot.drafters.registry import MODEL_FREE_KINDS, load_kind
from moot.rpc.identity import ROLES, Identity, identity_of
from moot.rpc.link import LinkConfig
from moot.rpc.tls import TlsOptions
from services.router.generation.drafter_set import parse_priors
from services.router.peers.discovery import K8S_SCHEME, parse_drafters, parse_slices, parse_source
from tests.deploy.charts import (
    CHART,
    CONFIGS,
    HELMS,
    NAMESPACE,
    RELEASE,
    Release,
    given,
    helm,
    parse,
    render,
    rendered,
)

SUFFIX = "drafters.suffix.kind: suffix"
POOLS = ("router", "verifier", "drafter-pool")


def test_programs_take_the_files_that_the_chart_writes(release: Release) -> None:
    """Each rendered file, with the rendered environment, is a config to the program that reads it."""
    for pod in release.programs:
        config = pod.program()
        assert pod.ports["metrics"] == config.service.metrics_port
        assert pod.ports["grpc"] == (config.grpc_port if pod.role == "router" else config.service.port)
        if pod.role == "router":
            assert pod.ports["http"] == config.port
            replicas = [one for addresses in parse_drafters(config.drafters).values() for one in addresses]
            for address in (*config.verifiers, *replicas):
                if address.startswith(K8S_SCHEME):
                    assert parse_slices(address, 1, api=object()).namespace == "serving"
                else:
                    parse_source([address], 1, 1)
        if pod.role == "drafter":
            assert config.drafter_id == pod.component.removeprefix("drafter-")
            own = {"model": config.model} if config.kind == "neural" else {"vocab_size": 100}
            parse_options(load_kind(config.kind).options, config.kind, {**own, **config.kind_options})
    wanted = {"router": True, "verifier": release.values.get("verifier", {}).get("enabled", True)}
    wanted["drafter"] = bool(release.values.get("drafters"))
    assert {pod.role for pod in release.programs} == {role for role, is_wanted in wanted.items() if is_wanted}


@pytest.mark.parametrize(("component", "key"), list(zip(POOLS, chart_values.ROLES, strict=True)))
def test_defaults_are_the_services_own(component: str, key: str) -> None:
    """Nothing set in the chart: every option that the chart does not own has the value of its dataclass."""
    pod = render(given("drafters.pool.kind: suffix")).pod(component)
    config = pod.program()
    link = {leaf.name for part in (LinkConfig, TlsOptions) for leaf in flat_options(part)}
    _, owned = chart_values.ROLES[key]
    compared = [leaf for leaf in flat_options(CONFIGS[pod.role]) if leaf.name not in owned - link]
    assert {leaf.name: value_at(config, leaf) for leaf in compared} == {leaf.name: leaf.default for leaf in compared}
    assert len(compared) > 10


def test_what_is_generated_is_up_to_date() -> None:
    """values.yaml, its schema, the list of options and the README's table are what the services say today."""
    assert chart_values.main(["--check"]) == 0, "python tools/chart_values.py"


def test_every_value_is_documented() -> None:
    """Each key of values.yaml stands in the README's table with a meaning, and the table has no others."""
    text = (CHART / "values.yaml").read_text()
    rows = dict(chart_values.documented(text))
    values = yaml.safe_load(text)
    assert not list(chart_values.undocumented(values, set(rows)))
    readme = (CHART / "README.md").read_text()
    for path, comment in rows.items():
        chart_values.at(values, path)
        assert len(comment) >= 3
        assert f"| `{path}` |" in readme


def test_the_schema_is_closed_and_knows_every_value() -> None:
    """A misspelt key is refused wherever it stands, and no key of values.yaml is unknown to the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(node: dict[str, Any], value: Any, path: str) -> None:
        while "$ref" in node:
            node = schema["definitions"][node["$ref"].removeprefix("#/definitions/")]
        if isinstance(value, dict) and "properties" in node:
            assert node["additionalProperties"] is False, path
            assert set(value) <= set(node["properties"]), path
            for key, inner in value.items():
                check(node["properties"][key], inner, f"{path}.{key}")

    check(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "")
    for name, node in schema["definitions"].items():
        if "properties" in node and name != "podSettings":
            assert node.get("additionalProperties") is False, name


def test_models_of_a_hub_and_of_a_volume_are_where_programs_look(release: Release) -> None:
    """The folder that the init container makes is the one that the program is told; weights only where needed."""
    for pod in release.pods:
        for init in pod.spec.get("initContainers", []):
            arguments = dict(part.removeprefix("--").partition("=")[::2] for part in init["args"])
            assert arguments["folder"] == (pod.config.get("model") or pod.config["tokenizer"]), pod.name
            needs_weights = pod.config.get("kind") == "neural" or "device" in pod.config
            assert ("without-weights" in arguments) != needs_weights, pod.name


BY_HAND = "tls.existingSecrets: {router: router-mine, verifier: verifier-mine, drafter: drafter-mine}"
MADE = "tls.certManager: {enabled: true, issuerRef: {name: ca, kind: ClusterIssuer}}"


@pytest.mark.parametrize(("tls", "secret"), [(BY_HAND, "{}-mine"), (MADE, "demo-moot-{}-tls")], ids=["by hand", "made"])
@pytest.mark.parametrize("bundle", ["", "authorities"], ids=["own", "bundle"])
def test_each_role_finds_its_certificate_where_it_looks(tls: str, secret: str, bundle: str) -> None:
    """Each role's own Secret, whole, so that changes reach the files; the programs are told those files."""
    release = render(given(f"{SUFFIX}, tls.enabled: true, tls.caConfigMap: '{bundle}', {tls}"))
    assert {pod.role for pod in release.programs} == set(ROLES)
    for pod in release.programs:
        volume, name = pod.volumes["tls"], secret.format(pod.role)
        if bundle:
            own, authorities = volume["projected"]["sources"]
            assert authorities["configMap"] == {"name": bundle, "items": [{"key": "ca.crt", "path": "ca.crt"}]}
            assert own["secret"]["name"] == name
            assert [item["key"] for item in own["secret"]["items"]] == ["tls.crt", "tls.key"]
        else:
            assert volume["secret"] == {"secretName": name}
        (mount,) = [mount for mount in pod.container["volumeMounts"] if mount["name"] == "tls"]
        assert "subPath" not in mount, "the kubelet does not update a subPath"
        files = tuple(Path(mount["mountPath"]) / key for key in ("tls.crt", "tls.key", "ca.crt"))
        assert pod.program().tls.tls_files == files
    for service in release.of_kind("Service"):
        for port in service["spec"]["ports"]:
            assert port["port"] not in (7100, 7200) or port["appProtocol"] == "https"


@pytest.mark.parametrize(("drafters", "roles"), [("drafters: {}", {"router", "verifier"}), (SUFFIX, set(ROLES))])
def test_certificates_say_what_the_programs_read(drafters: str, roles: set[str]) -> None:
    """The URI and the name of moot/rpc/tls.py, for the roles that there are pods of."""
    release = render(given(f"{drafters}, tls.enabled: true, {MADE}"))
    specs = {identity_of(one["spec"]["uris"]): one["spec"] for one in release.of_kind("Certificate")}
    assert set(specs) == {Identity(NAMESPACE, RELEASE, role) for role in roles}
    for identity, spec in specs.items():
        assert spec["dnsNames"] == [identity.server_name]
        assert spec["secretName"] == f"demo-moot-{identity.role}-tls"
        assert set(spec["usages"]) >= {"server auth", "client auth"}
        assert "commonName" not in spec, "64 characters at most, which names may pass"


def test_a_pool_takes_what_it_does_not_say_from_the_defaults() -> None:
    """podDefaults, then drafterDefaults, then the pool: the nearest wins, key by key."""
    release = render(
        given(
            "podDefaults: {priorityClassName: all, schedulerName: mine, preStopSeconds: 7},"
            "drafterDefaults: {priorityClassName: drafters, config: {maxBatch: 5, maxWidth: 3}},"
            "drafters.plain: {kind: suffix},"
            "drafters.own: {kind: suffix, priorityClassName: own, config: {maxBatch: 9}}"
        )
    )
    for name, priority, batch in (("plain", "drafters", 5), ("own", "own", 9)):
        pod = release.pod(f"drafter-{name}")
        assert (pod.spec["priorityClassName"], pod.spec["schedulerName"]) == (priority, "mine")
        assert (pod.config["max_batch"], pod.config["max_width"]) == (batch, 3)
    assert release.pod("router").spec["priorityClassName"] == "all"


def test_every_model_free_kind_makes_a_pool() -> None:
    """Every kind that needs no model can be a pool of pods, on an image without torch."""
    pools = {kind.replace("_", "-"): {"kind": kind} for kind in MODEL_FREE_KINDS}
    release = render({**given(""), "drafters": pools})
    found = {pod.program().kind: pod.container["image"] for pod in release.programs if pod.role == "drafter"}
    assert found == dict.fromkeys(MODEL_FREE_KINDS, "moot/drafter:0.1.0")


@pytest.mark.parametrize("version", HELMS)
def test_what_is_off_zero_or_empty_is_taken_too(version: str) -> None:
    """A role that says false, 0 or nothing at all has that, whatever the defaults say."""
    values = given(
        "podDefaults.tolerations: [{key: a, operator: Exists}],"
        "router: {replicas: 3, pdb: {enabled: false}, preStopSeconds: 0, tolerations: []},"
        "router.serviceAccount: {create: false, name: mine}, router.strategy.type: Recreate,"
        "drafterDefaults.config.numThreads: 4,"
        "drafters.pool: {kind: suffix, replicas: 0, config: {numThreads: 0}}"
    )
    release = render(values, version)
    router, pool = release.pod("router"), release.pod("drafter-pool")
    assert router.owner["spec"]["strategy"] == {"type": "Recreate"}
    assert not {"tolerations", "lifecycle"} & {*router.spec, *router.container}
    assert router.spec["serviceAccountName"] == "mine"
    assert ("ServiceAccount", "mine") not in release.by_name
    assert not release.of_kind("PodDisruptionBudget")
    assert pool.owner["spec"]["replicas"] == pool.config["num_threads"] == 0


@pytest.mark.parametrize(("release", "expected"), [("moot", "moot-router"), ("a" * 53, "a" * 38 + "-router")])
def test_a_release_that_is_called_as_the_chart_has_short_names(release: str, expected: str) -> None:
    """`helm install moot`: moot-router, not moot-moot-router; a long release's names still fit."""
    done = helm("helm3", "template", release, values=given(""))
    assert ("Deployment", expected) in Release({}, parse(done.stdout)).by_name, done.stderr


def scaled_values(scaler: str, owned: str, replicas: int) -> dict[str, Any]:
    """An installation in which an autoscaler owns the pods of one role, or of all."""
    auto = {"enabled": True, "kind": scaler, "prometheusAddress": "http://prometheus", "metric": "moot_num_sessions"}

    def role(name: str) -> dict[str, Any]:
        return {"replicas": replicas, "autoscaling": auto if owned in (name, "all") else {"enabled": False}}

    pool = {"kind": "suffix", **role("drafter-pool")}
    return {**given(""), "router": role("router"), "verifier": role("verifier"), "drafters": {"pool": pool}}


@pytest.mark.parametrize("owned", [*POOLS, "all"])
@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_an_upgrade_does_not_undo_an_autoscaler(scaler: str, owned: str) -> None:
    """C31: install and upgrade say nothing of the number of pods that an autoscaler owns, whatever `replicas` is in the
    values; of the others they do. So an upgrade changes only what the operator owns."""
    for replicas in (2, 3):
        programs = render(scaled_values(scaler, owned, replicas)).programs
        found = {pod.component: pod.owner["spec"].get("replicas") for pod in programs}
        assert found == {role: None if owned in (role, "all") else replicas for role in POOLS}


def egress_ports(release: Release) -> set[int]:
    """Those that routers are let out to."""
    policy = release.one("NetworkPolicy", "router")
    return {rule["port"] for egress in policy["spec"]["egress"] for rule in egress.get("ports", [])}


def test_sentinels_reach_the_router() -> None:
    """Addresses and name in the file, the password by reference, and a policy that lets routers out to their ports."""
    release = rendered("external-redis-tls")
    store = release.pod("router").program().store
    assert store.keeps_records
    assert store.sentinels == tuple(f"sentinel-{index}.store:26379" for index in range(3))
    assert (store.sentinel_master, store.sentinel_password) == ("records", "password")
    assert {6380, 26379} <= egress_ports(release)


def test_sentinels_need_no_url() -> None:
    """Without a password the name and the addresses are all that there is to say."""
    sentinel = "{enabled: true, master: records, nodes: [a:26379, b:26380]}"
    release = render(given(f"externalRedis.sentinel: {sentinel}"))
    store = release.pod("router").program().store
    assert (store.server_url, store.sentinels, store.sentinel_password) == ("redis://", ("a:26379", "b:26380"), None)
    assert {6379, 26379, 26380} <= egress_ports(release)


@pytest.mark.parametrize(
    ("values", "priors"),
    [
        ("drafters: {a: {kind: suffix, weightPrior: 0.25}, b: {kind: ngram}}", {"a": 0.25}),
        (
            "drafters: {a: {kind: suffix, weightPrior: 0.25}, b: {kind: ngram}}, drafterDefaults.weightPrior: 2",
            {"a": 0.25, "b": 2},
        ),
        ("drafters: {b: {kind: ngram}}", {}),
    ],
    ids=["of one pool", "of all", "none"],
)
def test_priors_of_pools_reach_the_vote(values: str, priors: dict[str, float]) -> None:
    """A pool's own prior, or that of all pools; none: nothing is said."""
    assert parse_priors(render(given(values)).pod("router").program().drafter_priors) == priors
