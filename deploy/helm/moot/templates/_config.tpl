{{/* The YAML files that the services read with --config. Keys of values are camelCase, theirs are snake_case. */}}

{{/* Takes a map of options; leaves out what is not set. */}}
{{- define "moot.options" -}}
{{- $out := dict -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $out (snakecase $key) $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $out -}}
{{- end -}}

{{/* Where the router finds the pods of a Service. Takes root, service, port. */}}
{{- define "moot.peers" -}}
{{- if eq .root.Values.discovery.mode "dns" -}}
dns:///{{ .service }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}:{{ .port }}
{{- else -}}
k8s:///{{ .root.Release.Namespace }}/{{ .service }}:{{ .port }}
{{- end -}}
{{- end -}}

{{/* What stands in every role's file. */}}
{{- define "moot.commonConfig" -}}
host: {{ .Values.listenAddress | quote }}
{{ include "moot.options" .Values.link }}
{{- if .Values.tls.enabled }}
tls_cert_file: /etc/moot/tls/tls.crt
tls_key_file: /etc/moot/tls/tls.key
tls_ca_file: /etc/moot/tls/ca.crt
{{- end }}
{{- end -}}

{{- define "moot.routerConfig" -}}
{{- $root := . -}}
{{- $role := include "moot.router" . | fromYaml -}}
{{- $full := include "moot.fullname" . -}}
{{ include "moot.commonConfig" . }}
port: 8000
grpc_port: 8001
metrics_port: 8002
model: {{ include "moot.targetFolder" (dict "root" . "weights" false) | quote }}
served_model_name: {{ .Values.model.servedNames | default (list (base .Values.model.name)) | toJson }}
{{- if eq .Values.discovery.mode "static" }}
verifiers: {{ .Values.discovery.verifiers | toJson }}
{{- $entries := list }}
{{- range $id, $addresses := .Values.discovery.drafters }}
{{- $entries = append $entries (printf "%s=%s" $id (join "|" $addresses)) }}
{{- end }}
drafters: {{ $entries | toJson }}
{{- else }}
verifiers: {{ list (include "moot.peers" (dict "root" . "service" (printf "%s-verifier" $full) "port" 7100)) | toJson }}
{{- $entries := list }}
{{- range $pool, $_ := .Values.drafters }}
{{- $entries = append $entries (printf "%s=%s" $pool (include "moot.peers" (dict "root" $root "service" (printf "%s-drafter-%s" $full $pool) "port" 7200))) }}
{{- end }}
drafters: {{ $entries | toJson }}
{{- end }}
{{- $priors := list }}
{{- range $pool, $_ := .Values.drafters }}
{{- with (include "moot.drafter" (dict "root" $root "pool" $pool) | fromYaml).weightPrior }}
{{- $priors = append $priors (printf "%s=%v" $pool .) }}
{{- end }}
{{- end }}
{{- with $priors }}
drafter_priors: {{ toJson . }}
{{- end }}
{{- if .Values.auth.existingSecret }}
api_keys_file: /etc/moot/auth/{{ .Values.auth.existingSecretKey }}
{{- end }}
store_prefix: {{ .Release.Name }}
{{- if .Values.externalRedis.sentinel.enabled }}
redis_sentinels: {{ .Values.externalRedis.sentinel.nodes | toJson }}
redis_sentinel_master: {{ .Values.externalRedis.sentinel.master | quote }}
{{- with .Values.externalRedis.sentinel.username }}
redis_sentinel_username: {{ . | quote }}
{{- end }}
{{- end }}
{{ include "moot.options" $role.config }}
{{- end -}}

{{- define "moot.verifierConfig" -}}
{{- $role := include "moot.verifier" . | fromYaml -}}
{{ include "moot.commonConfig" . }}
port: 7100
metrics_port: 7101
model: {{ include "moot.targetFolder" (dict "root" . "weights" true) | quote }}
device: {{ $role.device }}
{{ include "moot.options" $role.config }}
{{- end -}}

{{/* Takes root, pool. */}}
{{- define "moot.drafterConfig" -}}
{{- $role := include "moot.drafter" . | fromYaml -}}
{{ include "moot.commonConfig" .root }}
port: 7200
metrics_port: 7201
kind: {{ $role.kind }}
drafter_id: {{ .pool | quote }}
{{- $options := dict }}
{{- if $role.model }}
model: {{ include "moot.drafterFolder" (dict "root" .root "role" $role) | quote }}
{{- if ne $role.device "none" }}
{{- $_ := set $options "device" $role.device }}
{{- end }}
{{- else }}
tokenizer: {{ include "moot.targetFolder" (dict "root" .root "weights" false) | quote }}
{{- end }}
{{- $pairs := list }}
{{- range $key, $value := mergeOverwrite $options (default dict $role.options) }}
{{- $pairs = append $pairs (printf "%s=%v" $key $value) }}
{{- end }}
{{- with $pairs }}
option: {{ toJson . }}
{{- end }}
{{ include "moot.options" $role.config }}
{{- end -}}
