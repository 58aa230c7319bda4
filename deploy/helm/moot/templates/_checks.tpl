{{/* What no schema can say: values that do not work together. Each ends the rendering with one sentence that begins with the key. */}}

{{/* Takes root, program, option, key. The chart is ahead of the programs where they have no such option yet. */}}
{{- define "moot.needs" -}}
{{- $known := index (.root.Files.Get "files/options.json" | fromJson) .program -}}
{{- if not (has .option $known) -}}
{{- fail (printf "%s: the %s of this version has no option %s" .key .program .option) -}}
{{- end -}}
{{- end -}}

{{- define "moot.checks" -}}
{{- include "moot.checkModel" . -}}
{{- include "moot.checkPeers" . -}}
{{- include "moot.checkStore" . -}}
{{- include "moot.checkExposure" . -}}
{{- include "moot.checkTls" . -}}
{{- $root := . -}}
{{- include "moot.checkRole" (dict "root" . "key" "router" "program" "router" "role" (include "moot.router" . | fromYaml)) -}}
{{- if .Values.verifier.enabled -}}
{{- include "moot.checkRole" (dict "root" . "key" "verifier" "program" "verifier" "role" (include "moot.verifier" . | fromYaml)) -}}
{{- end -}}
{{- range $pool, $_ := .Values.drafters -}}
{{- $role := include "moot.drafter" (dict "root" $root "pool" $pool) | fromYaml -}}
{{- include "moot.checkRole" (dict "root" $root "key" (printf "drafters.%s" $pool) "program" "drafter" "role" $role) -}}
{{- include "moot.checkPool" (dict "root" $root "pool" $pool "role" $role) -}}
{{- end -}}
{{- end -}}

{{- define "moot.checkModel" -}}
{{- $model := .Values.model -}}
{{- if not $model.name -}}
{{- fail "model.name: name the target model, a hub id such as org/model, or with model.source=volume a folder on the volume" -}}
{{- end -}}
{{- if eq $model.source "volume" -}}
{{- if not $model.storage.existingClaim -}}
{{- fail "model.source: volume needs model.storage.existingClaim, the claim that the model lies on" -}}
{{- end -}}
{{- if or $model.checksums $model.revision -}}
{{- fail "model.checksums and model.revision belong to model.source=hub: what lies on a volume is taken as it is" -}}
{{- end -}}
{{- end -}}
{{- if and $model.storage.create $model.storage.existingClaim -}}
{{- fail "model.storage: create and existingClaim exclude each other" -}}
{{- end -}}
{{- if and $model.checksums (not $model.revision) -}}
{{- fail "model.checksums: without model.revision the files change whenever the hub's branch moves" -}}
{{- end -}}
{{- end -}}

