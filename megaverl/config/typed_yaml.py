"""YAML whose plain scalars are read by the type of the key that they stand at.

PyYAML implements YAML 1.1, which reads `010` as 8, `1:30` as 90, `no` as false and
`8210e54` as a number, whatever the key expects. Here a scalar is composed as text, and
`read_scalar` decides what it is once the key's type is known. Expansion of aliases,
nesting and size are bounded, so a hostile file cannot keep the loader busy.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from megaverl.config.wording import yaml_text

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 60
Key = tuple[str, ...]
TypeAt = Callable[[Key], Any]

# Tag of a scalar without quotes and without a tag of its own.
PLAIN = "!plain"
_CORE = "tag:yaml.org,2002:"
# Name of a tag, such as `!!int` -> types that a value with this tag may have.
_TAGGED_TYPES: dict[str, Any] = {
    "int": int,
    "float": int | float,
    "bool": bool,
    "null": type(None),
}
_NULLS = ("", "~", "null", "Null", "NULL")
_TRUE_OR_FALSE = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
_INTEGER = re.compile(r"[-+]?[0-9](?:_?[0-9])*")
_OTHER_BASE = re.compile(r"([-+]?)0([xob])([0-9a-fA-F](?:_?[0-9a-fA-F])*)")
_NUMBER = re.compile(
    r"[-+]?(?:[0-9](?:_?[0-9])*(?:\.(?:[0-9](?:_?[0-9])*)?)?|\.[0-9](?:_?[0-9])*)(?:[eE][-+]?[0-9]+)?"
)
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
# Python refuses to convert longer ones.
_MOST_DIGITS = 4000


class BadYaml(ValueError):
    """Raised for text that is not YAML, or for a value whose type is ambiguous.

    The message has the reason but no file name.
    """


class Forms(NamedTuple):
    """Kinds of YAML values that a key accepts.

    Attributes:
        choices: texts of a Literal.
        entry: type of a list's entries; None if the key accepts no list.
        mapping: the key accepts a mapping.
        anything: nothing is known about the type.
    """

    null: bool = False
    switch: bool = False
    integer: bool = False
    number: bool = False
    text: bool = False
    choices: tuple[str, ...] = ()
    entry: Any = None
    mapping: bool = False
    anything: bool = False


def forms_of(kind: Any) -> Forms:
    """Return the kinds of values that the annotation `kind` accepts."""
    simple = {
        None: Forms(null=True),
        type(None): Forms(null=True),
        bool: Forms(switch=True),
        int: Forms(integer=True),
        float: Forms(integer=True, number=True),
        str: Forms(text=True),
    }
    if isinstance(kind, type | None) and kind in simple:
        return simple[kind]
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        return forms_of(arguments[0])
    if origin is Literal:
        return Forms(
            choices=tuple(choice for choice in arguments if isinstance(choice, str))
        )
    if origin in (Union, types.UnionType):
        parts = [forms_of(argument) for argument in arguments]
        entries = [part.entry for part in parts if part.entry is not None]
        return Forms(
            null=any(part.null for part in parts),
            switch=any(part.switch for part in parts),
            integer=any(part.integer for part in parts),
            number=any(part.number for part in parts),
            text=any(part.text for part in parts),
            choices=tuple(choice for part in parts for choice in part.choices),
            entry=entries[0] if entries else None,
            mapping=any(part.mapping for part in parts),
            anything=any(part.anything for part in parts),
        )
    if kind in (list, tuple, set, frozenset) or origin in (list, tuple, set, frozenset):
        return Forms(null=True, entry=arguments[0] if arguments else Any)
    if kind is dict or origin is dict:
        return Forms(mapping=True)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return Forms(mapping=True, text=bool(getattr(kind, "may_be_text", False)))
    return Forms(anything=True)


def plain_value(text: str) -> Any:
    """Return null, a boolean, a number, or the text itself, as YAML 1.2 reads a plain scalar.

    Digits may contain `_`.
    """
    if text in _NULLS:
        return None
    if text in _TRUE_OR_FALSE:
        return _TRUE_OR_FALSE[text]
    if len(text) > _MOST_DIGITS:
        return text
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if match := _OTHER_BASE.fullmatch(text):
        sign, base, digits = match.groups()
        try:
            return int(sign + digits, {"x": 16, "o": 8, "b": 2}[base])
        except ValueError:
            return text
    if _NUMBER.fullmatch(text):
        return float(text.replace("_", ""))
    if match := _NOT_FINITE.fullmatch(text):
        return float(match[1] + match[2])
    return text


def read_scalar(text: str, forms: Forms, *, is_argument: bool = False) -> Any:
    """Return the value of a plain scalar for a key that accepts `forms`.

    Args:
        is_argument: the text comes from a command line, where a text key takes it literally. In a file, a text that
            YAML reads as a number or a boolean must be quoted.

    Raises:
        BadYaml: the key expects text and YAML reads a number, or the key's type is unknown and YAML 1.1 and 1.2
            disagree.
    """
    if forms.entry is not None and not (
        forms.text or forms.switch or forms.integer or forms.mapping or forms.choices
    ):
        # A single entry may stand for a list of one.
        return read_scalar(
            text, forms_of(forms.entry)._replace(null=True), is_argument=is_argument
        )
    value = plain_value(text.strip())
    if forms.anything:
        # For a key of unknown type, a guess would be wrong for half of the libraries
        # that read it.
        if text.strip().lower() in _SWITCHES:
            raise BadYaml(
                f"found {text.strip()}, which YAML 1.1 reads as {str(_SWITCHES[text.strip().lower()]).lower()} and "
                f"YAML 1.2 as text. Write true or false, or put the word in quotes."
            )
        return _unquoted(text) if is_argument and isinstance(value, str) else value
    if forms.switch and text.strip().lower() in _SWITCHES:
        return _SWITCHES[text.strip().lower()]
    if forms.text and is_argument:
        # On a command line the text is what the user typed: only an exact null or a
        # value of another accepted kind is converted.
        known = (forms.null and text == "null") or _accepts(forms, value)
        return value if known else text
    if text in forms.choices:
        return text
    if (
        forms.text
        and value is not None
        and not isinstance(value, str)
        and not _accepts(forms, value)
    ):
        kind = "a boolean" if isinstance(value, bool) else "a number"
        raise BadYaml(
            f"found {text}, which YAML reads as {kind}; expected text. Put it in quotes."
        )
    return _unquoted(text) if is_argument and isinstance(value, str) else value


def _accepts(forms: Forms, value: Any) -> bool:
    """Return whether `value`, a boolean or a number, is of a kind that `forms` accepts."""
    if isinstance(value, bool):
        return forms.switch
    return (forms.integer and isinstance(value, int)) or (
        forms.number and isinstance(value, float)
    )


def _unquoted(text: str) -> str:
    """Return the text inside the quotes if all of `text` is one quoted YAML scalar, else the stripped text."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        try:
            node = compose(text)
        except BadYaml:
            return text
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
    return text


