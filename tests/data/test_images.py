"""Images of rows: what is found, what is refused, and how they travel with a batch."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from PIL import Image

from megaverl.config.run import DataConfig, ImagesConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_io import load, save
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.examine import encoder_of, examine
from megaverl.data.images import COLUMN, Images, image_column
from megaverl.data.prefix_packing import prompt_numbers
from megaverl.data.prompts import Columns, PromptEncoder, PromptFormat
from megaverl.data.sources import open_source
from megaverl.data.streaming import StreamedPrompts
from megaverl.data.tokenizers import load_tokenizer
from megaverl.distributed.ragged import RaggedBatch
from megaverl.errors import DataError
from megaverl.models.tiny import make_tiny_vision_folder
from megaverl.rollout.engine import Generation

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
Read = Callable[..., PromptDataset]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = numpy.random.default_rng(seed).integers(
        0, 255, (height, width, 3), dtype=numpy.uint8
    )
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_vision_folder(tmp_path_factory.mktemp("vlm"), weights=False)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
def read(folder: Path, tmp_path: Path) -> Read:
    """Rows, written to a file beside images, as prompts."""

    def prompts(
        *rows: dict[str, Any], limit: int = 200, **images: Any
    ) -> PromptDataset:
        path = tmp_path / "rows.jsonl"
        path.write_text(
            "".join(json.dumps({"answer": "", **row}) + "\n" for row in rows)
        )
        tokenizer = load_tokenizer(folder)
        reader = Images.of(ImagesConfig(**images), folder, tokenizer)
        assert reader is not None
        encoder = PromptEncoder(
            tokenizer, PromptFormat(max_tokens=limit), reader.processor.token_id
        )
        return PromptDataset.load(path, encoder, Columns(images=reader))

    return prompts


def test_an_image_becomes_as_many_tokens_as_it_has_parts(
    read: Read, folder: Path, tmp_path: Path
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    picture(90, 70).save(tmp_path / "a.png")
    record = read({"prompt": "<image> which colour", "images": ["a.png"], "level": 1})[
        0
    ]
    [image] = record.images
    found = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        images=[picture(90, 70)], return_tensors="pt"
    )
    assert torch.equal(image.tensors["pixel_values"], found["pixel_values"])
    assert (
        image.tensors["image_grid_thw"].tolist()
        == found["image_grid_thw"][0].tolist()
        == [1, 4, 6]
    )
    token = json.loads((folder / "config.json").read_text())["image_token_id"]
    assert image.size == record.token_ids.count(token) == 4 * 6 // 4
    assert record.text.count(
        "<|vision_start|><|image_pad|><|vision_end|>"
    ) == 1 and record.extra == {"level": 1}


def test_every_way_to_give_an_image_gives_the_same(read: Read, tmp_path: Path) -> None:
    data = encoded(picture(60, 60))
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{text}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "hello"},
    ]
    ways: list[Any] = [
        "a.png",
        str(tmp_path / "a.png"),
        url,
        text,
        {"path": "a.png"},
        {"bytes": text, "path": None},
    ]
    rows = [{"prompt": "hello", "images": way} for way in ways]
    rows += [
        {"prompt": [{"role": "user", "content": parts}]},
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": "a.png"}, parts[1]],
                }
            ]
        },
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, parts[1]]}],
            "images": ["a.png"],
        },
    ]
    found = read(*rows)
    assert len({tuple(record.token_ids) for record in found}) == 1
    assert {image.key for record in found for image in record.images} == {
        found[0].images[0].key
    }


def test_several_images_stand_where_they_are_marked(read: Read, tmp_path: Path) -> None:
    picture(56, 56, 1).save(tmp_path / "1.png")
    picture(84, 56, 2).save(tmp_path / "2.webp", lossless=True)
    content = [
        {"type": "text", "text": "red "},
        {"type": "image"},
        {"type": "text", "text": " blue <image>"},
    ]
    row = {
        "prompt": [{"role": "user", "content": content}],
        "images": ["1.png", "2.webp"],
    }
    record, plain = read(row, {"prompt": "no image here"})
    assert [image.size for image in record.images] == [4, 6] and not plain.images
    assert record.text.count("<|image_pad|>") == 2
    assert (
        record.text.index("red")
        < record.text.index("<|image_pad|>")
        < record.text.index("blue")
    )


def test_a_turned_photograph_is_counted_as_it_is_seen(
    read: Read, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(84, 56).save(tmp_path / "turned.jpg", exif=exif)
    [image] = read({"prompt": "hello", "images": "turned.jpg"})[0].images
    assert image.tensors["image_grid_thw"].tolist() == [1, 6, 4] and image.size == 6


@pytest.mark.parametrize(
    ("make", "more", "said"),
    [
        (lambda path: path.write_text("hello"), {}, "is no image that is read here"),
        (lambda path: None, {}, "'a.png' is not there"),
        (
            lambda path: picture(300, 300).save(path),
            {"max_pixels": 80_000},
            "300 x 300 pixels, and at most 80000",
        ),
        (
            lambda path: picture(60, 60).save(path),
            {"max_bytes": 100},
            "at most 100 are allowed",
        ),
        (
            lambda path: picture(600, 2).save(path),
            {},
            "600 x 2 pixels, which the processor refuses",
        ),
    ],
)
def test_what_cannot_be_an_image_is_refused_by_row(
    read: Read,
    tmp_path: Path,
    make: Callable[[Path], Any],
    more: dict[str, Any],
    said: str,
) -> None:
    make(tmp_path / "a.png")
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl, line 2: image 1 .*|rows\.jsonl, line 2: image 1:",
    ) as raised:
        read({"prompt": "hello"}, {"prompt": "hello", "images": ["a.png"]}, **more)
    assert said in str(raised.value)


class Served(BaseHTTPRequestHandler):
    """What lies at a path: headers and body; `waits` sends a part, and the rest when the test is over."""

    answers: ClassVar[dict[str, tuple[int, dict[str, str], bytes]]] = {}
    asked: ClassVar[list[str]] = []
    over: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        status, headers, body = self.answers[self.path]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if self.path == "/waits":
            self.over.wait(60)

    def log_message(self, *args: Any) -> None:
        pass


def test_images_by_urls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with consent, only from there, whole, in time, and no more than is allowed."""
    whole, kind = encoded(picture(60, 60)), {"Content-Type": "image/png"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        Served.answers = {
            "/good": (200, kind, whole),
            "/told": (200, kind | {"Content-Length": str(len(whole))}, whole),
            "/moved": (302, {"Location": "/good"}, b""),
            "/elsewhere": (302, {"Location": f"http://localhost:{port}/good"}, b""),
            "/file": (302, {"Location": "file:///etc/passwd"}, b""),
            "/ftp": (302, {"Location": "ftp://127.0.0.1/a.png"}, b""),
            "/page": (200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>"),
            "/large": (200, kind, whole + bytes(20_000)),
            "/huge": (200, kind | {"Content-Length": "1000000000"}, b""),
            "/cut": (200, kind | {"Content-Length": str(len(whole))}, whole[:100]),
            "/waits": (200, kind | {"Content-Length": str(len(whole))}, whole[:100]),
            "/gone": (404, {}, b""),
        }
        tokenizer = load_tokenizer(folder)

        def read(path: str, allow: bool | list[str], host: str = "127.0.0.1") -> Any:
            reader = Images.of(
                ImagesConfig(allow_urls=allow, max_bytes=20_000), folder, tokenizer
            )
            assert reader is not None
            return reader.read(f"http://{host}:{port}{path}", "image 1", "here")

        refused: list[tuple[str, bool | list[str], str, str]] = [
            (
                "/good",
                False,
                "127.0.0.1",
                "unless data.images.allow_urls is true or names its host",
            ),
            (
                "/good",
                True,
                "127.0.0.1",
                "127.0.0.1 has the private address 127.0.0.1: name the host",
            ),
            ("/good", True, "%31%32%37.0.0.1", "has the private address 127.0.0.1"),
            ("/good", True, "localhost", "has the private address"),
            (
                "/good",
                ["a.org"],
                "127.0.0.1",
                "127.0.0.1 is not among the hosts of data.images.allow_urls",
            ),
        ]
        for path, allow, host, said in refused:
            with pytest.raises(DataError, match=re.escape(said)):
                read(path, allow, host)
        assert Served.asked == [], "nothing is asked for before it is allowed"
        here = ["127.0.0.1"]
        assert len({read(path, here).key for path in ("/good", "/told", "/moved")}) == 1
        for path, said in {
            "/elsewhere": "localhost is not among the hosts",
            "/file": "file:///etc/passwd' is not allowed",
            "/ftp": "it leads to 'ftp://127.0.0.1/a.png', and only http and https are followed",
            "/page": "it is text/html, and no image",
            "/large": "larger than data.images.max_bytes=20000",
            "/huge": "larger than data.images.max_bytes=20000",
            "/cut": f"it has {len(whole)} bytes, and 100 came",
            "/gone": "404",
        }.items():
            with pytest.raises(DataError, match=re.escape(said)):
                read(path, here)
        monkeypatch.setattr("megaverl.data.images.SECONDS", 0.3)
        with pytest.raises(DataError, match=r"it was not here within 0\.3 s"):
            read("/waits", here)
        Served.over.set()
        server.shutdown()
    assert Served.asked.count("/good") == 2, "once by itself, once as moved"


def test_a_bomb_is_refused_before_it_is_decoded(read: Read, tmp_path: Path) -> None:
    Image.new("1", (40_000, 40_000)).save(tmp_path / "bomb.png")
    with pytest.raises(
        DataError,
        match=r"image 1 is too large to be decoded: Image size \(1600000000 pixels\)",
    ):
        read({"prompt": "hello", "images": ["bomb.png"]})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "<image> and <image>", "images": ["a.png"]},
            "2 places for images of 'images'",
        ),
        ({"prompt": "hello", "images": ["a.png"] * 3}, "3 images, and at most 2"),
        (
            {"prompt": "hello", "images": ["https://a.org/b.png"]},
            "unless data.images.allow_urls is true",
        ),
        (
            {"prompt": "hello <|image_pad|>", "images": ["a.png"]},
            "has 1 images, and as the model reads it 2 places",
        ),
        ({"prompt": "hello", "images": [7]}, "image 1 is int; expected a path"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}]},
            "has a part {'type': 'video'}",
        ),
        (
            {"prompt": "hello", "images": ["data:image/png;base64,!!!"]},
            "not valid base64",
        ),
        ({"prompt": "red " * 250, "images": ["a.png"]}, "(One with images is not cut;"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    read: Read, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    picture(60, 60).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1") as raised:
        read(row, max_per_prompt=2)
    assert said in str(raised.value)


def test_data_check_decodes_what_a_start_does_not(folder: Path, tmp_path: Path) -> None:
    whole = encoded(picture(200, 200))
    (tmp_path / "good.png").write_bytes(whole)
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "hello", "answer": "", "images": [name]}
        for name in ("good.png", "cut.png")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder, images = encoder_of(DataConfig(), str(folder))
    found = examine(open_source(str(path)), encoder, Columns(images=images))
    assert (found.num_usable, found.num_images) == (1, 1)
    [problem] = found.errors
    assert (
        problem.where.endswith("line 2")
        and "image 1 is damaged or cut off" in problem.message
    )
    with pytest.raises(DataError, match=r"line 2: image 1 is damaged or cut off"):
        dataset = PromptDataset.load(str(path), encoder, Columns(images=images))
        dataset[1].images[0].tensors  # noqa: B018


