"""What every rendered object must be, whatever the values: safe pods, whole references, policies that cover all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import yaml

from tests.deploy.charts import SCENARIOS, Manifest, containers, of_kind, one, pod_templates, rendered, scenario_file

GIVEN = re.compile(r"^(moot-|hub-token|pull$|store-|api-tls)")
"""Secrets that an operator brings along."""
SELECTOR_LABELS = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}
CONNECTIONS = {"router": {7100, 7200, 6379}, "test": {8000}}
"""Who opens connections, and to which ports."""

every_scenario = pytest.mark.parametrize("scenario", SCENARIOS)


def component(labelled: Manifest) -> str:
    return str(labelled["metadata"]["labels"]["app.kubernetes.io/component"])


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """A Kubernetes label selector, as far as the chart uses it."""
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


@every_scenario
def test_pods_are_restricted(scenario: str) -> None:
    """Pod Security level "restricted" holds for every container, and more: no writable root, no service links."""
    for name, pod in pod_templates(rendered(scenario)):
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec), name
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] >= 10000, f"{name}: a low user id may be somebody on the node"
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["enableServiceLinks"] is False, f"{name}: MOOT_PORT of a Service would be taken for an option"
        for container in containers(pod):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["readOnlyRootFilesystem"] is True, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert not own.get("privileged"), name
            assert not any("hostPort" in port for port in container.get("ports", [])), name
        for volume in spec.get("volumes", []):
            (kind,) = set(volume) - {"name"}
            kinds = {kind} if kind != "projected" else {key for one in volume[kind]["sources"] for key in one}
            assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}, f"{name}: {kinds}"


@every_scenario
def test_only_a_router_that_watches_has_a_token(scenario: str) -> None:
    """No pod can talk to the API server but routers, and they may read endpoint slices and nothing else."""
    manifests = rendered(scenario)
    mode = (yaml.safe_load(scenario_file(scenario).read_text()).get("discovery") or {}).get("mode", "kubernetes")
    for account in of_kind(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for name, pod in pod_templates(manifests):
        watches = component(pod) == "router" and mode == "kubernetes"
        assert pod["spec"]["automountServiceAccountToken"] is watches, name
    rules = [rule for role in of_kind(manifests, "Role") for rule in role["rules"]]
    allowed = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    assert rules == ([allowed] if mode == "kubernetes" else [])
    assert not of_kind(manifests, "ClusterRole")
    accounts = {account["metadata"]["name"] for account in of_kind(manifests, "ServiceAccount")}
    for binding in of_kind(manifests, "RoleBinding"):
        (subject,) = binding["subjects"]
        assert subject["name"] in accounts
        assert binding["roleRef"]["name"] in {role["metadata"]["name"] for role in of_kind(manifests, "Role")}


@every_scenario
def test_selectors_are_three_labels_that_the_pods_have(scenario: str) -> None:
    """A selector cannot be changed later: it holds name, instance, component, and finds its own pods and no others."""
    manifests = rendered(scenario)
    pods = {name: pod["metadata"]["labels"] for name, pod in pod_templates(manifests)}
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            selector = manifest["spec"]["selector"]["matchLabels"]
        elif manifest["kind"] == "Service":
            selector = manifest["spec"]["selector"]
        else:
            continue
        assert set(selector) == SELECTOR_LABELS, manifest["metadata"]["name"]
        found = [name for name, labels in pods.items() if matches({"matchLabels": selector}, labels)]
        assert len(found) == 1, f"{manifest['metadata']['name']} selects {found}"


def references(pod: Manifest) -> Iterator[tuple[str, str, str | None]]:
    """Kind, name and key of all that a pod needs to be there."""
    spec = pod["spec"]
    for volume in spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"], None
        elif "secret" in volume:
            yield "Secret", volume["secret"]["secretName"], None
        elif "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], None
        for source in volume.get("projected", {}).get("sources", []):
            for kind, field in (("ConfigMap", "configMap"), ("Secret", "secret")):
                if field in source:
                    yield kind, source[field]["name"], None
    for container in containers(pod):
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                yield "Secret", source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]
    for secret in spec.get("imagePullSecrets", []):
        yield "Secret", secret["name"], None


@every_scenario
def test_what_pods_refer_to_exists(scenario: str) -> None:
    """Every ConfigMap, claim, account and volume named is rendered too, or is the operator's by the values' words."""
    manifests = rendered(scenario)
    given = yaml.safe_load(scenario_file(scenario).read_text())
    brought = {(given["model"].get("storage") or {}).get("existingClaim"), given.get("tls", {}).get("caConfigMap")}
    issued = {certificate["spec"]["secretName"] for certificate in of_kind(manifests, "Certificate")}
    for name, pod in pod_templates(manifests):
        spec = pod["spec"]
        for kind, wanted, _ in references(pod):
            if kind == "Secret":
                assert wanted in issued or GIVEN.match(wanted), f"{name}: {wanted}"
            elif wanted not in brought:
                one(manifests, kind, wanted)
        if component(pod) != "test":
            one(manifests, "ServiceAccount", spec["serviceAccountName"])
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        volumes |= {
            claim["metadata"]["name"]
            for owner in of_kind(manifests, "StatefulSet")
            if owner["spec"]["template"] is pod
            for claim in owner["spec"].get("volumeClaimTemplates", [])
        }
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == volumes, f"{name}: mounted and not there, or there and not mounted"
        for container in containers(pod):
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(paths) == len(set(paths)), name


@every_scenario
def test_ports_that_are_named_exist(scenario: str) -> None:
    """Services, probes, monitors, routes: every port leads to one that a container has, and the program listens on."""
    manifests = rendered(scenario)
    pods = dict(pod_templates(manifests))
    for service in of_kind(manifests, "Service"):
        (pod,) = [
            pod
            for pod in pods.values()
            if matches({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"])
        ]
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports[port["targetPort"]], "a headless Service changes no port"
    for name, pod in pods.items():
        for container in pod["spec"]["containers"]:
            numbers = {port["containerPort"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for how in ("httpGet", "tcpSocket"):
                    if how in container.get(probe, {}):
                        port = container[probe][how]["port"]
                        assert isinstance(port, int), f"{name}: the kubelet needs a number"
                        assert port in numbers, name
    for monitor in of_kind(manifests, "PodMonitor"):
        selected = [pod for pod in pods.values() if matches(monitor["spec"]["selector"], pod["metadata"]["labels"])]
        scraped = [p for p in selected if "metrics" in {q["name"] for q in p["spec"]["containers"][0].get("ports", [])}]
        assert {component(pod).split("-")[0] for pod in scraped} == {"router", "verifier", "drafter"}
    router = {port["port"] for port in one_service(manifests, "router")["spec"]["ports"]}
    for ingress in of_kind(manifests, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                assert path["backend"]["service"]["name"] == one_service(manifests, "router")["metadata"]["name"]
                assert path["backend"]["service"]["port"]["number"] in router
    for route in of_kind(manifests, "HTTPRoute"):
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            assert backend["port"] in router


def one_service(manifests: tuple[Manifest, ...], suffix: str) -> Manifest:
    (found,) = [one for one in of_kind(manifests, "Service") if one["metadata"]["name"].endswith(f"-{suffix}")]
    return found


@every_scenario
def test_every_program_is_probed(scenario: str) -> None:
    """Startup, readiness and liveness for each, and a start may take as long as the role's model does."""
    for name, pod in pod_templates(rendered(scenario)):
        if component(pod) == "test":
            continue
        (container,) = pod["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), name
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 120, name
        if component(pod) != "redis":
            # A router is not ready without verifiers; that must not have it restarted.
            assert startup["httpGet"]["path"] == container["livenessProbe"]["httpGet"]["path"] == "/livez", name
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz", name


@every_scenario
def test_pods_have_time_to_drain(scenario: str) -> None:
    """SIGKILL comes only after preStop, the program's own drain, and its stop."""
    manifests = rendered(scenario)
    for name, pod in pod_templates(manifests):
        if component(pod) in ("redis", "test"):
            continue
        (container,) = pod["spec"]["containers"]
        config = config_of(manifests, pod)
        pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        needed = pre_stop + math.ceil(config["drain_grace_s"]) + math.ceil(config.get("stop_timeout_s", 0))
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed, name


def config_of(manifests: tuple[Manifest, ...], pod: Manifest) -> Manifest:
    """The YAML file that the pod's program reads."""
    (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "config"]
    text = one(manifests, "ConfigMap", volume["configMap"]["name"])["data"]["config.yaml"]
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


@every_scenario
def test_a_changed_config_replaces_the_pods(scenario: str) -> None:
    """Programs read their file once: the pod carries its checksum."""
    for name, pod in pod_templates(rendered(scenario)):
        if component(pod) != "test":
            assert re.fullmatch("[0-9a-f]{64}", pod["metadata"]["annotations"]["checksum/config"]), name


@every_scenario
def test_gpus_are_asked_for_where_a_program_computes_on_one(scenario: str) -> None:
    """`device: cuda` and a GPU in the limits go together, always exactly one, and never in the init container."""
    manifests = rendered(scenario)
    for name, pod in pod_templates(manifests):
        if component(pod) in ("redis", "test"):
            continue
        config = config_of(manifests, pod)
        device = config.get("device") or dict(part.split("=", 1) for part in config.get("option", ())).get("device")
        for container in containers(pod):
            gpus = {k: v for k, v in container["resources"].get("limits", {}).items() if k.startswith("nvidia.com/")}
            is_program = container in pod["spec"]["containers"]
            assert list(gpus.values()) == ([1] if device == "cuda" and is_program else []), name
            expected = {"cuda": "-cuda", "cpu": "-cpu", None: ""}[device]
            if "@" not in container["image"]:
                assert container["image"].endswith(f":0.1.0{expected}"), name


@every_scenario
def test_nobody_counts_the_pods_of_an_autoscaler(scenario: str) -> None:
    """C31: no `replicas` where an autoscaler owns them, and every autoscaler has a Deployment of that name."""
    manifests = rendered(scenario)
    scaled = {
        scaler["spec"]["scaleTargetRef"]["name"]
        for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        for scaler in of_kind(manifests, kind)
    }
    names = {deployment["metadata"]["name"] for deployment in of_kind(manifests, "Deployment")}
    assert scaled <= names
    for deployment in of_kind(manifests, "Deployment"):
        assert ("replicas" in deployment["spec"]) == (deployment["metadata"]["name"] not in scaled)


@every_scenario
def test_budgets_never_keep_a_node(scenario: str) -> None:
    """No budget for one pod, and none that lets no pod go."""
    manifests = rendered(scenario)
    fewest = {one["metadata"]["name"]: one["spec"].get("replicas") for one in of_kind(manifests, "Deployment")}
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        fewest[scaler["spec"]["scaleTargetRef"]["name"]] = scaler["spec"]["minReplicas"]
    for scaler in of_kind(manifests, "ScaledObject"):
        fewest[scaler["spec"]["scaleTargetRef"]["name"]] = scaler["spec"]["minReplicaCount"]
    budgets = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests, "PodDisruptionBudget")}
    assert set(budgets) == {name for name, pods in fewest.items() if pods > 1}
    for name, budget in budgets.items():
        assert budget.get("maxUnavailable", 0) >= 1 or budget["minAvailable"] < fewest[name]


