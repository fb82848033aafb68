"""The switches of this process: resolved into the configuration, installed once, read as module constants.

Life of a switch: the process that makes the VllmConfig calls :func:`resolve` at the start of the
platform's config check; the resolved set lies in ``additional_config['strata']`` from then on, so it is
part of ``VllmConfig.compute_hash()`` and travels with the configuration to every worker. Each worker calls
:func:`install` before anything else is built. A module of a patch takes its switch as a constant of its
own::

    ENABLED: bool = switches.bind("min_tokens_mask_cache", __name__)

Before installation every constant is False: a process that never runs a model keeps upstream's behaviour.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_ascend.strata import series, switch_table
from vllm_ascend.strata.switch_table import CONFIG_KEY, VARIABLE, SwitchError, Table

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_installed: Table | None = None
_announced: Table | None = None
_constants: list[tuple[str, str, str]] = []


def resolve(vllm_config: VllmConfig) -> Table:
    """Write the resolved switches into ``vllm_config.additional_config['strata']`` and return them.

    Reads ``STRATA_SWITCHES`` and what the user put under ``strata``. A configuration that carries a
    resolved set already keeps it, whatever this process's environment says. The user's own dict is left as
    it is: the configuration gets a new one. Logs one line for each new outcome.

    Raises SwitchError for unusable settings and where additional_config is neither None nor a mapping.
    """
    global _announced
    known = series.load()
    additional, given = _sections(vllm_config)
    if switch_table.is_resolved(given):
        table = switch_table.from_resolved(known, given)
    else:
        table = switch_table.resolve(known, os.environ.get(VARIABLE, ""), given)
        vllm_config.additional_config = {**additional, CONFIG_KEY: table.as_config()}
    if table != _announced:
        _announced = table
        _log().info(
            "Strata series %s, %d patches. On: %s. Off: %s.",
            table.series,
            len(known.patches),
            ", ".join(table.names(on=True)) or "none",
            ", ".join(table.names(on=False)) or "none",
        )
    return table


def table_of(vllm_config: VllmConfig) -> Table:
    """The switches that a configuration carries: for code that runs while it is checked, before any
    installation.

    Raises SwitchError if it carries no resolved set.
    """
    _, given = _sections(vllm_config)
    if not switch_table.is_resolved(given):
        raise SwitchError(
            f"additional_config[{CONFIG_KEY!r}] holds no resolved switches; "
            "the platform's config check was skipped"
        )
    return switch_table.from_resolved(series.load(), given)


def install(vllm_config: VllmConfig) -> Table:
    """Make the configuration's switches those of this process, and set every bound constant.

    A second call with an equal table changes nothing. A configuration that never went through the
    platform's config check has no switches in its hash: it gets upstream's behaviour, all off, with a
    warning.

    Raises SwitchError if another table is installed already: constants may have been traced or captured.
    """
    global _installed
    _, given = _sections(vllm_config)
    if switch_table.is_resolved(given):
        table = switch_table.from_resolved(series.load(), given)
    else:
        table = switch_table.all_off(series.load())
        _log().warning(
            "Strata: the configuration carries no resolved switches, all patches with a switch stay off."
        )
    if _installed is not None:
        if table != _installed:
            changed = sorted(name for name in table.values if table[name] is not _installed[name])
            raise SwitchError(
                f"this process runs with other switches already (different: {', '.join(changed)}); "
                "one process serves one set, start another process"
            )
        return _installed
    _installed = table
    for switch, module, constant in _constants:
        _set_constant(switch, module, constant, table)
    _log().debug("Strata: installed %s", table.as_config())
    return table


def installed() -> Table | None:
    """The table of this process, None before :func:`install`."""
    return _installed


def bind(switch: str, module: str, constant: str = "ENABLED") -> bool:
    """Keep ``constant`` of the module named ``module`` equal to ``switch``; returns its value for now.

    Meant for the assignment itself (see the module's docstring). The constant is False until
    :func:`install` sets it, once.

    Raises SwitchError if the series has no such switch.
    """
    switch_table.check_switch(switch, module, series.load())
    entry = (switch, module, constant)
    if entry not in _constants:
        _constants.append(entry)
    return _installed[switch] if _installed is not None else False


def _set_constant(switch: str, module: str, constant: str, table: Table) -> None:
    if module in sys.modules:
        setattr(sys.modules[module], constant, table[switch])


def _sections(vllm_config: VllmConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """additional_config and its ``strata`` part, both as mappings."""
    additional = vllm_config.additional_config
    if additional is None:
        additional = {}
    if not isinstance(additional, Mapping):
        raise SwitchError(
            f"additional_config is a {type(additional).__name__}; vllm-ascend and Strata need a JSON object "
            "(a dict), else the switches would not be part of the configuration's hash"
        )
    given = additional.get(CONFIG_KEY, {})
    if not isinstance(given, Mapping):
        raise SwitchError(
            f'additional_config[{CONFIG_KEY!r}] is {given!r}; expected an object such as {{"all": "off"}}'
        )
    return additional, given


def _log() -> Any:
    from vllm.logger import logger

    return logger
