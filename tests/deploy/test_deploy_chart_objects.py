"""What every rendered object must be, whatever the values: safe pods, whole references, policies that cover all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from tests.deploy.charts import Manifest, PodTemplate, Release

GIVEN = re.compile(r"^(moot-|hub-token|pull$|store-|api-tls)")
"""Secrets that an operator brings along."""
SELECTOR_LABELS = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}
CONNECTIONS = {"router": {7100, 7200, 6379}, "test": {8000}}
"""Who opens connections, and to which ports."""
REFERENCES = {"configMap": ("ConfigMap", "name"), "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName")}
REFERENCES["secret"] = ("Secret", "secretName")
"""What a volume names, by its kind."""


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """A Kubernetes label selector, as far as the chart uses it."""
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def test_pods_are_restricted(release: Release) -> None:
    """Pod Security level "restricted" holds for every container, and more: no writable root, no service links."""
    for pod in release.pods:
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(pod.spec), pod.name
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True, pod.name
        assert context["runAsUser"] >= 10000, f"{pod.name}: a low user id may be somebody on the node"
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        assert pod.spec["enableServiceLinks"] is False, f"{pod.name}: a Service's MOOT_PORT would be an option"
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, pod.name
            assert own["readOnlyRootFilesystem"] is True, pod.name
            assert own["capabilities"] == {"drop": ["ALL"]}, pod.name
            assert not own.get("privileged"), pod.name
            assert not any("hostPort" in port for port in container.get("ports", [])), pod.name
        for volume in pod.volumes.values():
            (kind,) = set(volume) - {"name"}
            kinds = {kind} if kind != "projected" else {key for one in volume[kind]["sources"] for key in one}
            assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}, f"{pod.name}: {kinds}"


def test_only_a_router_that_watches_has_a_token(release: Release) -> None:
    """No pod can talk to the API server but routers, and they may read endpoint slices and nothing else."""
    mode = release.values.get("discovery", {}).get("mode", "kubernetes")
    accounts = {account["metadata"]["name"]: account for account in release.of_kind("ServiceAccount")}
    assert not any(account["automountServiceAccountToken"] for account in accounts.values())
    for pod in release.pods:
        watches = pod.component == "router" and mode == "kubernetes"
        assert pod.spec["automountServiceAccountToken"] is watches, pod.name
    rules = [rule for role in release.of_kind("Role") for rule in role["rules"]]
    allowed = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    assert rules == ([allowed] if mode == "kubernetes" else [])
    assert not release.of_kind("ClusterRole")
    for binding in release.of_kind("RoleBinding"):
        (subject,) = binding["subjects"]
        assert subject["name"] in accounts
        assert ("Role", binding["roleRef"]["name"]) in release.by_name


def test_selectors_are_three_labels_that_the_pods_have(release: Release) -> None:
    """A selector cannot be changed later: it holds name, instance, component, and finds its own pods and no others."""
    for manifest in release.of_kind("Deployment", "StatefulSet", "PodDisruptionBudget", "Service"):
        selector = manifest["spec"]["selector"]
        labels = selector if manifest["kind"] == "Service" else selector["matchLabels"]
        assert set(labels) == SELECTOR_LABELS, manifest["metadata"]["name"]
        selected(release, {"matchLabels": labels})


def selected(release: Release, selector: Manifest) -> PodTemplate:
    """The pods that a selector finds, all from one template."""
    (found,) = [pod for pod in release.pods if matches(selector, pod.labels)]
    return found


def references(pod: PodTemplate) -> Iterator[tuple[str, str]]:
    """Kind and name of all that a pod needs to be there."""
    for volume in pod.volumes.values():
        for key, (kind, name) in REFERENCES.items():
            if key in volume:
                yield kind, volume[key][name]
            yield from (
                (kind, one[key]["name"]) for one in volume.get("projected", {}).get("sources", []) if key in one
            )
    for container in pod.containers:
        sources = [variable.get("valueFrom", {}) for variable in container.get("env", [])]
        yield from (("Secret", source["secretKeyRef"]["name"]) for source in sources if "secretKeyRef" in source)
    yield from (("Secret", secret["name"]) for secret in pod.spec.get("imagePullSecrets", []))


def test_what_pods_refer_to_exists(release: Release) -> None:
    """Every ConfigMap, claim, account and volume named is rendered too, or is the operator's by the values' words."""
    model, tls = release.values["model"], release.values.get("tls", {})
    brought = {model.get("storage", {}).get("existingClaim"), tls.get("caConfigMap")}
    issued = {certificate["spec"]["secretName"] for certificate in release.of_kind("Certificate")}
    for pod in release.pods:
        for kind, wanted in references(pod):
            if kind == "Secret":
                assert wanted in issued or GIVEN.match(wanted), f"{pod.name}: {wanted}"
            else:
                assert wanted in brought or (kind, wanted) in release.by_name, f"{pod.name}: {wanted}"
        assert pod.component == "test" or ("ServiceAccount", pod.spec["serviceAccountName"]) in release.by_name
        claims = {claim["metadata"]["name"] for claim in pod.owner["spec"].get("volumeClaimTemplates", [])}
        mounts = [container["volumeMounts"] for container in pod.containers]
        mounted = {mount["name"] for listed in mounts for mount in listed}
        assert mounted == claims | set(pod.volumes), f"{pod.name}: mounted and not there, or there and not mounted"
        for listed in mounts:
            assert len(listed) == len({mount["mountPath"] for mount in listed}), pod.name


def test_ports_that_are_named_exist(release: Release) -> None:
    """Services, probes, monitors, routes: every port leads to one that a container has, and the program listens on."""
    for service in release.of_kind("Service"):
        ports = selected(release, {"matchLabels": service["spec"]["selector"]}).ports
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports[port["targetPort"]], "a headless Service changes no port"
    for pod in release.pods:
        probes = [pod.container.get(name, {}) for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        probed = [probe[how]["port"] for probe in probes for how in ("httpGet", "tcpSocket") if how in probe]
        assert all(isinstance(port, int) for port in probed), f"{pod.name}: the kubelet needs a number"
        assert set(probed) <= set(pod.ports.values()), pod.name
    for monitor in release.of_kind("PodMonitor"):
        scraped = [pod for pod in release.pods if matches(monitor["spec"]["selector"], pod.labels)]
        assert {pod.role for pod in scraped if "metrics" in pod.ports} == {"router", "verifier", "drafter"}
    router = release.one("Service", "router")
    router_ports = {port["port"] for port in router["spec"]["ports"]}
    for ingress in release.of_kind("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                assert path["backend"]["service"]["name"] == router["metadata"]["name"]
                assert path["backend"]["service"]["port"]["number"] in router_ports
    for route in release.of_kind("HTTPRoute"):
        assert {backend["port"] for backend in route["spec"]["rules"][0]["backendRefs"]} <= router_ports


def test_every_program_is_probed(release: Release) -> None:
    """Startup, readiness and liveness for each, and a start may take as long as the role's model does."""
    for pod in release.pods:
        if pod.component != "test":
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(pod.container), pod.name
            startup = pod.container["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 120, pod.name
    for pod in release.programs:
        # A router is not ready without verifiers; that must not have it restarted.
        assert pod.container["startupProbe"]["httpGet"]["path"] == "/livez", pod.name
        assert pod.container["livenessProbe"]["httpGet"]["path"] == "/livez", pod.name
        assert pod.container["readinessProbe"]["httpGet"]["path"] == "/readyz", pod.name


def test_pods_have_time_to_drain(release: Release) -> None:
    """SIGKILL comes only after preStop, the program's own drain, and its stop."""
    for pod in release.programs:
        pre_stop = int(pod.container["lifecycle"]["preStop"]["exec"]["command"][1])
        stop = math.ceil(pod.config["drain_grace_s"]) + math.ceil(pod.config.get("stop_timeout_s", 0))
        assert pod.spec["terminationGracePeriodSeconds"] > pre_stop + stop, pod.name


def test_a_changed_config_replaces_the_pods(release: Release) -> None:
    """Programs read their file once: the pod carries its checksum."""
    for pod in release.pods:
        if pod.component != "test":
            assert re.fullmatch("[0-9a-f]{64}", pod.annotations["checksum/config"]), pod.name


def test_gpus_are_asked_for_where_a_program_computes_on_one(release: Release) -> None:
    """`device: cuda` and a GPU in the limits go together, always exactly one, and never in the init container."""
    for pod in release.programs:
        options = dict(part.split("=", 1) for part in pod.config.get("option", ()))
        device = pod.config.get("device") or options.get("device")
        for container in pod.containers:
            gpus = {k: v for k, v in container["resources"].get("limits", {}).items() if k.startswith("nvidia.com/")}
            assert list(gpus.values()) == ([1] if device == "cuda" and container == pod.container else []), pod.name
            if "@" not in container["image"]:
                assert container["image"].endswith(f":0.1.0-{device}" if device else ":0.1.0"), pod.name


def scaled(release: Release) -> dict[str, int]:
    """The fewest pods that an autoscaler may leave of each Deployment."""
    specs = [scaler["spec"] for scaler in release.of_kind("HorizontalPodAutoscaler", "ScaledObject")]
    return {spec["scaleTargetRef"]["name"]: spec.get("minReplicas") or spec["minReplicaCount"] for spec in specs}


def test_nobody_counts_the_pods_of_an_autoscaler(release: Release) -> None:
    """C31: no `replicas` where an autoscaler owns them, and every autoscaler has a Deployment of that name."""
    deployments = {one["metadata"]["name"]: one["spec"] for one in release.of_kind("Deployment")}
    assert {name for name, spec in deployments.items() if "replicas" not in spec} == set(scaled(release))


def test_budgets_never_keep_a_node(release: Release) -> None:
    """No budget for one pod, and none that lets no pod go."""
    fewest = {one["metadata"]["name"]: one["spec"].get("replicas") for one in release.of_kind("Deployment")}
    fewest |= scaled(release)
    budgets = {one["metadata"]["name"]: one["spec"] for one in release.of_kind("PodDisruptionBudget")}
    assert set(budgets) == {name for name, pods in fewest.items() if pods > 1}
    for name, budget in budgets.items():
        assert budget.get("maxUnavailable", 0) >= 1 or budget["minAvailable"] < fewest[name]


def test_policies_cover_every_pod(release: Release) -> None:
    """Each pod is under a policy of both directions, beside the one that denies all."""
    for pod in release.pods:
        policies = release.of_kind("NetworkPolicy")
        covering = [policy for policy in policies if matches(policy["spec"]["podSelector"], pod.labels)]
        assert len(covering) >= 2, pod.name
        for policy in covering:
            if policy["metadata"]["name"].endswith("default-deny"):
                assert not {"ingress", "egress"} & set(policy["spec"])
                assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def allows(release: Release, direction: str, pod: PodTemplate, other: PodTemplate, port: int) -> bool:
    """Whether some policy of `pod` allows a connection with `other`, a pod of the same namespace, at this port."""
    key = "from" if direction == "ingress" else "to"
    peers: list[Any] = [
        peer
        for policy in release.of_kind("NetworkPolicy")
        if matches(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get(direction) or []
        if port in {entry["port"] for entry in rule.get("ports", [])}
        for peer in rule[key]
    ]
    return any(
        "podSelector" in peer and "namespaceSelector" not in peer and matches(peer["podSelector"], other.labels)
        for peer in peers
    )


def test_policies_let_through_what_pods_need_and_no_more(release: Release) -> None:
    """Routers reach verifiers, drafters and the store; the test pod reaches routers; no other pair may speak.

    Callers in the same namespace are the operator's to say (`networkPolicy.clients`), and not looked at here.
    """
    for source in release.pods:
        for target in release.pods:
            for port in target.ports.values():
                wanted = port in CONNECTIONS.get(source.component, set())
                out = allows(release, "egress", source, target, port)
                into = allows(release, "ingress", target, source, port)
                assert (out and into) == wanted, f"{source.name} to {target.name}:{port}"


def test_secrets_come_by_reference(release: Release) -> None:
    """No Secret is rendered, and no password, token or key stands in any object."""
    assert not release.of_kind("Secret")
    for pod in release.pods:
        for variable in (one for container in pod.containers for one in container.get("env", [])):
            if re.search("(PASSWORD|TOKEN|SECRET|_KEY|STORE_URL|AUTH)$", variable["name"]):
                assert "valueFrom" in variable, f"{pod.name}: {variable['name']}"
            assert not re.search(r"://[^/$]*:[^/$]+@", variable.get("value", "")), pod.name


def test_routers_look_for_the_services_that_there_are(release: Release) -> None:
    """The addresses in a router's file are those of the headless Services, one drafter per pool."""
    config = release.pod("router").config
    pools = {pod.component.removeprefix("drafter-") for pod in release.pods if pod.role == "drafter"}
    entries = dict(entry.split("=", 1) for entry in config["drafters"])
    if not config["verifiers"][0].startswith(("k8s:///", "dns:///")):
        assert not pools
        return
    assert set(entries) == pools
    for address in (*config["verifiers"], *entries.values()):
        name, _, port = re.sub(r"^(k8s:///serving/|dns:///)", "", address).rpartition(":")
        service = release.by_name["Service", name.split(".")[0]]["spec"]
        assert service["clusterIP"] == "None"
        assert int(port) in {entry["port"] for entry in service["ports"]}


def test_store_and_router_agree(release: Release) -> None:
    """A bundled store is the one that routers are sent to, with the same password; full means refused."""
    if not release.values.get("redis", {}).get("enabled"):
        assert "redis" not in {pod.component for pod in release.pods}
        return
    env, store = release.pod("router").env, release.pod("redis")
    assert release.one("Service", "redis")["metadata"]["name"] + ".serving.svc" in env["MOOT_REDIS_URL"]["value"]
    secrets = [volume["secret"] for volume in store.volumes.values() if "secret" in volume]
    passwords = [{"name": secret["secretName"], "key": secret["items"][0]["key"]} for secret in secrets]
    assert passwords == [env[name]["valueFrom"]["secretKeyRef"] for name in ("STORE_PASSWORD",) if name in env]
    settings = release.by_name["ConfigMap", store.volumes["config"]["configMap"]["name"]]["data"][
        "redis.conf"
    ].splitlines()
    assert {"maxmemory-policy noeviction", "appendonly yes", "appendfsync everysec"} <= set(settings)
    assert ("protected-mode yes" in settings) == bool(passwords)


def test_names_fit_and_belong_to_the_release(release: Release) -> None:
    """Every object is in the release's namespace, labelled as Helm's, with a name that Kubernetes takes and no other
    of its kind has."""
    assert len(release.by_name) == len(release.objects)
    for manifest in release.objects:
        metadata = manifest["metadata"]
        assert metadata["namespace"] == "serving"
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"]), metadata["name"]
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "demo"
        assert all(len(value) <= 63 for value in metadata["labels"].values())
