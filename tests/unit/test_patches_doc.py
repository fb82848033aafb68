"""The examples of docs/patches.md land on code that looks as they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from strata.languages import language_of
from strata.model import Edit, PatchFile

DOC = (Path(__file__).resolve().parents[2] / "docs" / "patches.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(b) for b in re.findall(r"^```yaml\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)]
EDITS = [e for b in BLOCKS for e in (b["edits"] if isinstance(b, dict) else b)]

PYTHON = '''\
"""Doc."""
import os


class State:
    batch: int


class AscendSampler:
    def greedy_sample(self, logits):
        return logits.argmax(dim=-1)


class C:
    names = ("a",)

    def run(self, items):
        for item in items:
            self.step(item, 1)
        self.stop()


def f(x):
    total = compute(x)
    log(total)
    launch(x, total)
    copy(x)
    copy_to_gpu(x)
    copy(x, total)
    commit()
    State(total, batch=1)
    done()
'''
SHELL = """\
if [[ "$SOC_VERSION" =~ ^ascend910_93 ]]; then
    CUSTOM_OPS_ARRAY=(
        "a"
    )
    SOC_ARG="ascend910_93"
fi
"""


@pytest.mark.parametrize("words", EDITS, ids=lambda w: next(k for k in reversed(w) if k != "local"))
def test_an_example_lands(words: dict[str, Any]) -> None:
    parsed = Edit.model_validate(words)
    if parsed.diff:
        return
    assert parsed.at is not None
    source = SHELL if parsed.at.file.endswith(".sh") else PYTHON
    placement = language_of(parsed.at.file).place(source, parsed)
    assert placement.spans


def test_the_whole_example_is_a_patch() -> None:
    assert PatchFile.model_validate(BLOCKS[0]).switch is not None


def test_every_verb_has_an_example() -> None:
    from strata.model import VERBS

    assert {Edit.model_validate(e).verb for e in EDITS} == {*VERBS, "diff"}


def test_every_code_of_the_table_is_one_that_is_raised() -> None:
    sources = "".join(
        p.read_text(encoding="utf-8")
        for p in (Path(__file__).resolve().parents[2] / "scripts" / "strata").glob("*.py")
    )
    for code in re.findall(r"E-[A-Z-]+", DOC):
        assert f'"{code}"' in sources, code
