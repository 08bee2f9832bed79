{{- /* What the schema cannot say: values that would render a cluster that does not work. */ -}}
{{- define "pixiu.checks" -}}
{{- include "pixiu.checkRegistry" . }}
{{- include "pixiu.checkPorts" . }}
{{- include "pixiu.checkLabels" . }}
{{- range $role, $values := .Values.roles }}
{{- if gt (int $values.replicas) 0 }}
{{- include "pixiu.checkRole" (dict "root" $ "role" $role "values" $values) }}
{{- else if eq $role $.Values.doubling }}
{{- fail (printf "doubling: %s has no replicas, so there is nothing to double: set roles.%s.replicas, or empty doubling" $role $role) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pixiu.checkRegistry" -}}
{{- $servers := .Values.registry.hosts | default "" }}
{{- $port := "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]" }}
{{- $server := printf "([A-Za-z0-9_][A-Za-z0-9._-]*|\\[[0-9A-Fa-f:.]+\\])(:(%s))?" $port }}
{{- if not (regexMatch (printf "^(%s(,%s){0,8})?$" $server $server) $servers) }}
{{- fail (printf "registry.hosts: %q: write HOST:PORT,HOST:PORT (at most 9) without zk:// and spaces, such as zk-0.zk:2181,zk-1.zk:2181; registry.tls and registry.root have the rest" $servers) }}
{{- end }}
{{- end }}

{{- /* One port has one listener. The network policy opens ports of clients by number, so this holds for all roles. */ -}}
{{- define "pixiu.checkPorts" -}}
{{- $names := dict }}
{{- range $name, $port := .Values.ports }}
{{- $number := toString (int $port) }}
{{- if and (ne $number "0") (hasKey $names $number) }}
{{- fail (printf "ports.%s and %s are both %s: give each a port of its own" $name (get $names $number) $number) }}
{{- end }}
{{- $_ := set $names $number (printf "ports.%s" $name) }}
{{- end }}
{{- range $role, $values := .Values.roles }}
{{- range $key := list "mqtt_plain_port" "console_port" }}
{{- $number := toString (int (get $values.options $key)) }}
{{- if and (ne $number "0") (hasKey $names $number) }}
{{- fail (printf "roles.%s.options.%s and %s are both %s: give each a port of its own" $role $key (get $names $number) $number) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pixiu.checkLabels" -}}
{{- range $key, $_ := .Values.podLabels }}
{{- if has $key (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "pixiu/partition") }}
{{- fail (printf "podLabels: the chart sets the label %s of pods itself: take another key" $key) }}
{{- end }}
{{- end }}
{{- $own := include "pixiu.chartLabels" . | fromYaml }}
{{- range $key, $_ := .Values.serviceMonitor.labels }}
{{- if hasKey $own $key }}
{{- fail (printf "serviceMonitor.labels: the chart sets the label %s itself: take another key" $key) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pixiu.checkRole" -}}
{{- $replicas := int .values.replicas }}
{{- $needed := int (get .values.options "min_in_sync" | default 1) }}
{{- if lt $replicas $needed }}
{{- fail (printf "roles.%s.replicas is %d, below min_in_sync, which is %d, so every write would be refused: raise roles.%s.replicas, or set roles.%s.options.min_in_sync to %d" .role $replicas $needed .role .role $replicas) }}
{{- end }}
{{- $grace := add .root.Values.drainSeconds 15 }}
{{- $drain := get .values.options "drain_timeout_s" | default 0 }}
{{- if ge (float64 $drain) (float64 $grace) }}
{{- fail (printf "roles.%s.options.drain_timeout_s is %v, but the kubelet kills a pod %d s after SIGTERM: make it smaller, or set drainSeconds, which is for all roles" .role $drain $grace) }}
{{- end }}
{{- end }}

{{- /* Keys of a table of the configuration that the chart sets. `given`: the operator's; `set`: the chart's. */ -}}
{{- define "pixiu.checkKeys" -}}
{{- $instead := dict "registry" "registry.hosts, registry.root and registry.tls" "port" "ports.cluster" "http_port" "ports.http" "stream_port" "ports.streams" "client_port" "ports.clients" "mqtt_port" "ports.mqtt" "websocket_port" "ports.websocket" "api_port" "ports.api" "cluster_insecure" "insecure" "clients_insecure" "insecure" "mqtt_insecure" "insecure" "access_file" "secrets.access" "tls_certificate" "secrets.clients" "tls_key" "secrets.clients" "tls_dir" "secrets.tls" "key_dir" "secrets.keys" "ticket_key_dir" "secrets.tickets" "registry_credentials_file" "secrets.registry" }}
{{- $arguments := list "partition" "advertised_host" "advertised_client_host" "mqtt_host" }}
{{- $free := list "drain_timeout_s" "log_format" }}
{{- range $key, $_ := .given }}
{{- if or (has $key $arguments) (and (hasKey $.set $key) (not (has $key $free))) }}
{{- $hint := ternary (printf ", and set %s" (get $instead $key)) "" (hasKey $instead $key) }}
{{- fail (printf "%s.%s: the chart sets %s itself: leave it out%s" $.table $key $key $hint) }}
{{- end }}
{{- end }}
{{- end }}
