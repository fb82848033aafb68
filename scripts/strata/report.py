"""The survey of a series for people (a table and findings) and for programs (the same as JSON)."""

from __future__ import annotations

from collections.abc import Collection
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strata.check import Survey
from strata.verdict import Verdict

_STYLES = {True: "green", False: "bold red"}
_WIDTH = 118


def as_data(survey: Survey, ids: Collection[str]) -> dict[str, Any]:
    """The survey as plain data. The keys are a promise: base, patches (id, verdict, go, findings),
    interactions, exit.
    """
    return {
        "base": survey.base,
        "patches": [
            {
                "id": patch_id,
                "verdict": _headline(survey, patch_id),
                "go": survey.go([patch_id]),
                "findings": [_finding(v) for v in survey.verdicts[patch_id] if v.finding],
            }
            for patch_id in survey.series.ids
            if patch_id in ids
        ],
        "interactions": [
            {"patch": i.patch, "uses": str(i.uses), "edited_by": i.edited_by, "at": str(i.at)}
            for i in survey.interactions
            if i.patch in ids or i.edited_by in ids
        ],
        "exit": survey.exit_code(ids),
    }


def _finding(verdict: Verdict) -> dict[str, Any]:
    data: dict[str, Any] = {
        "verdict": verdict.name,
        "go": verdict.go,
        "at": str(verdict.at) if verdict.at else None,
    }
    if verdict.near is not None:
        data["distance"] = "near" if verdict.near else "far"
    if verdict.condition:
        data["condition"] = verdict.condition
    return data | (verdict.finding.as_dict() if verdict.finding else {})


def _headline(survey: Survey, patch_id: str) -> str:
    found = survey.worst(patch_id)
    return found.name if found else "UNTOUCHED"


def as_text(survey: Survey, ids: Collection[str], *, colour: bool = False) -> str:
    """A table of patches and verdicts, then every finding that stops one, then notes on what goes with a
    remark.
    """
    shown = [i for i in survey.series.ids if i in ids]
    parts = [_table(survey, shown, colour)]
    stopping = [v for i in shown for v in survey.verdicts[i] if not v.go and v.finding]
    parts += [_render(v) for v in stopping]
    notes = [v for i in shown for v in survey.verdicts[i] if v.go and v.finding]
    if notes:
        parts.append(
            "Notes:\n"
            + "\n".join(f"  {v.patch}: {v.name} {v.at}: {v.finding.message}" for v in notes if v.finding)
        )
    together = [i for i in survey.interactions if i.patch in ids or i.edited_by in ids]
    if together:
        parts.append(
            "Interactions (test both on):\n"
            + "\n".join(
                dict.fromkeys(
                    f"  {i.patch} relies on {i.uses}, which {i.edited_by} edits" for i in together
                )
            )
        )
    stopped = [i for i in shown if not survey.go([i])]
    parts.append(
        f"{len(shown)} patch{'' if len(shown) == 1 else 'es'} on {survey.base}: "
        + (
            f"{len(stopped)} need{'s' if len(stopped) == 1 else ''} a person: {', '.join(stopped)}"
            if stopped
            else "all may go"
        )
    )
    return "\n\n".join(parts)


def _render(verdict: Verdict) -> str:
    assert verdict.finding is not None
    code = verdict.finding.code
    head = "" if code == verdict.name else f"{verdict.name} "
    distance = "" if verdict.near is None else (" (near)" if verdict.near else " (far)")
    text = verdict.finding.render()
    return head + text.replace(f"{code}:", f"{code}{distance}:", 1)


def _table(survey: Survey, shown: list[str], colour: bool) -> str:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in ("patch", "group", "verdict", "edits", "uses", "what it is for"):
        table.add_column(name, no_wrap=name != "what it is for", overflow="fold")
    for patch_id in shown:
        patch = survey.series[patch_id]
        verdict = Text(_headline(survey, patch_id), style=_STYLES[survey.go([patch_id])])
        table.add_row(
            patch_id,
            patch.group,
            verdict,
            str(len(survey.seen[patch_id])),
            str(len(patch.spec.uses)),
            patch.spec.title,
        )
    out = StringIO()
    console = Console(
        file=out, width=_WIDTH, force_terminal=colour, color_system="standard" if colour else None
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
