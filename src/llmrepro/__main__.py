"""`python -m llmrepro` is the command `llmrepro` of this very interpreter."""

from llmrepro.cli import main

if __name__ == "__main__":
    main(prog_name="llmrepro")