@every_scenario
def test_policies_cover_every_pod(scenario: str) -> None:
    """Each pod is under a policy of both directions, beside the one that denies all."""
    manifests = rendered(scenario)
    policies = of_kind(manifests, "NetworkPolicy")
    for name, pod in pod_templates(manifests):
        covering = [p for p in policies if matches(p["spec"]["podSelector"], pod["metadata"]["labels"])]
        assert len(covering) >= 2, name
        for policy in covering:
            if policy["metadata"]["name"].endswith("default-deny"):
                assert not {"ingress", "egress"} & set(policy["spec"])
                assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def allows(policies: list[Manifest], direction: str, pod: Manifest, other: Manifest, port: int) -> bool:
    """Whether some policy of `pod` allows a connection with `other`, a pod of the same namespace, at this port."""
    key = "from" if direction == "ingress" else "to"
    for policy in policies:
        if not matches(policy["spec"]["podSelector"], pod["metadata"]["labels"]):
            continue
        for rule in policy["spec"].get(direction) or []:
            if port not in {entry["port"] for entry in rule.get("ports", [])}:
                continue
            for peer in rule[key]:
                selector = peer.get("podSelector")
                same_namespace = selector is not None and "namespaceSelector" not in peer
                if same_namespace and matches(selector, other["metadata"]["labels"]):
                    return True
    return False


