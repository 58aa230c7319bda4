{{/* Names, labels, images: what every object is called by. */}}

{{- define "moot.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 38 | trimSuffix "-" -}}
{{- end -}}

{{- define "moot.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 38 | trimSuffix "-" -}}
{{- else if contains (include "moot.name" .) .Release.Name -}}
{{- .Release.Name | trunc 38 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "moot.name" .) | trunc 38 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What a selector may hold: these three never change in the life of an object. Takes root, component. */}}
{{- define "moot.selectorLabels" -}}
app.kubernetes.io/name: {{ include "moot.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "moot.labels" -}}
{{ include "moot.selectorLabels" . }}
app.kubernetes.io/part-of: moot
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name, namespace, labels, annotations. Takes root, component, and suffix (of the name) or name. */}}
{{- define "moot.metadata" -}}
name: {{ .name | default (printf "%s-%s" (include "moot.fullname" .root) .suffix) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "moot.labels" . | nindent 2 }}
{{- with mergeOverwrite (dict) (default dict .root.Values.commonAnnotations) (default dict .annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Takes root, image (registry, repository, tag, digest), and variant (what the tag ends with when it is not given). */}}
{{- define "moot.image" -}}
{{- $registry := .image.registry | default .root.Values.imageRegistry -}}
{{- $tag := .image.tag | default (printf "%s%s" .root.Chart.AppVersion (.variant | default "")) -}}
{{- with $registry }}{{ . }}/{{ end }}{{ .image.repository }}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end -}}

{{- define "moot.serviceAccountName" -}}
{{- .role.serviceAccount.name | default (printf "%s-%s" (include "moot.fullname" .root) .component) -}}
{{- end -}}
