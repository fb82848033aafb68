"""Presets: serving variants as data, with single values overridden by environment variables.

A preset is ``presets/<name>.yaml`` over ``defaults.yaml``; the environment wins over both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from strata.config import Strict, near, parse_yaml, read_text, validate
from strata.errors import Finding, StrataError
from strata.serving import facts

PREFIX = "STRATA_"
Positive = Annotated[int, Field(ge=1)]
GraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


class Speculation(Strict):
    """Speculative decoding. method: a wish of ``speculation`` in spellings.yaml, or a name the base knows;
    tokens: N.
    """

    method: str
    tokens: Annotated[int, Field(ge=1, le=15)]
    model: str | None = None


class Evidence(Strict):
    """A published or measured figure. verified_here: measured by this project."""

    source: str
    model: str | None = None
    metric: str
    before: float | None = None
    after: float | None = None
    note: str | None = None
    verified_here: bool


class Preset(Strict):
    """One serving variant.

    capture: sequence counts that get a graph of their own (None: chosen, see capture.concurrencies).
    features: wishes of spellings.yaml. arguments, additional_config: what has no wish of its own; checked
    like a written start line.
    """

    title: str
    why: str
    model: str
    served_model_name: str
    tensor_parallel: Positive
    pipeline_parallel: Positive
    data_parallel: Positive
    max_num_seqs: Positive
    max_model_len: Positive
    max_num_batched_tokens: Positive
    memory_utilization: Annotated[float, Field(gt=0, le=1)]
    graph_mode: GraphMode
    capture: tuple[Positive, ...] | None = None
    speculation: Speculation | None = None
    features: dict[str, bool]
    arguments: tuple[str, ...] = ()
    additional_config: dict[str, Any] = Field(default_factory=dict)
    needs_npu: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    @model_validator(mode="after")
    def _known_features(self) -> Preset:
        wishes = facts.facts().wishes
        for name in self.features:
            if name not in wishes:
                guess = near(name, wishes)
                raise ValueError(
                    f"unknown feature {name!r} (known: {', '.join(sorted(wishes))})"
                    + (f"; did you mean {guess!r}?" if guess else "")
                )
        return self

    @property
    def devices(self) -> int:
        """How many devices one replica set takes."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def speculative_tokens(self) -> int:
        return self.speculation.tokens if self.speculation else 0


@dataclass(frozen=True)
class Override:
    """One environment variable that overrides a value: where it goes, how its text is read, what that is
    called.
    """

    path: tuple[str, ...]
    kind: Literal["text", "int", "float", "bool", "ints"]


OVERRIDES: dict[str, Override] = {
    "MODEL": Override(("model",), "text"),
    "SERVED_MODEL_NAME": Override(("served_model_name",), "text"),
    "TENSOR_PARALLEL": Override(("tensor_parallel",), "int"),
    "PIPELINE_PARALLEL": Override(("pipeline_parallel",), "int"),
    "DATA_PARALLEL": Override(("data_parallel",), "int"),
    "MAX_NUM_SEQS": Override(("max_num_seqs",), "int"),
    "MAX_MODEL_LEN": Override(("max_model_len",), "int"),
    "MAX_NUM_BATCHED_TOKENS": Override(("max_num_batched_tokens",), "int"),
    "MEMORY_UTILIZATION": Override(("memory_utilization",), "float"),
    "GRAPH_MODE": Override(("graph_mode",), "text"),
    "CAPTURE": Override(("capture",), "ints"),
    "SPECULATIVE_METHOD": Override(("speculation", "method"), "text"),
    "SPECULATIVE_TOKENS": Override(("speculation", "tokens"), "int"),
    "STATIC_KERNEL": Override(("features", "static_kernel"), "bool"),
    "SUPER_KERNEL": Override(("features", "super_kernel"), "bool"),
    "CPU_BINDING": Override(("features", "cpu_binding"), "bool"),
    "PREFIX_CACHING": Override(("features", "prefix_caching"), "bool"),
}
"""Each is read under its own name and, winning over that, with the prefix ``STRATA_``."""

OTHER_VARIABLES = (
    "STRATA_PRESET",
    "STRATA_PROFILE_KIND",
    "STRATA_PORT",
    "STRATA_HOST",
    "STRATA_SWITCHES",
    "STRATA_SERVING_DIR",
    "STRATA_IMAGE",
    "STRATA_IMAGE_JSON",
    "STRATA_PROOF_JSON",
    "STRATA_ENV",
    "STRATA_LOG_JSON",
)
"""Variables of our prefix that mean something else."""


def names() -> list[str]:
    """The presets there are."""
    return sorted(p.stem for p in (facts.directory() / "presets").glob("*.yaml"))


