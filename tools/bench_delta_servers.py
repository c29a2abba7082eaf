"""Bytes and time of weight updates of real vLLM servers, as changes and whole, through a folder and shard to shard.

    python tools/bench_delta_servers.py
    python tools/bench_delta_servers.py --servers 4 --lr 1e-5 --steps 8

Starts `megaverl serve rollout` processes on this machine's CPU cores, and runs PPO in bfloat16 on two tensor-parallel
ranks four times: `rollout.servers.transfer` folder and direct, each with `reshard.delta` on and off. The model is the
tests' tiny one, so bytes say what a larger model would save, and seconds are mostly those of requests. The table has
means over the updates after the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# A checkout needs no installation of megaverl.
sys.path.insert(0, str(ROOT))

from tests.faults.runs import arguments
from tests.launcher import free_port
from tests.rollout.vllm_serve import vllm_servers
from tests.trainer.conftest import environment, make_inputs

RUN_SECONDS = 240.0
TRANSFERS, WAYS = ("folder", "direct"), ("on", "off")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder) / "inputs")
        with serving(inputs, options.servers) as urls:
            figures = [
                {"transfer": transfer, "delta": way}
                | measure(inputs, Path(folder), urls, transfer, way, options)
                for transfer in TRANSFERS
                for way in WAYS
            ]
    print(table(figures, options))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


@contextmanager
def serving(inputs: Path, count: int) -> Iterator[list[str]]:
    """Start servers of the model, wait until they answer, and yield their URLs."""
    ports = [free_port() for _ in range(count)]
    names = [str(port) for port in ports]
    with vllm_servers(inputs, inputs / "model", names):
        yield [f"http://127.0.0.1:{port}" for port in ports]


def measure(
    inputs: Path,
    folder: Path,
    urls: Sequence[str],
    transfer: str,
    way: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Run PPO on the servers; return the means of its updates after the first."""
    runs = folder / f"{transfer}-{way}"
    servers = {"urls": list(urls), "transfer": transfer, "poll_seconds": 0.05}
    rollout = {"engine": "server", "use_dynamic_batching": False, "servers": servers}
    given = arguments(
        inputs,
        runs,
        f"rollout={json.dumps(rollout)}",
        f"reshard={{delta: {way}, check_every: 1}}",
        "model.dtype=bfloat16",
        f"actor.optimizer.lr={options.lr}",
        f"trainer.steps={options.steps}",
    )
    done = subprocess.run(
        [sys.executable, "-m", "megaverl", *given],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    lines = (runs / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    updates = [each for each in map(json.loads, lines) if "reshard/seconds" in each]
    return {
        name: statistics.mean(each.get(f"reshard/{name}", 0.0) for each in updates)
        for name in ("seconds", "bytes_sent", "bytes_received", "changed_fraction")
    }


def table(figures: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """Format the figures as a table in Markdown."""
    lines = [
        f"{options.servers} servers, lr {options.lr:g}, {options.steps} steps",
        "",
        "| Transfer | `reshard.delta` | Changed | Sent or written, kB | Received or read, kB | Seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in figures:
        changed = f"{row['changed_fraction']:.1%}" if row["changed_fraction"] else ""
        lines.append(
            f"| {row['transfer']} | {row['delta']} | {changed} | {row['bytes_sent'] / 1e3:.1f} "
            f"| {row['bytes_received'] / 1e3:.1f} | {row['seconds']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
