{{- /* Traces are set up by OpenTelemetry's own variables. */ -}}
{{- define "service.tracingEnv" -}}
{{- with .Values.tracing }}
{{- if .endpoint -}}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | toJson }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ eq .protocol "grpc" | ternary "grpc" "http/protobuf" }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ divf (int64 .samplePercent) 100 | printf "%.2f" | quote }}
- name: OTEL_SERVICE_NAME
  value: {{ include "service.name" $ }}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $.Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- with .headers }}
{{- if .secretName }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ .secretName }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Where the collector is reached: the port is written in the endpoint. */ -}}
{{- define "service.tracingEgress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
- ports:
    - port: {{ regexFind ":[0-9]+(/|$)" .endpoint | trimAll ":/" }}
      protocol: TCP
  {{- with .collector }}
  to:
    - podSelector: {{ empty .podLabels | ternary (dict) (dict "matchLabels" .podLabels) | toJson }}
      {{- with .namespaceLabels }}
      namespaceSelector: {{ dict "matchLabels" . | toJson }}
      {{- end }}
  {{- end }}
{{- end -}}
