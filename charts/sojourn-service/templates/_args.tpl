{{- /*
The command lines of both processes. A setting without a value is left out, so that the process's own default holds.
*/ -}}
{{- define "service.inferenceArgs" -}}
- serve
- --model={{ include "service.modelPath" . }}
{{- with .Values.model.name }}
- {{ printf "--model-name=%s" . | toJson }}
{{- end }}
- --device={{ .Values.device }}
- --dtype={{ .Values.dtype }}
- --listen=0.0.0.0:{{ int64 .Values.grpc.port }}
- --metrics-listen=0.0.0.0:{{ int64 .Values.metrics.port }}
- --max-waiting={{ int64 .Values.grpc.maxWaiting }}
- --max-message-bytes={{ int64 .Values.grpc.maxMessageBytes }}
- --stall-seconds={{ int64 .Values.grpc.stallSeconds }}
- --grace-seconds={{ int64 .Values.terminationGraceSeconds }}
{{- if .Values.grpc.tls.secretName }}
- --tls-cert=/etc/sojourn/tls/tls.crt
- --tls-key=/etc/sojourn/tls/tls.key
{{- if .Values.grpc.tls.clientCa }}
- --client-ca=/etc/sojourn/tls/ca.crt
{{- end }}
{{- else }}
# Plain text inside the cluster; who may call is up to the NetworkPolicy.
- --allow-insecure
{{- end }}
{{- if .Values.grpc.token.secretName }}
- --token-file=/etc/sojourn/token/{{ .Values.grpc.token.key }}
{{- end }}
{{- with .Values.adaln }}
- --adaln-cache={{ .mode }}
- --adaln-plans={{ int64 .plans }}
- --adaln-plan-width={{ int64 .width }}
{{- if kindIs "invalid" .hostTierBytes | not }}
- --adaln-host-bytes={{ int64 .hostTierBytes }}
{{- end }}
- --adaln-precision={{ .precision }}
{{- range .families }}
- --adaln-family={{ .component }}={{ .family }}
{{- end }}
{{- if .planStore.hostPath }}
- --adaln-store=/var/lib/sojourn/plans
- --adaln-store-bytes={{ int64 .planStore.sizeBytes }}
- --fingerprint-cache=/var/lib/sojourn/plans
{{- end }}
{{- end }}
{{- with .Values.offload }}
- --offload={{ .mode }}{{ include "service.offloadLayers" . }}
{{- if ne .residentPolicy "leading" }},policy={{ .residentPolicy }}{{ end }}
{{- range .components }}
- --offload={{ .name }}={{ .mode }}{{ include "service.offloadLayers" . }}
{{- with .residentPolicy }},policy={{ . }}{{ end }}
{{- end }}
- --pinning={{ .pinning }}
- --cold-page-advice={{ .coldPageAdvice }}
{{- if kindIs "invalid" .nextStageHeadroomBytes | not }}
- --next-stage-headroom={{ int64 .nextStageHeadroomBytes }}
{{- end }}
{{- if kindIs "invalid" .deviceMemoryBytes | not }}
- --device-memory={{ int64 .deviceMemoryBytes }}
{{- end }}
{{- if kindIs "invalid" .hostMemoryBytes | not }}
- --host-memory={{ int64 .hostMemoryBytes }}
{{- end }}
{{- end }}
{{- with .Values.quality }}
- --fusions={{ .fusions }}
{{- if .stepCacheTable.configMapName }}
- --step-cache-table=/etc/sojourn/quality/{{ .stepCacheTable.key }}
{{- end }}
{{- end }}
- --log-level={{ .Values.logging.level }}
- --log-format={{ eq .Values.logging.format "text" | ternary "human" "json" }}
{{- end -}}

{{- /* Numbers of layers behind a mode. Those that are left out are the memory plan's, or the ones for all components. */ -}}
{{- define "service.offloadLayers" -}}
{{- if kindIs "invalid" .residentLayers | not }},resident={{ include "service.layers" .residentLayers }}{{ end -}}
{{- if kindIs "invalid" .prefetchLayers | not }},prefetch={{ include "service.layers" .prefetchLayers }}{{ end -}}
{{- end -}}

{{- /* A number of layers, or of "50%" the share: the process takes what is below 1 for one. */ -}}
{{- define "service.layers" -}}
{{- if kindIs "string" . -}}
{{ divf (trimSuffix "%" . | int64) 100 | printf "%.2f" }}
{{- else -}}
{{ int64 . }}
{{- end -}}
{{- end -}}

{{- define "service.residencydArgs" -}}
- serve
- --map=/run/sojourn
- --grpc-address=0.0.0.0:{{ int64 .Values.residency.port }}
- --metrics-address=0.0.0.0:{{ int64 .Values.residency.metricsPort }}
- --floor-seconds={{ int64 .Values.residency.intervalSeconds }}
- --deep-share={{ divf (int64 .Values.residency.deepScanMillicores) 1000 | printf "%.3f" }}
- --log-level={{ .Values.logging.level }}
{{- if eq .Values.logging.format "text" }}
- --log-text
{{- end }}
{{- end -}}
