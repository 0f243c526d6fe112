"""`python -m gemini`: the command line, where its script is not on PATH."""

from gemini.cli.app import app

if __name__ == "__main__":
    app(prog_name="gemini")
