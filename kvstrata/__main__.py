"""`python -m kvstrata` is the command line."""

from kvstrata.cli import app

app()
