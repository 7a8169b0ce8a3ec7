"""`python -m fedwan` is the `fedwan` command."""

from fedwan.cli.main import main

if __name__ == "__main__":
    main()
