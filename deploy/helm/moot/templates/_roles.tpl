{{/* The settings of one role: podDefaults, and what the role says otherwise. */}}

{{/* Takes root. Gives the router's settings as YAML. */}}
{{- define "moot.router" -}}
{{- mergeOverwrite (deepCopy .Values.podDefaults) (deepCopy .Values.router) | toYaml -}}
{{- end -}}

{{- define "moot.verifier" -}}
{{- mergeOverwrite (deepCopy .Values.podDefaults) (deepCopy .Values.verifier) | toYaml -}}
{{- end -}}

{{/* Takes root, pool. Gives one pool's settings as YAML. */}}
{{- define "moot.drafter" -}}
{{- $pool := index .root.Values.drafters .pool -}}
{{- mergeOverwrite (deepCopy .root.Values.podDefaults) (deepCopy .root.Values.drafterDefaults) (deepCopy (default dict $pool)) | toYaml -}}
{{- end -}}

{{/* What a device adds to an image's tag. */}}
{{- define "moot.variant" -}}
{{- if eq (.device | default "none") "none" -}}
{{- else if eq .device "cuda" -}}
-cuda
{{- else -}}
-cpu
{{- end -}}
{{- end -}}

{{/* Whole seconds a pod gets to end in. Takes role, stop (seconds after the drain that the program may take). */}}
{{- define "moot.gracePeriod" -}}
{{- if .role.terminationGracePeriodSeconds -}}
{{- int .role.terminationGracePeriodSeconds -}}
{{- else -}}
{{- add (int .role.preStopSeconds) (ceil .role.config.drainGraceS) .stop 5 -}}
{{- end -}}
{{- end -}}

{{/* Seconds a program takes after its drain at most: last answers and, where it computes, its thread. */}}
{{- define "moot.stopSeconds" -}}
{{- add 5 (ceil (default 0 .role.config.stopTimeoutS)) -}}
{{- end -}}

{{/* Recreate takes no numbers, which a role has from podDefaults. */}}
{{- define "moot.strategy" -}}
{{- ternary (omit .strategy "rollingUpdate") .strategy (eq .strategy.type "Recreate") | toYaml -}}
{{- end -}}

{{/* Pods that there are at least. Takes role. */}}
{{- define "moot.minReplicas" -}}
{{- if .role.autoscaling.enabled }}{{ int .role.autoscaling.minReplicas }}{{ else }}{{ int .role.replicas }}{{ end -}}
{{- end -}}
