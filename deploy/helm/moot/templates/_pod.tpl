{{/* The parts of a pod that all roles have in common. */}}

{{/* Takes root, component, role, checksum (text that the pod must be replaced for), scrape (numeric port). */}}
{{- define "moot.podMetadata" -}}
labels:
  {{- include "moot.labels" . | nindent 2 }}
  {{- with .role.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ .checksum | sha256sum }}
  {{- with mergeOverwrite (dict) (default dict .root.Values.commonAnnotations) (default dict .role.podAnnotations) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Pod-level fields up to the containers. Takes root, component, role, grace, token (whether the API is talked to). */}}
{{- define "moot.podSpec" -}}
serviceAccountName: {{ include "moot.serviceAccountName" . }}
automountServiceAccountToken: {{ .token | default false }}
{{- /* A Service named moot would set MOOT_PORT in every pod, which is an option of the programs. */}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- toYaml .role.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .role.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .role.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := default list .role.tolerations }}
{{- if and (eq (.role.device | default "none") "cuda") .role.gpu.tolerate }}
{{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if .role.affinity }}
  {{- toYaml .role.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "moot.selectorLabels" . | nindent 14 }}
  {{- end }}
{{- with .role.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml . | nindent 4 }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels:
        {{- include "moot.selectorLabels" $ | nindent 8 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Probes on the plaintext port that answers whatever the program's own threads do. Takes role, port. */}}
{{- define "moot.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: {{ .role.probes.timeoutSeconds }}
  failureThreshold: {{ max 1 (div (add (int .role.probes.startupSeconds) 4) 5) }}
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: {{ .role.probes.readinessPeriodSeconds }}
  timeoutSeconds: {{ .role.probes.timeoutSeconds }}
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: {{ .port }}}
  periodSeconds: {{ .role.probes.livenessPeriodSeconds }}
  timeoutSeconds: {{ .role.probes.timeoutSeconds }}
  failureThreshold: 3
{{- if gt (int .role.preStopSeconds) 0 }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ int .role.preStopSeconds | toString | quote }}]
{{- end }}
{{- end -}}

{{/* Takes role. */}}
{{- define "moot.resources" -}}
{{- $resources := deepCopy (default dict .role.resources) -}}
{{- if eq (.role.device | default "none") "cuda" -}}
{{- $_ := set $resources "limits" (mergeOverwrite (dict .role.gpu.resourceName (int .role.gpu.count)) (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Environment of every program: a home that can be written to, no look at a hub while serving. Takes root, role. */}}
{{- define "moot.env" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /tmp/hub}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- with .role.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes root, role, component, models (whether the pod reads any). */}}
{{- define "moot.volumes" -}}
- name: config
  configMap:
    name: {{ include "moot.fullname" .root }}-{{ .component }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .role.tmpSizeLimit }}
{{- if .models }}
{{ include "moot.modelVolumes" .root }}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  {{- if .root.Values.tls.caConfigMap }}
  projected:
    sources:
      - secret:
          name: {{ include "moot.tlsSecret" . }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
      - configMap:
          name: {{ .root.Values.tls.caConfigMap }}
          items: [{key: ca.crt, path: ca.crt}]
  {{- else }}
  secret:
    secretName: {{ include "moot.tlsSecret" . }}
  {{- end }}
{{- end }}
{{- with .role.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes root, role, models. */}}
{{- define "moot.volumeMounts" -}}
- {name: config, mountPath: /etc/moot/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .models }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/moot/tls, readOnly: true}
{{- end }}
{{- with .role.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The roles that this release has pods of, separated by commas. */}}
{{- define "moot.tlsRoles" -}}
router
{{- if .Values.verifier.enabled }},verifier{{ end }}
{{- if .Values.drafters }},drafter{{ end }}
{{- end -}}

{{/* What the ports between pods speak, for meshes and load balancers. */}}
{{- define "moot.peerProtocol" -}}
{{ ternary "https" "kubernetes.io/h2c" .Values.tls.enabled }}
{{- end -}}

{{/* Takes root, tlsRole (router, verifier or drafter). */}}
{{- define "moot.tlsSecret" -}}
{{- if .root.Values.tls.certManager.enabled -}}
{{- include "moot.fullname" .root }}-{{ .tlsRole }}-tls
{{- else -}}
{{- index .root.Values.tls.existingSecrets .tlsRole -}}
{{- end -}}
{{- end -}}
