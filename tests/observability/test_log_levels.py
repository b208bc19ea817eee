"""The level of printing changes while a process runs: SIGUSR1 prints DEBUG, SIGUSR2 what was configured again."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Each sets up logging as its process does, then says one line at DEBUG whenever it reads one.
SETS_UP = {
    "sojourn": "from sojourn.inference import logs; printing = logs.configure()",
    "residencyd": "from sojourn.residencyd import logs; printing, _ = logs.set_up(level='info', json_lines=True)",
    "sojourn-operator": "from sojourn.operator import logs; printing = logs.configure(level='info', as_json=True)",
}
SAYS = """
import logging, sys
logs.obey_signals(printing, name={name!r})
for line in sys.stdin:
    logging.getLogger("sojourn.test").debug("detail")
    logging.getLogger("sojourn.test").info("said")
"""


class Talker:
    """A process, its lines as they come."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stderr is not None
        message: str = json.loads(self.process.stderr.readline())["message"]
        return message

    def lines(self, last: str) -> list[str]:
        """Messages up to and with one."""
        return [*iter(self.line, last), last]

    def say(self) -> list[str]:
        """What it prints when it is asked to say something."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.lines("said")


@pytest.fixture
def talker() -> Iterator[Callable[[str], Talker]]:
    started = []

    def start(name: str) -> Talker:
        code = SETS_UP[name] + SAYS.format(name=name)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return Talker(process)

    yield start
    for process in started:
        process.communicate(timeout=30)
        assert process.returncode == 0


@pytest.mark.parametrize("name", SETS_UP)
def test_signals_change_what_is_printed(talker: Callable[[str], Talker], name: str) -> None:
    it = talker(name)
    assert it.say() == ["said"]
    for _ in range(2):
        it.process.send_signal(signal.SIGUSR1)
        assert it.line() == "printing from level debug on"
        assert it.say() == ["detail", "said"]
        it.process.send_signal(signal.SIGUSR2)
        assert it.line() == "printing from level info on"
        assert it.say() == ["said"]


@pytest.mark.parametrize("name", SETS_UP)
def test_the_process_can_be_found_by_its_name(talker: Callable[[str], Talker], name: str) -> None:
    it = talker(name)
    it.say()
    assert Path(f"/proc/{it.process.pid}/comm").read_text() == f"{name[:15]}\n"
