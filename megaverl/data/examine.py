"""Examine a whole data set: report every unusable row, suspicious properties, and statistics."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaverl.config import Config
from megaverl.config.run import DataConfig
from megaverl.data.images import Images
from megaverl.data.preferences import Judged, PreferenceColumns
from megaverl.data.prompts import (
    Columns,
    PromptEncoder,
    PromptFormat,
    RowColumns,
    load_tools,
    value_at,
)
from megaverl.data.row_source import RowSource
from megaverl.data.row_values import is_converted
from megaverl.data.sources import RowChain, as_source, open_source
from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import DataError

SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class DataProblem:
    """Problem of one row, or of the whole data set.

    Attributes:
        where: file and line. Empty for the whole data set.
        severity: error: a run would fail there, or cannot learn from it. warning: a person should look at it.
        message: the problem in words.
    """

    where: str
    severity: str
    message: str

    def __str__(self) -> str:
        return (
            f"{self.severity}: {self.where}{': ' if self.where else ''}{self.message}"
        )


@dataclass
class Examined:
    """Result of examining one data set.

    Attributes:
        num_rows: all rows.
        num_usable: rows that a run would train on.
        num_long, num_short: rows dropped or cut because of their length.
        lengths: tokens of every usable prompt.
        answer_lengths: characters of every answer that is text.
        keys: number of rows with each column.
        converted: column -> type of its values, for types that JSON lacks; see `row_values.plain_value`.
        num_pairs: rows with a better and a worse response.
        num_desirable, num_undesirable: rows with a single response.
        prompts: digest of every usable prompt's text -> first row with it.
    """

    num_rows: int = 0
    num_usable: int = 0
    num_long: int = 0
    num_short: int = 0
    problems: list[DataProblem] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    answer_lengths: list[int] = field(default_factory=list)
    keys: Counter[str] = field(default_factory=Counter)
    converted: dict[str, str] = field(default_factory=dict)
    num_pairs: int = 0
    num_desirable: int = 0
    num_undesirable: int = 0
    num_images: int = 0
    prompts: dict[bytes, str] = field(default_factory=dict)
    example: str = ""

    @property
    def errors(self) -> list[DataProblem]:
        """Problems with the severity "error"."""
        return [problem for problem in self.problems if problem.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the prompts, as JSON values."""
        return {
            "rows": self.num_rows,
            "usable": self.num_usable,
            "too_long": self.num_long,
            "too_short": self.num_short,
            "prompt_tokens": quantiles(self.lengths),
            "answer_characters": quantiles(self.answer_lengths),
            "columns": dict(self.keys),
            "converted_columns": dict(self.converted),
            "images": self.num_images,
            "pairs": self.num_pairs,
            "single_responses": {
                "desirable": self.num_desirable,
                "undesirable": self.num_undesirable,
            },
            "problems": [vars(problem) for problem in self.problems],
        }

    def as_text(self, name: str, most: int | None = None) -> str:
        """Return a report on the data set `name`, with at most `most` problems."""
        lines = [f"{name}: {self.num_rows} rows, {self.num_usable} can be used"]
        if self.num_long or self.num_short:
            lines.append(f"  too long: {self.num_long}   too short: {self.num_short}")
        if self.num_images:
            lines.append(f"  images: {self.num_images}, all read and processed")
        if self.num_pairs:
            lines.append(f"  pairs of responses: {self.num_pairs}")
        if self.num_desirable + self.num_undesirable:
            lines.append(
                f"  single responses: {self.num_desirable} desirable, {self.num_undesirable} undesirable"
            )
        for label, values in (
            ("prompt tokens", self.lengths),
            ("answer characters", self.answer_lengths),
        ):
            if values:
                numbers = "   ".join(
                    f"{word} {value}" for word, value in quantiles(values).items()
                )
                lines.append(f"  {label}: {numbers}")
        lines.append(
            f"  columns: {', '.join(f'{key} ({count})' for key, count in self.keys.items())}"
        )
        if self.converted:
            columns = ", ".join(
                f"{key} ({kind})" for key, kind in self.converted.items()
            )
            lines.append(
                f"  read as text or numbers, as JSON has no such values: {columns}"
            )
        if self.example:
            example = (
                self.example
                if len(self.example) <= 400
                else self.example[:400] + " ..."
            )
            lines += [
                "  the first prompt, as the model sees it:",
                *(f"    | {line}" for line in example.splitlines()),
            ]
        shown = self.problems[:most]
        lines += [f"  {problem}" for problem in shown]
        if len(shown) < len(self.problems):
            lines.append(f"  ... and {len(self.problems) - len(shown)} more (--all)")
        if not self.problems:
            lines.append("  nothing is wrong with it")
        return "\n".join(lines)


