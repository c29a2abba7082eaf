"""What a pseudo terminal has shown."""

from __future__ import annotations

import errno
import os


def read_to_the_end(terminal: int) -> str:
    """All that was written to a pseudo terminal whose other end is closed: it arrives in pieces, then EIO."""
    pieces = []
    try:
        while piece := os.read(terminal, 65536):
            pieces.append(piece)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    finally:
        os.close(terminal)
    return b"".join(pieces).decode()
