"""Check of the Python version. It runs before every other import, so this module parses in old versions of Python 3."""

import sys


def check_python() -> None:
    """Stop if this Python is older than the package needs. A checkout has no installer that checks python_requires.

    Raises:
        ImportError: Python is too old.
        SystemExit: the same for a command (`python -m megaverl`), which shows the sentence without a traceback.
    """
    if sys.version_info < (3, 11):  # noqa: UP036
        major, minor = sys.version_info[:2]
        problem = f"megaverl needs Python 3.11 or 3.12; this is Python {major}.{minor} ({sys.executable})."
        if sys.argv[:1] == ["-m"]:
            raise SystemExit(problem)
        raise ImportError(problem)
