"""The sidecar that reports, per model component, what is in which memory tier and what is really resident."""
