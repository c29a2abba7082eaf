"""A rank of a trial that answers, or not, and ends as its argument says."""

from __future__ import annotations

import os
import sys
import tempfile
import time

what = sys.argv[1 + int(os.environ["RANK"])]
tempfile.mkdtemp()
if what in ("exits", "fails", "stays"):
    print('{"found": "right"}', flush=True)
elif what != "leaves":
    print("broken", flush=True)
if what in ("stays", "hangs"):
    time.sleep(600)
sys.exit(what in ("fails", "silent"))
