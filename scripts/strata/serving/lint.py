"""The linter for start lines: everything that is wrong with a ``vllm serve`` line on one base, told in one
run.

Upstream reports one fault at a time and says nothing of keys it ignores; here each option, key and value is
held against the base's catalogue, and the corrected line is given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.config import near
from strata.errors import Finding, StrataError
from strata.serving import capture
from strata.serving.facts import Catalogue, Facts, Stale, facts, version_key
from strata.serving.startline import JSON_OPTIONS, Option, StartLine, dumps, integer, read, read_json

OURS = "strata"
"""The key of ``--additional-config`` under which Strata's own switches may be given."""
_FULL = ("FULL", "FULL_DECODE_ONLY")


@dataclass(frozen=True)
class Linted:
    """findings: all of them, errors (``E-``) before warnings (``W-``); corrected: the mended line, None where
    a value could not be read at all.
    """

    findings: list[Finding]
    corrected: list[str] | None

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.code.startswith("E-")]


def lint(
    arguments: Sequence[str],
    catalogue: Catalogue,
    *,
    environment: Mapping[str, str] | None = None,
    patches: Collection[str] = (),
    additional: Collection[str] | None = None,
) -> Linted:
    """Hold a start line (and the environment it runs in) against a base.

    patches: ids of Strata's patches in the image (some bring keys of their own); additional: the keys that
    the installed source reads, where it is at hand (None: the catalogue's).
    """
    line, findings = read(arguments, catalogue)
    linter = _Linter(
        line, catalogue, facts(), patches, catalogue.additional if additional is None else additional
    )
    findings += linter.run()
    findings += _environment(environment or {}, catalogue, facts())
    unreadable = any(f.code == "E-JSON" for f in findings)
    findings.sort(key=lambda f: not f.code.startswith("E-"))
    return Linted(findings, None if unreadable else line.arguments())


def _stale(entries: Sequence[Stale], name: str, version: str) -> Stale | None:
    return next((s for s in entries if s.name == name and version_key(s.since) <= version_key(version)), None)


def _environment(environment: Mapping[str, str], catalogue: Catalogue, known: Facts) -> list[Finding]:
    findings = []
    for name in sorted(environment):
        stale = _stale(known.stale_environment, name, catalogue.version)
        if stale:
            findings.append(
                Finding(
                    "E-STALE-ENV",
                    f"{name} has no effect on {catalogue.version}: {stale.note}",
                    where=f"environment: {name}",
                    found=environment[name],
                    hint=f"unset {name}" + (f", and give {stale.becomes}" if stale.becomes else ""),
                )
            )
        elif name.startswith(("VLLM_", "VLLM_ASCEND_")) and name not in catalogue.environment:
            guess = near(name, catalogue.environment)
            if guess:
                findings.append(
                    Finding(
                        "W-ENV",
                        f"{catalogue.version} does not read {name}",
                        where=f"environment: {name}",
                        found=environment[name],
                        hint=f"did you mean {guess}?",
                    )
                )
    return findings


