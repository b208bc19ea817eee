"""Every state of an object, in order, while something is done to it."""

import json
import subprocess
import tempfile
from types import TracebackType

from tests.e2e.node import KUBECONFIG, Object
from tests.kubernetes import program


class Watch:
    """`kubectl get --watch` in the background; `events` holds the states once it has ended."""

    def __init__(self, namespace: str, kind: str, name: str):
        self._command = [str(program("kubectl")), "--kubeconfig", KUBECONFIG, "-n", namespace, "get", kind, name,
                         "--watch", "-o", "json"]  # fmt: skip
        self.events: list[Object] = []

    def __enter__(self) -> "Watch":
        self._file = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(self._command, stdout=self._file)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._file.seek(0)
        self.events = list(documents(self._file.read()))
        self._file.close()


def documents(text: str) -> list[Object]:
    """JSON documents that follow each other; the last may be cut off."""
    found, position, decoder = [], 0, json.JSONDecoder()
    while position < len(text):
        try:
            document, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            break
        found.append(document)
        position += len(text[position:]) - len(text[position:].lstrip())
    return found
