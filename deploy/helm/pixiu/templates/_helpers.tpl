{{- define "pixiu.name" -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" }}
{{- end }}

{{- define "pixiu.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "pixiu.labels" -}}
app.kubernetes.io/name: pixiu
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pixiu.chartLabels" -}}
{{ include "pixiu.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "pixiu.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "pixiu.name" .) }}
{{- end }}

{{- /* Where ZooKeeper is: hosts of the operator's, or the chart's three pods. */ -}}
{{- define "pixiu.target" -}}
{{- $hosts := .Values.registry.hosts }}
{{- if not $hosts }}
{{- $name := include "pixiu.name" . }}
{{- $list := list }}
{{- range $number := until (int .Values.zookeeper.replicas) }}
{{- $list = append $list (printf "%s-zookeeper-%d.%s-zookeeper:2181" $name $number $name) }}
{{- end }}
{{- $hosts = join "," $list }}
{{- end }}
{{- printf "%s://%s%s" (ternary "zks" "zk" .Values.registry.tls) $hosts .Values.registry.root }}
{{- end }}

{{- define "pixiu.partitioned" -}}
{{- list "router" "broker" "relay" "xiu" "pi" "topic" | toJson }}
{{- end }}

{{- define "pixiu.clientRoles" -}}
{{- list "gateway" "proxy" "topic" | toJson }}
{{- end }}

{{- /* Partitions that run: while a role is doubled, twice as many as the layout had. */ -}}
{{- define "pixiu.partitions" -}}
{{- $number := int (index .root.Values.roles .role).partitions }}
{{- ternary (mul 2 $number) $number (eq .root.Values.doubling .role) }}
{{- end }}

{{- /* The whole container of a process or a command: nothing that root may do, nothing written but where it must. */ -}}
{{- define "pixiu.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "pixiu.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- /* Volumes of the secrets that a process of a role, or an operator's command, may read. */ -}}
{{- define "pixiu.secretVolumes" -}}
{{- $secrets := .root.Values.secrets }}
{{- if not .root.Values.insecure }}
{{- if $secrets.tls }}
- name: tls
  secret:
    secretName: {{ $secrets.tls }}
    defaultMode: 0440
    items:
      - { key: ca.pem, path: ca.pem }
      - { key: {{ .name }}.pem, path: {{ .name }}.pem }
{{- end }}
{{- if and $secrets.keys (ne .name "operator") }}
- name: keys
  secret: { secretName: {{ $secrets.keys }}, defaultMode: 0440 }
{{- end }}
{{- if and $secrets.tickets (not (has .name (list "operator" "gateway"))) }}
- name: tickets
  secret: { secretName: {{ $secrets.tickets }}, defaultMode: 0440 }
{{- end }}
{{- if $secrets.registry }}
- name: registry-secret
  secret:
    secretName: {{ $secrets.registry }}
    defaultMode: 0440
    items: [{ key: {{ .name }}, path: credentials }]
- name: registry
  emptyDir: { medium: Memory, sizeLimit: 1Mi }
{{- end }}
{{- if has .name (include "pixiu.clientRoles" .root | fromJsonArray) }}
{{- if $secrets.access }}
- name: access
  secret: { secretName: {{ $secrets.access }}, defaultMode: 0440 }
{{- end }}
{{- if $secrets.clients }}
- name: clients
  secret: { secretName: {{ $secrets.clients }}, defaultMode: 0440 }
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pixiu.secretMounts" -}}
{{- $secrets := .root.Values.secrets }}
{{- if not .root.Values.insecure }}
{{- if $secrets.tls }}
- { name: tls, mountPath: /etc/pixiu/tls, readOnly: true }
{{- end }}
{{- if and $secrets.keys (ne .name "operator") }}
- { name: keys, mountPath: /etc/pixiu/keys, readOnly: true }
{{- end }}
{{- if and $secrets.tickets (not (has .name (list "operator" "gateway"))) }}
- { name: tickets, mountPath: /etc/pixiu/tickets, readOnly: true }
{{- end }}
{{- if $secrets.registry }}
- { name: registry, mountPath: /etc/pixiu/registry, readOnly: true }
{{- end }}
{{- if has .name (include "pixiu.clientRoles" .root | fromJsonArray) }}
{{- if $secrets.access }}
- { name: access, mountPath: /etc/pixiu/access, readOnly: true }
{{- end }}
{{- if $secrets.clients }}
- { name: clients, mountPath: /etc/pixiu/clients, readOnly: true }
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Logins of the registry are refused when a group may read them, and files of a Secret belong to root and a group. */ -}}
{{- define "pixiu.registryLogin" -}}
{{- if and .root.Values.secrets.registry (not .root.Values.insecure) }}
- name: registry-login
  image: {{ include "pixiu.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [install, -m, "0600", /run/registry-secret/credentials, /etc/pixiu/registry/credentials]
  securityContext:
    {{- include "pixiu.containerSecurity" . | nindent 4 }}
  resources: { requests: { cpu: 10m, memory: 16Mi }, limits: { memory: 64Mi } }
  volumeMounts:
    - { name: registry-secret, mountPath: /run/registry-secret, readOnly: true }
    - { name: registry, mountPath: /etc/pixiu/registry }
{{- end }}
{{- end }}

{{- /* One value of TOML: JSON's strings, numbers, booleans and lists are TOML's. */ -}}
{{- define "pixiu.toml" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
