"""A server process for tests: `process.py MODEL_FOLDER SETTINGS_AS_JSON`; logs say where it listens."""

import json
import sys
from pathlib import Path

from sojourn.inference import logs
from sojourn.inference.server.config import Address, ServerConfig
from sojourn.inference.server.engine import Engine
from sojourn.inference.server.main import run
from sojourn.inference.telemetry import Telemetry


def load() -> Engine:
    from sojourn.inference.pipeline import load_pipeline

    return load_pipeline(Path(sys.argv[1]))


def main() -> int:
    anywhere = Address(host="127.0.0.1", port=0)
    config = ServerConfig(listen=anywhere, metrics_listen=anywhere, **json.loads(sys.argv[2]))
    telemetry = Telemetry(model_name=config.model_name, max_waiting=config.max_waiting)
    printing = logs.configure(count=telemetry.log_line)
    return run(config, load, telemetry=telemetry, printing=printing)


if __name__ == "__main__":
    sys.exit(main())
