"""An ordinary unified diff of one file, in the form that ``git apply`` and ``patch -p1`` read."""

from __future__ import annotations

import difflib

_NO_NEWLINE = "\\ No newline at end of file\n"


def unified(file: str, before: str | None, after: str, *, context: int = 3) -> str:
    """The diff from ``before`` (None: a new file) to ``after``; empty where they are equal. Lines end as in
    the texts.
    """
    if before == after:
        return ""
    head = f"diff --git a/{file} b/{file}\n"
    if before is None:
        head += "new file mode 100644\n"
        if not after:
            return head
    old, new = _only_newlines(before or ""), _only_newlines(after)
    body = []
    for line in difflib.unified_diff(
        old, new, "/dev/null" if before is None else f"a/{file}", f"b/{file}", n=context
    ):
        body.append(line if line.endswith("\n") else line + "\n" + _NO_NEWLINE)
    return head + "".join(body)


def _only_newlines(text: str) -> list[str]:
    """Lines as git counts them: split at ``\\n`` alone, form feeds and carriage returns stay inside."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