def read_argument(text: str, kind: Any, type_at: TypeAt, at: Key) -> Any:
    """Return the value of `key=text` on a command line.

    Args:
        kind: annotation of the key.
        type_at: returns the annotation at a path, for values inside a list or mapping.
        at: the key's path.

    Raises:
        BadYaml: the text is neither valid YAML nor acceptable as text.
    """
    forms = forms_of(kind)
    holds_others = forms.entry is not None or forms.mapping or forms.anything
    if not holds_others or (forms.text and not text.lstrip().startswith(("[", "{"))):
        return read_scalar(text, forms, is_argument=True)
    if text.lstrip().startswith(("[", "{")) or (forms.mapping and _opens_mapping(text)):
        takes_text = forms.text or (
            forms.entry is not None and forms_of(forms.entry).text
        )
        node = None
        try:
            node = compose(text)
        # A text such as `[INST] {question}` opens like a list without being one.
        except BadYaml:
            if not (takes_text or forms.anything):
                raise
        if (
            node is not None
            and not isinstance(node, yaml.ScalarNode)
            and not _is_template(node, takes_text, forms)
        ):
            return _Construction(type_at, is_argument=True).construct(node, at)
    return read_scalar(text, forms, is_argument=True)


def _opens_mapping(text: str) -> bool:
    """Return whether `text` starts like `key: value`."""
    return re.match(r"\s*[\w.\"'-]+\s*:(\s|$)", text) is not None


def _is_template(node: yaml.Node, takes_text: bool, forms: Forms) -> bool:
    """Return whether the braces of a parsed mapping are part of a text, such as the template `{x}`."""
    if not isinstance(node, yaml.MappingNode):
        return False
    if (
        takes_text
        and not forms.mapping
        and not (forms.entry is not None and forms_of(forms.entry).mapping)
    ):
        return True
    # For a key of unknown type, `{x}` parses as a mapping whose value is empty and has
    # no colon before it.
    return forms.anything and any(
        value.tag == PLAIN
        and value.value == ""
        and value.start_mark.index == key.end_mark.index
        for key, value in node.value
    )


