"""Images of prompts: found in a row, checked against limits, and converted to a model's input when needed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.config.run import ImagesConfig
from megaverl.data.downloads import fetch
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError
from megaverl.outside import check_sizes, read_json_file

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from megaverl.data.messages import Message
    from megaverl.data.prefix_tree import PrefixTree
    from megaverl.data.tokenizers import Tokenizer

# Column of a batch with a list of `SharedItem` per sample.
COLUMN = "images"
# Formats that PIL decodes without an external program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# `model_type` of the models that take images.
FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
# Placeholder in a prompt for an image of the row's column.
IN_TEXT = "<image>"
# Deadline of a download, including redirects.
SECONDS = 30.0
# From this EXIF orientation on, width and height are exchanged.
TURNED = 5
ORIENTATION = 0x0112
Values = Sequence[Any]


class ImageProcessor:
    """A model's image processor, in its PIL variant, which gives the same numbers with and without torchvision.

    Attributes:
        token_id: token that stands for a part of an image in the prompt.
        written: an image in the text of a prompt. Its token is repeated later for every part of the image.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, options: Mapping[str, Any]
    ) -> None:
        """Load the processor of a model.

        Args:
            folder: the model's folder, with preprocessor_config.json.
            options: options that replace those in that file.

        Raises:
            DataError: the model's family is not supported, or its folder lacks the file.
        """
        config = _model_config(folder)
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise DataError(
                f"{folder}: images of {kind} are not supported. Supported: {', '.join(FAMILIES)}. For text only, name "
                "a folder with its language model."
            )
        from transformers import AutoImageProcessor

        try:
            check_sizes(Path(folder).glob("*processor_config.json"))
            self._process: Any = AutoImageProcessor.from_pretrained(
                folder, backend="pil", **options
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{folder}: no image processor can be made of it ({type(error).__name__}: {error}). Copy "
                "preprocessor_config.json from the model's source, and correct data.images.processor if you set it."
            ) from error
        self.token_id = int(config["image_token_id"])
        ids = (
            config["vision_start_token_id"],
            self.token_id,
            config["vision_end_token_id"],
        )
        self.written = "".join(tokenizer.backend.convert_ids_to_tokens(list(ids)))
        # Part of every image's key: another processor makes other tensors of the same
        # bytes.
        facts = json.dumps(self._process.to_dict(), sort_keys=True, default=str)
        self._identity = hashlib.blake2b(facts.encode(), digest_size=8).digest()

    def item(
        self,
        data: bytes,
        size: tuple[int, int],
        decode: Callable[[], Image],
        described: str,
    ) -> SharedItem:
        """Return an image in the model's form: `pixel_values` [patches, values] float32 and `image_grid_thw` [3] int64.

        Both are computed on first use.

        Args:
            data: contents of the image, which identify it.
            size: width and height in pixels.
            decode: returns the decoded image.
            described: name of the image in messages.

        Raises:
            DataError: the processor refuses the image's shape.
        """
        try:
            patches = self._process.get_number_of_image_patches(size[1], size[0], {})
        except ValueError as error:
            raise DataError(
                f"{described} is {size[0]} x {size[1]} pixels, which the processor refuses: {error}."
            ) from error
        key = hashlib.blake2b(self._identity + data, digest_size=16).hexdigest()

        def tensors() -> Mapping[str, Tensor]:
            processed = self._process(images=[decode()], return_tensors="pt")
            return {
                "pixel_values": processed["pixel_values"],
                "image_grid_thw": processed["image_grid_thw"][0],
            }

        return SharedItem(key, patches // self._process.merge_size**2, tensors)


class Images:
    """Reads the images of rows according to `data.images`."""

    def __init__(self, config: ImagesConfig, processor: ImageProcessor) -> None:
        self.config = config
        self.processor = processor

    @classmethod
    def of(
        cls, config: ImagesConfig, folder: str | Path, tokenizer: Tokenizer
    ) -> Images | None:
        """Return the reader for a model that takes images, or None if its config.json has no `vision_config`."""
        path = Path(folder) / "config.json"
        if not path.is_file() or "vision_config" not in _model_config(path.parent):
            return None
        return cls(config, ImageProcessor(Path(folder), tokenizer, config.processor))

    def write_images(
        self,
        prompt: str | list[Message],
        parts: Values,
        column: Any,
        where: str,
    ) -> tuple[str | list[Message], list[SharedItem]]:
        """Return the prompt with its images written into it, and the images in that order.

        Args:
            prompt: prompt with a `MARK` for each image.
            parts: image at each mark. None: the next one of the column.
            column: an image or a list of images. Each replaces a mark without an image, or an `<image>` placeholder.
                Without any, they are put before the first user's text.
            where: the row, for messages.

        Raises:
            DataError: there are too many images, their number does not match the placeholders, or one cannot be read.
        """
        entries = column if isinstance(column, list | tuple) else [column]
        images = [entry for entry in entries if entry is not None]
        key = self.config.key
        values = list[Any]()
        if images and None not in parts and IN_TEXT not in _text(prompt):
            # A prompt without places for its images gets them before its text.
            prompt = _before(prompt, MARK * len(images))
            parts = [None] * len(images) + list(parts)
        waiting = iter(parts)
        written = 0

        def put(text: str) -> str:
            nonlocal written
            pieces = re.split(
                f"({re.escape(MARK)}|{IN_TEXT})" if images else f"({re.escape(MARK)})",
                text,
            )
            for place, piece in enumerate(pieces):
                if place % 2:
                    value = next(waiting) if piece == MARK else None
                    if value is None:
                        value = images[written] if written < len(images) else None
                        written += 1
                    values.append(value)
                    pieces[place] = self.processor.written
            return "".join(pieces)

        if isinstance(prompt, str):
            prompt = put(prompt)
        else:
            prompt = [
                {**message, "content": put(message["content"])} for message in prompt
            ]
        if written != len(images):
            raise DataError(
                f"{where}: {written} places for images of {key!r} in the prompt, and {len(images)} images. Write "
                f"{IN_TEXT} once for each, or nowhere: they then stand before the text."
            )
        if len(values) > self.config.max_per_prompt:
            raise DataError(
                f"{where}: {len(values)} images, and at most {self.config.max_per_prompt} are allowed. Raise "
                "data.images.max_per_prompt, or shorten the row."
            )
        return prompt, [
            self.read(value, f"{where}: image {n}", where)
            for n, value in enumerate(values, 1)
        ]

    def read(self, value: Any, name: str, where: str) -> SharedItem:
        """Read one image. Only its header is parsed until its pixels are needed.

        Args:
            value: a path, a URL, bytes, a PIL image, or a mapping with one of these.
            name: name of the image in messages.
            where: the row. Paths are relative to the folder of its file.

        Raises:
            DataError: the image is missing, too large, or not an image.
        """
        from PIL import Image as pil

        if isinstance(value, pil.Image):
            self._check_pixels(value.size, name)
            # An already decoded image has no encoded bytes to hash. Its pixels stand
            # for them.
            image: Image = value
            head = f"{value.mode} {value.size}".encode()
            return self.processor.item(
                head + value.tobytes(), value.size, lambda: image.convert("RGB"), name
            )
        data = self._bytes(value, name, where)
        if len(data) > self.config.max_bytes:
            raise DataError(
                f"{name} has {len(data)} bytes, and at most {self.config.max_bytes} are allowed. Make it smaller, or "
                "raise data.images.max_bytes."
            )
        with _opened(data, name) as opened:
            self._check_pixels(opened.size, name)
            # Pixels are decoded upright, and the number of tokens depends on the size
            # after that.
            size = opened.size[::-1] if _orientation(opened) >= TURNED else opened.size
        return self.processor.item(data, size, lambda: _pixels(data, name), name)

    def _check_pixels(self, size: tuple[int, int], name: str) -> None:
        """Raise DataError if an image has too many pixels."""
        if size[0] * size[1] > self.config.max_pixels:
            raise DataError(
                f"{name} is {size[0]} x {size[1]} pixels, and at most {self.config.max_pixels} in all are allowed: it "
                "was not decoded. Make it smaller, or raise data.images.max_pixels."
            )

    def _bytes(self, value: Any, name: str, where: str) -> bytes:
        """Return the encoded bytes of an image."""
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if isinstance(value, Mapping):
            for key in ("bytes", "base64", "url", "path", "image", "image_url"):
                if value.get(key) is not None:
                    inner = value[key]
                    is_encoded = key in ("bytes", "base64") and isinstance(inner, str)
                    return (
                        _decoded(inner, name)
                        if is_encoded
                        else self._bytes(inner, name, where)
                    )
        if not isinstance(value, str):
            raise DataError(
                f"{name} is {type(value).__name__}; expected a path, a data: URL, bytes, or a mapping with one of them "
                "under path, url, bytes or base64."
            )
        scheme = value[:8].lower()
        if scheme.startswith("data:"):
            header, comma, body = value.partition(",")
            if not comma or not header.endswith(";base64"):
                raise DataError(
                    f"{name}: a data: URL must be like data:image/png;base64,...; found {value!r:.40}."
                )
            return _decoded(body, name)
        if scheme.startswith(("http://", "https://")):
            if not self.config.allow_urls:
                raise DataError(
                    f"{name} is {value!r:.80}: nothing is fetched unless data.images.allow_urls is true or names its "
                    "host. Download it, and name the file."
                )
            return self._download(value, name)
        path = Path(value.removeprefix("file://"))
        base = getattr(where, "folder", Path())
        try:
            if path.is_absolute() or (base / path).exists():
                return (base / path).read_bytes()
        except OSError as error:
            # A longer text that is no path may be base64, which is tried below.
            if path.is_absolute() or len(value) < 256:
                raise DataError(
                    f"{name}: {value!r:.200} cannot be read ({error.strerror or error})."
                ) from error
        # Too long for a file's name, and made of base64's characters.
        if len(value) >= 64 and re.fullmatch(r"[A-Za-z0-9+/\s]+={0,2}\s*", value):
            return _decoded(value, name)
        raise DataError(
            f"{name}: {value!r:.200} is not there (looked in {base.resolve()}). Correct the path."
        )

    def _download(self, url: str, name: str) -> bytes:
        """Return the bytes at a URL, within the limits."""
        try:
            return fetch(url, self.config.max_bytes, self.config.allow_urls, SECONDS)
        except (OSError, ValueError, HTTPException) as error:
            raise DataError(
                f"{name}: {url!r:.120} cannot be fetched ({error or type(error).__name__})."
            ) from error


# Stands for an image in the text of a message until the image is written.
MARK = "\N{OBJECT REPLACEMENT CHARACTER}\0"


def text_of_parts(content: Sequence[Any], where: str) -> tuple[str, list[Any]]:
    """Return the text of a message's parts, with `MARK` for each image, and the images.

    A part is {"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url":
    ...}} or {"type": "image", "image": ...}, as OpenAI writes them. A part of type
    image without an image stands for the next one of the row's column.

    Raises:
        DataError: a part is of another kind.
    """
    texts = []
    images = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image", "image_url"):
            rest = {
                key: value
                for key, value in part.items()
                if key != "type" and value is not None
            }
            texts.append(MARK)
            images.append(rest["image"] if set(rest) == {"image"} else rest or None)
        else:
            raise DataError(
                f'{where} has a part {part!r:.60}; expected {{"type": "text", "text": "..."}} or '
                '{"type": "image_url", "image_url": {"url": "..."}}.'
            )
    return "".join(texts), images


def image_column(
    of_prompts: Iterable[Sequence[SharedItem] | None],
) -> dict[str, list[list[SharedItem]]]:
    """Return the batch column of these prompts' images, or an empty dictionary for a model without images."""
    with_images = [images for images in of_prompts if images is not None]
    return (
        {COLUMN: [list(prompt_images) for prompt_images in with_images]}
        if with_images
        else {}
    )


def images_of_rows(
    column: Sequence[Sequence[SharedItem] | None] | None,
    tree: PrefixTree | None = None,
) -> list[SharedItem]:
    """Return all images of a batch, row after row.

    Args:
        column: the batch's column of images, or None if it has none.
        tree: tree of the rows' prompts, if they are packed into one row. A prompt that several rows share has its
            images once, at the first of them.
    """
    if column is None:
        return []
    rows = column
    if tree is not None:
        rows = [
            column[row]
            for row, shared in zip(tree.order, tree.shared, strict=True)
            if not shared
        ]
    return [image for row_images in rows for image in row_images or ()]


def _text(prompt: str | list[Message]) -> str:
    """Return all text of a prompt."""
    return (
        prompt
        if isinstance(prompt, str)
        else "".join(message["content"] for message in prompt)
    )


def _before(prompt: str | list[Message], text: str) -> str | list[Message]:
    """Return the prompt with `text` before the user's first message."""
    if isinstance(prompt, str):
        return text + prompt
    first = next(
        (n for n, message in enumerate(prompt) if message["role"] == "user"), 0
    )
    changed = {**prompt[first], "content": text + prompt[first]["content"]}
    return [*prompt[:first], changed, *prompt[first + 1 :]]


def _decoded(text: Any, name: str) -> bytes:
    """Return the bytes of base64 text."""
    try:
        return base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise DataError(f"{name}: not valid base64 ({error}).") from error


def _opened(data: bytes, name: str) -> Image:
    """Open an image and read its header."""
    from PIL import Image as pil

    try:
        with warnings.catch_warnings():
            # PIL warns at a limit of its own; here `max_pixels` is the limit.
            warnings.simplefilter("ignore", pil.DecompressionBombWarning)
            return pil.open(io.BytesIO(data), formats=FORMATS)
    except pil.DecompressionBombError as error:
        raise DataError(
            f"{name} is too large to be decoded: {error} Make it smaller."
        ) from error
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(
            f"{name} is no image that is read here ({', '.join(FORMATS)}); it begins with {data[:16]!r}. Fix the row."
        ) from error


def _orientation(opened: Image) -> int:
    """Return the EXIF orientation in the header.

    A PNG's own method would decode the whole image, to look for a later EXIF block.
    """
    from PIL import Image as pil

    return int(pil.Image.getexif(opened).get(ORIENTATION, 1))


def _pixels(data: bytes, name: str) -> Image:
    """Decode an image, upright, as RGB."""
    from PIL import ImageOps

    with _opened(data, name) as opened:
        try:
            return (
                ImageOps.exif_transpose(opened) if _orientation(opened) > 1 else opened
            ).convert("RGB")
        except (OSError, ValueError, SyntaxError, IndexError) as error:
            raise DataError(
                f"{name} is damaged or cut off ({error}). Copy the file again from its source."
            ) from error


def _model_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a model's folder."""
    path = folder / "config.json"
    try:
        config = read_json_file(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Copy the file again from its source."
        ) from error
    if not isinstance(config, dict):
        raise DataError(
            f"{path}: expected a JSON object, found {type(config).__name__}. Copy the file again."
        )
    return config
