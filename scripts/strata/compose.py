"""The checker for compose files: device names, drivers, logical ids, quotes, and what a command becomes on
its way.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from strata.config import near, read_text
from strata.errors import Finding, StrataError
from strata.serving.startline import JSON_OPTIONS, integer

CONTROL_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
DRIVER_MOUNTS = (
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)
"""What the container of an A2 or A3 host needs of the host beside the cards themselves."""
_CARD = re.compile(r"^/dev/davinci(\d+)$")
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:?[-?+])([^}]*))?\}|(\w+))")


@dataclass
class Service:
    """What matters of one service. cards: numbers of davinci nodes, in order; environment: its variables,
    resolved.
    """

    name: str
    devices: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    command: str | list[str] | None = None
    privileged: bool = False

    @property
    def cards(self) -> list[int]:
        return [int(m[1]) for d in self.devices if (m := _CARD.match(d))]


class _Loader(yaml.SafeLoader):
    """Reads compose's own tags: ``!reset`` and ``!override``."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def _override(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_scalar(node)  # type: ignore[arg-type]


_Loader.add_constructor("!override", _override)


def emit(arguments: Sequence[str]) -> list[str]:
    """A command for a compose file: a list, ``$`` doubled. E-COMPOSE where it would not read back as
    given.
    """
    written = [a.replace("$", "$$") for a in arguments]
    back = read_back(yaml.safe_load(yaml.safe_dump(written)))
    if back != list(arguments):
        raise StrataError(
            Finding(
                "E-COMPOSE",
                "the command does not survive the way through the compose file",
                expected=json.dumps(list(arguments)),
                found=json.dumps(back),
            )
        )
    return written


