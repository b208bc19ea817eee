"""The commands of the runbook, as somebody types them at night."""

import re
import subprocess

import pytest

from tests.e2e.client import Client
from tests.e2e.node import KUBECONFIG, PORT, STUDIO, kubectl, pods, until
from tests.kubernetes import ROOT, program

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("demo")]
TEXT = (ROOT / "docs/runbook.md").read_text()
# In blocks and within lines; comments are off.
COMMANDS = sorted({
    found.split("  #")[0].strip()
    for found in [*re.findall(r"^    (kubectl .*)$", TEXT, re.M), *re.findall(r"`(kubectl [^`]*)`", TEXT)]
})  # fmt: skip
# What does not work on a service that is well.
NEEDS = {
    "--previous": "a container that has ended",
    "rollout": "a fault: it changes the release or restarts the operator",
    "residencyd top": "a terminal",
}
WELL = [command for command in COMMANDS if not any(part in command for part in NEEDS)]


def run(command: str, name: str = "demo") -> str:
    """Output of a command of the runbook in a shell, with its names filled in."""
    pod = pods(name=name)[0]["metadata"]["name"]
    for word, value in (("NS", STUDIO), ("POD", pod), ("NAME", name)):
        command = re.sub(rf"\b{word}\b", value, command)
    binary = program("kubectl")
    command = re.sub(r"^kubectl\b", f"{binary} --kubeconfig {KUBECONFIG}", command)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    # grep ends with 1 where there is nothing to find.
    fine = (0, 1) if "| grep" in command else (0,)
    assert done.returncode in fine, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_there_are_commands() -> None:
    assert len(WELL) > 10
    assert len(WELL) < len(COMMANDS)


@pytest.mark.parametrize("command", [command for command in WELL if "kill" not in command or "operator" in command])
def test_a_command_works(command: str) -> None:
    run(command)


@pytest.mark.parametrize("process", ["inference", "residencyd"])
def test_debug_lines_come_without_a_restart_and_go(process: str, neighbour: Client) -> None:
    (command,) = (command for command in WELL if f"-c {process} -- sh -c 'kill -USR1" in command)
    log = ("-n", STUDIO, "logs", "deploy/dsvc-demo", "-c", process)
    assert '"level": "debug"' not in kubectl(*log)
    run(command)
    try:
        neighbour.generate(f"dsvc-demo.{STUDIO}.svc:{PORT}")
        until(lambda: '"level": "debug"' in kubectl(*log), 30, f"DEBUG lines of {process}")
    finally:
        run(command.replace("USR1", "USR2"))
    assert not any(container["restartCount"] for pod in pods() for container in pod["status"]["containerStatuses"])
