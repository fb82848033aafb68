"""Which switches are on: reading the settings and deciding, without touching process or configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm_ascend.strata.series import Series

VARIABLE = "STRATA_SWITCHES"
CONFIG_KEY = "strata"
SERIES_KEY = "series"
"""Beside the switches in ``additional_config['strata']``: the digest of the series that resolved them."""
ALL = "all"
_WORDS = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


class SwitchError(RuntimeError):
    """A setting that names no switch, has no usable value, or contradicts another one. Stops the start."""


@dataclass(frozen=True)
class Table:
    """The resolved switches of one series: every known name has a value. Immutable.

    values: switch name -> on; series: digest of the series (see :class:`vllm_ascend.strata.series.Series`).
    """

    values: Mapping[str, bool]
    series: str

    def __getitem__(self, name: str) -> bool:
        return self.values[name]

    def as_config(self) -> dict[str, Any]:
        """The form kept in ``additional_config['strata']``: plain JSON types, names sorted, plus the series
        digest.
        """
        return {SERIES_KEY: self.series, **{name: self.values[name] for name in sorted(self.values)}}

    def names(self, on: bool) -> list[str]:
        """The switches that are on (or off), sorted."""
        return sorted(name for name, value in self.values.items() if value is on)


def parse_variable(text: str, series: Series) -> dict[str, bool]:
    """Read ``name=on,name=off,all=off``; names may repeat only with the same value. Blank text gives no
    settings.

    Raises SwitchError for an unknown name (with the near match and the known ones), a bad value, a missing
    ``=``.
    """
    given: dict[str, bool] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, word = (part.strip() for part in item.partition("="))
        if not equals:
            raise SwitchError(
                f"{VARIABLE}: {item!r} has no '='; write {name}=on or {name}=off, separated by commas"
            )
        value = _value(word, name, VARIABLE)
        _check_name(name, VARIABLE, series)
        if given.setdefault(name, value) is not value:
            raise SwitchError(f"{VARIABLE}: {name!r} is given twice, as on and as off; keep one")
    return given


def parse_config(given: Mapping[str, Any], series: Series) -> dict[str, bool]:
    """Read the user's ``{"strata": {name: true | false | "on" | "off"}}``. Raises SwitchError like
    parse_variable.
    """
    where = f"additional_config[{CONFIG_KEY!r}]"
    settings: dict[str, bool] = {}
    for name, value in given.items():
        _check_name(name, where, series)
        settings[name] = value if isinstance(value, bool) else _value(value, name, where)
    return settings


def resolve(series: Series, variable: str, given: Mapping[str, Any]) -> Table:
    """Defaults, then ``all``, then single names, from environment text and user configuration alike.

    Raises SwitchError if the two sources give one name (or ``all``) two values.
    """
    from_variable = parse_variable(variable, series)
    from_config = parse_config(given, series)
    for name, value in from_variable.items():
        if from_config.get(name, value) is not value:
            raise SwitchError(
                f"{name!r} is {_word(value)} in {VARIABLE} and {_word(not value)} in "
                f"additional_config[{CONFIG_KEY!r}]; keep one"
            )
    settings = {**from_config, **from_variable}
    values = dict(series.defaults)
    if ALL in settings:
        values = dict.fromkeys(values, settings.pop(ALL))
    values.update(settings)
    return Table(MappingProxyType(values), series.digest)


def is_resolved(given: Mapping[str, Any]) -> bool:
    """Whether ``additional_config['strata']`` was written by Strata rather than by the user."""
    return SERIES_KEY in given


def from_resolved(series: Series, given: Mapping[str, Any]) -> Table:
    """The table that another process (or an earlier check) resolved.

    Raises SwitchError if it was resolved by another series, as on a host with another image, or is
    incomplete.
    """
    if given[SERIES_KEY] != series.digest:
        raise SwitchError(
            f"the switches in additional_config[{CONFIG_KEY!r}] come from series {given[SERIES_KEY]!r}, "
            f"this process has series {series.digest!r}; start every host from the same image "
            f"(to set switches by hand leave {SERIES_KEY!r} out)"
        )
    values = {name: value for name, value in given.items() if name != SERIES_KEY}
    if values.keys() != series.defaults.keys() or not all(
        isinstance(value, bool) for value in values.values()
    ):
        raise SwitchError(
            f"additional_config[{CONFIG_KEY!r}] carries {SERIES_KEY!r} but not exactly the switches "
            f"{_known(series)} as true or false: {dict(given)!r}; "
            f"to set switches by hand leave {SERIES_KEY!r} out"
        )
    return Table(MappingProxyType(values), series.digest)


def all_off(series: Series) -> Table:
    """Upstream's behaviour in full."""
    return Table(MappingProxyType(dict.fromkeys(series.defaults, False)), series.digest)


def check_switch(name: str, where: str, series: Series) -> None:
    """Raise SwitchError unless ``name`` is a switch of the series."""
    if name not in series.defaults:
        guess = difflib.get_close_matches(str(name), [*series.defaults, ALL], n=1, cutoff=0.5)
        near = f"; did you mean {guess[0]!r}?" if guess else ""
        raise SwitchError(f"{where}: no switch {name!r}{near} (known: {_known(series)})")


def _check_name(name: str, where: str, series: Series) -> None:
    if name != ALL:
        check_switch(name, where, series)


def _value(word: Any, name: str, where: str) -> bool:
    value = _WORDS.get(word.lower()) if isinstance(word, str) else None
    if value is None:
        raise SwitchError(f"{where}: the value of {name!r} is {word!r}; expected on or off")
    return value


def _known(series: Series) -> str:
    return ", ".join(sorted(series.defaults)) or "none in this image"


def _word(value: bool) -> str:
    return "on" if value else "off"
