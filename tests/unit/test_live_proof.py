"""The live proof: written from a plan, checked in a running interpreter; each way in which an edit can be
idle is seen.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from strata.errors import StrataError
from strata.serving import keys, verify

SOURCE = """
import functools


def decorate(f):
    @functools.wraps(f)
    def outer(*a):
        return f(*a)
    return outer


class Sampler:
    limit = 3

    @property
    def top(self):
        return hook_top(self.limit)

    @top.setter
    def top(self, value):
        hook_set(value)

    @staticmethod
    def plain(x):
        return hook_plain(x)

    @classmethod
    def made(cls):
        return hook_made(cls)

    @decorate
    def forward(self, x):
        def inner(y):
            return hook_inner(y)
        return inner(hook_forward(x, key=self.limit))


def free(x):
    return [hook_free(i) for i in x]
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made: list[str] = []

    def make(text: str = SOURCE, name: str = "strata_proof_sample") -> ModuleType:
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        made.extend(sys.modules.keys() & {name})
        sys.modules.pop(name, None)
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


def lines_of(module: ModuleType, marker: str) -> tuple[int, int]:
    text = Path(str(module.__file__)).read_text().splitlines()
    first = next(i for i, line in enumerate(text, 1) if marker in line)
    return first - 2, first + 6


def proof(
    module: ModuleType, symbol: str, names: tuple[str, ...] = (), lines: tuple[int, int] | None = None
) -> verify.Proof:
    path = Path(str(module.__file__))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return verify.Proof(
        proof=1,
        roots={"vllm-ascend": str(path.parent)},
        files=(
            verify.ProofFile(
                patches=("p",),
                tree="vllm-ascend",
                file=path.name,
                sha256=digest,
                new=False,
                module=module.__name__,
            ),
        ),
        edits=(
            verify.ProofEdit(
                patches=("p",),
                tree="vllm-ascend",
                file=path.name,
                module=module.__name__,
                symbol=symbol,
                lines=lines,
                names=names,
            ),
        ),
    )


def outcome(
    entry: verify.Proof, platform: Callable[[], None] = lambda: None, standin: bool = False
) -> tuple[str, str]:
    state, results = verify.run(entry, standin=standin, platform=platform)
    return state, "; ".join(r.reason for r in results if r.reason)


@pytest.mark.parametrize(
    ("symbol", "names"),
    [
        ("Sampler.top", ("hook_top",)),
        ("Sampler.top.setter", ("hook_set",)),
        ("Sampler.plain", ("hook_plain",)),
        ("Sampler.made", ("hook_made",)),
        ("Sampler.forward", ("hook_forward", "key", "hook_inner")),
        ("Sampler.forward.inner", ("hook_inner",)),
        ("free", ("hook_free",)),
        ("Sampler", ("forward",)),
        ("Sampler.limit", ()),
        ("<module>", ("free",)),
        ("free#1", ("hook_free",)),
    ],
)
def test_every_kind_of_symbol_is_proved(
    load: Callable[..., ModuleType], symbol: str, names: tuple[str, ...]
) -> None:
    assert outcome(proof(load(), symbol, names)) == ("proved", "")


def test_a_hook_that_the_loaded_code_does_not_mention(load: Callable[..., ModuleType]) -> None:
    state, reason = outcome(proof(load(), "free", ("hook_elsewhere",)))
    assert state == "failed"
    assert "does not mention hook_elsewhere" in reason
    assert outcome(proof(load(), "<module>", ("nothing",)))[0] == "failed"


@pytest.mark.parametrize("symbol", ["Sampler.forward", "free", "Sampler.plain", "Sampler.top"])
def test_shadowed_by_an_assignment(load: Callable[..., ModuleType], symbol: str) -> None:
    module = load()
    entry = proof(module, symbol)

    def replacement(*arguments: Any) -> None:
        return None

    replacement.__module__, replacement.__qualname__ = module.__name__, symbol

    def shadow() -> None:
        owner, _, name = symbol.rpartition(".")
        kept = getattr(module, owner) if owner else module
        setattr(kept, name, property(replacement) if name == "top" else replacement)

    state, reason = outcome(entry, shadow)
    assert state == "failed"
    assert "shadowed" in reason


def test_stale_code_and_changed_files(load: Callable[..., ModuleType]) -> None:
    module = load()
    path = Path(str(module.__file__))
    path.write_text(path.read_text().replace("hook_free(i)", "hook_free(i + 1)"))
    state, reason = outcome(proof(module, "free", ("hook_free",)))
    assert state == "failed"
    assert "stale bytecode" in reason
    entry = proof(module, "free")
    path.write_text(path.read_text() + "\n")
    state, reason = outcome(entry)
    assert state == "failed"
    assert "built as" in reason
    path.unlink()
    assert outcome(entry)[0] == "failed"


