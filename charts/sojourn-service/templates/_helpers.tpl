{{- /* Every object is called like the release. */ -}}
{{- define "service.name" -}}
{{ .Release.Name }}
{{- end -}}

{{- /* Never in here: versions of chart or application. They would restart pods when only the operator changes. */ -}}
{{- define "service.selector" -}}
app.kubernetes.io/name: sojourn-service
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "service.labels" -}}
{{ include "service.selector" . }}
app.kubernetes.io/part-of: sojourn
app.kubernetes.io/component: service
{{- end -}}

{{- /* Name, namespace, labels and owner of an object. */ -}}
{{- define "service.metadata" -}}
name: {{ include "service.name" . }}
namespace: {{ .Release.Namespace }}
labels: {{- include "service.labels" . | nindent 2 }}
{{- with .Values.owner }}
{{- if .uid }}
ownerReferences:
  - apiVersion: {{ .apiVersion }}
    kind: {{ .kind }}
    name: {{ .name }}
    uid: {{ .uid }}
    controller: true
    blockOwnerDeletion: false
{{- end }}
{{- end }}
{{- end -}}

{{- define "service.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Where the container sees the checkpoint as it comes. */ -}}
{{- define "service.sourcePath" -}}
{{- if eq .Values.model.source "builtIn" -}}
{{ .Values.model.path }}
{{- else if and (eq .Values.model.source "image") .Values.model.subPath -}}
/model/{{ .Values.model.subPath }}
{{- else -}}
/model
{{- end -}}
{{- end -}}

{{- /* Where the container maps the checkpoint from. */ -}}
{{- define "service.modelPath" -}}
{{- if .Values.model.cache.hostPath -}}
/model-cache/{{ required "model.cache.key is required with model.cache.hostPath" .Values.model.cache.key }}
{{- else -}}
{{ include "service.sourcePath" . }}
{{- end -}}
{{- end -}}

{{- /* The mount of the checkpoint as it comes, for every container that reads it. */ -}}
{{- define "service.sourceMount" -}}
{{- if ne .Values.model.source "builtIn" }}
- name: model
  mountPath: /model
  readOnly: true
  {{- if and .Values.model.subPath (eq .Values.model.source "persistentVolumeClaim") }}
  subPath: {{ .Values.model.subPath | toJson }}
  {{- end }}
{{- end }}
{{- end -}}
