"""Words the message for a wrong field: its value, and the values that the field's type and bounds allow."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from batchinfer.core.sampling import OTHER_NAMES
from batchinfer.job.yaml_tree import Finding, Loc, resolve, shorten

_A_WORD = re.compile(r"[\w.-]+")  # excludes examples, such as addresses
_NAMES: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text that is not empty",
    Path: "a path",
}
_OTHER_WORDS = {"gpu": "cuda", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_OTHER_WORDS |= {"w8a8": "int8", "q8_0": "int8", "8bit": "int8", "off": "none", "no": "none"}
_BOOLEAN_WORDS = frozenset({"yes", "no", "on", "off", "y", "n", "true", "false"})


@dataclass(frozen=True, slots=True)
class ValidValues:
    """An annotation of a field's type with a description of valid values, if the type alone does not show them."""

    text: str


def findings_of(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> list[Finding]:
    """Convert pydantic's error about a job file to findings in plain words, one per wrong field.

    Args:
        error: Pydantic's error, which may have several entries per field.
        model: The pydantic class of the whole job file, Job.
        values: The values of the job file by section.
    """
    groups: dict[Loc, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        loc = _of_member(model, details["loc"], values)
        if loc is not None:
            groups.setdefault(_field_of(model, loc), []).append(details)
    return [_finding(model, loc, group, values) for loc, group in groups.items()]


def describe_valid_values(info: FieldInfo) -> str:
    """Return a text for users about a field's valid values, such as `a whole number from 1 to 64, or auto`."""
    return _phrase(info.annotation, info.metadata)


def describe_value(value: object) -> str:
    """Return a text for users about a value, such as `the text "64"` or `a list`."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        text = repr(value) if isinstance(value, float) else f"{value:d}"
        return f"the number {text[:40]}"
    if isinstance(value, str):
        return f"the text {shorten(value)}"
    return "a list" if isinstance(value, tuple) else "a mapping"


def options(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a pydantic class of the job file by their keys in the file.

    Args:
        model: The class of a section or of the whole job file.
    """
    return {info.alias or name: info for name, info in model.model_fields.items()}


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the pydantic class of a section in a job file. None if the field is a plain value or unknown.

    Args:
        model: The class that has the field.
        name: The name of the field.
    """
    info = model.model_fields.get(name)
    candidates = [info.annotation, *get_args(info.annotation)] if info else []
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _may_be_value(model: type[BaseModel], name: str) -> bool:
    members = get_args(model.model_fields[name].annotation) if name in model.model_fields else ()
    return section_of(model, name) is not None and len({*members} - {types.NoneType}) > 1


def _of_member(model: type[BaseModel], loc: Loc, values: Mapping[str, Any]) -> Loc | None:
    # pydantic reports errors for both members of a union; None: the error is about the member that is not meant
    if len(loc) < 2 or not _may_be_value(model, str(loc[0])):
        return loc
    section = section_of(model, str(loc[0]))
    assert section is not None, "a field that may be one"
    meant = isinstance(values.get(str(loc[0])), dict)
    if meant != (loc[1] == section.__name__):
        return None
    return (loc[0], *loc[2:]) if meant else loc[:1]


def _field_of(model: type[BaseModel], loc: Loc) -> Loc:
    # pydantic adds members of a union and list positions to the location of a field
    current: type[BaseModel] | None = model
    kept: list[str | int] = []
    for part in loc:
        if current is None:
            break
        kept.append(part)
        current = section_of(current, str(part))
    return tuple(kept)


def _finding(
    model: type[BaseModel], loc: Loc, group: list[ErrorDetails], values: Mapping[str, Any]
) -> Finding:
    owner = model
    for part in loc[:-1]:
        owner = section_of(owner, str(part)) or owner
    kinds = {details["type"] for details in group}
    if "extra_forbidden" in kinds:
        return _unknown(model, owner, loc)
    section = None if _may_be_value(owner, str(loc[-1])) else section_of(owner, str(loc[-1]))
    expected = _keys(section) if section else describe_valid_values(options(owner)[str(loc[-1])])
    if "missing" in kinds:
        return Finding(loc, f"is missing; it must be {expected}")
    own = [details["ctx"]["error"] for details in group if details["type"] == "value_error"]
    if own:
        return Finding(loc, str(own[0]))
    return _wrong(loc, _at(values, loc), expected, group)


def _wrong(loc: Loc, value: object, expected: str, group: list[ErrorDetails]) -> Finding:
    items = [part for details in group for part in details["loc"] if isinstance(part, int)]
    if isinstance(value, tuple) and items:
        message = f"found {describe_value(value[items[0]])} as item {items[0] + 1}; it must be {expected}"
        return Finding((*loc, items[0]), message)
    limit = next((details["ctx"]["max_length"] for details in group if details["type"] == "too_long"), None)
    if isinstance(value, tuple) and limit is not None:
        return Finding(loc, f"has {len(value):,} items; the limit is {limit:,}")
    if value in ("", ()):
        return Finding(loc, f"is empty; it must be {expected}")
    return Finding(loc, f"found {describe_value(value)}; it must be {expected}", _cure(value, expected))


def _cure(value: object, expected: str) -> str | None:
    if not isinstance(value, str):
        return None
    if "true or false" in expected and value.lower() in _BOOLEAN_WORDS:
        return "in YAML 1.2 only true and false are truth values, without quotes"
    if "number" in expected and isinstance(resolve(value), int | float):
        return "write the number without quotes; a ${VARIABLE} always gives a text, --set gives a number"
    words = [word for word in expected.replace(",", "").split() if _A_WORD.fullmatch(word)]
    same = _OTHER_WORDS.get(value.lower())
    near = [same] if same in words else difflib.get_close_matches(value, words, 1)
    return f'did you mean "{near[0]}"?' if near and value not in near else None


def _unknown(model: type[BaseModel], owner: type[BaseModel], loc: Loc) -> Finding:
    key = str(loc[-1])
    if loc[-2:] == ("engine", "nodes"):
        return Finding(
            loc, "was removed; several machines need a Ray cluster", "use ray.address, or --ray auto"
        )
    place = f"the section {loc[-2]}" if len(loc) > 1 else "a job file"
    return Finding(loc, f"{place} has no key {shorten(key)}", _nearest(model, owner, key))


def _nearest(model: type[BaseModel], owner: type[BaseModel], key: str) -> str:
    known = list(options(owner))
    near = [OTHER_NAMES[key]] if OTHER_NAMES.get(key) in known else []
    near = near or difflib.get_close_matches(key, known, 1, 0.7)
    if near:
        return f"did you mean {near[0]}?"
    for name in options(model):
        section = section_of(model, name)
        if section is not None and section is not owner and key in options(section):
            return f"did you mean {name}.{key}?"
    if owner is not model and key in options(model):
        return f"{key} is a section of its own: check the indentation"
    loose = difflib.get_close_matches(key, known, 1, 0.5)
    return f"did you mean {loose[0]}?" if loose else f"known keys: {', '.join(known)}"


def _keys(section: type[BaseModel]) -> str:
    return f"a section with keys among {', '.join(options(section))}"


def _at(values: Mapping[str, Any], loc: Loc) -> object:
    value: Any = values
    for part in loc:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _phrase(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    flat = _flat(metadata)
    own = next((one.text for one in flat if isinstance(one, ValidValues)), None)
    if own is not None:
        return own
    if isinstance(annotation, types.GenericAlias) or get_origin(annotation) is tuple:
        return _list(get_args(annotation)[0], flat)
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _phrase(inner, more)
    if get_origin(annotation) is Literal:
        return _choice([str(one) for one in get_args(annotation)])
    if get_origin(annotation) in (Union, types.UnionType):
        return _any_of([one for one in get_args(annotation) if one is not type(None)], flat)
    return _NAMES[annotation] + _range(flat)


def _flat(metadata: Iterable[Any]) -> list[Any]:
    # pydantic wraps some metadata in a FieldInfo
    flat: list[Any] = []
    for one in metadata:
        flat += _flat(one.metadata) if isinstance(one, FieldInfo) else [one]
    return flat


def _list(item: Any, metadata: list[Any]) -> str:
    most = next((one.max_length for one in metadata if getattr(one, "max_length", None) is not None), None)
    bound = f"of at most {most}" if most is not None else "of"
    return f"a list, in brackets, {bound} items that are each {_phrase(item)}"


def _any_of(members: list[Any], metadata: list[Any]) -> str:
    phrases = [_phrase(one, metadata) for one in members]
    plain = [phrase for phrase in phrases if phrase != "auto"]
    return ", or ".join([*plain, *(["auto"] if "auto" in phrases else [])])


def _choice(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _range(metadata: list[Any]) -> str:
    bounds = {
        name: getattr(one, name) for one in metadata for name in ("ge", "gt", "le") if hasattr(one, name)
    }
    high = f"{bounds['le']:,}" if "le" in bounds else None
    if "gt" in bounds:
        return f" above {bounds['gt']:,}" + (f" and up to {high}" if high else "")
    if "ge" in bounds:
        return f" from {bounds['ge']:,} to {high}" if high else f", {bounds['ge']:,} or more"
    return ""
