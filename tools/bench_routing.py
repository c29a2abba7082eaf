"""Compare ways to spread multi-turn conversations over two real vLLM servers: in turn, by load, and by prefix.

    python tools/bench_routing.py                                  # three minutes on two cores
    python tools/bench_routing.py --sessions 32 --turns 6 --rounds 3

Every conversation begins with a prompt, and each turn adds what the model wrote and what it reads next. All
conversations request their next turns together, as episodes do. The servers' caches are emptied before every round;
rounds of the three ways alternate. Prints medians: the share of prompt tokens that the servers found in their prefix
caches (their own counters), generated tokens a second, and processor seconds of the servers. The model has random
weights; what it writes does not matter here.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

# A checkout needs no installation of megaverl.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaverl.models.tiny import make_tiny_folder
from megaverl.processes import ending_with_parent
from megaverl.rollout.prefix_routing import PrefixRouter

MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
SERVE = "--kv-cache-memory-bytes 1500000000 --max-model-len 4096 --max-num-seqs 64"
START_SECONDS = 300.0
Choose = Callable[[Sequence[int], Mapping[str, int]], str]


class Round(NamedTuple):
    """What one round of all conversations cost.

    Attributes:
        found: share of prompt tokens that were in the caches.
        tokens_per_second: generated tokens, by wall time.
        processor_seconds: of all processes of the servers.
    """

    found: float
    tokens_per_second: float
    processor_seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--read", type=int, default=128, help="tokens between turns")
    parser.add_argument("--write", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="megaverl_routing_") as folder:
        model = make_tiny_folder(Path(folder) / "model", "Qwen3ForCausalLM", **MODEL)
        with served(Path(folder), model) as servers:
            rounds: dict[str, list[Round]] = {name: [] for name in WAYS}
            # The first round of a server is slower, whatever the way.
            play(servers, WAYS["in turn"](), options, seed=0)
            for number in range(options.rounds):
                for name, make in WAYS.items():
                    seed = 1 + number
                    rounds[name].append(play(servers, make(), options, seed=seed))
    print(f"{'':10}{'found in caches':>17}{'tokens/s':>10}{'processor s':>13}")
    for name, played in rounds.items():
        cached_share, speed, seconds = (
            statistics.median(column) for column in zip(*played, strict=True)
        )
        print(f"{name:10}{cached_share:>17.1%}{speed:>10.1f}{seconds:>13.1f}")
    return 0


def in_turn() -> Choose:
    """Return round robin."""
    count = iter(range(sys.maxsize))
    return lambda _, loads: list(loads)[next(count) % len(loads)]


def by_load() -> Choose:
    return lambda _, loads: min(loads, key=lambda server: loads[server])


def by_prefix() -> Choose:
    return PrefixRouter().choose


WAYS: dict[str, Callable[[], Choose]] = {
    "in turn": in_turn,
    "by load": by_load,
    "by prefix": by_prefix,
}


class Server(NamedTuple):
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]

    def processor_seconds(self) -> float:
        root = psutil.Process(self.process.pid)
        total = 0.0
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def cached(self) -> tuple[float, float]:
        """Return (prompt tokens that were looked for in the cache, and found) since the start."""
        text = httpx.get(f"{self.url}/metrics").text
        return tuple(
            sum(
                map(
                    float,
                    re.findall(
                        rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$",
                        text,
                        re.MULTILINE,
                    ),
                )
            )
            for name in ("queries", "hits")
        )  # type: ignore[return-value]


@contextmanager
def served(folder: Path, model: Path) -> Iterator[list[Server]]:
    """Start two servers of the model, and end them."""
    servers: list[Server] = []
    try:
        for number in range(2):
            port = free_port()
            command = [
                *(sys.executable, "-m", "megaverl", "serve", "rollout", str(model)),
                *("--port", str(port), f"--vllm={SERVE}"),
            ]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            with (folder / f"server_{number}.log").open("w") as log:
                process = subprocess.Popen(
                    ending_with_parent(command),
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=ROOT,
                )
            servers.append(Server(f"http://127.0.0.1:{port}", process))
        end = time.monotonic() + START_SECONDS
        for number, server in enumerate(servers):
            while not answers(server.url):
                if server.process.poll() is not None or time.monotonic() > end:
                    log_text = (folder / f"server_{number}.log").read_text()
                    raise SystemExit(
                        f"server {number} did not start:\n{log_text[-3000:]}"
                    )
                time.sleep(0.5)
        yield servers
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
        for server in servers:
            server.process.wait(60)


def free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    return False


def play(
    servers: Sequence[Server], choose: Choose, options: argparse.Namespace, *, seed: int
) -> Round:
    """Play all conversations to their end."""
    draw = random.Random(seed)
    by_url = {server.url: server for server in servers}
    for server in servers:
        httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()
    before = [server.cached() for server in servers]
    spent = sum(server.processor_seconds() for server in servers)
    said = [
        [draw.randrange(1000) for _ in range(options.prompt)]
        for _ in range(options.sessions)
    ]
    [first, *_] = httpx.get(f"{servers[0].url}/v1/models").json()["data"]
    loads = dict.fromkeys(by_url, 0)
    lock = threading.Lock()
    start = time.monotonic()

    def turn(session: int) -> None:
        with lock:
            url = choose(said[session], loads)
            loads[url] += 1
        body = {
            "model": first["id"],
            "prompt": said[session],
            "max_tokens": options.write,
            "min_tokens": options.write,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600.0)
        with lock:
            loads[url] -= 1
        answer.raise_for_status()
        said[session] += answer.json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(options.sessions) as threads:
        for _ in range(options.turns):
            # Episodes reach their next turns in another order every time.
            order = draw.sample(range(options.sessions), options.sessions)
            list(threads.map(turn, order))
            for tokens in said:
                tokens += [draw.randrange(1000) for _ in range(options.read)]
    seconds = time.monotonic() - start
    after = [server.cached() for server in servers]
    asked_tokens = sum(a[0] - b[0] for a, b in zip(after, before, strict=True))
    cached_tokens = sum(a[1] - b[1] for a, b in zip(after, before, strict=True))
    spent = sum(server.processor_seconds() for server in servers) - spent
    generated = options.sessions * options.turns * options.write
    return Round(cached_tokens / asked_tokens, generated / seconds, spent)


if __name__ == "__main__":
    raise SystemExit(main())