{{- define "moot.checkPeers" -}}
{{- $discovery := .Values.discovery -}}
{{- if eq $discovery.mode "static" -}}
{{- if not $discovery.verifiers -}}
{{- fail "discovery.mode: static needs discovery.verifiers, at least one host:port" -}}
{{- end -}}
{{- if or .Values.verifier.enabled .Values.drafters -}}
{{- fail "discovery.mode: static is for verifiers and drafters outside this release: set verifier.enabled=false, and no drafters" -}}
{{- end -}}
{{- else -}}
{{- if or $discovery.verifiers $discovery.drafters -}}
{{- fail "discovery.verifiers and discovery.drafters are read with discovery.mode=static only" -}}
{{- end -}}
{{- if not .Values.verifier.enabled -}}
{{- fail "verifier.enabled: a router without verifiers serves nobody; name others with discovery.mode=static and discovery.verifiers" -}}
{{- end -}}
{{- end -}}
{{- $router := .Values.router.config -}}
{{- if gt (float64 $router.voteSoftDeadlineMs) (float64 $router.voteHardDeadlineMs) -}}
{{- fail "router.config.voteSoftDeadlineMs must not be above router.config.voteHardDeadlineMs" -}}
{{- end -}}
{{- if gt (float64 $router.voteQuorum) 1.0 -}}
{{- fail "router.config.voteQuorum is a share of the drafters, 0 to 1" -}}
{{- end -}}
{{- if .Values.verifier.enabled -}}
{{- $verifier := .Values.verifier.config -}}
{{- if gt (int $router.maxDraftTokens) (int $verifier.maxDraftTokens) -}}
{{- fail "router.config.maxDraftTokens must not be above verifier.config.maxDraftTokens: longer drafts would be refused" -}}
{{- end -}}
{{- if lt (int $verifier.maxNumBatchedTokens) (int (add $verifier.prefillChunkTokens $verifier.maxDraftTokens 1)) -}}
{{- fail "verifier.config.maxNumBatchedTokens must hold prefillChunkTokens, maxDraftTokens and one more" -}}
{{- end -}}
{{- if or (le (float64 $verifier.kvMemoryFraction) 0.0) (gt (float64 $verifier.kvMemoryFraction) 1.0) -}}
{{- fail "verifier.config.kvMemoryFraction must be above 0 and at most 1" -}}
{{- end -}}
{{- end -}}
{{- $ids := list -}}
{{- range concat $router.inProcessDrafters $router.requestDrafters -}}
{{- $ids = append $ids (splitList "=" (splitList ":" . | first) | first) -}}
{{- end -}}
{{- range $pool, $_ := .Values.drafters -}}
{{- if has $pool $ids -}}
{{- fail (printf "drafters.%s: router.config.inProcessDrafters or requestDrafters has a drafter of that name: call one of them otherwise" $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "moot.checkPool" -}}
{{- $key := printf "drafters.%s" .pool -}}
{{- if has .pool (list "true" "false" "null") -}}
{{- fail (printf "%s: YAML reads y, yes, on, n, no and off as true and false: put the pool's name in quotes, or call it otherwise" $key) -}}
{{- end -}}
{{- $role := .role -}}
{{- if not $role.kind -}}
{{- fail (printf "%s.kind: say which kind of drafter it is, suffix or neural for instance" $key) -}}
{{- end -}}
{{- if has $role.kind (list "prediction" "sibling") -}}
{{- fail (printf "%s.kind: %s lives from what a request brings; the router runs it itself (router.config.requestDrafters)" $key $role.kind) -}}
{{- end -}}
{{- if has $role.kind (list "heads" "self" "lookahead") -}}
{{- fail (printf "%s.kind: %s runs inside the verifier (verifier.config.drafters)" $key $role.kind) -}}
{{- end -}}
{{- if has $role.kind (list "neural" "superposed") -}}
{{- if not $role.model -}}
{{- fail (printf "%s.model: kind %s needs a draft model" $key $role.kind) -}}
{{- end -}}
{{- if eq $role.device "none" -}}
{{- fail (printf "%s.device: kind %s computes on cuda or cpu" $key $role.kind) -}}
{{- end -}}
{{- end -}}
{{- if and (has $role.kind (list "suffix" "ngram" "prompt_lookup" "recycling")) (ne $role.device "none") -}}
{{- fail (printf "%s.device: kind %s has no model to run on %s" $key $role.kind $role.device) -}}
{{- end -}}
{{- if and (has $role.kind (list "suffix" "ngram" "prompt_lookup" "recycling")) $role.model -}}
{{- fail (printf "%s.model: kind %s has no model; what it was trained on goes into %s.options" $key $role.kind $key) -}}
{{- end -}}
{{- if and $role.modelChecksums (not $role.modelRevision) -}}
{{- fail (printf "%s.modelChecksums: without modelRevision the files change whenever the hub's branch moves" $key) -}}
{{- end -}}
{{- if hasKey $role.options "device" -}}
{{- fail (printf "%s.options.device: the chart sets it from %s.device" $key $key) -}}
{{- end -}}
{{- if $role.weightPrior -}}
{{- include "moot.needs" (dict "root" .root "program" "router" "option" "drafter_priors" "key" (printf "%s.weightPrior" $key)) -}}
{{- end -}}
{{- end -}}

{{- define "moot.checkStore" -}}
{{- $external := .Values.externalRedis -}}
{{- $has := or $external.url $external.existingSecret $external.sentinel.enabled -}}
{{- if and .Values.redis.enabled $has -}}
{{- fail "redis.enabled and externalRedis exclude each other: records have one place" -}}
{{- end -}}
{{- if and $external.url $external.existingSecret -}}
{{- fail "externalRedis: url and existingSecret exclude each other" -}}
{{- end -}}
{{- if contains "@" $external.url -}}
{{- fail "externalRedis.url must hold no user or password: put the whole URL into a Secret and name it in externalRedis.existingSecret" -}}
{{- end -}}
{{- if and $external.url $external.tls.existingSecret (not (hasPrefix "rediss://" $external.url)) -}}
{{- fail "externalRedis.tls: the url must begin with rediss://" -}}
{{- end -}}
{{- if ne (empty $external.tls.certKey) (empty $external.tls.keyKey) -}}
{{- fail "externalRedis.tls: certKey and keyKey go together" -}}
{{- end -}}
{{- if and (eq .Values.router.config.storeMode "required") (not .Values.redis.enabled) (not $has) -}}
{{- fail "router.config.storeMode: required needs redis.enabled or externalRedis" -}}
{{- end -}}
{{- if $external.sentinel.enabled -}}
{{- if or (not $external.sentinel.master) (not $external.sentinel.nodes) -}}
{{- fail "externalRedis.sentinel needs master and nodes" -}}
{{- end -}}
{{- if and $external.sentinel.username (not $external.sentinel.existingSecret) -}}
{{- fail "externalRedis.sentinel.username needs externalRedis.sentinel.existingSecret, with the password" -}}
{{- end -}}
{{- if and $external.tls.existingSecret (not $external.url) (not $external.existingSecret) -}}
{{- fail "externalRedis.tls: say with url or existingSecret that the server speaks TLS: rediss://, then whatever host" -}}
{{- end -}}
{{- include "moot.needs" (dict "root" . "program" "router" "option" "redis_sentinels" "key" "externalRedis.sentinel.enabled") -}}
{{- end -}}
{{- end -}}

{{- define "moot.checkExposure" -}}
{{- $open := list -}}
{{- if .Values.ingress.enabled -}}{{- $open = append $open "ingress" -}}{{- end -}}
{{- if .Values.httpRoute.enabled -}}{{- $open = append $open "httpRoute" -}}{{- end -}}
{{- if ne .Values.router.service.type "ClusterIP" -}}{{- $open = append $open (printf "router.service.type=%s" .Values.router.service.type) -}}{{- end -}}
{{- if $open -}}
{{- if not (or .Values.auth.existingSecret .Values.auth.allowAnonymous) -}}
{{- fail (printf "%s: the API would be open to everybody: name a Secret of key hashes in auth.existingSecret, or set auth.allowAnonymous=true" (first $open)) -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.clients) -}}
{{- fail (printf "%s: networkPolicy.clients must name who comes from outside, for instance the namespace of the ingress controller" (first $open)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.hosts: name at least one host" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name at least one gateway" -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{- fail "podMonitor and serviceMonitor exclude each other: every sample would count twice" -}}
{{- end -}}
{{- if and .Values.prometheusRule.enabled (not (.Files.Glob "files/rules/*.yaml")) -}}
{{- fail "prometheusRule.enabled: this chart carries no rules" -}}
{{- end -}}
{{- if and .Values.grafanaDashboards.enabled (not (.Files.Glob "files/dashboards/*.json")) -}}
{{- fail "grafanaDashboards.enabled: this chart carries no dashboards" -}}
{{- end -}}
{{- end -}}

{{- define "moot.checkTls" -}}
{{- $tls := .Values.tls -}}
{{- if $tls.enabled -}}
{{- range $program := include "moot.tlsRoles" . | splitList "," -}}
{{- if and (not $tls.certManager.enabled) (not (index $tls.existingSecrets $program)) -}}
{{- fail (printf "tls.existingSecrets.%s: name a Secret, or let tls.certManager make it" $program) -}}
{{- end -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name: name the issuer" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes root, key, program, role: what holds for every role. */}}
{{- define "moot.checkRole" -}}
{{- $key := .key -}}
{{- $role := .role -}}
{{- $floor := add (int $role.preStopSeconds) (ceil $role.config.drainGraceS) -}}
{{- if and $role.terminationGracePeriodSeconds (le (int $role.terminationGracePeriodSeconds) (int $floor)) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds must be above preStopSeconds plus config.drainGraceS (%d): requests would be cut" $key (int $floor)) -}}
{{- end -}}
{{- $device := $role.device | default "none" -}}
{{- $asked := false -}}
{{- range $name, $_ := mergeOverwrite (dict) (default dict $role.resources.limits) (default dict $role.resources.requests) -}}
{{- if or (eq $name $role.gpu.resourceName) (contains "nvidia.com/" $name) -}}{{- $asked = true -}}{{- end -}}
{{- end -}}
{{- if $asked -}}
{{- fail (printf "%s.resources: GPUs are asked for with device=cuda and %s.gpu, not here" $key $key) -}}
{{- end -}}
{{- if and (eq $device "cuda") (ne (int $role.gpu.count) 1) (not $role.resources.claims) -}}
{{- fail (printf "%s.gpu.count: a program computes on one GPU; more of them are more replicas" $key) -}}
{{- end -}}
{{- $auto := $role.autoscaling -}}
{{- if $auto.enabled -}}
{{- if gt (int $auto.minReplicas) (int $auto.maxReplicas) -}}
{{- fail (printf "%s.autoscaling: minReplicas must not be above maxReplicas" $key) -}}
{{- end -}}
{{- if and (eq $auto.kind "keda") (not $auto.prometheusAddress) -}}
{{- fail (printf "%s.autoscaling.prometheusAddress: keda asks Prometheus: say where it is" $key) -}}
{{- end -}}
{{- if and (eq $auto.kind "keda") (eq $auto.metric "cpu") -}}
{{- fail (printf "%s.autoscaling.metric: cpu is for kind hpa; keda wants a metric of Prometheus" $key) -}}
{{- end -}}
{{- if and (eq $auto.metric "cpu") (not (dig "requests" "cpu" "" $role.resources)) -}}
{{- fail (printf "%s.autoscaling.metric: cpu is a percentage of resources.requests.cpu, which is missing" $key) -}}
{{- end -}}
{{- else if and (eq (int $role.replicas) 0) (ne .program "drafter") -}}
{{- fail (printf "%s.replicas: at least one" $key) -}}
{{- end -}}
{{- if not (or (kindIs "invalid" $role.pdb.minAvailable) (kindIs "invalid" $role.pdb.maxUnavailable)) -}}
{{- fail (printf "%s.pdb: minAvailable and maxUnavailable exclude each other" $key) -}}
{{- end -}}
{{- if kindIs "float64" $role.pdb.minAvailable -}}
{{- if and $role.pdb.enabled (ge (int $role.pdb.minAvailable) (include "moot.minReplicas" . | int)) (gt (include "moot.minReplicas" . | int) 1) -}}
{{- fail (printf "%s.pdb.minAvailable must be below the number of pods: no node could ever be drained" $key) -}}
{{- end -}}
{{- end -}}
{{- $rolling := dig "rollingUpdate" dict $role.strategy -}}
{{- if and (ne $role.strategy.type "Recreate") (eq (dig "maxSurge" 1 $rolling | toString) "0") (eq (dig "maxUnavailable" 1 $rolling | toString) "0") -}}
{{- fail (printf "%s.strategy: maxSurge and maxUnavailable cannot both be 0: nothing could be replaced" $key) -}}
{{- end -}}
{{- $known := index (.root.Files.Get "files/options.json" | fromJson) .program -}}
{{- $owned := list "host" "port" "grpc_port" "metrics_port" "model" "kind" "drafter_id" "verifiers" "ready_file" "api_key" "redis_url" "redis_sentinels" "redis_sentinel_master" "redis_sentinel_username" "redis_sentinel_password" "device" "config" -}}
{{- range $role.extraArgs -}}
{{- $option := splitList "=" (trimPrefix "--" .) | first | replace "-" "_" -}}
{{- if eq $option "api_key" -}}
{{- fail (printf "%s.extraArgs: a key on a command line can be read by everybody who may list pods: use auth.existingSecret" $key) -}}
{{- end -}}
{{- if or (has $option $owned) (and (eq $option "drafters") (eq $.program "router")) -}}
{{- fail (printf "%s.extraArgs: --%s is set by the chart" $key (replace "_" "-" $option)) -}}
{{- end -}}
{{- if not (has $option $known) -}}
{{- fail (printf "%s.extraArgs: the %s has no option --%s" $key $.program (replace "_" "-" $option)) -}}
{{- end -}}
{{- end -}}
{{- range $role.extraEnv -}}
{{- if and .value (regexMatch "(?i)(TOKEN|PASSWORD|SECRET|API_KEY|REDIS_URL)$" .name) -}}
{{- fail (printf "%s.extraEnv: %s holds a secret: take it from one with valueFrom.secretKeyRef" $key .name) -}}
{{- end -}}
{{- end -}}
{{- range $role.extraVolumeMounts -}}
{{- if has .mountPath (list "/tmp" "/models" "/etc/moot/config") -}}
{{- fail (printf "%s.extraVolumeMounts: %s is mounted by the chart" $key .mountPath) -}}
{{- end -}}
{{- end -}}
{{- end -}}
