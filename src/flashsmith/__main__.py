"""The flashsmith command, and `python -m flashsmith`."""

import sys

from flashsmith.errors import FlashsmithError, install_extra

# The names of the packages that the extra 'cli' installs.
_PACKAGES = ("rich", "typer")


def main() -> None:
    """Entry point. Without the packages of the extra 'cli', only the two commands that servers need
    still work. Any other command prints one line on standard error, which names the extra."""
    try:
        from flashsmith.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise SystemExit(_bare(sys.argv[1:], error.name)) from None
    run()


def _bare(words: list[str], missing: str) -> int:
    """Runs the command in an installation without extras, as in a server image; returns the exit
    status."""
    try:
        if words in (["--version"], ["-V"]):
            from flashsmith import __version__

            print(f"flashsmith {__version__}")
            return 0
        if words == ["cache", "verify"]:
            from flashsmith.builder import verify_in_words
            from flashsmith.printable import printable

            lines, all_well = verify_in_words()
            print(printable("\n".join(lines), lines=True))
            return 0 if all_well else 1
    except (FlashsmithError, OSError) as error:
        print(f"flashsmith: {error}", file=sys.stderr)
        return 2
    print(
        f"flashsmith: the command needs {missing}, not installed here: the extra 'cli' has it "
        f"(and 'compiler' also nvcc); {install_extra('cli')}. Only 'flashsmith cache verify' and "
        "'flashsmith --version' work without it",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    main()
