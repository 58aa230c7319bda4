{{/* Where models lie in a pod, and the init container that fetches and checks them.

Of a hub: /models/KIND/REVISION/NAME, KIND is `whole` or `tokenizer` (all but the weights), so that on a shared volume a
router's fetch is never taken for a whole model, nor one revision for another. On a volume: where the operator put them. */}}

{{/* Takes root, name, revision, weights. */}}
{{- define "moot.folder" -}}
{{- if eq .root.Values.model.source "volume" -}}
/models/{{ .name | trimPrefix "/" }}
{{- else -}}
/models/{{ ternary "whole" "tokenizer" .weights }}/{{ .revision | default "main" }}/{{ base .name }}
{{- end -}}
{{- end -}}

{{/* Takes root, weights. */}}
{{- define "moot.targetFolder" -}}
{{- include "moot.folder" (dict "root" .root "name" .root.Values.model.name "revision" .root.Values.model.revision "weights" .weights) -}}
{{- end -}}

{{/* Takes root, role (of a pool). */}}
{{- define "moot.drafterFolder" -}}
{{- if hasPrefix "shipped@" .role.model -}}
{{- .role.model -}}
{{- else -}}
{{- include "moot.folder" (dict "root" .root "name" .role.model "revision" .role.modelRevision "weights" true) -}}
{{- end -}}
{{- end -}}

{{- define "moot.claimName" -}}
{{- if .Values.model.storage.existingClaim -}}
{{- .Values.model.storage.existingClaim -}}
{{- else if .Values.model.storage.create -}}
{{- include "moot.fullname" . }}-models
{{- end -}}
{{- end -}}

{{- define "moot.modelVolumes" -}}
- name: models
  {{- if include "moot.claimName" . }}
  persistentVolumeClaim:
    claimName: {{ include "moot.claimName" . }}
    {{- if eq .Values.model.source "volume" }}
    readOnly: true
    {{- end }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.model.storage.sizeLimit }}
  {{- end }}
{{- if eq .Values.model.source "hub" }}
- name: fetch
  configMap:
    name: {{ include "moot.fullname" . }}-fetch
{{- with .Values.model.hub.existingSecret }}
- name: hub
  secret:
    secretName: {{ . }}
    items:
      - {key: {{ $.Values.model.hub.existingSecretKey }}, path: token}
{{- end }}
{{- end }}
{{- end -}}

{{/* Takes root, role, image, name, revision, checksums, weights. Nothing when the models are on the volume already. */}}
{{- define "moot.fetchContainer" -}}
{{- if eq .root.Values.model.source "hub" }}
- name: fetch-model
  image: {{ .image }}
  imagePullPolicy: {{ .role.image.pullPolicy }}
  command: [python, /etc/moot/fetch/fetch_model.py]
  args:
    - --repository={{ .name }}
    - --folder={{ include "moot.folder" . }}
    {{- with .revision }}
    - --revision={{ . }}
    {{- end }}
    - --timeout-s={{ int .root.Values.model.hub.timeoutSeconds }}
    {{- if not .weights }}
    - --without-weights
    {{- end }}
    {{- range $file, $sha256 := .checksums }}
    - --sha256={{ $file }}={{ $sha256 }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /tmp/hub}
    {{- with .root.Values.model.hub.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- if .root.Values.model.hub.existingSecret }}
    - {name: HF_TOKEN_PATH, value: /etc/moot/hub/token}
    {{- end }}
    {{- with .root.Values.model.hub.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .root.Values.model.hub.resources | nindent 4 }}
  securityContext:
    {{- toYaml .role.securityContext | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: fetch, mountPath: /etc/moot/fetch, readOnly: true}
    {{- if .root.Values.model.hub.existingSecret }}
    - {name: hub, mountPath: /etc/moot/hub, readOnly: true}
    {{- end }}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}
