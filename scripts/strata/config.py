"""YAML read into typed models: unknown keys and bad values become findings that name file, key and near match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from strata.errors import Finding, StrataError

ModelT = TypeVar("ModelT", bound=BaseModel)


class Strict(BaseModel):
    """Base of every configuration model: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


# libyaml's parser reads the series several times faster, where PyYAML was built with it
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeyLoader(_Loader):
    """Safe loader that refuses a key given twice: YAML's last-one-wins loses the first value silently.

    A key is what is written: YAML 1.1 reads the bare key ``on`` as the truth value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:bool":
                key_node.tag = "tag:yaml.org,2002:str"
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"key {key!r} is given twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


def near(word: str, known: Iterable[str]) -> str:
    """The known word closest to ``word``, or an empty string where none is close."""
    hits = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return hits[0] if hits else ""


def read_text(path: Path) -> str:
    """The file as UTF-8 text; E-READ with the place of the first bad byte where it cannot be read so."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrataError(
            Finding(
                "E-READ",
                "the file is not valid UTF-8",
                where=f"{path}: byte {error.start}",
                expected="UTF-8 text",
                found=f"byte 0x{error.object[error.start]:02x}",
                hint="save the file as UTF-8",
            )
        ) from error
    except OSError as error:
        raise StrataError(
            Finding("E-READ", "the file cannot be read", where=str(path), found=error.strerror or str(error),
                    expected="a readable file", hint="check its name and its permissions")
        ) from error
    except ValueError as error:  # a name that no file can have
        raise StrataError(
            Finding("E-READ", "the file cannot be read", where=repr(str(path)), found=str(error),
                    expected="a file name", hint="mend the name")
        ) from error


def parse_yaml(text: str, where: str) -> Any:
    """YAML text as plain data; E-YAML with line and column where it does not parse."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise StrataError(
            Finding("E-YAML", "not readable as YAML", where=place, expected="YAML",
                    found=getattr(error, "problem", None) or str(error), hint="mend the file at this place")
        ) from error
    except (ValueError, RecursionError) as error:  # a date that does not exist, brackets without end
        raise StrataError(
            Finding("E-YAML", "not readable as YAML", where=where, found=str(error), expected="YAML",
                    hint="quote what is no number or date; nest no deeper than needed")
        ) from error


def load(path: Path, model: type[ModelT]) -> ModelT:
    """Read ``path`` as YAML and check it against ``model``; every fault in the file is reported, not only the first."""
    return validate(parse_yaml(read_text(path), str(path)), model, str(path))


def validate(data: Any, model: type[ModelT], where: str) -> ModelT:
    """Check plain data against ``model``; raises StrataError with one E-CONFIG finding per fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise StrataError([_finding(fault, model, where) for fault in error.errors()]) from error


def _finding(fault: Any, model: type[BaseModel], where: str) -> Finding:
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _keys_at(model, fault["loc"][:-1])
        key = str(fault["loc"][-1])
        guess = near(key, known)
        return Finding(
            "E-CONFIG",
            f"unknown key {path!r}",
            where=where,
            expected="one of " + ", ".join(sorted(known)),
            found=key,
            hint=f"did you mean {guess!r}?" if guess else "remove the key",
        )
    return Finding(
        "E-CONFIG",
        f"bad value for {path!r}" if path else "bad content",
        where=where,
        expected=fault["msg"],
        found=_short(fault["input"]),
        hint=f"mend {path or 'the file'} in {where}",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _keys_at(model: type[BaseModel], loc: tuple[Any, ...]) -> set[str]:
    """The keys that the model nested at ``loc`` knows (by alias)."""
    current: type[BaseModel] = model
    for part in loc:
        field = next((f for n, f in current.model_fields.items() if part in (n, f.alias)), None)
        nested = _nested_model(field.annotation) if field else None
        if nested is not None:
            current = nested
    return {f.alias or n for n, f in current.model_fields.items()}


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _nested_model(argument)
        if found is not None:
            return found
    return None
