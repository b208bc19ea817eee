"""The Kubernetes API over one HTTP session: how to reach it (`access`), and what can be asked of it (`client`)."""