def test_images_of_datasets_come_as_they_are_stored(
    folder: Path, tmp_path: Path
) -> None:
    import datasets

    images = [picture(60, 60, seed) for seed in range(3)]
    rows = {
        "prompt": ["hello"] * 3,
        "answer": [""] * 3,
        "images": [[image] for image in images],
    }
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "images": [datasets.Image()],
        }
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(
        str(tmp_path / "saved")
    )
    encoder, reader = encoder_of(DataConfig(), str(folder))
    columns = Columns(images=reader)
    numbered = PromptDataset.load(str(tmp_path / "saved"), encoder, columns)
    streamed = StreamedPrompts(
        [str(tmp_path / "saved")], encoder, columns, seed=0
    ).take(3)
    keys = [record.images[0].key for record in numbered]
    assert keys == [record.images[0].key for record in streamed] and len(set(keys)) == 3
    assert reader is not None
    image = reader.read(images[1], "image", "here")  # and as `datasets` decodes them
    assert torch.equal(
        image.tensors["pixel_values"], numbered[1].images[0].tensors["pixel_values"]
    )


def batch_of(records: list[PromptRecord]) -> RolloutBatch:
    answers = [Generation([5], [-1.0], "stop") for _ in records]
    return RolloutBatch.from_generations(
        [r.token_ids for r in records],
        answers,
        columns=image_column(r.images for r in records),
    )


