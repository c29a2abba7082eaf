"""A tiny random vision-language model learns by GRPO to name the colour of the shape in a picture.

Pictures, tokenizer and model are made on the spot. The model (Qwen2-VL's architecture) starts from random weights, so
all words of its vocabulary are equally likely. The Hugging Face model trains under FSDP2, and vLLM generates.
`learning_curves.py --task shapes` runs this.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

RGB = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "yellow": (230, 210, 30),
}
SIZE = 56
COUNTS = {"train": 512, "held_out": 128}
ACCURACY, DIFFERENCE = "validation/accuracy", "rollout/logprob_diff_max"


def make_pictures(folder: Path, seed: int, counts: Mapping[str, int] = COUNTS) -> None:
    """Write train.jsonl, held_out.jsonl and the pictures that their rows name, each drawn from its own seed."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        lines = []
        for number in range(count):
            draw = random.Random(f"{seed} {name} {number}")
            colour, shape = (
                draw.choice(list(RGB)),
                draw.choice(["square", "circle", "triangle", "cross"]),
            )
            picture = picture_of(colour, shape, draw)
            picture.save(folder / name / f"{number}.png")
            lines.append(
                {
                    "prompt": "<image> which colour",
                    "images": [f"{name}/{number}.png"],
                    "answer": colour,
                }
            )
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )


def picture_of(colour: str, shape: str, draw: random.Random) -> Any:
    """Draw a PIL image of a shape at a random place on grey."""
    from PIL import Image, ImageDraw

    grey = draw.randrange(90, 170)
    image = Image.new("RGB", (SIZE, SIZE), (grey, grey, grey))
    pen, side = ImageDraw.Draw(image), draw.randrange(24, 40)
    left, top = draw.randrange(SIZE - side), draw.randrange(SIZE - side)
    right, bottom, third = left + side, top + side, side // 3
    fill = RGB[colour]
    if shape == "square":
        pen.rectangle((left, top, right, bottom), fill)
    elif shape == "circle":
        pen.ellipse((left, top, right, bottom), fill)
    elif shape == "triangle":
        pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill)
    else:
        pen.rectangle((left + third, top, right - third, bottom), fill)
        pen.rectangle((left, top + third, right, bottom - third), fill)
    return image


def settings(out: Path, seed: int, *overrides: str) -> list[str]:
    """Return a run's overrides of configs/qwen2_vl/grpo_shapes_cpu.yaml."""
    inputs = out / "runs" / f"shapes_{seed}" / "inputs"
    return [
        f"run.dir={out / 'runs'}",
        f"run.name=shapes_{seed}",
        f"run.seed={seed}",
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        f"data.validation={inputs / 'held_out.jsonl'}",
        *overrides,
    ]


def run(out: Path, seeds: list[int], seconds: float) -> int:
    """Train the seeds that are missing. Returns 0 when all are there, 3 if time ran out."""
    from tools.learning_curves import attempt, join_world, recorded

    start, longest, joined = time.monotonic(), 0.0, False
    for seed in seeds:
        if result_file(out, seed).exists():
            continue
        if time.monotonic() - start + longest > seconds:
            return 3
        if not joined:
            join_world()
            joined = True
        prepare(out, seed)
        began = time.monotonic()
        error = attempt(configuration(out, seed))
        longest = max(longest, time.monotonic() - began)
        records = recorded(out, f"shapes_{seed}")
        result = {
            "seed": seed,
            "curve": [
                (record["step"], record[ACCURACY])
                for record in records
                if ACCURACY in record
            ],
            "seconds": round(time.monotonic() - began, 1),
            "log_probs": max(record.get(DIFFERENCE, 0.0) for record in records),
            "error": error,
        }
        result_file(out, seed).parent.mkdir(parents=True, exist_ok=True)
        result_file(out, seed).write_text(json.dumps(result), encoding="utf-8")
        print(json.dumps(result), flush=True)
    return 0


def report(out: Path, docs: Path, seeds: list[int]) -> int:
    """Draw docs/pictures/shapes.png: some of the pictures, and accuracy on held-out ones by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [
        json.loads(result_file(out, seed).read_text())
        for seed in seeds
        if result_file(out, seed).exists()
    ]
    if not results:
        print(f"{out} holds no results: run them first")
        return 2
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), width_ratios=(1, 2))
    folder = out / "runs" / f"shapes_{results[0]['seed']}" / "inputs" / "held_out"
    rows = [
        [pyplot.imread(folder / f"{4 * row + column}.png") for column in range(4)]
        for row in range(3)
    ]
    left.imshow(numpy.concatenate([numpy.concatenate(row, axis=1) for row in rows]))
    left.axis("off")
    for result in results:
        right.plot(*zip(*result["curve"], strict=True), label=f"seed {result['seed']}")
    right.set(xlabel="step", ylabel="accuracy, held out", ylim=(0, 1.02))
    right.legend()
    figure.tight_layout()
    figure.savefig(docs / "pictures" / "shapes.png", dpi=100)
    for result in results:
        first, last = result["curve"][0][1], result["curve"][-1][1]
        print(
            f"seed {result['seed']}: {first:.1%} -> {last:.1%} in {result['seconds']:.0f} s; {result['log_probs']:.1e}"
        )
    return 0


def result_file(out: Path, seed: int) -> Path:
    return out / "results" / f"shapes_{seed}.json"


def prepare(out: Path, seed: int) -> None:
    """Make every input of the run once."""
    from megaverl.models.tiny import make_tiny_vision_folder

    inputs = out / "runs" / f"shapes_{seed}" / "inputs"
    if not (inputs / "held_out.jsonl").exists():
        make_tiny_vision_folder(
            inputs / "model", "qwen2_vl", pixels=(SIZE * SIZE, SIZE * SIZE), seed=seed
        )
        make_pictures(inputs, seed)


def configuration(out: Path, seed: int, *overrides: str) -> Any:
    """Return the configuration of one seed."""
    from megaverl.config import load_config
    from megaverl.config.yaml_source import recipe

    return load_config(
        recipe("qwen2_vl/grpo_shapes_cpu"),
        settings(out, seed, *overrides),
        world_size=1,
    )
