"""The chart's values and the services' options: same names, same defaults, and files that the services take."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from moot.config import load_config
from moot.core.options import flat_options, value_at
from moot.drafters.interface import parse_options
from moot.drafters.registry import MODEL_FREE_KINDS, load_kind
from moot.rpc.identity import ROLES, Identity, identity_of
from moot.rpc.link import LinkConfig
from moot.rpc.tls import TlsOptions
from services.drafter.config import DrafterConfig
from services.router.config import RouterConfig
from services.router.peers.discovery import K8S_SCHEME, parse_drafters, parse_slices, parse_source
from services.verifier.config import VerifierConfig
from tests.deploy.charts import (
    CHART,
    HELMS,
    MINIMAL,
    NAMESPACE,
    RELEASE,
    ROOT,
    SCENARIOS,
    helm,
    of_kind,
    one,
    parse,
    pod_templates,
    render,
    rendered,
)

CONFIGS: dict[str, type] = {"router": RouterConfig, "verifier": VerifierConfig, "drafter": DrafterConfig}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart_values", ROOT / "tools" / "chart_values.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded(tmp_path: Path, role: str, text: str, env: list[dict[str, Any]]) -> Any:
    """What the program makes of its file and of the environment that the chart gives it."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    environ = {variable["name"]: variable.get("value", "") for variable in env}
    return load_config(CONFIGS[role], ["--config", str(path)], environ)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_programs_take_the_files_that_the_chart_writes(scenario: str, tmp_path: Path) -> None:
    """Each rendered file, with the rendered environment, is a config to the program that reads it."""
    manifests = rendered(scenario)
    seen = set()
    for _, pod in pod_templates(manifests):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        role = component.partition("-")[0]
        if role not in CONFIGS:
            continue
        seen.add(role)
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "config"]
        text = one(manifests, "ConfigMap", volume["configMap"]["name"])["data"]["config.yaml"]
        config = loaded(tmp_path, role, text, pod["spec"]["containers"][0].get("env", []))
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        assert ports["metrics"] == config.service.metrics_port
        assert ports["grpc"] == (config.grpc_port if role == "router" else config.service.port)
        if role == "router":
            assert ports["http"] == config.port
            replicas = [one for addresses in parse_drafters(config.drafters).values() for one in addresses]
            for address in (*config.verifiers, *replicas):
                if address.startswith(K8S_SCHEME):
                    assert parse_slices(address, 1, api=object()).namespace == "serving"
                else:
                    parse_source([address], 1, 1)
        if role == "drafter":
            assert config.drafter_id == component.removeprefix("drafter-")
            vocabulary = {} if config.kind == "neural" else {"vocab_size": 100}
            model = {"model": config.model} if config.kind == "neural" else {}
            parse_options(load_kind(config.kind).options, config.kind, {**vocabulary, **model, **config.kind_options})
    assert seen == set(CONFIGS) or scenario in ("static-peers", "external-redis-tls")


def test_defaults_are_the_services_own(tmp_path: Path) -> None:
    """Nothing set in the chart: every option that the chart does not own has the value of its dataclass."""
    values = {**MINIMAL, "drafters": {"suffix": {"kind": "suffix"}}}
    manifests = render(values)
    owned = generator().ROLES
    for role, name, key in (
        ("router", "demo-moot-router", "router"),
        ("verifier", "demo-moot-verifier", "verifier"),
        ("drafter", "demo-moot-drafter-suffix", "drafterDefaults"),
    ):
        text = one(manifests, "ConfigMap", name)["data"]["config.yaml"]
        config = loaded(tmp_path, role, text, [])
        link = {leaf.name for part in (LinkConfig, TlsOptions) for leaf in flat_options(part)}
        compared = 0
        for leaf in flat_options(CONFIGS[role]):
            if leaf.name not in owned[key][1] or leaf.name in link:
                assert value_at(config, leaf) == leaf.default, f"{role}: {leaf.name}"
                compared += 1
        assert compared > 10


def test_what_is_generated_is_up_to_date() -> None:
    """values.yaml, its schema, the list of options and the README's table are what the services say today."""
    stale = [path.name for path, text in generator().made().items() if path.read_text() != text]
    assert stale == [], "python tools/chart_values.py"


def test_every_value_is_documented() -> None:
    """Each key of values.yaml stands in the README's table with a meaning, and the table has no others."""
    text = (CHART / "values.yaml").read_text()
    rows = dict(generator().documented(text))
    values = yaml.safe_load(text)
    assert not list(generator().undocumented(values, set(rows)))
    readme = (CHART / "README.md").read_text()
    for path, comment in rows.items():
        generator().at(values, path)
        assert len(comment) >= 3
        assert f"| `{path}` |" in readme