def load(name: str, environment: Mapping[str, str] | None = None) -> Preset:
    """The preset ``name`` with the environment's overrides (None: this process's).

    E-PRESET for an unknown name, E-CONFIG for faults in the files, E-ENV for each bad variable, all at once.
    """
    environment = os.environ if environment is None else environment
    if name not in names():
        guess = near(name, names())
        raise StrataError(
            Finding(
                "E-PRESET",
                f"no preset {name!r}",
                where=str(facts.directory() / "presets"),
                expected="one of " + ", ".join(names()),
                found=name,
                hint=f"did you mean {guess!r}?" if guess else "name one of these (in a container: STRATA_PRESET)",
            )
        )
    where = facts.directory() / "presets" / f"{name}.yaml"
    defaults = _mapping(facts.directory() / "defaults.yaml")
    data = _merge(defaults, _mapping(where))
    overrides, faults = read_environment(environment)
    if faults:
        raise StrataError(faults)
    validate(data, Preset, str(where))  # faults of the file are told as such, before the environment joins
    touched = []
    for variable, value in overrides.items():
        override = OVERRIDES[variable.removeprefix(PREFIX)]
        if override.path[0] == "speculation" and not isinstance(data.get("speculation"), dict):
            data["speculation"] = {"method": "mtp"}
        if override.path == ("speculation", "tokens") and value == 0:
            data["speculation"] = None
            continue
        _put(data, override.path, value)
        touched.append(variable)
    return validate(
        data,
        Preset,
        f"preset {name} with {', '.join(touched)} from the environment" if touched else str(where),
    )


def read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[Finding]]:
    """The overrides in ``environment`` as typed values by variable, and a finding for each bad one.

    Empty values count as not given. A variable of our prefix that nothing reads is E-ENV; so is a variable
    without it that differs from an override's name by a letter or two (``MAX_NUM_SEQ``).
    """
    values: dict[str, Any] = {}
    faults: list[Finding] = []
    known = [*OVERRIDES, *(PREFIX + n for n in OVERRIDES), *OTHER_VARIABLES]
    for variable in sorted(environment):
        text = environment[variable].strip()
        bare = variable.removeprefix(PREFIX)
        if variable in OTHER_VARIABLES or not text:
            continue
        if bare in OVERRIDES:
            if bare == variable and environment.get(PREFIX + bare, "").strip():
                continue
            try:
                values[variable] = _typed(text, OVERRIDES[bare].kind)
            except ValueError as error:
                faults.append(
                    Finding(
                        "E-ENV",
                        f"{variable} has a value of the wrong type",
                        where=f"environment: {variable}",
                        expected=str(error),
                        found=text,
                        hint=f"correct {variable} or leave it out",
                    )
                )
        elif variable.startswith(PREFIX) or _slip(variable):
            guess = near(variable, known) or _slip(variable)
            faults.append(
                Finding(
                    "E-ENV",
                    f"{variable} is read by nothing",
                    where=f"environment: {variable}",
                    expected="one of " + ", ".join(sorted({*OVERRIDES, *OTHER_VARIABLES})),
                    found=variable,
                    hint=f"did you mean {guess}?" if guess else "leave it out",
                )
            )
    return values, faults


def _slip(variable: str) -> str:
    """The override that ``variable`` is a slip of: same first word, one or two letters apart. Empty
    otherwise.
    """
    if "_" not in variable:
        return ""
    for name in OVERRIDES:
        if (
            "_" in name
            and name != variable
            and _distance(variable, name, 2) <= 2
            and name[:3] == variable[:3]
        ):
            return name
    return ""


def _distance(a: str, b: str, limit: int) -> int:
    """Levenshtein distance, or ``limit`` + 1 where it is larger."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (x != y)))
    return min(row[-1], limit + 1)


def _typed(text: str, kind: str) -> Any:
    """The text as the kind says; ValueError whose text is what was expected."""
    if kind == "int":
        if not text.lstrip("-").isdigit():
            raise ValueError("a whole number")
        return int(text)
    if kind == "float":
        try:
            return float(text)
        except ValueError:
            raise ValueError("a number") from None
    if kind == "bool":
        words = {
            "1": True,
            "true": True,
            "on": True,
            "yes": True,
            "0": False,
            "false": False,
            "off": False,
            "no": False,
        }
        if text.lower() not in words:
            raise ValueError("on or off")
        return words[text.lower()]
    if kind == "ints":
        parts = [p.strip() for p in text.split(",")]
        if not all(p.isdigit() for p in parts):
            raise ValueError("sequence counts with commas between, such as 1,4,8")
        return [int(p) for p in parts]
    return text


def _mapping(path: Any) -> dict[str, Any]:
    data = parse_yaml(read_text(path), str(path))
    if not isinstance(data, dict):
        raise StrataError(
            Finding("E-CONFIG", "a mapping is wanted", where=str(path), found=type(data).__name__)
        )
    return data


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        data[key] = dict(data.get(key) or {})
        data = data[key]
    data[path[-1]] = value