def test_another_definition_in_force(load: Callable[..., ModuleType]) -> None:
    module = load("def f():\n    return hook()\n\n\nif True:\n    def f():\n        return hook()\n")
    state, reason = outcome(proof(module, "f", ("hook",), lines=(1, 2)))
    assert state == "failed"
    assert "starts at line 6" in reason


def test_a_symbol_that_is_not_there(load: Callable[..., ModuleType]) -> None:
    assert outcome(proof(load(), "Sampler.gone"))[0] == "failed"


def test_a_module_loaded_from_elsewhere(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    entry = proof(load(), "free")
    other = tmp_path / "copy"
    other.mkdir()
    (other / "strata_proof_sample.py").write_text(SOURCE)
    moved = entry.model_copy(update={"roots": {"vllm-ascend": str(other)}})
    moved = moved.model_copy(update={"files": ()})
    state, reason = outcome(moved)
    assert state == "failed"
    assert "not from" in reason


def test_a_graft_that_another_took_over(load: Callable[..., ModuleType]) -> None:
    target = load("class Owner:\n    pass\n", "strata_proof_target")
    text = "import strata_proof_target as t\ndef grafted(self):\n  return hook(self)\nt.Owner.run = grafted\n"
    module = load(text, "patch.strata_proof_graft")
    path = Path(str(module.__file__))
    entry = proof(module, "grafted", ("hook",))
    assert outcome(entry) == ("proved", "")
    state, reason = outcome(entry, lambda: setattr(target.Owner, "run", lambda self: None))
    assert state == "failed"
    assert "t.Owner.run" in reason
    assert path.parent.name == "patch"


@pytest.mark.parametrize(
    ("error", "standin", "state"),
    [
        (ImportError("libascend_hal.so"), False, "deferred"),
        (OSError("no driver"), False, "deferred"),
        (ImportError("x"), True, "failed"),
        (RuntimeError("ours"), False, "failed"),
    ],
)
def test_a_platform_that_does_not_load(
    load: Callable[..., ModuleType], error: Exception, standin: bool, state: str
) -> None:
    def platform() -> None:
        raise error

    assert outcome(proof(load(), "free"), platform, standin)[0] == state


def test_a_module_that_does_not_import(load: Callable[..., ModuleType]) -> None:
    module = load()
    entry = proof(module, "free")
    edit = entry.edits[0].model_copy(update={"module": "strata_no_such_module"})
    entry = entry.model_copy(update={"edits": (edit,)})
    assert outcome(entry)[0] == "failed"
    state, results = verify.run(entry, standin=True, platform=lambda: None)
    assert state == "proved"
    assert [r.state for r in results] == ["proved", "deferred"]
    assert "deferred: " in verify.report(state, results)


def test_a_proof_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "proof.json"
    with pytest.raises(StrataError):
        verify.load(path)
    path.write_text('{"proof": 2}')
    monkeypatch.setenv("STRATA_PROOF_JSON", str(path))
    assert verify.main([]) == 2
    assert "E-PROOF" in capsys.readouterr().err


# the keys that a source reads


def test_keys_read_from_a_source() -> None:
    source = """
class Inner:
    _defaults = {"deep": 1}

    def __init__(self, first: bool = True, **kwargs):
        self.more = kwargs.get("more", 2)


class Mapped:
    def __init__(self, mapped_config, vllm_config):
        self.on = mapped_config.get("on", False)
        self.other = vllm_config.get("not_ours")


class Config:
    def __init__(self, vllm_config):
        additional_config = vllm_config.additional_config or {}
        inner = additional_config.get("inner", {})
        self.inner = Inner(**inner)
        mapped = additional_config.get("mapped", {})
        self.mapped = Mapped(mapped, vllm_config)
        self.flag = self._value(additional_config, "flag", "ENV")
        self.sub = vllm_config.additional_config["subscript"]
        self.seen = "member" in additional_config
        unrelated = {}.get("unrelated")


def elsewhere(config):
    (config.additional_config or {}).setdefault("late", {})
    return config.inner.get("outside")
"""
    assert keys.additional_keys([source]) == [
        "flag",
        "inner",
        "inner.deep",
        "inner.first",
        "inner.more",
        "inner.outside",
        "late",
        "mapped",
        "mapped.on",
        "member",
        "subscript",
    ]
