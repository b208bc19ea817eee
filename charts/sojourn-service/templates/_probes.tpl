{{- /*
Whether the model is served. The kubelet cannot speak gRPC over TLS; with a certificate the process's own state is
read from its metrics instead, which need no certificate.
*/ -}}
{{- define "service.servingProbe" -}}
{{- if .Values.grpc.tls.secretName -}}
exec:
  command:
    - python3
    - -c
    - >-
      import sys, urllib.request;
      text = urllib.request.urlopen("http://127.0.0.1:{{ int64 .Values.metrics.port }}/metrics", timeout=4).read().decode();
      sys.exit('sojourn_service_state{state="serving"} 1.0' not in text)
{{- else -}}
grpc:
  port: {{ int64 .Values.grpc.port }}
{{- end }}
{{- end -}}
