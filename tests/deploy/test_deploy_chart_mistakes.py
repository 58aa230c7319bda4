"""What an operator reads who gives the chart wrong values: each mistake is refused, and the message names the key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.charts import HELMS, MINIMAL, refusal, render

HOSTS = {"enabled": True, "hosts": ["api.example.com"]}
KEYS = {"existingSecret": "keys"}
CLIENTS = {"clients": [{"namespaceSelector": {}}]}
NEURAL = {"kind": "neural", "model": "org/small", "device": "cuda"}
SHA = "0" * 64


def with_role(role: str, **settings: Any) -> dict[str, Any]:
    return {**MINIMAL, role: settings}


def with_pool(**settings: Any) -> dict[str, Any]:
    return {**MINIMAL, "drafters": {"pool": settings}}


SENTINELS = {"enabled": True, "master": "m", "nodes": ["s:26379"]}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    # What does not work together: a sentence of the chart's own.
    "no model": ({}, "model.name: name the target model"),
    "volume without a claim": (
        {"model": {"name": "a/b", "source": "volume"}},
        "model.source: volume needs model.storage.existingClaim",
    ),
    "revision on a volume": (
        {"model": {"name": "a/b", "source": "volume", "revision": "abc", "storage": {"existingClaim": "models"}}},
        "model.checksums and model.revision belong to model.source=hub",
    ),
    "two claims": (
        {"model": {"name": "a/b", "storage": {"create": True, "existingClaim": "models"}}},
        "model.storage: create and existingClaim exclude each other",
    ),
    "checksums of a branch": (
        {"model": {"name": "a/b", "checksums": {"model.safetensors": SHA}}},
        "model.checksums: without model.revision the files change",
    ),
    "static without addresses": (
        {**MINIMAL, "discovery": {"mode": "static"}, "verifier": {"enabled": False}},
        "discovery.mode: static needs discovery.verifiers",
    ),
    "static, and verifiers of one's own": (
        {**MINIMAL, "discovery": {"mode": "static", "verifiers": ["10.0.0.1:7100"]}},
        "discovery.mode: static is for verifiers and drafters outside this release",
    ),
    "addresses that nobody reads": (
        {**MINIMAL, "discovery": {"verifiers": ["10.0.0.1:7100"]}},
        "discovery.verifiers and discovery.drafters are read with discovery.mode=static only",
    ),
    "no verifiers": (
        with_role("verifier", enabled=False),
        "verifier.enabled: a router without verifiers serves nobody",
    ),
    "soft deadline behind the hard one": (
        with_role("router", config={"voteSoftDeadlineMs": 500}),
        "router.config.voteSoftDeadlineMs must not be above router.config.voteHardDeadlineMs",
    ),
    "quorum of two": (with_role("router", config={"voteQuorum": 2}), "router.config.voteQuorum is a share"),
    "drafts that verifiers refuse": (
        with_role("router", config={"maxDraftTokens": 100}),
        "router.config.maxDraftTokens must not be above verifier.config.maxDraftTokens",
    ),
    "a batch too small for its parts": (
        with_role("verifier", config={"maxNumBatchedTokens": 256}),
        "verifier.config.maxNumBatchedTokens must hold",
    ),
    "more than all memory": (
        with_role("verifier", config={"kvMemoryFraction": 1.5}),
        "verifier.config.kvMemoryFraction must be above 0 and at most 1",
    ),
    "one name for two drafters": (
        {
            **MINIMAL,
            "drafters": {"suffix": {"kind": "suffix"}},
            "router": {"config": {"inProcessDrafters": ["suffix:min_match=2"]}},
        },
        "drafters.suffix: router.config.inProcessDrafters or requestDrafters has a drafter of that name",
    ),
    "a pool named yes": (
        {**MINIMAL, "drafters": {True: {"kind": "suffix"}}},
        "drafters.true: YAML reads y, yes, on, n, no and off as true and false",
    ),
    "a pool without a kind": (with_pool(replicas=2), "drafters.pool.kind: say which kind of drafter it is"),
    "a kind of the router's": (
        with_pool(kind="sibling"),
        "drafters.pool.kind: sibling lives from what a request brings",
    ),
    "a kind of the verifier's": (with_pool(kind="heads"), "drafters.pool.kind: heads runs inside the verifier"),
    "neural without a model": (
        with_pool(kind="neural", device="cuda"),
        "drafters.pool.model: kind neural needs a draft model",
    ),
    "neural on nothing": (
        with_pool(kind="neural", model="a/b"),
        "drafters.pool.device: kind neural computes on cuda or cpu",
    ),
    "superposed without a model": (
        with_pool(kind="superposed", device="cuda"),
        "drafters.pool.model: kind superposed needs a draft model",
    ),
    "superposed on nothing": (
        with_pool(kind="superposed", model="a/b"),
        "drafters.pool.device: kind superposed computes on cuda or cpu",
    ),
    "a GPU for a suffix tree": (
        with_pool(kind="suffix", device="cuda"),
        "drafters.pool.device: kind suffix has no model",
    ),
    "a model for a suffix tree": (
        with_pool(kind="suffix", model="a/b"),
        "drafters.pool.model: kind suffix has no model",
    ),
    "device twice": (
        with_pool(**NEURAL, options={"device": "cpu"}),
        "drafters.pool.options.device: the chart sets it from drafters.pool.device",
    ),
    "a prior of nothing": (
        with_pool(kind="suffix", weightPrior=0),
        "weightPrior",
    ),
    "two stores": (
        {**MINIMAL, "redis": {"enabled": True}, "externalRedis": {"url": "redis://store:6379/0"}},
        "redis.enabled and externalRedis exclude each other",
    ),
    "two addresses of a store": (
        {**MINIMAL, "externalRedis": {"url": "redis://store:6379/0", "existingSecret": "store"}},
        "externalRedis: url and existingSecret exclude each other",
    ),
    "a password among the values": (
        {**MINIMAL, "externalRedis": {"url": "redis://:secret@store:6379/0"}},
        "externalRedis.url must hold no user or password",
    ),
    "certificates for a plain connection": (
        {**MINIMAL, "externalRedis": {"url": "redis://store:6379/0", "tls": {"existingSecret": "ca"}}},
        "externalRedis.tls: the url must begin with rediss://",
    ),
    "half a key pair": (
        {
            **MINIMAL,
            "externalRedis": {"url": "rediss://store/0", "tls": {"existingSecret": "ca", "certKey": "tls.crt"}},
        },
        "externalRedis.tls: certKey and keyKey go together",
    ),
    "a store that is required and not there": (
        with_role("router", config={"storeMode": "required"}),
        "router.config.storeMode: required needs redis.enabled or externalRedis",
    ),
    "sentinels without names": (
        {**MINIMAL, "externalRedis": {"sentinel": {"enabled": True}}},
        "externalRedis.sentinel needs master and nodes",
    ),
    "sentinels of a bundled store": (
        {**MINIMAL, "redis": {"enabled": True}, "externalRedis": {"sentinel": SENTINELS}},
        "redis.enabled and externalRedis exclude each other",
    ),
    "a sentinel's user without password": (
        {**MINIMAL, "externalRedis": {"sentinel": {**SENTINELS, "username": "u"}}},
        "externalRedis.sentinel.username needs externalRedis.sentinel.existingSecret",
    ),
    "certificates for sentinels without rediss": (
        {**MINIMAL, "externalRedis": {"sentinel": SENTINELS, "tls": {"existingSecret": "ca"}}},
        "externalRedis.tls: say with url or existingSecret that the server speaks TLS",
    ),
    "sentinels as a flag": (
        with_role("router", extraArgs=["--redis-sentinels=a:1"]),
        "router.extraArgs: --redis-sentinels is set by the chart",
    ),
    "the API open to everybody": (
        {**MINIMAL, "ingress": HOSTS, "networkPolicy": CLIENTS},
        "ingress: the API would be open to everybody",
    ),
    "a load balancer open to everybody": (
        {**with_role("router", service={"type": "LoadBalancer"}), "networkPolicy": CLIENTS},
        "router.service.type=LoadBalancer: the API would be open to everybody",
    ),
    "an ingress that a policy stops": (
        {**MINIMAL, "ingress": HOSTS, "auth": KEYS},
        "ingress: networkPolicy.clients must name who comes from outside",
    ),
    "an ingress for no host": (
        {**MINIMAL, "ingress": {"enabled": True}, "auth": KEYS, "networkPolicy": CLIENTS},
        "ingress.hosts: name at least one host",
    ),
    "a route of no gateway": (
        {**MINIMAL, "httpRoute": {"enabled": True}, "auth": KEYS, "networkPolicy": CLIENTS},
        "httpRoute.parentRefs: name at least one gateway",
    ),
    "everything scraped twice": (
        {**MINIMAL, "podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
        "podMonitor and serviceMonitor exclude each other",
    ),
    "requests cut while draining": (
        with_role("router", terminationGracePeriodSeconds=20),
        "router.terminationGracePeriodSeconds must be above preStopSeconds plus config.drainGraceS (25)",
    ),
    "GPUs among the resources": (
        with_role("verifier", resources={"limits": {"nvidia.com/gpu": 1}}),
        "verifier.resources: GPUs are asked for with device=cuda and verifier.gpu",
    ),
    "two GPUs": (
        with_role("verifier", gpu={"count": 2}),
        "verifier.gpu.count: a program computes on one GPU",
    ),
    "more at least than at most": (
        with_role("router", autoscaling={"enabled": True, "minReplicas": 9}),
        "router.autoscaling: minReplicas must not be above maxReplicas",
    ),
    "keda without Prometheus": (
        with_role("verifier", autoscaling={"enabled": True, "kind": "keda"}),
        "verifier.autoscaling.prometheusAddress: keda asks Prometheus",
    ),
    "a share of nothing": (
        with_role("router", autoscaling={"enabled": True}, resources={"requests": {"cpu": None}}),
        "router.autoscaling.metric: cpu is a percentage of resources.requests.cpu, which is missing",
    ),
    "no routers": (with_role("router", replicas=0), "router.replicas: at least one"),
    "two budgets": (
        with_role("router", pdb={"minAvailable": 1, "maxUnavailable": 1}),
        "router.pdb: minAvailable and maxUnavailable exclude each other",
    ),
    "a budget that keeps every node": (
        with_role("router", pdb={"minAvailable": 2}),
        "router.pdb.minAvailable must be below the number of pods",
    ),
    "a strategy that replaces nothing": (
        with_role("verifier", strategy={"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}),
        "verifier.strategy: maxSurge and maxUnavailable cannot both be 0",
    ),
    "a flag that is the chart's": (
        with_role("router", extraArgs=["--port=9"]),
        "router.extraArgs: --port is set by the chart",
    ),
    "a flag that is nobody's": (
        with_role("verifier", extraArgs=["--tensor-parallel-size=2"]),
        "verifier.extraArgs: the verifier has no option --tensor-parallel-size",
    ),
    "a key on a command line": (
        with_role("router", extraArgs=["--api-key=abc"]),
        "router.extraArgs: a key on a command line can be read by everybody",
    ),
    "a secret among the variables": (
        with_role("router", extraEnv=[{"name": "MOOT_API_KEY", "value": "abc"}]),
        "router.extraEnv: MOOT_API_KEY holds a secret",
    ),
    "a mount over the chart's": (
        with_role("router", extraVolumeMounts=[{"name": "x", "mountPath": "/tmp"}]),
        "router.extraVolumeMounts: /tmp is mounted by the chart",
    ),
    "TLS without certificates": (
        {**MINIMAL, "tls": {"enabled": True}},
        "tls.existingSecrets.router: name a Secret, or let tls.certManager make it",
    ),
    "TLS without the drafters' certificate": (
        {**with_pool(kind="suffix"), "tls": {"enabled": True, "existingSecrets": {"router": "r", "verifier": "v"}}},
        "tls.existingSecrets.drafter: name a Secret",
    ),
    "certificates of nobody": (
        {**MINIMAL, "tls": {"enabled": True, "certManager": {"enabled": True}}},
        "tls.certManager.issuerRef.name: name the issuer",
    ),
    # What the schema says: helm names the key.
    "a misspelt key": ({**MINIMAL, "verifer": {}}, "verifer"),
    "a misspelt option": (with_role("router", config={"numSpeculativeToken": 4}), "numSpeculativeToken"),
    "a snake-case option": (with_role("router", config={"num_speculative_tokens": 4}), "num_speculative_tokens"),
    "an unknown vote": (with_role("router", config={"vote": "loudest"}), "/router/config/vote"),
    "text for a number": (with_role("verifier", config={"maxNumSeqs": "many"}), "/verifier/config/maxNumSeqs"),
    "a negative wait": (with_role("router", config={"verifyTimeoutS": -1}), "/router/config/verifyTimeoutS"),
    "an unknown device": (with_role("verifier", device="tpu"), "/verifier/device"),
    "a pool name with a capital": ({**MINIMAL, "drafters": {"Suffix": {"kind": "suffix"}}}, "Suffix"),
    "a pool name too long": ({**MINIMAL, "drafters": {"a" * 17: {"kind": "suffix"}}}, "a" * 17),
    "a misspelt key of a pool": (with_pool(kind="suffix", replica=2), "replica"),
    "a model path that climbs": ({"model": {"name": "../../etc"}}, "/model/name"),
    "a digest that is none": (with_role("router", image={"digest": "latest"}), "/router/image/digest"),
    "a secret by value": ({**MINIMAL, "auth": {"keys": ["abc"]}}, "keys"),
    "a port that is none": (with_role("router", service={"httpPort": 70000}), "/router/service/httpPort"),
    "a flag without dashes": (with_role("router", extraArgs=["log-level=debug"]), "/router/extraArgs/0"),
    "a checksum that is none": (
        {"model": {"name": "a/b", "revision": "abc", "checksums": {"model.safetensors": "abc"}}},
        "/model/checksums/model.safetensors",
    ),
}
"""Values, and part of what helm then says."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_name(mistake: str) -> None:
    """No mistake of the table reaches a cluster, and the operator reads which value it was and why."""
    values, expected = MISTAKES[mistake]
    message = refusal(values)
    assert expected in message.replace("'", "")
    assert "nil pointer" not in message
    assert "error calling" not in message or "fail" in message


def test_the_other_helm_says_the_same() -> None:
    """A sentence of the chart's, and one of the schema's, with the newer helm."""
    for mistake in ("two stores", "a misspelt option", "neural without a model"):
        values, expected = MISTAKES[mistake]
        assert expected in refusal(values, HELMS[1]).replace("'", "")


def test_the_values_around_the_mistakes_are_good() -> None:
    """What the mistakes are made from is taken: it was the mistake that was refused."""
    for values in (
        MINIMAL,
        with_pool(**NEURAL),
        {**MINIMAL, "ingress": HOSTS, "auth": KEYS, "networkPolicy": CLIENTS},
        {**MINIMAL, "ingress": HOSTS, "auth": {"allowAnonymous": True}, "networkPolicy": {"enabled": False}},
        with_role("router", terminationGracePeriodSeconds=26),
        {**MINIMAL, "externalRedis": {"url": "rediss://store/0", "tls": {"existingSecret": "ca"}}},
    ):
        assert render(values)