class _Linter:
    """One pass over one line; mends ``line`` in place while it collects findings."""

    def __init__(
        self,
        line: StartLine,
        catalogue: Catalogue,
        known: Facts,
        patches: Collection[str],
        additional: Collection[str],
    ) -> None:
        self.line, self.catalogue, self.facts, self.patches = line, catalogue, known, patches
        self.additional = {*additional, OURS, *self._patch_keys()}
        self.findings: list[Finding] = []

    def run(self) -> list[Finding]:
        for option in list(self.line.options):
            self._flag(option)
        for name in JSON_OPTIONS:
            given = self.line.get(name)
            if given is not None and given.data is not None:
                self._keys(name, given.data)
        self._values()
        self._speculation()
        self._features()
        self._capture()
        self._slips()
        for name in ("--compilation-config", "--additional-config"):
            emptied = self.line.get(name)
            if emptied is not None and emptied.data == {}:
                self.line.remove(name)
        return self.findings

    def _patch_keys(self) -> set[str]:
        own = {key for patch in self.patches for key in self.facts.patch_keys.get(patch, ())}
        return own | {
            f"{outer}.{inner}"
            for wish in self.facts.wishes.values()
            for spelling in wish.wanted
            if spelling.patch in self.patches
            for outer, value in spelling.additional_config.items()
            for inner in (value if isinstance(value, dict) else ())
        }

    def _say(self, code: str, message: str, **parts: Any) -> None:
        self.findings.append(Finding(code, message, **parts))

    # options

    def _flag(self, option: Option) -> None:
        version = self.catalogue.version
        stale = _stale(self.facts.stale_flags, option.name, version)
        if stale is not None and (option.flag is None or stale.silent):
            self._stale_flag(option, stale)
        elif option.flag is None:
            guess = near(option.name, [n for n in self.catalogue.names() if n.startswith("--")])
            self._say(
                "E-FLAG",
                f"{version} has no option {option.name}",
                where=option.written,
                found=option.written,
                hint=f"did you mean {guess}?" if guess else "remove it",
            )
            meant = self.catalogue.flag(guess) if guess else None
            taken = {o.name for o in self.line.options}
            if meant is not None and guess not in taken and (meant.takes == "nothing") == (not option.values):
                option.name, option.flag = guess, meant
                if guess in JSON_OPTIONS:
                    self.findings += read_json(option)
            else:
                self.line.options.remove(option)

    def _stale_flag(self, option: Option, stale: Stale) -> None:
        version = self.catalogue.version
        if stale.how == "renamed" and stale.becomes:
            value = option.values[0] if option.values else ""
            new = stale.values.get(value, value)
            self._say(
                "E-STALE",
                f"{version} has no {option.name}: renamed to {stale.becomes}",
                where=option.written,
                found=" ".join([option.written, *option.values]),
                hint=f"write {stale.becomes} {new}",
                details=(stale.note,),
            )
            option.name, option.flag = stale.becomes, self.catalogue.flag(stale.becomes)
            option.values = [new] if new else []
            return
        verdict = "now the default" if stale.how == "default" else "dropped"
        self._say(
            "W-DEFAULT" if stale.silent else "E-STALE",
            f"{option.name}: {verdict}" if stale.silent else f"{version} has no {option.name}: {verdict}",
            where=option.written,
            found=" ".join([option.written, *option.values]),
            details=(stale.note,),
            hint="remove it" + (f"; its place is taken by {stale.becomes}" if stale.becomes else ""),
        )
        self.line.options.remove(option)

    # keys of JSON options

    def _keys(self, name: str, data: dict[str, Any]) -> None:
        bare = name.removeprefix("--")
        stale_entries = self.facts.stale_keys.get(bare, ())
        known = set(
            self.additional if name == "--additional-config" else self.catalogue.configs.get(bare, ())
        )
        if not known:
            return
        silent = name == "--additional-config"
        for key in list(data):
            if key in known and key != "":
                self._inner(name, key, data, known)
                continue
            stale = _stale(stale_entries, key, self.catalogue.version)
            if stale is not None:
                self._stale_key(name, key, data, stale)
                continue
            top = [k for k in known if "." not in k]
            inside = sorted(k for k in known if k.endswith("." + key))
            bringers = [p for p, keys in self.facts.patch_keys.items() if silent and key in keys]
            guess = "" if bringers else near(key, top)
            hint = (
                f"the patch {bringers[0]} brings it; this image is without"
                if bringers
                else f"it belongs into {inside[0].rpartition('.')[0]}"
                if inside
                else (f"did you mean {guess!r}?" if guess else "remove it")
            )
            self._say(
                "E-KEY",
                f"{self.catalogue.version} knows no {key!r} in {name}"
                + (", and would ignore it silently" if silent else ""),
                where=f"{name}: {key}",
                expected=_some(top),
                found=f"{key}: {dumps(data[key])}",
                hint=hint,
            )
            value = data.pop(key)
            if inside:
                data.setdefault(inside[0].split(".")[0], {})[key] = value
            elif guess and guess not in data:
                data[guess] = value

    def _inner(self, name: str, key: str, data: dict[str, Any], known: set[str]) -> None:
        inner = {k.removeprefix(key + ".") for k in known if k.startswith(key + ".")}
        value = data[key]
        if not inner or not isinstance(value, dict) or key == OURS:
            return
        for part in list(value):
            if part in inner:
                continue
            from_patch = self._patch_hint(key, part)
            guess = "" if from_patch else near(part, inner)
            hint = from_patch or (f"did you mean {guess!r}?" if guess else "remove it")
            self._say(
                "E-KEY",
                f"{self.catalogue.version} knows no {part!r} in {key}, and would ignore it silently",
                where=f"{name}: {key}.{part}",
                expected=_some(inner),
                found=f"{part}: {dumps(value[part])}",
                hint=hint,
            )
            old = value.pop(part)
            if guess and guess not in value:
                value[guess] = old

    def _patch_hint(self, outer: str, inner: str) -> str:
        for wish in self.facts.wishes.values():
            for s in wish.wanted:
                if (
                    s.patch
                    and inner in (s.additional_config.get(outer) or {})
                    and s.holds(self.catalogue.version)
                ):
                    return f"the patch {s.patch} brings it; this image is without"
        return ""

    def _stale_key(self, name: str, key: str, data: dict[str, Any], stale: Stale) -> None:
        value = data.pop(key)
        lost = tuple(f"dropped with it: {key}.{inner}" for inner in value) if isinstance(value, dict) else ()
        effect = ", and would ignore it silently" if stale.silent else ""
        if stale.how == "renamed" and stale.becomes:
            hint = f"write {stale.becomes!r}"
            if stale.becomes.endswith("_sizes") and isinstance(value, int):
                value = [value]
            data.setdefault(stale.becomes, value)
        elif stale.how == "replaced" and stale.becomes:
            hint = f"write {stale.becomes!r}" + (f": {dumps(stale.value)}" if stale.value is not None else "")
            if stale.value is not None and value:
                data.setdefault(stale.becomes, stale.value)
            elif isinstance(value, dict):
                # the switches moved as they are, but for the one whose name says the outer key again
                outer = key.removesuffix("_config")
                moved = {
                    (f"enable_{outer}" if k in ("enable", "enabled") else k): v for k, v in value.items()
                }
                data.setdefault(stale.becomes, {}).update(moved)
                lost = ()
        elif stale.becomes and "." in stale.becomes and " " not in stale.becomes:
            outer, inner = stale.becomes.split(".")
            data.setdefault(outer, {})[inner] = value
            hint = f"it moved: {stale.becomes}"
        else:
            hint = (
                f"delete it; its successor: {stale.becomes}" if stale.becomes else "no successor, delete it"
            )
        self._say(
            "E-STALE-KEY",
            f"{self.catalogue.version} has no {key!r} in {name}{effect}",
            where=f"{name}: {key}",
            found=f"{key}: {dumps(value)}",
            hint=hint,
            details=(stale.note, *lost),
        )

    # values

    def _values(self) -> None:
        for option in self.line.options:
            flag = option.flag
            if flag is None or option.name in JSON_OPTIONS:
                continue
            if flag.takes == "one" and not option.values:
                self._say("E-VALUE", f"{option.name} wants a value", where=option.written, hint="give it one")
            for value in option.values:
                if flag.choices and value not in flag.choices:
                    guess = near(value, flag.choices)
                    self._say(
                        "E-VALUE",
                        f"{option.name} does not know {value!r}",
                        where=option.written,
                        expected="one of " + ", ".join(flag.choices),
                        found=value,
                        hint=f"did you mean {guess!r}?" if guess else "take one of these",
                    )
                elif flag.type == "int" and integer(value) is None:
                    self._say(
                        "E-VALUE", f"{option.name} wants a whole number", where=option.written, found=value
                    )
        mode = self.line.data("--compilation-config").get("cudagraph_mode")
        if isinstance(mode, str) and mode.upper() not in self.catalogue.graph_modes:
            guess = near(mode.upper(), self.catalogue.graph_modes)
            self._say(
                "E-VALUE",
                f"cudagraph_mode does not know {mode!r}",
                where="--compilation-config: cudagraph_mode",
                expected="one of " + ", ".join(self.catalogue.graph_modes),
                found=mode,
                hint=f"did you mean {guess}?" if guess else "take one of these",
            )
            if guess:
                self.line.data("--compilation-config")["cudagraph_mode"] = guess

    def _speculation(self) -> None:
        data = self.line.data("--speculative-config")
        method = data.get("method", self.line.text("--spec-method"))
        if isinstance(method, str):
            name, finding = speculative_method(method, self.catalogue)
            if finding:
                self.findings.append(finding)
            if name and "method" in data:
                data["method"] = name

    @property
    def tokens(self) -> int:
        """N as written, 0 without speculation."""
        written = self.line.data("--speculative-config").get(
            "num_speculative_tokens", self.line.text("--spec-tokens")
        )
        return (integer(str(written)) or 0) if written is not None else 0

    # features that hang together

    def _features(self) -> None:
        settings = self.line.data("--additional-config").get("ascend_compilation_config")
        if not isinstance(settings, dict):
            return
        static, super_ = settings.get("enable_static_kernel"), settings.get("enable_super_kernel")
        if super_ and not static:
            self._say(
                "E-SUPER",
                "enable_super_kernel without enable_static_kernel",
                where="--additional-config: ascend_compilation_config.enable_super_kernel",
                expected="both, or neither",
                found="super alone",
                hint="it fuses statically compiled operators: add enable_static_kernel, or take it out",
            )
            settings["enable_static_kernel"] = static = True
        if not static:
            return
        mode = self.line.data("--compilation-config").get("cudagraph_mode")
        if self.line.get("--enforce-eager") or str(mode).upper() not in _FULL:
            found = (
                "--enforce-eager"
                if self.line.get("--enforce-eager")
                else f"cudagraph_mode {mode or 'not given'}"
            )
            self._say(
                "E-GRAPH",
                "static kernels need a full-graph mode; they are turned off silently otherwise",
                where="--compilation-config: cudagraph_mode",
                expected=" or ".join(_FULL),
                found=found,
                hint='"cudagraph_mode":"FULL_DECODE_ONLY"',
            )
            self.line.remove("--enforce-eager")
            self.line.ensure("--compilation-config")["cudagraph_mode"] = "FULL_DECODE_ONLY"

    def _capture(self) -> None:
        compilation = self.line.data("--compilation-config")
        seqs = integer(self.line.text("--max-num-seqs"))
        mode = compilation.get("cudagraph_mode")
        n = self.tokens
        tp = integer(self.line.text("--tensor-parallel-size")) or 1
        passes = compilation.get("pass_config")
        parallel = bool(passes.get("enable_sp")) if isinstance(passes, dict) else False
        try:
            capture.unit(n, tp, parallel)
        except StrataError as error:
            self.findings += error.findings
            return
        if seqs is None or seqs < 1 or mode in ("NONE", 0) or self.line.get("--enforce-eager"):
            return
        sizes = compilation.get("cudagraph_capture_sizes")
        listed = self.line.get("--cudagraph-capture-sizes")
        if sizes is None and listed is not None:
            sizes = [integer(v) for v in listed.values]
        maximum = compilation.get(
            "max_cudagraph_capture_size", integer(self.line.text("--max-cudagraph-capture-size"))
        )
        if sizes is not None and (
            not isinstance(sizes, list) or not all(isinstance(s, int) and s > 0 for s in sizes) or not sizes
        ):
            self._say(
                "E-VALUE",
                "capture sizes are a list of token counts",
                where="cudagraph_capture_sizes",
                found=dumps(sizes),
            )
            return
        budget = integer(self.line.text("--max-num-batched-tokens"))
        _, finding = capture.check(
            sizes, seqs, n, maximum=maximum, tp=tp, sequence_parallel=parallel, max_num_tokens=budget
        )
        if finding is None:
            return
        self.findings.append(finding)
        reachable = seqs if budget is None else min(seqs, budget // (n + 1))
        if reachable < 1:
            return
        self.line.remove("--cudagraph-capture-sizes", "--max-cudagraph-capture-size")
        compilation = self.line.ensure("--compilation-config")
        compilation.pop("max_cudagraph_capture_size", None)
        compilation["cudagraph_capture_sizes"] = capture.capture_sizes(
            reachable, n, tp=tp, sequence_parallel=parallel
        )

    def _slips(self) -> None:
        for name in ("--max-num-batched-tokens", "--max-model-len"):
            written = self.line.text(name)
            value = integer(written)
            power = near_power(value) if value else None
            if power:
                self._say(
                    "W-SLIP",
                    f"{name} {written} is legal, but looks like a slip for {power}",
                    where=name,
                    found=str(written),
                    hint=f"write {power} if you meant that",
                )


def near_power(value: int) -> int | None:
    """The power of two (1024 or more) that ``value`` misses by less than 2 %, None where it is one or misses
    all.
    """
    if value < 1000:
        return None
    low = 1 << (value.bit_length() - 1)
    return next((p for p in (low, low * 2) if p >= 1024 and p != value and abs(value - p) * 50 < p), None)


def speculative_method(method: str, catalogue: Catalogue) -> tuple[str | None, Finding | None]:
    """(the name that this base wants, finding): W-METHOD for an alias that still works, E-METHOD for an
    unknown one.
    """
    if method in catalogue.mtp_aliases:
        return "mtp", Finding(
            "W-METHOD",
            f"{method!r} is an old name of 'mtp' on {catalogue.version}",
            found=method,
            where="--speculative-config: method",
            hint="write mtp",
        )
    if method in catalogue.methods:
        return method, None
    guess = near(method, catalogue.methods)
    wanted = "mtp" if guess in catalogue.mtp_aliases else guess
    hint = (
        f"did you mean {guess!r}?" + (" (this base calls it 'mtp')" if wanted != guess else "")
        if guess
        else ""
    )
    return wanted or None, Finding(
        "E-METHOD",
        f"{catalogue.version} knows no speculative method {method!r}",
        found=method,
        where="--speculative-config: method",
        expected=_some(catalogue.methods),
        hint=hint or "take one of these",
    )


def _some(names: Collection[str]) -> str:
    ordered = sorted(n for n in names if "." not in n)
    return (
        "one of " + ", ".join(ordered)
        if len(ordered) <= 20
        else f"one of {len(ordered)} keys, such as {', '.join(ordered[:8])}"
    )
