"""The gRPC server of the inference process: validation, admission, streaming, health, security.

`main.serve` is the entry; `config.ServerConfig` says what can be set.
"""
