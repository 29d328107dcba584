"""`python -m polyphily` is the command line."""

import sys

try:
    from polyphily.cli import main
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "polyphily":
        raise
    sys.exit(
        f"error: the package '{error.name}', which polyphily needs, is not installed for "
        f"{sys.executable}: pip install polyphily, or make install in a checkout"
    )

main()
