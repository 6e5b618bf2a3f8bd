"""The command line. Each command is a file here, with a function `command`; what it needs is imported when it runs,
so that `--help` is quick."""

from __future__ import annotations

import sys

COMMANDS = ("serve", "chat", "generate", "bench", "explain", "ops", "profile", "calibrate", "verify")


def main() -> None:
    """Entry point of `firstlight`. Mistakes of the user end in one readable line each, with exit status 1 or 2."""
    import importlib
    from importlib import metadata

    import typer

    from firstlight.errors import FirstlightError

    app = typer.Typer(
        help="Run, verify and predict large language models from one model description.",
        epilog="Every engine and server option can also be set in the environment: --max-running is FIRSTLIGHT_MAX_RUNNING.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def common(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
        if version:
            print(f"firstlight {metadata.version('firstlight')}")
            raise typer.Exit

    for name in COMMANDS:
        app.command(name)(importlib.import_module(f"firstlight.cli.{name}").command)
    try:
        app()
    except FirstlightError as error:
        print(f"firstlight: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
