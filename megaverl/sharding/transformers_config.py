"""Read a `config.json` with transformers' own configuration class.

A missing key has the default of the model's class, and defaults differ between classes:
Mixtral's rotary base is 1e6, gpt-oss scales by YaRN, Mistral has a window of 4,096
tokens. Some keys also have several spellings. The class decides both, so no default is
repeated here. `own_configs.py` has classes of models that transformers has none of.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megaverl.errors import ModelError

# Configuration classes create lists with one entry per layer. A damaged file must not
# make them create a billion.
MOST_LAYERS = 10_000


def read_by_transformers(
    model_type: str, config: dict[str, Any], source: str = "config.json"
) -> dict[str, Any]:
    """Return every key of `config` as transformers' class for `model_type` reads it, with its defaults.

    transformers imports torch if it is installed, which takes seconds. A process that
    has not imported torch therefore reads the file in a child process without torch,
    which takes two seconds. The result is cached in the user's cache folder, under a
    digest of the values and of transformers' files.

    Raises:
        ModelError: transformers has no such model type, or its class refuses the values.
    """
    for key, value in _counts(config):
        if value > MOST_LAYERS:
            raise ModelError(
                f"{source}: {key} is {value:,}; expected at most {MOST_LAYERS:,}. Copy the file again."
            )
    answer = json.loads(_answer(model_type, json.dumps(config)))
    if "error" in answer:
        raise ModelError(f"{source}: transformers cannot read it: {answer['error']}")
    read_config: dict[str, Any] = answer["config"]
    return read_config


def _counts(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield keys and numbers of layers in a configuration and in its parts, such as `text_config`."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif str(key).endswith(("_layers", "n_layer", "depth")) and type(value) is int:
            yield key, value


def is_model_type(name: Any) -> bool:
    """Return whether transformers has a model of this type, without importing transformers."""
    package = find_spec("transformers")
    if (
        not isinstance(name, str)
        or not name.isidentifier()
        or package is None
        or package.origin is None
    ):
        return False
    return (Path(package.origin).parent / "models" / name).is_dir()


@lru_cache(maxsize=256)
def _answer(model_type: str, config: str) -> str:
    """Return the JSON of `_read`, from the cache if possible."""
    # With torch loaded already, neither a child process nor the cache saves time.
    if "torch" in sys.modules:
        return _read(model_type, config)
    kept = _cache_file(model_type, config)
    with suppress(OSError):
        return kept.read_text(encoding="utf-8")
    answer = _ask_child(model_type, config)
    if "error" not in json.loads(answer):
        # The cache is a convenience: a full or read-only disk must not fail the run.
        with suppress(OSError):
            _write(kept, answer)
    return answer


def _cache_file(model_type: str, config: str) -> Path:
    """Return the cache file for a configuration.

    Its name depends on the values, and on the files of transformers that interpret
    them.
    """
    package = find_spec("transformers")
    folder = (
        Path(package.origin).parent
        if package is not None and package.origin is not None
        else Path()
    )
    files = [folder / "__init__.py", folder / "configuration_utils.py"]
    files += (
        sorted((folder / "models" / model_type).glob("configuration_*.py"))
        if is_model_type(model_type)
        else [Path(__file__).with_name("own_configs.py")]
    )
    facts = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file()
    ]
    digest = hashlib.blake2b(
        json.dumps([sys.version, facts, model_type, config]).encode(), digest_size=16
    )
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "megaverl" / "configurations" / f"{digest.hexdigest()}.json"


def _write(file: Path, text: str) -> None:
    """Write a file atomically, safe against concurrent writers and an early end of the process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # The process number keeps concurrent writers from sharing a file.
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def _ask_child(model_type: str, config: str) -> str:
    """Run this module in a child process and return its answer."""
    command = [sys.executable, "-m", __name__, model_type]
    # Only the answer may be printed, without transformers' advice about torch or its
    # progress of imports.
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command,
        input=config,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[
            -1
        ]
        raise ModelError(
            f"transformers cannot be imported to read the model's config.json: {reason}"
        )
    # Libraries may print while they are imported. The answer is the last line.
    return done.stdout.splitlines()[-1]


def _read(model_type: str, config: str) -> str:
    """Return JSON: {"config": {...}}, or {"error": "..."}."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils import logging

    from megaverl.sharding.own_configs import config_class_of

    # megaverl refuses or reports what transformers would warn about, and every rank
    # that loads the model would warn again.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        kind = config_class_of(model_type) or CONFIG_MAPPING[model_type]
        known = kind.from_dict(json.loads(config, object_hook=_special_float))
        values = {
            **known.to_dict(),
            **{name: getattr(known, name, None) for name in known.attribute_map},
        }
        return json.dumps({"config": values}, default=str)
    # Every configuration class validates in its own way.
    except Exception as error:
        text = " ".join(str(error).split())
        return json.dumps(
            {
                "error": text
                if text.startswith("Validation error")
                else f"{type(error).__name__}: {text}"
            }
        )
    finally:
        logging.set_verbosity(verbosity)


def _special_float(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as {"__float__": "Infinity"}, or another object unchanged."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def main() -> None:
    """Read a config.json from standard input without torch, and print the answer."""
    # Makes `import torch` fail, so that transformers runs without it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    print(_read(sys.argv[1], sys.stdin.read()))


if __name__ == "__main__":
    main()
