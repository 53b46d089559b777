"""The flashsmith command, and `python -m flashsmith`."""

import sys

from flashsmith.errors import install_extra

# What the extra 'cli' brings.
_PACKAGES = ("rich", "typer")


def main() -> None:
    """Entry point; where the command's packages are missing, one line on standard error says so."""
    try:
        from flashsmith.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        print(
            f"flashsmith: the command needs {error.name}, not installed here: the extra 'cli' "
            f"brings it (and 'compiler' also nvcc); {install_extra('cli')}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
