"""The two source trees of a base, read only: vllm-ascend and vllm side by side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from strata.errors import Finding, StrataError

# tree -> its Python package, which tells a source tree from a directory of the same name
PACKAGES = {"vllm-ascend": "vllm_ascend", "vllm": "vllm"}
_SKIPPED_DIRECTORIES = {"__pycache__", ".git", ".strata", "node_modules"}


@dataclass(frozen=True)
class Trees:
    """Source trees by name; ``roots`` maps ``vllm-ascend`` and ``vllm`` to absolute directories."""

    roots: dict[str, Path]

    @classmethod
    def at(cls, directory: Path) -> Trees:
        """The trees below ``directory``, which holds ``vllm-ascend/`` and ``vllm/``. E-TREE where it does
        not."""
        faults = [
            Finding(
                "E-TREE",
                f"no {tree} source tree here",
                where=str(directory),
                expected=f"{tree}/{package}/__init__.py",
                found="no such file" if directory.is_dir() else "no such directory",
                hint="name the directory that holds vllm-ascend/ and vllm/, or run: make sources",
            )
            for tree, package in PACKAGES.items()
            if not (directory / tree / package / "__init__.py").is_file()
        ]
        if faults:
            raise StrataError(faults)
        return cls({tree: (directory / tree).resolve() for tree in PACKAGES})

    def path(self, tree: str, file: str) -> Path:
        """The absolute path of a file; it need not exist. E-TREE for a tree that is not one of ours."""
        if tree not in self.roots:
            raise StrataError(
                Finding("E-TREE", f"no tree {tree!r}", expected="one of " + ", ".join(self.roots), found=tree)
            )
        return self.roots[tree] / file

    def read(self, tree: str, file: str) -> str | None:
        """The file as text with its newlines as they are; None where there is no such file, E-READ for bad
        UTF-8."""
        path = self.path(tree, file)
        try:
            return path.read_bytes().decode("utf-8")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except UnicodeDecodeError as error:
            raise StrataError(
                Finding(
                    "E-READ",
                    "the file is not valid UTF-8",
                    where=f"{'' if tree == 'vllm-ascend' else tree + '::'}{file}: byte {error.start}",
                    expected="UTF-8 text",
                    found=f"byte 0x{error.object[error.start]:02x}",
                    hint="take the file from the release again: it is damaged",
                )
            ) from error
        except OSError as error:
            raise StrataError(
                Finding(
                    "E-READ",
                    "the file cannot be read",
                    where=str(path),
                    expected="a readable file",
                    found=error.strerror or str(error),
                    hint="check its name and its permissions",
                )
            ) from error

    def files(self, tree: str, suffixes: tuple[str, ...] = (".py",)) -> list[str]:
        """Relative paths, sorted, of the tree's files that end so; caches and build outputs left out."""
        root = self.roots[tree]
        found: list[str] = []
        for directory, names, files in os.walk(root):
            names[:] = [n for n in names if n not in _SKIPPED_DIRECTORIES and not n.endswith(".egg-info")]
            found += [
                (Path(directory) / f).relative_to(root).as_posix() for f in files if f.endswith(suffixes)
            ]
        return sorted(found)
