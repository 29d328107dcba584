"""`python -m polyphily` is the command line."""

from polyphily.cli import main

main()
