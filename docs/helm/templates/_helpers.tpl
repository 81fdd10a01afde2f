{{- /* Helpers take (list . "part"), where a part is router, poller, eds, redis, envoy or test. */ -}}

{{- define "extproc.name" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{- define "extproc.fullname" -}}
{{- $name := include "extproc.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{ .Values.fullnameOverride | default $full | trunc 49 | trimSuffix "-" }}
{{- end }}

{{- define "extproc.of" -}}
{{ include "extproc.fullname" (first .) }}-{{ last . }}
{{- end }}

{{- define "extproc.selector" -}}
{{ dict "app.kubernetes.io/name" (include "extproc.name" (first .)) "app.kubernetes.io/instance" (first .).Release.Name "app.kubernetes.io/component" (last .) | toJson }}
{{- end }}

{{- define "extproc.labels" -}}
{{- $chart := (first .).Chart -}}
{{ include "extproc.selector" . | fromJson | toYaml }}
app.kubernetes.io/version: {{ $chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (first .).Release.Service }}
helm.sh/chart: {{ $chart.Name }}-{{ $chart.Version }}
{{- end }}

{{- define "extproc.metadata" -}}
metadata:
  name: {{ include "extproc.of" . }}
  labels:
    {{- include "extproc.labels" . | nindent 4 }}
{{- end }}

{{- define "extproc.image" -}}
image: {{ .repository }}:{{ .tag }}
imagePullPolicy: {{ .pullPolicy }}
securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{- /* Options of a part's pods: those of `pods`, then the part's own. Lists are joined. The pod of `helm test` checks the
configuration with the files and variables of a router. */ -}}
{{- define "extproc.options" -}}
{{- $all := (first .).Values.pods -}}
{{- $own := get (first .).Values (last . | replace "test" "router") | default dict -}}
{{- $made := dict "priorityClassName" ($own.priorityClassName | default $all.priorityClassName | default "") -}}
{{- range list "env" "volumes" "volumeMounts" "tolerations" -}}
{{- $_ := set $made . (concat (get $all . | default list) (get $own . | default list) | default list) -}}
{{- end -}}
{{- range list "affinity" "nodeSelector" "podLabels" "podAnnotations" -}}
{{- $_ := set $made . (merge (dict) (get $own . | default dict) (get $all . | default dict)) -}}
{{- end -}}
{{ toJson $made }}
{{- end }}

{{- /* Metadata and spec of a pod without its containers: (dict "root" . "part" "router" "user" 65532 "config" FILE);
the pod restarts when its configuration changes. */ -}}
{{- define "extproc.pod" -}}
{{- $at := list .root .part -}}
{{- $options := include "extproc.options" $at | fromJson -}}
metadata:
  labels: {{ merge (include "extproc.selector" $at | fromJson) $options.podLabels | toJson }}
  {{- with merge (ternary (dict "checksum/config" (sha256sum .config)) (dict) (ne .config "")) $options.podAnnotations }}
  annotations: {{ toJson . }}
  {{- end }}
spec:
  {{- include "extproc.podSpec" . | nindent 2 }}
{{- end }}

{{- /* Spec of a pod without its containers, with the options of its part. */ -}}
{{- define "extproc.podSpec" -}}
{{- $at := list .root .part -}}
{{- $options := include "extproc.options" $at | fromJson -}}
enableServiceLinks: false
securityContext: {runAsNonRoot: true, runAsUser: {{ .user }}, runAsGroup: {{ .user }}, fsGroup: {{ .user }}, seccompProfile: {type: RuntimeDefault}}
topologySpreadConstraints:  # the loss of a node leaves one of two
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {{ include "extproc.selector" $at }}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- range $key := list "tolerations" "affinity" "nodeSelector" "priorityClassName" }}
{{- with get $options $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* `volumeMounts` and `volumes` of a part: (dict "root" . "part" "router" "files" (dict PATH SOURCE …)), where SOURCE is
that of a volume. With TLS, the part's Secret is added, and then the volumes of the options. */ -}}
{{- define "extproc.files" -}}
{{- $at := list .root .part -}}
{{- $secret := dict "secret" (dict "secretName" (printf "%s-tls" (include "extproc.of" $at))) -}}
{{- merge (dict) .files (ternary (dict "/etc/tls/extproc" $secret) (dict) .root.Values.tls.enabled) | toJson -}}
{{- end }}

{{- define "extproc.volume" -}}
{{ . | trimPrefix "/etc/" | replace "/" "-" }}
{{- end }}

{{- define "extproc.mounts" -}}
{{- $made := list -}}
{{- range $path, $source := include "extproc.files" . | fromJson -}}
{{- $made = append $made (dict "name" (include "extproc.volume" $path) "mountPath" $path "readOnly" true) -}}
{{- end -}}
{{- concat $made (include "extproc.options" (list .root .part) | fromJson).volumeMounts | default list | toJson -}}
{{- end }}

{{- define "extproc.volumes" -}}
{{- $made := list -}}
{{- range $path, $source := include "extproc.files" . | fromJson -}}
{{- $made = append $made (merge (dict "name" (include "extproc.volume" $path)) $source) -}}
{{- end -}}
{{- concat $made (include "extproc.options" (list .root .part) | fromJson).volumes | default list | toJson -}}
{{- end }}

{{- /* Probes, from their handlers. A busy node may take a minute to start a process, and seconds to run a command. */ -}}
{{- define "extproc.probes" -}}
readinessProbe: {{ merge (dict "periodSeconds" 1) .ready | toJson }}
{{- with .live }}
startupProbe: {{ merge (dict "periodSeconds" 1 "timeoutSeconds" 5 "failureThreshold" 60) . | toJson }}
livenessProbe: {{ merge (dict "periodSeconds" 5 "timeoutSeconds" 5) . | toJson }}
{{- end }}
{{- end }}

{{- define "extproc.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "extproc.metadata" . }}
spec: {maxUnavailable: 1, unhealthyPodEvictionPolicy: AlwaysAllow, selector: {matchLabels: {{ include "extproc.selector" . }}}}
{{- end }}

{{- /* Who may reach a part: (list . (list (dict "port" 1 "from" PEERS) …) "part"); without "from" everybody may. */ -}}
{{- define "extproc.policy" -}}
{{- if (first .).Values.networkPolicy.enabled -}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
{{ include "extproc.metadata" (list (first .) (last .)) }}
spec:
  podSelector: {matchLabels: {{ include "extproc.selector" (list (first .) (last .)) }}}
  {{- $rules := list }}
  {{- range index . 1 }}
  {{- if or .from (not (hasKey . "from")) }}
  {{- $rules = append $rules (merge (dict "ports" (list (dict "port" .port))) (pick . "from")) }}
  {{- end }}
  {{- end }}
  ingress: {{- toYaml $rules | nindent 4 }}
{{- end }}
{{- end }}

{{- define "extproc.peer" -}}
{{ dict "podSelector" (dict "matchLabels" (include "extproc.selector" . | fromJson)) | toJson }}
{{- end }}
