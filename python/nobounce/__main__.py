"""`python -m nobounce`: the command."""

from ._command import main

main()
