"""One entry of `data.train` and its like: a path or a name, or a mapping that says more."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from megaverl.config.section import Positive, PositiveFloat, Section


class SourceConfig(Section):
    """Rows from one place."""

    path: str = Field(
        min_length=1,
        description="A JSONL or Parquet file, a pattern of such, a folder of them or one of datasets.save_to_disk, a "
        "data set on the hub as org/name (needs the package datasets), or your own as module:object.",
    )
    weight: PositiveFloat | None = Field(
        default=None,
        description="Its share of the prompts, over the sum of all weights. null, for all sources: as many as it has "
        "rows.",
    )
    split: str = Field(default="train", min_length=1, description="Of a data set on the hub or of save_to_disk.")
    subset: str | None = Field(default=None, min_length=1, description="Configuration of a data set on the hub.")
    limit: Positive | None = Field(default=None, description="Only its first rows, so many.")

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> Any:
        """One that is only a path is written as one."""
        values = handler(self)
        return self.path if self == SourceConfig(path=self.path) else values

    def __str__(self) -> str:
        return self.path


def _as_sources(value: Any) -> Any:
    entries = value if isinstance(value, list) else [value]
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


# One may stand alone, and one that is only a path may be written as one: `data.train=train.jsonl`.
Sources = Annotated[list[SourceConfig], BeforeValidator(_as_sources)]