def test_a_group_shares_its_images_wherever_its_rows_go(
    read: Read, tmp_path: Path
) -> None:
    for seed in range(2):
        picture(56, 56, seed).save(tmp_path / f"{seed}.png")
    a, b, c = read(
        *({"prompt": "hello", "images": [f"{seed}.png"]} for seed in (0, 1)),
        {"prompt": "no image"},
    )
    batch = batch_of([a, b, a, c, b])
    assert prompt_numbers(batch) == [0, 1, 0, 2, 1], "the same tokens, and other images"
    once = 16 * 3 * 2 * 14 * 14 * 4
    ragged = RaggedBatch(batch.tensors, columns=batch.columns)
    header, payload, _ = ragged.pack([0, 1, 2, 3, 4])
    assert 2 * once < payload.numel() < 3 * once
    back = RaggedBatch.unpack(header, payload, {}).columns[COLUMN]
    assert back == batch.columns[COLUMN] and back[0][0] is back[2][0] and back[3] == []
    save(batch, tmp_path / "batch.safetensors")
    assert (tmp_path / "batch.safetensors").stat().st_size < 3 * once
    for found in (
        load(tmp_path / "batch.safetensors"),
        RolloutBatch.concat([batch[:2]]),
    ):
        kept = found.columns[COLUMN][1][0].tensors
        assert all(
            torch.equal(kept[name], tensor)
            for name, tensor in b.images[0].tensors.items()
        )
    # samples that are sent one by one join, whether theirs is a prompt with images or
    # not
    joined = RolloutBatch.concat([batch_of([a]), batch_of([c])])
    assert joined.columns[COLUMN] == [a.images, []] and prompt_numbers(joined) == [0, 1]
