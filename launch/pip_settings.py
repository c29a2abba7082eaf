"""pip's settings as uv's: `pip config list | python launch/pip_settings.py` prints what uv is to be started with.

A line `NAME=VALUE` is for uv's environment; the other lines are its arguments. uv does not read pip's configuration,
and people have put their mirror, their folder of wheels and their certificate there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator

# pip reads them in this order, and a later one replaces an earlier one
SECTIONS = ("global", "install", ":env:")
ARGUMENTS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}


def uv_settings(lines: Iterable[str]) -> Iterator[str]:
    """What uv needs to find packages where pip does, from the lines of `pip config list`."""
    settings: dict[str, str] = {}
    parsed = [_parsed(line) for line in lines if "=" in line]
    for section in SECTIONS:
        settings |= {
            key: value for line_section, key, value in parsed if line_section == section
        }
    for key, variable in VARIABLES.items():
        if key in settings:
            yield f"{variable}={settings[key]}"
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        yield "--no-index"
    for key, argument in ARGUMENTS.items():
        for value in settings.get(key, "").split():
            yield from (argument, value)
    # Pip asks every index, and takes the best.
    yield from ("--index-strategy", "unsafe-best-match")


def _parsed(line: str) -> tuple[str, str, str]:
    """Section, key and value of a line such as `global.find-links='/wheels /more'`."""
    name, _, quoted = line.strip().partition("=")
    section, _, key = name.rpartition(".")
    try:
        return section, key, str(ast.literal_eval(quoted))
    except (SyntaxError, ValueError):
        return section, key, quoted


if __name__ == "__main__":
    print("\n".join(uv_settings(sys.stdin)))
