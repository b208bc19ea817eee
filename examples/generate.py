"""A client of one's own, in plain grpcio: python examples/generate.py 127.0.0.1:50051 "a moving seven" out.mp4."""

import sys

import grpc
from sojourn.v1 import inference_pb2 as pb
from sojourn.v1 import inference_pb2_grpc as rpc


def generate(address: str, prompt: str, path: str) -> None:
    """Asks the server at `address` for a clip and writes it to `path`."""
    with grpc.insecure_channel(address) as channel, open(path, "wb") as file:
        call = rpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(prompt=prompt), timeout=600)
        for response in call:
            match response.WhichOneof("event"):
                case "accepted":
                    print(f"seed {response.accepted.seed}, {response.accepted.queue_position} before us")
                case "progress":
                    progress = response.progress
                    print(f"{pb.Stage.Name(progress.stage)} {progress.step}/{progress.steps}")
                case "artifact":
                    file.write(response.artifact.data)
                case "completed":
                    print(f"{path}: sha256 {response.completed.artifacts[0].sha256}")


if __name__ == "__main__":
    try:
        generate(*sys.argv[1:4])
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