@every_scenario
def test_policies_let_through_what_pods_need_and_no_more(scenario: str) -> None:
    """Routers reach verifiers, drafters and the store; the test pod reaches routers; no other pair may speak.

    Callers in the same namespace are the operator's to say (`networkPolicy.clients`), and not looked at here.
    """
    manifests = rendered(scenario)
    policies = of_kind(manifests, "NetworkPolicy")
    pods = dict(pod_templates(manifests))
    for source_name, source in pods.items():
        for target_name, target in pods.items():
            ports = {port["containerPort"] for port in target["spec"]["containers"][0].get("ports", [])}
            for port in ports:
                wanted = port in CONNECTIONS.get(component(source), set())
                out = allows(policies, "egress", source, target, port)
                into = allows(policies, "ingress", target, source, port)
                assert (out and into) == wanted, f"{source_name} to {target_name}:{port}"


@every_scenario
def test_secrets_come_by_reference(scenario: str) -> None:
    """No Secret is rendered, and no password, token or key stands in any object."""
    manifests = rendered(scenario)
    assert not of_kind(manifests, "Secret")
    for name, pod in pod_templates(manifests):
        for container in containers(pod):
            for variable in container.get("env", []):
                if re.search("(PASSWORD|TOKEN|SECRET|_KEY|STORE_URL|AUTH)$", variable["name"]):
                    assert "valueFrom" in variable, f"{name}: {variable['name']}"
                assert not re.search(r"://[^/$]*:[^/$]+@", variable.get("value", "")), name