class Composer(yaml.SafeLoader):
    """YAML loader that keeps every plain scalar as text, with the tag `PLAIN`, instead of guessing its type."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return PLAIN
        resolved: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return resolved


def compose(text: str) -> yaml.Node | None:
    """Parse a document into its node tree, in which an alias is the same node as its anchor.

    Returns None for an empty document.

    Raises:
        BadYaml: invalid YAML, or larger or deeper than a configuration may be.
    """
    if len(text) > MAX_BYTES:
        raise BadYaml(
            f"holds {len(text):,} characters; a configuration has at most {MAX_BYTES:,}."
        )
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=Composer)
        if node is not None:
            _check_size(node)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1} " if error.problem_mark else ""
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise BadYaml(f"{line}is not valid YAML: {problem}.") from None
    except yaml.YAMLError as error:
        raise BadYaml(f"is not valid YAML: {error}.") from None
    # PyYAML itself recurses before the depth can be checked.
    except RecursionError:
        raise BadYaml(f"is nested deeper than {MAX_DEPTH} levels.") from None
    return node


def _check_size(root: yaml.Node) -> None:
    """Raise BadYaml if the tree has too many values once all aliases are expanded. Computed without expanding them.

    Nested aliases can describe billions of values in a few lines ("billion laughs").
    """
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size(node: yaml.Node, depth: int) -> int:
        # An alias is the same node as its anchor, so its size is counted once and added
        # wherever it stands.
        if id(node) in sizes:
            return sizes[id(node)]
        line = node.start_mark.line + 1
        if id(node) in inside:
            raise BadYaml(
                f"line {line}: an anchor (&) stands inside what it names. Write the value out."
            )
        if depth > MAX_DEPTH:
            raise BadYaml(f"line {line}: is nested deeper than {MAX_DEPTH} levels.")
        inside.add(id(node))
        total = 1
        if isinstance(node, yaml.SequenceNode):
            total += sum(size(item, depth + 1) for item in node.value)
        elif isinstance(node, yaml.MappingNode):
            total += sum(
                size(key, depth + 1) + size(value, depth + 1)
                for key, value in node.value
            )
        inside.remove(id(node))
        if total > MAX_VALUES:
            raise BadYaml(
                f"line {line}: holds more than {MAX_VALUES:,} values once its aliases (*) are written out. "
                "A configuration needs fewer."
            )
        sizes[id(node)] = total
        return total

    size(root, 0)


def construct(
    node: yaml.Node, type_at: TypeAt, note: Callable[[Key, str], None] | None = None
) -> Any:
    """Return the value of a file's root node.

    Args:
        type_at: returns the annotation at a key path.
        note: receives a path and the problem there, and the value becomes null. None: BadYaml is raised instead.

    Raises:
        BadYaml: an ambiguous value, if `note` is None.
    """
    return _Construction(type_at, note).construct(node, ())


def read_untyped(text: str) -> Any:
    """Return the value of a YAML file whose keys have no declared types, or None for an empty file.

    Raises:
        BadYaml: invalid YAML, or larger than a small file may be.
    """
    node = compose(text)
    return None if node is None else construct(node, lambda path: Any)


class _Construction:
    """Builds values from a node tree, reading each scalar by the type of the key at its path."""

    def __init__(
        self,
        type_at: TypeAt,
        note: Callable[[Key, str], None] | None = None,
        *,
        is_argument: bool = False,
    ) -> None:
        self._type_at = type_at
        self._note = note
        self._is_argument = is_argument

    def construct(self, node: yaml.Node, at: Key) -> Any:
        """Return the value of `node`, which stands at the path `at`."""
        try:
            if isinstance(node, yaml.MappingNode):
                _check_tag(node, "map")
                return self._mapping(node, at)
            if isinstance(node, yaml.SequenceNode):
                _check_tag(node, "seq")
                return [
                    self.construct(item, (*at, str(number)))
                    for number, item in enumerate(node.value)
                ]
            return self._scalar(node, at)
        except BadYaml as error:
            if self._note is None:
                raise
            # With a recorder, reading continues, so that one error can list all
            # mistakes of a file.
            self._note(at, str(error))
            return None

    def _scalar(self, node: yaml.Node, at: Key) -> Any:
        if node.tag == PLAIN:
            return read_scalar(
                node.value, forms_of(self._type_at(at)), is_argument=self._is_argument
            )
        if node.tag == _CORE + "str":
            return node.value
        value = plain_value(node.value)
        wanted = _TAGGED_TYPES.get(node.tag.removeprefix(_CORE))
        if wanted is None or not isinstance(value, wanted):
            raise BadYaml(
                f"found {yaml_text(node.value)} with the tag {node.tag}, which does not fit. Leave the tag out."
            )
        # `!!float 1` is an integer in its text.
        if isinstance(value, int) and node.tag == _CORE + "float":
            return float(value)
        return value

    def _mapping(self, node: yaml.MappingNode, at: Key) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        kind = self._type_at(at)
        is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
        merges = [value for key, value in node.value if _is_merge(key)]
        # Merged mappings (`<<: *anchor`) have lower priority than keys written beside
        # them, and earlier ones win.
        for merge in merges:
            for merged in (
                merge.value if isinstance(merge, yaml.SequenceNode) else [merge]
            ):
                if not isinstance(merged, yaml.MappingNode):
                    raise BadYaml("merges (<<) something that is no mapping.")
                values = {**self._mapping(merged, at), **values}
        for key, value in node.value:
            if _is_merge(key):
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise BadYaml("has a key that is a list or a mapping. Keys are text.")
            # Keys of sections are names, so `on:` and `1:` stay text. Other mappings
            # may have numbers as keys.
            name = (
                key.value if is_section or key.tag != PLAIN else plain_value(key.value)
            )
            values[name] = self.construct(value, (*at, key.value))
        return values


def _is_merge(key: yaml.Node) -> bool:
    return key.tag == PLAIN and bool(key.value == "<<")


def _check_tag(node: yaml.Node, name: str) -> None:
    if node.tag != _CORE + name:
        raise BadYaml(f"has the tag {node.tag}, which is not known here. Leave it out.")
