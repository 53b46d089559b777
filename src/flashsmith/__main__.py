"""The flashsmith command, and `python -m flashsmith`."""

import sys

from flashsmith.errors import FlashsmithError, install_extra

# What the extra 'cli' brings.
_PACKAGES = ("rich", "typer")


def main() -> None:
    """Entry point. Where the command's packages are missing, what servers ask for works without
    them; of anything else one line on standard error says what brings them."""
    try:
        from flashsmith.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise SystemExit(_bare(sys.argv[1:], error.name)) from None
    run()


def _bare(words: list[str], missing: str) -> int:
    """The command of a bare install, which a server's image has; returns its exit status."""
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
        f"flashsmith: the command needs {missing}, not installed here: the extra 'cli' brings it "
        f"(and 'compiler' also nvcc); {install_extra('cli')}. Without it there are 'flashsmith "
        "cache verify' and 'flashsmith --version'",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    main()
