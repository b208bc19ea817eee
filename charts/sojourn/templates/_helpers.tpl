{{- define "sojourn.name" -}}
{{ printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "sojourn.selector" -}}
app.kubernetes.io/name: sojourn
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sojourn.labels" -}}
{{ include "sojourn.selector" . }}
app.kubernetes.io/part-of: sojourn
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "sojourn.image" -}}
{{ .Values.operator.image.repository }}:{{ .Values.operator.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* A file of dashboards/ or rules/ as it is, but for where the runbook is to be found. */ -}}
{{- define "sojourn.monitoring" -}}
{{ .root.Files.Get .path | replace "https://sojourn.dev/docs/runbook.md" .root.Values.monitoring.runbookUrl }}
{{- end -}}

{{- /* What the operator does, and nothing more; tests run it with exactly these rights. */ -}}
{{- define "sojourn.rules" -}}
- apiGroups: [sojourn.dev]
  resources: [diffusionservices, adalncaches, layerwiseoffloads]
  verbs: [get, list, watch]
# The finalizer.
- apiGroups: [sojourn.dev]
  resources: [diffusionservices]
  verbs: [patch]
- apiGroups: [sojourn.dev]
  resources: [diffusionservices/status, adalncaches/status, layerwiseoffloads/status]
  verbs: [patch]
# Objects of a release. Deployments, Services and NetworkPolicies are watched for drift.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch, delete]
# Release records.
{{- if eq .Values.helm.driver "secret" }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, create, update, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [list, delete]
{{- else }}
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, create, update, patch, delete]
{{- end }}
{{- if and .Values.operator.readServiceSecrets (ne .Values.helm.driver "secret") }}
# Certificates and tokens of services, by name.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
{{- if and .Values.services.checkNodes (not .Values.operator.namespaces) }}
# Whether what is asked for fits any node.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
{{- end }}
# Why pods do not serve.
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
