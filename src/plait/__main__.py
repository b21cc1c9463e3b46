"""`python -m plait`: the `plait` command, where its script is not on the path."""

from plait.cli.main import main

if __name__ == "__main__":
    main()