def examine(
    rows: RowSource,
    encoder: PromptEncoder | None,
    columns: Columns,
    preferences: PreferenceColumns | None = None,
) -> Examined:
    """Examine every row without stopping at mistakes.

    Args:
        encoder: renders and tokenizes prompts. None: prompts are only checked for their form.
        preferences: every row has judged responses instead of an answer. None: only rows without an answer may have
            them, in columns with the usual names.
    """
    examined = Examined(num_rows=len(rows))
    for number in range(len(rows)):
        where = rows.where(number)
        try:
            row = rows[number]
            examined.keys.update(
                _printable(key) for key, value in row.items() if value is not None
            )
            examined.converted.update(
                (_printable(key), type(value).__name__)
                for key, value in row.items()
                if is_converted(value)
            )
            # A row with judged responses needs no answer.
            judged = preferences or _usual(row, columns)
            read = (replace(columns, answer=None) if judged else columns).read(
                row, where
            )
            responses = judged.read(row, where) if judged else []
            if _usable(examined, read, encoder, where, repeats=judged is not None):
                _judged(examined, responses, where)
        except DataError as error:
            examined.problems.append(
                DataProblem(where, "error", str(error).removeprefix(f"{where}: "))
            )
    examined.problems += _about_the_whole(examined, encoder)
    return examined


def examine_run(config: Config, tokenizer: str | None = None) -> dict[str, Examined]:
    """Examine the training and held-out data of a configuration. Returns the results by key, including overlaps.

    Args:
        tokenizer: replaces the configuration's tokenizer.
    """
    data = config.data
    model = config.model
    results = {}
    # All rows are counted, also where a run would stop at the first one.
    too_long = "drop" if data.too_long == "error" else data.too_long
    encoder, images = encoder_of(
        data.model_copy(update={"too_long": too_long}),
        tokenizer or model.tokenizer or model.path,
        model=model.path,
        trust_remote_code=model.trust_remote_code,
    )
    tools = load_tools(data.tools) if data.tools else None
    columns = Columns(data.prompt_key, data.answer_key, data.tools_key, tools, images)
    for section in ("data", "preference"):
        judged = (
            PreferenceColumns.of(config.preference) if section == "preference" else None
        )
        for part in ("train", "validation"):
            sources = [
                as_source(entry) for entry in getattr(getattr(config, section), part)
            ]
            if sources:
                rows = RowChain([open_source(source) for source in sources])
                results[f"{section}.{part}"] = examine(rows, encoder, columns, judged)
        if f"{section}.train" in results and f"{section}.validation" in results:
            held_out = results[f"{section}.validation"]
            held_out.problems += overlap(results[f"{section}.train"], held_out)
    return results


def encoder_of(
    data: DataConfig,
    tokenizer: str,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PromptEncoder, Images | None]:
    """Return the prompt encoder and image reader that a run with this section `data` would use.

    Args:
        model: folder of the model, which may take images. None: the tokenizer's folder.
    """
    loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    images = Images.of(data.images, model or tokenizer, loaded)
    return PromptEncoder(
        loaded, PromptFormat.of(data), images.processor.token_id if images else None
    ), images


def _printable(key: Any) -> str:
    """Return the name of a column with unencodable characters escaped."""
    return str(key).encode(errors="backslashreplace").decode()


def _usual(row: Mapping[str, Any], columns: Columns) -> PreferenceColumns | None:
    """Return the usual preference columns if the row has them and no answer, else None."""
    usual = PreferenceColumns()
    has_answer = columns.answer is None or value_at(row, columns.answer) is not None
    return usual if not has_answer and usual.fit(row) else None


def _judged(examined: Examined, responses: Sequence[Judged], where: str) -> None:
    """Count the judged responses of a row."""
    examined.answer_lengths += [len(response.value) for response in responses]
    examined.num_pairs += len(responses) == 2
    examined.num_desirable += [response.desirable for response in responses] == [True]
    examined.num_undesirable += [response.desirable for response in responses] == [
        False
    ]
    if len(responses) == 2 and responses[0].value == responses[1].value:
        problem = "the better and the worse response are the same: it teaches nothing."
        examined.problems.append(DataProblem(where, "warning", problem))


