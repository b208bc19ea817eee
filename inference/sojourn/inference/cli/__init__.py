"""The `sojourn` command: serve a model, generate with it, look into its folder.

Every error that this package raises on purpose is printed in one line on stderr; the exit status says its kind:
0 done, 1 failed, 2 the request or the command line is not valid, 3 not possible now or here (try again, or install
what the message names), 4 deadline passed, 130 interrupted.
"""

import sys
from typing import NoReturn

import typer
from sojourn.inference.cli import adaln
from sojourn.inference.cli.exits import CommandFailed, Exit
from sojourn.inference.cli.generate import generate
from sojourn.inference.cli.inspect import inspect
from sojourn.inference.cli.plan import plan
from sojourn.inference.cli.serve import serve
from sojourn.inference.errors import SojournError

app = typer.Typer(
    name="sojourn",
    help="Serve a diffusion transformer, generate with it, and see what it is made of.",
    epilog="First: sojourn inspect MODEL; then: sojourn serve --model MODEL; then: sojourn generate PROMPT -o out.mp4",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(serve)
app.command()(generate)
app.command()(inspect)
app.command()(plan)
app.add_typer(adaln.app, name="adaln")


def main() -> NoReturn:
    """Entry point of the `sojourn` command."""
    try:
        app(prog_name="sojourn")
    except CommandFailed as error:
        _quit(error, error.status)
    except SojournError as error:
        _quit(error, Exit.of(error))
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    sys.exit(Exit.DONE)


def _quit(error: Exception, status: int) -> NoReturn:
    print(f"sojourn: {error}", file=sys.stderr)
    sys.exit(status)
