"""Python imports this first of all where its folder is on PYTHONPATH: see `tests/softcuda/install.py`."""

import os

if os.environ.get("SOFTCUDA"):
    from tests.softcuda import install, vllm

    install.install_from_environment()
    vllm.install()