@every_scenario
def test_routers_look_for_the_services_that_there_are(scenario: str) -> None:
    """The addresses in a router's file are those of the headless Services, one drafter per pool."""
    manifests = rendered(scenario)
    (router,) = [pod for _, pod in pod_templates(manifests) if component(pod) == "router"]
    config = config_of(manifests, router)
    services = {one["metadata"]["name"]: one for one in of_kind(manifests, "Service")}
    pools = {
        component(pod).removeprefix("drafter-") for _, pod in pod_templates(manifests) if "drafter-" in component(pod)
    }
    entries = dict(entry.split("=", 1) for entry in config["drafters"])
    if config["verifiers"][0].startswith(("k8s:///", "dns:///")):
        assert set(entries) == pools
        for address in (*config["verifiers"], *entries.values()):
            name, _, port = re.sub(r"^(k8s:///serving/|dns:///)", "", address).rpartition(":")
            service = services[name.split(".")[0]]
            assert service["spec"]["clusterIP"] == "None"
            assert int(port) in {entry["port"] for entry in service["spec"]["ports"]}
    else:
        assert not pools


@every_scenario
def test_store_and_router_agree(scenario: str) -> None:
    """A bundled store is the one that routers are sent to, with the same password; full means refused."""
    manifests = rendered(scenario)
    (router,) = [pod for _, pod in pod_templates(manifests) if component(pod) == "router"]
    env = {variable["name"]: variable for variable in router["spec"]["containers"][0]["env"]}
    stores = [pod for _, pod in pod_templates(manifests) if component(pod) == "redis"]
    for store in stores:
        service = one_service(manifests, "redis")
        assert service["metadata"]["name"] + ".serving.svc" in env["MOOT_REDIS_URL"]["value"]
        secrets = [volume["secret"] for volume in store["spec"]["volumes"] if "secret" in volume]
        passwords = [{"name": secret["secretName"], "key": secret["items"][0]["key"]} for secret in secrets]
        assert passwords == [env[name]["valueFrom"]["secretKeyRef"] for name in ("STORE_PASSWORD",) if name in env]
        (volume,) = [volume for volume in store["spec"]["volumes"] if volume["name"] == "config"]
        settings = one(manifests, "ConfigMap", volume["configMap"]["name"])["data"]["redis.conf"].splitlines()
        assert {"maxmemory-policy noeviction", "appendonly yes", "appendfsync everysec"} <= set(settings)
        assert ("protected-mode yes" in settings) == bool(passwords)


@every_scenario
def test_names_fit_and_belong_to_the_release(scenario: str) -> None:
    """Every object is in the release's namespace, labelled as Helm's, with a name that Kubernetes takes."""
    for manifest in rendered(scenario):
        metadata = manifest["metadata"]
        assert metadata["namespace"] == "serving"
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"]), metadata["name"]
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "demo"
        for value in metadata["labels"].values():
            assert len(value) <= 63
