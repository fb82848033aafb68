"""Time of the patch engine on the release's real sources: `make bench` prints it, no test depends on it.

Each row is one fresh process, so imports count; seconds of CPU, and of wall time on this machine as it is now.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {"strata check": ["check"], "strata apply --dry-run": ["apply", "--dry-run"]}


def once(command: list[str], trees: Path) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one run. SystemExit with its output where it fails."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "strata.cli", *command, "--trees", str(trees)],
        capture_output=True,
        text=True,
        check=False,
    )
    after = os.times()
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=Path, required=True, help="directory that holds vllm-ascend/ and vllm/")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    print(f"{'command':<26}{'CPU s (min, median)':>24}{'wall s (min, median)':>24}")
    for name, command in COMMANDS.items():
        runs = [once(command, given.trees.resolve()) for _ in range(given.runs)]
        cpu, wall = (sorted(column) for column in zip(*runs, strict=True))
        print(
            f"{name:<26}{cpu[0]:>14.2f}{statistics.median(cpu):>10.2f}{wall[0]:>14.2f}{statistics.median(wall):>10.2f}"
        )


if __name__ == "__main__":
    main()