def test_the_schema_is_closed_and_knows_every_value() -> None:
    """A misspelt key is refused wherever it stands, and no key of values.yaml is unknown to the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            node = schema["definitions"][node["$ref"].removeprefix("#/definitions/")]
        return node

    def check(node: dict[str, Any], value: Any, path: str) -> None:
        node = resolve(node)
        if not isinstance(value, dict) or "properties" not in node:
            return
        assert node["additionalProperties"] is False, path
        assert set(value) <= set(node["properties"]), path
        for key, inner in value.items():
            check(node["properties"][key], inner, f"{path}.{key}")

    check(schema, values, "")
    for name, node in schema["definitions"].items():
        if "properties" in node and name != "podSettings":
            assert node.get("additionalProperties") is False, name


def test_models_of_a_hub_and_of_a_volume_are_where_programs_look(tmp_path: Path) -> None:
    """The folder that the init container makes is the one that the program is told; weights only where needed."""
    for scenario in SCENARIOS:
        manifests = rendered(scenario)
        for name, pod in pod_templates(manifests):
            for init in pod["spec"].get("initContainers", []):
                arguments = dict(part.removeprefix("--").partition("=")[::2] for part in init["args"])
                (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "config"]
                text = one(manifests, "ConfigMap", volume["configMap"]["name"])["data"]["config.yaml"]
                config = yaml.safe_load(text)
                assert arguments["folder"] == (config.get("model") or config["tokenizer"]), name
                needs_weights = config.get("kind") == "neural" or "device" in config
                assert ("without-weights" in arguments) != needs_weights, name


BY_HAND = {"existingSecrets": {"router": "r-tls", "verifier": "v-tls", "drafter": "d-tls"}}
MADE = {"certManager": {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}}


@pytest.mark.parametrize("tls", [BY_HAND, MADE], ids=["by hand", "made"])
@pytest.mark.parametrize("bundle", ["", "authorities"], ids=["own", "bundle"])
def test_each_role_finds_its_certificate_where_it_looks(tmp_path: Path, tls: dict[str, Any], bundle: str) -> None:
    """Each role's own Secret, whole, so that changes reach the files; the programs are told those files."""
    by_role = BY_HAND["existingSecrets"] if tls is BY_HAND else {r: f"demo-moot-{r}-tls" for r in ROLES}
    values = {**MINIMAL, "drafters": {"suffix": {"kind": "suffix"}}}
    manifests = render({**values, "tls": {"enabled": True, "caConfigMap": bundle, **tls}})
    seen = set()
    for name, pod in pod_templates(manifests):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if (role := component.partition("-")[0]) not in by_role:
            continue
        seen.add(role)
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
        if bundle:
            secret, authorities = volume["projected"]["sources"]
            assert authorities["configMap"] == {"name": bundle, "items": [{"key": "ca.crt", "path": "ca.crt"}]}
            assert secret["secret"]["name"] == by_role[role]
            assert [item["key"] for item in secret["secret"]["items"]] == ["tls.crt", "tls.key"]
        else:
            assert volume["secret"] == {"secretName": by_role[role]}
        (container,) = pod["spec"]["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
        assert "subPath" not in mount, "the kubelet does not update a subPath"
        text = one(manifests, "ConfigMap", name.rpartition("/")[2])["data"]["config.yaml"]
        config = loaded(tmp_path, role, text, [])
        assert config.tls.tls_files == tuple(Path(mount["mountPath"]) / key for key in ("tls.crt", "tls.key", "ca.crt"))
    assert seen == set(by_role)
    for service in of_kind(manifests, "Service"):
        for port in service["spec"]["ports"]:
            if port["port"] in (7100, 7200):
                assert port["appProtocol"] == "https"


def test_certificates_say_what_the_programs_read() -> None:
    """The URI and the name of moot/rpc/tls.py, for the roles that there are pods of."""
    for drafters, roles in (({}, {"router", "verifier"}), ({"suffix": {"kind": "suffix"}}, set(ROLES))):
        manifests = render({**MINIMAL, "drafters": drafters, "tls": {"enabled": True, **MADE}})
        specs = [certificate["spec"] for certificate in of_kind(manifests, "Certificate")]
        identities = [identity_of(spec["uris"]) for spec in specs]
        assert {identity.role for identity in identities} == roles
        for identity, spec in zip(identities, specs, strict=True):
            assert identity == Identity(NAMESPACE, RELEASE, identity.role)
            assert spec["dnsNames"] == [identity.server_name]
            assert spec["secretName"] == f"demo-moot-{identity.role}-tls"
            assert set(spec["usages"]) >= {"server auth", "client auth"}
            assert "commonName" not in spec, "64 characters at most, which names may pass"


def test_a_pool_takes_what_it_does_not_say_from_the_defaults() -> None:
    """podDefaults, then drafterDefaults, then the pool: the nearest wins, key by key."""
    values = {
        **MINIMAL,
        "podDefaults": {"priorityClassName": "all", "schedulerName": "mine", "preStopSeconds": 7},
        "drafterDefaults": {"priorityClassName": "drafters", "config": {"maxBatch": 5, "maxWidth": 3}},
        "drafters": {
            "plain": {"kind": "suffix"},
            "own": {"kind": "suffix", "priorityClassName": "own", "config": {"maxBatch": 9}},
        },
    }
    manifests = render(values)
    for name, priority, batch in (("plain", "drafters", 5), ("own", "own", 9)):
        spec = one(manifests, "Deployment", f"demo-moot-drafter-{name}")["spec"]["template"]["spec"]
        assert (spec["priorityClassName"], spec["schedulerName"]) == (priority, "mine")
        config = yaml.safe_load(one(manifests, "ConfigMap", f"demo-moot-drafter-{name}")["data"]["config.yaml"])
        assert (config["max_batch"], config["max_width"]) == (batch, 3)
    router = one(manifests, "Deployment", "demo-moot-router")["spec"]["template"]["spec"]
    assert router["priorityClassName"] == "all"


def test_every_model_free_kind_makes_a_pool(tmp_path: Path) -> None:
    """Every kind that needs no model can be a pool of pods, on an image without torch."""
    values = {**MINIMAL, "drafters": {kind.replace("_", "-"): {"kind": kind} for kind in MODEL_FREE_KINDS}}
    manifests = render(values)
    for kind in MODEL_FREE_KINDS:
        name = f"demo-moot-drafter-{kind.replace('_', '-')}"
        config = loaded(tmp_path, "drafter", one(manifests, "ConfigMap", name)["data"]["config.yaml"], [])
        assert config.kind == kind
        image = one(manifests, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]["image"]
        assert image == "moot/drafter:0.1.0"


def test_what_is_off_zero_or_empty_is_taken_too() -> None:
    """A role that says false, 0 or nothing at all has that, whatever the defaults say."""
    values = {
        **MINIMAL,
        "podDefaults": {"tolerations": [{"key": "a", "operator": "Exists"}]},
        "router": {
            **{"replicas": 3, "pdb": {"enabled": False}, "preStopSeconds": 0, "tolerations": []},
            **{"serviceAccount": {"create": False, "name": "mine"}, "strategy": {"type": "Recreate"}},
        },
        "drafterDefaults": {"config": {"numThreads": 4}},
        "drafters": {"pool": {"kind": "suffix", "replicas": 0, "config": {"numThreads": 0}}},
    }
    for version in HELMS:
        manifests = render(values, version)
        router = one(manifests, "Deployment", "demo-moot-router")
        spec = router["spec"]["template"]["spec"]
        assert router["spec"]["strategy"] == {"type": "Recreate"}
        assert not {"tolerations", "lifecycle"} & {*spec, *spec["containers"][0]}
        assert spec["serviceAccountName"] == "mine"
        assert "mine" not in {account["metadata"]["name"] for account in of_kind(manifests, "ServiceAccount")}
        assert not of_kind(manifests, "PodDisruptionBudget")
        assert one(manifests, "Deployment", "demo-moot-drafter-pool")["spec"]["replicas"] == 0
        config = yaml.safe_load(one(manifests, "ConfigMap", "demo-moot-drafter-pool")["data"]["config.yaml"])
        assert config["num_threads"] == 0


def test_a_release_that_is_called_as_the_chart_has_short_names() -> None:
    """`helm install moot`: moot-router, not moot-moot-router; a long release's names still fit."""
    for release, expected in (("moot", "moot-router"), ("a" * 53, "a" * 38 + "-router")):
        done = helm("helm3", "template", release, str(CHART), "--values", "-", values=MINIMAL)
        assert done.returncode == 0, done.stderr
        one(parse(done.stdout), "Deployment", expected)
