"""Compare the files that the wheels of a lock install.

`pip install --no-deps` unpacks one wheel after the other and does not compare them. If two wheels hold the same path
with different contents, the one that is unpacked last wins, and importing the other may fail. Each wheel lists its
files with digests in its RECORD. Only the RECORD is fetched: pip's own reader of remote wheels asks for byte ranges.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple, cast
from urllib.parse import unquote, urlparse

CONNECTIONS = 8


class Overlap(NamedTuple):
    """Two packages that install the same paths with different contents.

    Attributes:
        first: name of a package.
        second: name of the other one.
        paths: all such paths, sorted.
    """

    first: str
    second: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        rest = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.first} and {self.second} both install {self.paths[0]}{rest}, with different contents"


def find_overlaps(records: Mapping[str, Mapping[str, str]]) -> list[Overlap]:
    """Return the pairs of packages of which the one unpacked last would damage the other.

    Args:
        records: for each package the digests of its files, by installed path.
    """
    owners: dict[str, list[str]] = defaultdict(list)
    for package in sorted(records):
        for path in records[package]:
            owners[path].append(package)
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, packages in owners.items():
        for number, first in enumerate(packages):
            for second in packages[number + 1 :]:
                if records[first][path] != records[second][path]:
                    shared[first, second].append(path)
    return [
        Overlap(*pair, tuple(sorted(paths))) for pair, paths in sorted(shared.items())
    ]


def read_records(
    wheels: Mapping[str, str], open_wheel: Callable[[str], IO[bytes]]
) -> dict[str, dict[str, str]]:
    """Return the digests of every wheel's files, {package: {installed path: digest}}.

    Args:
        wheels: {package: URL, file URL or path of its wheel}.
        open_wheel: opens a URL as a seekable file, such as `remote_wheels` returns.

    Raises:
        ValueError: a wheel has no RECORD.
    """

    def read(place: str) -> dict[str, str]:
        address = urlparse(place)
        if address.scheme in ("", "file"):
            return read_record(Path(unquote(address.path)))
        return read_record(open_wheel(place))

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return dict(zip(wheels, pool.map(read, wheels.values()), strict=True))


def read_record(wheel: Path | IO[bytes]) -> dict[str, str]:
    """Return {installed path: digest} of one wheel, without its own folder of metadata.

    Raises:
        ValueError: the wheel has no RECORD.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name
            for name in archive.namelist()
            if name.endswith(".dist-info/RECORD") and name.count("/") == 1
        ]
        if not names:
            raise ValueError(f"{wheel}: no RECORD in this wheel")
        text = archive.read(names[0]).decode("utf-8")
    own_metadata = names[0].removesuffix("RECORD")
    rows = ((row[0], row[1]) for row in csv.reader(io.StringIO(text)) if len(row) >= 2)
    return {
        _installed_path(path): digest
        for path, digest in rows
        if not path.startswith(own_metadata)
    }


def _installed_path(path: str) -> str:
    """Return where a file of a wheel goes, relative to site-packages or, for other schemes, with the scheme's name."""
    folder, _, rest = path.partition("/")
    if not folder.endswith(".data"):
        return path
    scheme, _, rest = rest.partition("/")
    return rest if scheme in ("purelib", "platlib") else f"({scheme})/{rest}"


def remote_wheels(settings: Iterable[str]) -> Callable[[str], IO[bytes]]:
    """Return a function that opens a wheel by its URL and fetches only the byte ranges that are read.

    Args:
        settings: what launch/pip_settings.py prints; the certificate and the proxy are taken from it.
    """
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP
    from pip._internal.network.session import PipSession

    variables = dict(
        setting.split("=", 1) for setting in settings if setting[0].isupper()
    )
    session = PipSession(retries=3)
    if "SSL_CERT_FILE" in variables:
        session.verify = variables["SSL_CERT_FILE"]  # type: ignore[assignment]  # requests takes a path, too
    if "ALL_PROXY" in variables:
        session.proxies = dict.fromkeys(("http", "https"), variables["ALL_PROXY"])
    return lambda url: cast(IO[bytes], LazyZipOverHTTP(url, session))
