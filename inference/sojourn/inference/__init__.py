"""The inference process: models, denoising stages, plan cache, offload, and the gRPC service over them."""
