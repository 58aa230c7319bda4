"""What an operator reads who gives the chart wrong values: each mistake is refused, and the message names the key."""

from __future__ import annotations

import pytest

from tests.deploy.charts import HELMS, given, refusal, render

MISTAKES = {
    # What does not work together: a sentence of the chart's own.
    "model: {}": "model.name: name the target model",
    "model: {name: a/b, source: volume}": "model.source: volume needs model.storage.existingClaim",
    "model: {name: a/b, revision: abc, source: volume, storage: {existingClaim: models}}": (
        "model.checksums and model.revision belong to model.source=hub"
    ),
    "model: {name: a/b, storage: {create: true, existingClaim: models}}": (
        "model.storage: create and existingClaim exclude each other"
    ),
    f"model: {{name: a/b, checksums: {{model.safetensors: '{'0' * 64}'}}}}": (
        "model.checksums: without model.revision the files change"
    ),
    "discovery.mode: static, verifier.enabled: false": "discovery.mode: static needs discovery.verifiers",
    "discovery: {mode: static, verifiers: [10.0.0.1:7100]}": (
        "discovery.mode: static is for verifiers and drafters outside this release"
    ),
    "discovery.verifiers: [10.0.0.1:7100]": (
        "discovery.verifiers and discovery.drafters are read with discovery.mode=static only"
    ),
    "verifier.enabled: false": "verifier.enabled: a router without verifiers serves nobody",
    "router.config.voteSoftDeadlineMs: 500": (
        "router.config.voteSoftDeadlineMs must not be above router.config.voteHardDeadlineMs"
    ),
    "router.config.voteQuorum: 2": "router.config.voteQuorum is a share",
    "router.config.maxDraftTokens: 100": (
        "router.config.maxDraftTokens must not be above verifier.config.maxDraftTokens"
    ),
    "verifier.config.maxNumBatchedTokens: 256": "verifier.config.maxNumBatchedTokens must hold",
    "verifier.config.kvMemoryFraction: 1.5": "verifier.config.kvMemoryFraction must be above 0 and at most 1",
    "drafters.suffix.kind: suffix, router.config.inProcessDrafters: [suffix:min_match=2]": (
        "drafters.suffix: router.config.inProcessDrafters or requestDrafters has a drafter of that name"
    ),
    "drafters: {true: {kind: suffix}}": "drafters.true: YAML reads y, yes, on, n, no and off as true and false",
    "drafters.pool.replicas: 2": "drafters.pool.kind: say which kind of drafter it is",
    "drafters.pool.kind: sibling": "drafters.pool.kind: sibling lives from what a request brings",
    "drafters.pool.kind: heads": "drafters.pool.kind: heads runs inside the verifier",
    "drafters.pool: {kind: neural, device: cuda}": "drafters.pool.model: kind neural needs a draft model",
    "drafters.pool: {kind: neural, model: a/b}": "drafters.pool.device: kind neural computes on cuda or cpu",
    "drafters.pool: {kind: superposed, device: cuda}": "drafters.pool.model: kind superposed needs a draft model",
    "drafters.pool: {kind: superposed, model: a/b}": "drafters.pool.device: kind superposed computes on cuda or cpu",
    "drafters.pool: {kind: suffix, device: cuda}": "drafters.pool.device: kind suffix has no model",
    "drafters.pool: {kind: suffix, model: a/b}": "drafters.pool.model: kind suffix has no model",
    "drafters.pool: {kind: neural, device: cuda, model: org/small, options: {device: cpu}}": (
        "drafters.pool.options.device: the chart sets it from drafters.pool.device"
    ),
    "drafters.pool: {kind: suffix, weightPrior: 0}": "weightPrior",
    "redis.enabled: true, externalRedis.url: redis://store:6379/0": (
        "redis.enabled and externalRedis exclude each other"
    ),
    "externalRedis: {existingSecret: store, url: redis://store:6379/0}": (
        "externalRedis: url and existingSecret exclude each other"
    ),
    "externalRedis.url: redis://:secret@store:6379/0": "externalRedis.url must hold no user or password",
    "externalRedis: {url: redis://store:6379/0, tls: {existingSecret: ca}}": (
        "externalRedis.tls: the url must begin with rediss://"
    ),
    "externalRedis: {tls: {certKey: tls.crt, existingSecret: ca}, url: rediss://store/0}": (
        "externalRedis.tls: certKey and keyKey go together"
    ),
    "router.config.storeMode: required": "router.config.storeMode: required needs redis.enabled or externalRedis",
    "externalRedis.sentinel.enabled: true": "externalRedis.sentinel needs master and nodes",
    "redis.enabled: true, externalRedis.sentinel: {enabled: true, master: m, nodes: [s:26379]}": (
        "redis.enabled and externalRedis exclude each other"
    ),
    "externalRedis.sentinel: {enabled: true, master: m, nodes: [s:26379], username: u}": (
        "externalRedis.sentinel.username needs externalRedis.sentinel.existingSecret"
    ),
    "externalRedis: {sentinel: {enabled: true, master: m, nodes: [s:26379]}, tls: {existingSecret: ca}}": (
        "externalRedis.tls: say with url or existingSecret that the server speaks TLS"
    ),
    "router.extraArgs: [--redis-sentinels=a:1]": "router.extraArgs: --redis-sentinels is set by the chart",
    "ingress: {enabled: true, hosts: [api.example.com]}, networkPolicy.clients: [{namespaceSelector: {}}]": (
        "ingress: the API would be open to everybody"
    ),
    "router.service.type: LoadBalancer, networkPolicy.clients: [{namespaceSelector: {}}]": (
        "router.service.type=LoadBalancer: the API would be open to everybody"
    ),
    "ingress: {enabled: true, hosts: [api.example.com]}, auth.existingSecret: keys": (
        "ingress: networkPolicy.clients must name who comes from outside"
    ),
    "ingress.enabled: true, auth.existingSecret: keys, networkPolicy.clients: [{namespaceSelector: {}}]": (
        "ingress.hosts: name at least one host"
    ),
    "httpRoute.enabled: true, auth.existingSecret: keys, networkPolicy.clients: [{namespaceSelector: {}}]": (
        "httpRoute.parentRefs: name at least one gateway"
    ),
    "podMonitor.enabled: true, serviceMonitor.enabled: true": "podMonitor and serviceMonitor exclude each other",
    "router.terminationGracePeriodSeconds: 20": (
        "router.terminationGracePeriodSeconds must be above preStopSeconds plus config.drainGraceS (25)"
    ),
    "verifier.resources: {limits: {nvidia.com/gpu: 1}}": (
        "verifier.resources: GPUs are asked for with device=cuda and verifier.gpu"
    ),
    "verifier.gpu.count: 2": "verifier.gpu.count: a program computes on one GPU",
    "router.autoscaling: {enabled: true, minReplicas: 9}": (
        "router.autoscaling: minReplicas must not be above maxReplicas"
    ),
    "verifier.autoscaling: {enabled: true, kind: keda}": "verifier.autoscaling.prometheusAddress: keda asks Prometheus",
    "router: {autoscaling: {enabled: true}, resources: {requests: {cpu: null}}}": (
        "router.autoscaling.metric: cpu is a percentage of resources.requests.cpu, which is missing"
    ),
    "router.replicas: 0": "router.replicas: at least one",
    "router.pdb: {minAvailable: 1, maxUnavailable: 1}": (
        "router.pdb: minAvailable and maxUnavailable exclude each other"
    ),
    "router.pdb.minAvailable: 2": "router.pdb.minAvailable must be below the number of pods",
    "verifier.strategy.rollingUpdate: {maxSurge: 0, maxUnavailable: 0}": (
        "verifier.strategy: maxSurge and maxUnavailable cannot both be 0"
    ),
    "router.extraArgs: [--port=9]": "router.extraArgs: --port is set by the chart",
    "verifier.extraArgs: [--tensor-parallel-size=2]": (
        "verifier.extraArgs: the verifier has no option --tensor-parallel-size"
    ),
    "router.extraArgs: [--api-key=abc]": "router.extraArgs: a key on a command line can be read by everybody",
    "router.extraEnv: [{name: MOOT_API_KEY, value: abc}]": "router.extraEnv: MOOT_API_KEY holds a secret",
    "router.extraVolumeMounts: [{name: x, mountPath: /tmp}]": "router.extraVolumeMounts: /tmp is mounted by the chart",
    "tls.enabled: true": "tls.existingSecrets.router: name a Secret, or let tls.certManager make it",
    "drafters.pool.kind: suffix, tls: {enabled: true, existingSecrets: {router: r, verifier: v}}": (
        "tls.existingSecrets.drafter: name a Secret"
    ),
    "tls: {enabled: true, certManager: {enabled: true}}": "tls.certManager.issuerRef.name: name the issuer",
    # What the schema says: helm names the key.
    "verifer: {}": "verifer",
    "router.config.numSpeculativeToken: 4": "numSpeculativeToken",
    "router.config.num_speculative_tokens: 4": "num_speculative_tokens",
    "router.config.vote: loudest": "/router/config/vote",
    "verifier.config.maxNumSeqs: many": "/verifier/config/maxNumSeqs",
    "router.config.verifyTimeoutS: -1": "/router/config/verifyTimeoutS",
    "verifier.device: tpu": "/verifier/device",
    "drafters.Suffix.kind: suffix": "Suffix",
    "drafters.aaaaaaaaaaaaaaaaa.kind: suffix": "aaaaaaaaaaaaaaaaa",
    "drafters.pool: {kind: suffix, replica: 2}": "replica",
    "model.name: ../../etc": "/model/name",
    "router.image.digest: latest": "/router/image/digest",
    "auth.keys: [abc]": "keys",
    "router.service.httpPort: 70000": "/router/service/httpPort",
    "router.extraArgs: [log-level=debug]": "/router/extraArgs/0",
    "model: {name: a/b, revision: abc, checksums: {model.safetensors: abc}}": "/model/checksums/model.safetensors",
}
"""Values beside the least that the chart can be given, and part of what helm then says."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_name(mistake: str) -> None:
    """No mistake of the table reaches a cluster, and the operator reads which value it was and why."""
    message = refusal(given(mistake))
    assert MISTAKES[mistake] in message.replace("'", "")
    assert "nil pointer" not in message
    assert "error calling" not in message or "fail" in message


@pytest.mark.parametrize(
    "mistake",
    [
        "redis.enabled: true, externalRedis.url: redis://store:6379/0",
        "router.config.numSpeculativeToken: 4",
        "drafters.pool: {kind: neural, device: cuda}",
    ],
)
def test_the_other_helm_says_the_same(mistake: str) -> None:
    """Sentences of the chart's, and one of the schema's, with the newer helm."""
    assert MISTAKES[mistake] in refusal(given(mistake), HELMS[1]).replace("'", "")


@pytest.mark.parametrize(
    "values",
    [
        "",
        "drafters.pool: {kind: neural, model: org/small, device: cuda}",
        "ingress: {enabled: true, hosts: [a.b]}, auth.existingSecret: keys, networkPolicy.clients: [{podSelector: {}}]",
        "ingress: {enabled: true, hosts: [a.b]}, auth.allowAnonymous: true, networkPolicy.enabled: false",
        "router.terminationGracePeriodSeconds: 26",
        "externalRedis: {url: rediss://store/0, tls: {existingSecret: ca}}",
    ],
)
def test_the_values_around_the_mistakes_are_good(values: str) -> None:
    """What the mistakes are made from is taken: it was the mistake that was refused."""
    assert render(given(values)).objects
