"""`python -m flashsmith`: the flashsmith command."""

from flashsmith.cli import main

if __name__ == "__main__":
    main()