def overlap(training: Examined, held_out: Examined) -> list[DataProblem]:
    """Return a warning if held-out prompts occur in training, since measurements on them are meaningless."""
    both = [
        where
        for digest, where in held_out.prompts.items()
        if digest in training.prompts
    ]
    if not both:
        return []
    more = f", and {len(both) - 1} others" if len(both) > 1 else ""
    first = training.prompts[
        next(d for d, where in held_out.prompts.items() if where == both[0])
    ]
    message = f"this held-out prompt is a training prompt too ({first}){more}. Leave it out of one of the two."
    return [DataProblem(both[0], "warning", message)]


def quantiles(values: Sequence[int]) -> dict[str, int]:
    """Return minimum, median, 90 %, 99 % and maximum."""
    ordered = sorted(values)
    names = ("least", "median", "90%", "99%", "most")
    return {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in zip(names, SHARES, strict=True)
        if ordered
    }


def _usable(
    examined: Examined,
    read: RowColumns,
    encoder: PromptEncoder | None,
    where: str,
    *,
    repeats: bool,
) -> bool:
    """Count one row, and return whether its length allows training on it.

    Args:
        repeats: the same prompt may occur in several rows.

    Raises:
        DataError: the row cannot be used.
    """
    if encoder is not None:
        if encoder.is_short(read.prompt, where, read.tools):
            examined.num_short += 1
            return False
        encoded = encoder.encode(read.prompt, where, read.tools, read.images or ())
        if encoded is None:
            examined.num_long += 1
            return False
        examined.num_long += encoded.num_truncated > 0
        examined.lengths.append(len(encoded.token_ids))
        examined.example = examined.example or encoded.text
    # A run decodes an image only when its prompt comes, so decode it here.
    for image in read.images or ():
        assert image.tensors
    examined.num_usable += 1
    examined.num_images += len(read.images or ())
    if isinstance(read.reference, str):
        examined.answer_lengths.append(len(read.reference))
        if not read.reference.strip():
            examined.problems.append(
                DataProblem(where, "warning", "the answer is empty.")
            )
    # Images belong to the prompt: the same question about another image is another
    # prompt.
    text = json.dumps(
        [read.prompt, *(image.key for image in read.images or ())],
        sort_keys=True,
        ensure_ascii=False,
    )
    # Eight bytes: texts of all prompts could fill the memory.
    digest = hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    if digest in examined.prompts and not repeats:
        examined.problems.append(
            DataProblem(
                where, "warning", f"the same prompt as {examined.prompts[digest]}."
            )
        )
    # The first row with a prompt is the one that messages name.
    examined.prompts.setdefault(digest, where)
    if "\N{REPLACEMENT CHARACTER}" in text:
        examined.problems.append(
            DataProblem(
                where,
                "warning",
                "the prompt holds � (a wrong encoding, somewhere before).",
            )
        )
    return True


def _about_the_whole(
    examined: Examined, encoder: PromptEncoder | None
) -> Iterator[DataProblem]:
    """Yield problems of the whole data set."""
    if not examined.num_usable:
        reasons = (
            [f"{examined.num_long} are longer than data.max_prompt_tokens: raise it"]
            if examined.num_long
            else []
        )
        reasons += (
            [f"{examined.num_short} are shorter than data.min_prompt_tokens: lower it"]
            if examined.num_short
            else []
        )
        yield DataProblem(
            "",
            "error",
            f"no row can be used{': ' if reasons else ''}{'; '.join(reasons)}.",
        )
        return
    if examined.num_pairs + examined.num_desirable + examined.num_undesirable not in (
        0,
        examined.num_usable,
    ):
        yield DataProblem(
            "", "warning", "some rows have judged responses, and others an answer."
        )
    elif not examined.num_pairs and bool(examined.num_desirable) != bool(
        examined.num_undesirable
    ):
        which = "desirable" if examined.num_desirable else "undesirable"
        yield DataProblem(
            "",
            "warning",
            f"every single response is {which}: kto and bco need both to tell them apart.",
        )
    odd = [key for key, count in examined.keys.items() if count < examined.num_rows]
    if examined.num_pairs and examined.num_desirable + examined.num_undesirable:
        # Pairs and single responses have different columns.
        odd = []
    if odd:
        yield DataProblem(
            "",
            "warning",
            f"columns that only some rows have: {', '.join(sorted(odd)[:8])}.",
        )
    if examined.num_long > 0.1 * examined.num_rows:
        share = examined.num_long / examined.num_rows
        yield DataProblem(
            "",
            "warning",
            f"{share:.0%} of the rows are too long: raise data.max_prompt_tokens.",
        )
    if (
        encoder is not None
        and not encoder.uses_chat_template
        and encoder.tokenizer.chat_template is not None
    ):
        yield DataProblem(
            "",
            "warning",
            "the tokenizer has a chat template, and data.chat_template=none leaves it out.",
        )
