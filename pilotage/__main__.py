"""`python -m pilotage` is the `pilotage` command."""

from pilotage.cli import main

if __name__ == "__main__":
    main()