def read_back(command: str | Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """The arguments that the container gets of a written command: interpolated, and split where it is a
    string.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    return [interpolate(w, environment or {}) for w in words]


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """Compose's substitution: ``$$``, ``$X``, ``${X}``, ``${X:-default}`` and its kin."""

    def put(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name, operator, rest = match[2] or match[5], match[3] or "", match[4] or ""
        value = environment.get(name)
        present = bool(value) if operator.startswith(":") else value is not None
        if operator.endswith("-"):
            return (value or "") if present else interpolate(rest, environment)
        if operator.endswith("+"):
            return rest if present else ""
        return value or ""

    return _VARIABLE.sub(put, text)


def check_files(paths: Sequence[Path], environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Check each file by itself: findings with ``file: service``. StrataError where one is not a compose
    file.
    """
    environment = dict(os.environ) if environment is None else environment
    findings: list[Finding] = []
    for path in paths:
        try:
            data = yaml.load(read_text(path), Loader=_Loader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
            findings.append(
                Finding(
                    "E-YAML", "not readable as YAML", where=place, found=str(getattr(error, "problem", error))
                )
            )
            continue
        if not isinstance(data, dict) or not isinstance(data.get("services"), dict):
            findings.append(
                Finding("E-COMPOSE", "no services in it", where=str(path), expected="a mapping 'services'")
            )
            continue
        for service in services(data, environment):
            findings += check(service, str(path))
    return findings


def services(data: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Service]:
    """The services of a read compose file, values interpolated."""
    for name, body in data["services"].items():
        body = body or {}
        given = body.get("environment") or {}
        if isinstance(given, list):
            pairs = [str(item).partition("=") for item in given]
            given = {k: (v if eq else environment.get(k, "")) for k, eq, v in pairs}
        yield Service(
            name=str(name),
            devices=[interpolate(_source(d), environment) for d in body.get("devices") or ()],
            mounts=[interpolate(_source(v), environment) for v in body.get("volumes") or ()],
            environment={
                k: interpolate(str(v), environment) if v is not None else environment.get(k, "")
                for k, v in given.items()
            },
            command=body.get("command"),
            privileged=bool(body.get("privileged")),
        )


def _source(entry: Any) -> str:
    """The host side of a device or volume, long or short form; a ``:`` inside ``${…}`` belongs to the
    variable.
    """
    if isinstance(entry, dict):
        return str(entry.get("source", ""))
    return re.split(r":(?![^{]*\})", str(entry))[0]


def check(service: Service, file: str) -> list[Finding]:
    """Every finding about one service."""
    where = f"{file}: {service.name}"
    return [
        *_device_findings(service, where),
        *_visible_findings(service, where),
        *_command_findings(service, where),
    ]


def _device_findings(service: Service, where: str) -> Iterator[Finding]:
    for device in service.devices:
        if _CARD.match(device) or device in CONTROL_DEVICES:
            continue
        if not device.startswith("/dev/d") and not device.startswith("/dev/h"):
            continue  # another kind of device: none of our business
        guess = near(device, [*CONTROL_DEVICES, "/dev/davinci0"])
        yield Finding(
            "E-COMPOSE-DEVICE",
            f"no NPU host has a device {device}",
            where=where,
            found=device,
            expected="/dev/davinci<n>, " + ", ".join(CONTROL_DEVICES),
            hint=f"did you mean {guess}?" if guess else "take it out",
        )
    twice = sorted({d for d in service.devices if service.devices.count(d) > 1})
    if twice:
        yield Finding(
            "E-COMPOSE-DEVICE",
            "devices are named twice",
            where=where,
            found=", ".join(twice),
            hint="name each once",
        )
    if not service.cards:
        return
    lacking = [d for d in CONTROL_DEVICES if d not in service.devices] if not service.privileged else []
    if lacking:
        yield Finding(
            "E-COMPOSE-DEVICE",
            "cards without the devices that drive them",
            where=where,
            expected=", ".join(CONTROL_DEVICES),
            found="without " + ", ".join(lacking),
            hint="add " + ", ".join(lacking),
        )
    mounted = [m.rstrip("/") for m in service.mounts]
    absent = [m for m in DRIVER_MOUNTS if not any(m == have or m.startswith(have + "/") for have in mounted)]
    if absent:
        yield Finding(
            "E-COMPOSE-DRIVER",
            "the host's driver is not mounted",
            where=where,
            expected=", ".join(DRIVER_MOUNTS),
            found="without " + ", ".join(absent),
            hint="mount them read-only: " + " ".join(f"{m}:{m}:ro" for m in absent),
        )


def _visible_findings(service: Service, where: str) -> Iterator[Finding]:
    text = service.environment.get("ASCEND_RT_VISIBLE_DEVICES", "").strip()
    count = len(service.cards)
    if text:
        ids = [part.strip() for part in text.split(",")]
        bad = [i for i in ids if not i.isdigit()]
        if bad:
            yield Finding(
                "E-COMPOSE-IDS",
                "ASCEND_RT_VISIBLE_DEVICES has entries that are no numbers",
                where=where,
                expected="numbers with commas between",
                found=text,
            )
            return
        numbers = [int(i) for i in ids]
        if len(set(numbers)) != len(numbers):
            yield Finding(
                "E-COMPOSE-IDS",
                "ASCEND_RT_VISIBLE_DEVICES names a card twice",
                where=where,
                found=text,
                hint=",".join(dict.fromkeys(ids)),
            )
        if service.cards and not service.privileged:
            outside = [n for n in numbers if n >= count]
            if outside:
                logical = ",".join(str(n) for n in range(min(count, len(set(numbers)))))
                yield Finding(
                    "E-COMPOSE-IDS",
                    "ids inside the container are logical: they count the cards handed in from 0",
                    where=where,
                    expected=f"ids below {count}, such as {logical}",
                    found=text,
                    hint=f"ASCEND_RT_VISIBLE_DEVICES={logical} for {', '.join(service.devices[:count])}",
                )
        elif service.privileged and service.cards:
            physical = [n for n in numbers if n not in service.cards]
            if physical:
                yield Finding(
                    "E-COMPOSE-IDS",
                    "a privileged container sees every card, so its ids are the host's",
                    where=where,
                    expected=",".join(map(str, service.cards)),
                    found=text,
                    hint="better: no privileged, and ids from 0",
                )
        count = min(count, len(set(numbers))) if service.cards else len(set(numbers))
    wanted, how = _parallelism(service)
    if count and wanted > count:
        yield Finding(
            "E-COMPOSE-PARALLEL",
            f"{how} needs {wanted} cards and {count} are there",
            where=where,
            expected=f"at most {count}",
            found=str(wanted),
            hint="hand in more cards, or lower the parallelism",
        )


def _parallelism(service: Service) -> tuple[int, str]:
    try:
        words = read_back(service.command, service.environment) if service.command else []
    except ValueError:  # quotes that don't close are told where the command is checked
        words = []
    total, how = 1, []
    for label, variable, options in (
        ("TP", "TENSOR_PARALLEL", ("--tensor-parallel-size", "-tp")),
        ("PP", "PIPELINE_PARALLEL", ("--pipeline-parallel-size", "-pp")),
        ("DP", "DATA_PARALLEL", ("--data-parallel-size", "-dp")),
    ):
        value = (
            integer(service.environment.get(variable))
            or _option(words, options)
            or _preset_value(service, variable)
            or 1
        )
        total *= value
        how.append(f"{label}={value}")
    return total, " × ".join(how)


def _preset_value(service: Service, variable: str) -> int | None:
    name = service.environment.get("STRATA_PRESET", "")
    if not name:
        return None
    from strata.serving import presets

    if name not in presets.names():
        return None
    preset = presets.load(name, {})
    value: int = getattr(preset, presets.OVERRIDES[variable].path[0])
    return value


def _option(words: Sequence[str], names: Sequence[str]) -> int | None:
    expanded = [w for word in words for w in (word.split() if " " in word else [word])]
    for i, word in enumerate(expanded):
        head, eq, value = word.partition("=")
        if head in names:
            return integer(value if eq else expanded[i + 1] if i + 1 < len(expanded) else None)
    return None


def _command_findings(service: Service, where: str) -> Iterator[Finding]:
    command = service.command
    if command is None:
        return
    lone = [
        m.group(0)
        for m in _VARIABLE.finditer(command if isinstance(command, str) else " ".join(map(str, command)))
        if not m[1] and m[5]
    ]
    if lone:
        yield Finding(
            "E-COMPOSE-DOLLAR",
            "compose replaces these before the container sees them",
            where=where,
            found=", ".join(lone),
            expected="$$ for a dollar sign",
            hint="double the dollar sign",
        )
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(w) for w in command]
    except ValueError as error:
        yield Finding(
            "E-COMPOSE-QUOTES",
            "the command's quotes don't close",
            where=where,
            found=str(error),
            hint="write the command as a list",
        )
        return
    inner = _shell_script(words)
    if inner is not None:
        try:
            words = shlex.split(inner)
        except ValueError as error:
            yield Finding(
                "E-COMPOSE-QUOTES",
                "the script's quotes don't close",
                where=where,
                found=str(error),
                hint="write the command as a list, without bash",
            )
            return
    for i, word in enumerate(words):
        head, eq, value = word.partition("=")
        if head not in JSON_OPTIONS:
            continue
        text = (value if eq else words[i + 1] if i + 1 < len(words) else "").replace("$$", "$")
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            yield Finding(
                "E-COMPOSE-QUOTES",
                f"what arrives as the value of {head} is not JSON: {error.msg}",
                where=where,
                expected="the JSON as it was meant",
                found=text,
                hint="write the command as a list, one argument an entry, and JSON in single quotes: "
                f"command: [serve, …, {head}, '{{…}}']",
            )


def _shell_script(words: Sequence[str]) -> str | None:
    """The script of ``bash -c SCRIPT``, as it arrives after the first split; quotes lost then are lost."""
    for i, word in enumerate(words):
        if (
            word in ("-c", "-lc", "-ec", "-xc")
            and i
            and words[i - 1].rsplit("/", 1)[-1] in ("bash", "sh")
            and i + 1 < len(words)
        ):
            return words[i + 1]
    return None
