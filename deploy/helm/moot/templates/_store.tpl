{{/* How the router reaches the server of request records. Secrets come by reference, as environment variables. */}}
{{- define "moot.storeEnv" -}}
{{- $tls := "" -}}
{{- with .Values.externalRedis.tls }}
{{- if .existingSecret }}
{{- $tls = printf "?ssl_ca_certs=/etc/moot/redis-tls/%s" .caKey }}
{{- if .certKey }}{{ $tls = printf "%s&ssl_certfile=/etc/moot/redis-tls/%s&ssl_keyfile=/etc/moot/redis-tls/%s" $tls .certKey .keyKey }}{{ end }}
{{- end }}
{{- end }}
{{- if .Values.redis.enabled }}
{{- $host := printf "%s-redis.%s.svc.%s" (include "moot.fullname" .) .Release.Namespace .Values.clusterDomain }}
{{- if .Values.redis.auth.existingSecret }}
- name: STORE_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.auth.existingSecret }}
      key: {{ .Values.redis.auth.existingSecretKey }}
- {name: MOOT_REDIS_URL, value: "redis://:$(STORE_PASSWORD)@{{ $host }}:6379/0"}
{{- else }}
- {name: MOOT_REDIS_URL, value: "redis://{{ $host }}:6379/0"}
{{- end }}
{{- else if .Values.externalRedis.existingSecret }}
- name: STORE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.externalRedis.existingSecret }}
      key: {{ .Values.externalRedis.existingSecretKey }}
- {name: MOOT_REDIS_URL, value: "$(STORE_URL){{ $tls }}"}
{{- else if .Values.externalRedis.url }}
- {name: MOOT_REDIS_URL, value: {{ printf "%s%s" .Values.externalRedis.url $tls | quote }}}
{{- end }}
{{- with .Values.externalRedis.sentinel }}
{{- if and .enabled .existingSecret }}
- name: MOOT_REDIS_SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .existingSecretKey }}
{{- end }}
{{- end }}
{{- end -}}
