"""The `rooftree` command, also as `python -m rooftree`."""

from __future__ import annotations

import sys

from rooftree import ShadowedPackageError, check_packages

EXIT_INPUT = 2  # as for other input that the user can mend


def main() -> None:
    """Check the packages, then run the command line."""
    try:
        check_packages()
    except ShadowedPackageError as error:
        sys.stderr.write(f"rooftree: {error}\n")
        sys.exit(EXIT_INPUT)
    from profiler.cli import main as run

    run()


if __name__ == "__main__":
    main()
