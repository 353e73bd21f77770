"""`python -m caffepy` is the command `caffepy`."""

from caffepy.cli.main import main

if __name__ == "__main__":
    main()
