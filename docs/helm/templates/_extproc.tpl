{{- /* Processes of extproc: router, poller and eds. */ -}}

{{- /* Sources of replicas by pool: {"": […], batch: […]}; "" is the pool of `replicas`. A source with a selector gets a
Service, named by the source's place: if selector or port change, the Service changes in place, and running pollers, which
watch it until new pollers are ready, keep their pods. */ -}}
{{- define "extproc.sources" -}}
{{- $pools := dict "" .Values.replicas -}}
{{- range $pool, $values := .Values.pools }}{{ $_ := set $pools $pool $values.replicas }}{{ end -}}
{{- range $pool, $sources := $pools -}}
{{- $named := list -}}
{{- range $place, $source := $sources -}}
{{- $source = deepCopy $source -}}
{{- if dig "kubernetes" "selector" "" $source -}}
{{- $name := printf "%s/%d" $pool $place | sha256sum | trunc 8 -}}
{{- $_ := set $source.kubernetes "service" (printf "%s-%s" (include "extproc.fullname" $) $name) -}}
{{- end -}}
{{- $named = append $named $source -}}
{{- end -}}
{{- $_ := set $pools $pool $named -}}
{{- end -}}
{{ toJson $pools }}
{{- end }}

{{- /* Sources in the form of the configuration: {replicas: […]} */ -}}
{{- define "extproc.replicas" -}}
{{- range . -}}
{{- if dig "kubernetes" "selector" "" . -}}
{{- if kindIs "string" .kubernetes.port }}{{ $_ := set .kubernetes "port" "http" }}{{ end -}}
{{- $_ := unset .kubernetes "selector" -}}
{{- end -}}
{{- end -}}
{{ dict "replicas" . | toJson }}
{{- end }}

{{- define "extproc.redisUrl" -}}
{{- $files := "ssl_ca_certs=/etc/tls/extproc/ca.crt&ssl_certfile=/etc/tls/extproc/tls.crt&ssl_keyfile=/etc/tls/extproc/tls.key" -}}
{{- if not .Values.redis.enabled -}}
{{- required "redis.url: the existing Redis, where redis.enabled is false" .Values.redis.url -}}
{{- else if .Values.tls.enabled -}}
rediss://{{ include "extproc.of" (list . "redis") }}:6379/0?{{ $files }}
{{- else -}}
redis://{{ include "extproc.of" (list . "redis") }}:6379/0
{{- end -}}
{{- end }}

{{- /* extproc.yaml, the same for all processes. */ -}}
{{- define "extproc.config" -}}
{{- $admin := dict -}}
{{- $grpc := dict -}}
{{- if .Values.tls.enabled -}}
{{- $admin = dict "tls_cert" "/etc/tls/extproc/tls.crt" "tls_key" "/etc/tls/extproc/tls.key" -}}
{{- $grpc = merge (dict "tls_client_ca" "/etc/tls/extproc/ca.crt") $admin -}}
{{- end -}}
{{- $sources := include "extproc.sources" . | fromJson -}}
{{- $made := include "extproc.replicas" (get $sources "") | fromJson -}}
{{- $_ := set $made "redis" (dict "url" (include "extproc.redisUrl" .)) -}}
{{- $_ := set $made "serve" (merge (dict "listen" "0.0.0.0:50051" "admin" "0.0.0.0:9090") $grpc) -}}
{{- $_ := set $made "poll" (dict "admin" "0.0.0.0:9091") -}}
{{- $_ := set $made "eds" (merge (dict "listen" "0.0.0.0:18000") $grpc) -}}
{{- $_ := set $made "admin" $admin -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.pools -}}
{{- $_ := set $pools $name (merge (include "extproc.replicas" (get $sources $name) | fromJson) (omit $pool "hosts" "replicas")) -}}
{{- end -}}
{{- $_ := set $made "pools" $pools -}}
{{- mustMergeOverwrite $made (deepCopy .Values.config) | toYaml -}}
{{- end }}

{{- define "extproc.env" -}}
{{- with (include "extproc.options" . | fromJson).env -}}
{{ toYaml . }}
{{ end -}}
- {name: EXTPROC_CONFIG, value: /etc/extproc/extproc.yaml}
{{- with (first .).Values.redis.passwordSecret }}
{{- if .name }}
- {name: EXTPROC_REDIS__PASSWORD, valueFrom: {secretKeyRef: {{ toJson . }}}}
{{- end }}
{{- end }}
{{- end }}

{{- /* Pod template: (dict "root" . "part" "router" "command" "serve" "ports" (dict "grpc" 50051 …)) */ -}}
{{- define "extproc.process" -}}
{{- $values := .root.Values -}}
{{- $config := include "extproc.config" .root -}}
{{- $mounted := merge (dict "files" (dict "/etc/extproc" (dict "configMap" (dict "name" (include "extproc.of" (list .root "config")))))) . -}}
{{- include "extproc.pod" (dict "root" .root "part" .part "user" 65532 "config" $config) }}
  {{- if eq .part "poller" }}
  serviceAccountName: {{ include "extproc.of" (list .root "poller") }}
  {{- else }}
  automountServiceAccountToken: false
  {{- end }}
  {{- with .grace }}
  terminationGracePeriodSeconds: {{ . }}
  {{- end }}
  containers:
  - name: {{ .part }}
    {{- include "extproc.image" (merge (dict "tag" ($values.image.tag | default .root.Chart.AppVersion)) $values.image) | nindent 4 }}
    args: [{{ .command }}]
    env:
    {{- include "extproc.env" (list .root .part) | nindent 4 }}
    ports:
    {{- range $name, $port := .ports }}
    - {name: {{ $name }}, containerPort: {{ $port }}}
    {{- end }}
    {{- $scheme := ternary "HTTPS" "HTTP" (hasKey ($config | fromYaml).admin "tls_cert") }}
    {{- $live := dict }}  {{- /* a restart gives eds no replica, without which its port stays closed */}}
    {{- $ready := dict "tcpSocket" (dict "port" "grpc") }}
    {{- if .ports.metrics }}
    {{- $live = dict "httpGet" (dict "path" "/livez" "port" "metrics" "scheme" $scheme) }}
    {{- $ready = dict "httpGet" (dict "path" "/readyz" "port" "metrics" "scheme" $scheme) }}
    {{- end }}
    {{- include "extproc.probes" (dict "live" $live "ready" $ready) | nindent 4 }}
    resources: {{ index $values .part "resources" | toJson }}
    volumeMounts: {{ include "extproc.mounts" $mounted }}
  volumes: {{ include "extproc.volumes" $mounted }}
{{- end }}
