"""`python -m gpt2block`: the same as the command `gpt2block`."""

from gpt2block.apps.cli import main

if __name__ == "__main__":
    main()
