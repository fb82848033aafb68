"""What a base overwrites or never runs: small trees for each way, then the counts on the real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from series_tools import VERSION, code, make_trees
from strata.model import At
from strata.shadow import Shadow, ShadowInfo, shadow_map
from strata.shadow_store import ShadowStore
from strata.trees import Trees

SCHEDULER = code(
    """
    class Scheduler:
        def schedule(self):
            return 1

        def update(self):
            return 2

        def untouched(self):
            return 3

    def helper():
        return 4

    def free():
        return 5
    """
)
PLATFORM_INIT = code(
    """
    from vllm_ascend.utils import is_310p, vllm_version_is
    import vllm_ascend.patch.platform.patch_always
    if is_310p():
        import vllm_ascend.patch.platform.patch_case
    if not vllm_version_is("0.23.0"):
        import vllm_ascend.patch.platform.patch_never
    if vllm_version_is("0.23.0"):
        from vllm_ascend.patch.platform import patch_release
    """
)


def info(tmp_path: Path, files: dict[str, str], version: str = VERSION) -> ShadowInfo:
    base = {
        "vllm_ascend/utils.py": "def is_310p(): ...\ndef vllm_version_is(v): ...\n",
        "vllm_ascend/patch/__init__.py": "",
        "vllm_ascend/patch/worker/__init__.py": "",
        "vllm_ascend/patch/platform/__init__.py": PLATFORM_INIT,
        "vllm_ascend/patch/platform/patch_always.py": "",
        "vllm::vllm/sched.py": SCHEDULER,
    }
    return shadow_map(make_trees(tmp_path / "trees", base | {k: code(v) for k, v in files.items()}), version)


def why(found: ShadowInfo, at: str, line: int | None = None) -> Shadow | None:
    return found.explain(At.parse(at), line)


def test_assigned_over_without_condition(tmp_path: Path) -> None:
    found = info(
        tmp_path,
        {
            "vllm_ascend/patch/platform/patch_always.py": """
            import vllm.sched
            from vllm.sched import Scheduler
            def new(self): return 0
            Scheduler.schedule = new
            vllm.sched.helper = lambda: 0
            """
        },
    )
    shadow = why(found, "vllm::vllm/sched.py::Scheduler.schedule")
    assert shadow is not None
    assert (shadow.verdict, shadow.condition, shadow.kind) == ("SHADOWED", "", "assigned")
    assert shadow.by == "vllm_ascend/patch/platform/patch_always.py:4"
    assert why(found, "vllm::vllm/sched.py::helper") is not None
    assert why(found, "vllm::vllm/sched.py::Scheduler.untouched") is None
    assert why(found, "vllm::vllm/sched.py::Scheduler") is None
    assert why(found, "vllm::vllm/sched.py::free") is None


@pytest.mark.parametrize(
    ("body", "target"),
    [
        ("from vllm import sched\nS = sched.Scheduler\nS.update = lambda self: 0", "Scheduler.update"),
        ("from vllm.sched import Scheduler as S\nsetattr(S, 'update', lambda self: 0)", "Scheduler.update"),
        (
            "from vllm.sched import Scheduler as S\nfor n in ('x', 'update'):\n    setattr(S, n, print)",
            "Scheduler.update",
        ),
        ("from vllm.sched import Scheduler as S\nS.schedule, S.update = len, print", "Scheduler.update"),
        ("from vllm.sched import Scheduler as S\nS.update: object = print", "Scheduler.update"),
        ("import vllm.sched as s\ns.__dict__['helper'] = print", "helper"),
        ("import vllm.sched\nvars(vllm.sched)['helper'] = print", "helper"),
        (
            "from vllm.sched import Scheduler as S\nN = 'update'\nsetattr(S, N, lambda self: 0)",
            "Scheduler.update",
        ),
        ("import sys\nm = sys.modules.get('vllm.sched')\nif m is not None:\n    m.free = 1", "free"),
        ("def go():\n    import vllm.sched as s\n    s.free = 1\ngo()", "free"),
    ],
)
def test_the_ways_to_write_it(tmp_path: Path, body: str, target: str) -> None:
    found = info(tmp_path, {"vllm_ascend/patch/platform/patch_always.py": body})
    assert why(found, f"vllm::vllm/sched.py::{target}") is not None


@pytest.mark.parametrize(
    ("tail", "at", "conditional"),
    [
        ("Scheduler.update = print", "Scheduler.update", False),
        ("Scheduler.update = helper(Scheduler.update)", "Scheduler.update", True),
        ("from vllm.other import free", "free", False),
        ("try:\n    from vllm.other import free\nexcept ImportError:\n    pass", "free", True),
        ("import vllm.other as Scheduler", "Scheduler.update", False),
        ("del free", "free", False),
    ],
)
def test_a_file_that_binds_its_own_names_anew(tmp_path: Path, tail: str, at: str, conditional: bool) -> None:
    after = info(tmp_path, {"vllm::vllm/sched.py": SCHEDULER + tail + "\n"})
    found = why(after, f"vllm::vllm/sched.py::{at}")
    assert found is not None and found.verdict == "SHADOWED" and bool(found.condition) == conditional
    before = info(tmp_path / "before", {"vllm::vllm/sched.py": "from vllm.other import free\n" + SCHEDULER})
    assert why(before, "vllm::vllm/sched.py::free") is None


def test_a_wrapper_that_keeps_the_original_is_conditional(tmp_path: Path) -> None:
    found = info(
        tmp_path,
        {
            "vllm_ascend/patch/platform/patch_always.py": """
            from vllm.sched import Scheduler
            _original = Scheduler.update
            def wrapped(self): return _original(self) + 1
            Scheduler.update = wrapped
            """
        },
    )
    shadow = why(found, "vllm::vllm/sched.py::Scheduler.update")
    assert shadow is not None and shadow.verdict == "SHADOWED"
    assert "_original" in shadow.condition


def test_the_condition_of_the_import_counts(tmp_path: Path) -> None:
    assign = "from vllm.sched import Scheduler\nScheduler.{} = lambda self: 0\n"
    found = info(
        tmp_path,
        {
            "vllm_ascend/patch/platform/patch_case.py": assign.format("schedule"),
            "vllm_ascend/patch/platform/patch_never.py": assign.format("update"),
            "vllm_ascend/patch/platform/patch_release.py": assign.format("untouched"),
        },
    )
    only = why(found, "vllm::vllm/sched.py::Scheduler.schedule")
    assert only is not None and only.condition == "310P"
    assert why(found, "vllm::vllm/sched.py::Scheduler.update") is None
    always = why(found, "vllm::vllm/sched.py::Scheduler.untouched")
    assert always is not None and always.condition == ""


def test_another_release_takes_the_other_branch(tmp_path: Path) -> None:
    assign = "from vllm.sched import Scheduler\nScheduler.{} = 1\n"
    files = {
        "vllm_ascend/patch/platform/patch_never.py": assign.format("update"),
        "vllm_ascend/patch/platform/patch_release.py": assign.format("schedule"),
    }
    found = info(tmp_path, files, version="0.24.0rc1")
    assert why(found, "vllm::vllm/sched.py::Scheduler.update") is not None
    assert why(found, "vllm::vllm/sched.py::Scheduler.schedule") is None


def test_a_subclass_in_its_place_shadows_what_it_overrides(tmp_path: Path) -> None:
    found = info(
        tmp_path,
        {
            "vllm_ascend/patch/platform/patch_always.py": """
            import vllm.sched
            from vllm.sched import Scheduler
            class Other(Scheduler):
                def schedule(self):
                    return 7
                def update(self):
                    if self.plain:
                        return super().update()
                    return 8
                def untouched(self):
                    before = super().untouched()
                    return before + 1
            vllm.sched.Scheduler = Other
            """
        },
    )
    assert why(found, "vllm::vllm/sched.py::Scheduler") is None
    direct = why(found, "vllm::vllm/sched.py::Scheduler.schedule")
    assert direct is not None and direct.condition == ""
    sometimes = why(found, "vllm::vllm/sched.py::Scheduler.update")
    assert sometimes is not None and "super()" in sometimes.condition
    assert why(found, "vllm::vllm/sched.py::Scheduler.untouched") is None


def test_reexported_and_inherited_targets(tmp_path: Path) -> None:
    found = info(
        tmp_path,
        {
            "vllm::vllm/user.py": "from vllm.sched import helper\nfrom vllm.sched import Scheduler\n"
            "class Child(Scheduler): ...\n",
            "vllm_ascend/patch/platform/patch_always.py": """
            import vllm.user
            vllm.user.helper = lambda: 0
            vllm.user.Child.update = lambda self: 0
            """,
        },
    )
    partly = why(found, "vllm::vllm/sched.py::helper")
    assert partly is not None and "vllm.user" in partly.condition
    inherited = why(found, "vllm::vllm/sched.py::Scheduler.update")
    assert inherited is not None and "Child" in inherited.condition


OPERATORS = {
    "vllm::vllm/model_executor/__init__.py": "",
    "vllm::vllm/model_executor/custom_op.py": """
    class CustomOp:
        def dispatch_forward(self): ...
        def forward_native(self, x): ...
    """,
    "vllm::vllm/norm.py": """
    from vllm.model_executor.custom_op import CustomOp
    class RMSNorm(CustomOp):
        def __init__(self): self.eps = 1
        def forward_native(self, x): return x
        def forward_cuda(self, x): return x
    class Plain(CustomOp):
        def forward_native(self, x): return self.forward_cuda(x)
        def forward_cuda(self, x): return x
    """,
    "vllm_ascend/ops.py": """
    from vllm.norm import RMSNorm
    class AscendRMSNorm(RMSNorm):
        def __init__(self): self.eps = 2
        def forward_oot(self, x): return x
    class AscendRMSNorm310(RMSNorm):
        def extra(self): ...
        def forward_oot(self, x): return x
    """,
    "vllm_ascend/register.py": """
    from vllm.model_executor.custom_op import CustomOp
    from vllm_ascend.ops import AscendRMSNorm, AscendRMSNorm310
    from vllm_ascend.utils import is_310p
    def register():
        TABLE = {"RMSNorm": AscendRMSNorm}
        if is_310p():
            TABLE.update({"RMSNorm": AscendRMSNorm310})
        for name, cls in TABLE.items():
            CustomOp.register_oot(_decorated_op_cls=cls, name=name)
    """,
}


def test_out_of_tree_operators(tmp_path: Path) -> None:
    found = info(tmp_path, OPERATORS)
    init = why(found, "vllm::vllm/norm.py::RMSNorm.__init__")
    assert init is not None and (init.kind, init.condition) == ("out-of-tree", "")
    cuda = why(found, "vllm::vllm/norm.py::RMSNorm.forward_cuda")
    assert cuda is not None and (cuda.verdict, cuda.condition) == ("IDLE", "")
    native = why(found, "vllm::vllm/norm.py::RMSNorm.forward_native")
    assert native is not None and "custom_ops" in native.condition
    assert why(found, "vllm::vllm/norm.py::Plain.forward_cuda") is None  # its forward_native calls it
    assert why(found, "vllm::vllm/norm.py::Plain.forward_native") is None


def test_the_subclass_that_the_platform_runs(tmp_path: Path) -> None:
    found = info(
        tmp_path,
        {
            "vllm::vllm/runner.py": """
            class Worker:
                def load(self): ...
                def other(self): ...
            class Runner:
                def execute(self): ...
                def kept(self): ...
            class Sampler:
                def sample(self): ...
            class Unused:
                def run(self): ...
            """,
            "vllm_ascend/platform.py": """
            from vllm_ascend.utils import is_310p
            def choose(config):
                if is_310p():
                    config.worker_cls = "vllm_ascend.worker.SmallWorker"
                else:
                    config.worker_cls = "vllm_ascend.worker.NPUWorker"
            """,
            "vllm_ascend/worker.py": """
            from vllm.runner import Runner, Sampler, Unused, Worker
            class NPUWorker(Worker):
                def load(self): self.runner = NPURunner()
            class SmallWorker(Worker):
                def other(self): ...
            class NPURunner(Runner):
                def __init__(self): self.sampler = make()
                def execute(self): ...
            class NPUSampler(Sampler):
                def sample(self): ...
            class NPUUnused(Unused):
                def run(self): ...
            def make(): return NPUSampler()
            def never(): return NPUUnused()
            """,
        },
    )
    for at in ("Worker.load", "Runner.execute", "Sampler.sample"):
        shadow = why(found, f"vllm::vllm/runner.py::{at}")
        assert shadow is not None and (shadow.kind, shadow.condition) == ("overridden", ""), at
    special = why(found, "vllm::vllm/runner.py::Worker.other")
    assert special is not None and special.condition == "310P"
    assert why(found, "vllm::vllm/runner.py::Runner.kept") is None
    assert why(found, "vllm::vllm/runner.py::Unused.run") is None


def test_dead_branches(tmp_path: Path) -> None:
    text = code(
        """
        from typing import TYPE_CHECKING
        from vllm_ascend.utils import is_310p, vllm_version_is
        if vllm_version_is("0.23.0"):
            NEW = False
            from vllm_ascend.old import Runner
        else:
            NEW = True
            class Runner:
                def go(self): ...
        if NEW:
            def modern(): ...
        if TYPE_CHECKING:
            class Hint: ...
        def f(self):
            if not vllm_version_is("0.23.0"):
                return 1
            if is_310p():
                return 2
            return 3
            unreachable()
        """
    )
    found = info(tmp_path, {"vllm_ascend/mod.py": text, "vllm_ascend/old.py": "class Runner: ...\n"})
    lines = text.splitlines()

    def line(word: str) -> int:
        return next(n for n, content in enumerate(lines, 1) if word in content)

    for symbol in ("Runner", "Runner.go", "modern", "Hint"):
        shadow = why(found, f"vllm_ascend/mod.py::{symbol}")
        assert shadow is not None and (shadow.verdict, shadow.condition) == ("IDLE", ""), symbol
    assert why(found, "vllm_ascend/mod.py::f") is None
    assert why(found, "vllm_ascend/mod.py::f", line("return 3")) is None
    for word in ("return 1", "unreachable"):
        dead = why(found, "vllm_ascend/mod.py::f", line(word))
        assert dead is not None and dead.condition == "", word
    special = why(found, "vllm_ascend/mod.py::f", line("return 2"))
    assert special is not None and special.condition == "only with 310P"


HERE = ":\n    def here(): ...\n"


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import fast\n    HAS = True\nexcept ImportError:\n    HAS = False\nif not HAS",
        "DONE = False\ndef set_it():\n    global DONE\n    DONE = True\nif DONE",
        "FLAG = False\nFLAG = bool(other)\nif FLAG",
        "FLAG = False\nif FLAG",
        "for FLAG in x:\n    pass\nif FLAG",
        "with a as FLAG:\n    pass\nif (FLAG := f())",
        "if vllm_version_is('0.23.0'):\n    OLD = True\nOLD = ask()\nif not OLD",
        "if vllm_version_is('0.23.0'):\n    try:\n        OLD = True\n    except E:\n        OLD = 0\n"
        "if not OLD",
        "if f():\n    OLD = True\nelse:\n    OLD = False\nif OLD",
    ],
)
def test_a_flag_that_says_nothing_of_the_base_kills_nothing(tmp_path: Path, text: str) -> None:
    assert why(info(tmp_path, {"vllm_ascend/mod.py": text + HERE}), "vllm_ascend/mod.py::here") is None


@pytest.mark.parametrize(
    "text",
    [
        "OLD = vllm_version_is('0.23.0')\nif not OLD",
        "if vllm_version_is('0.23.0'):\n    NEW = False\nelse:\n    NEW = True\nif NEW",
        "if vllm_version_is('0.23.0') and TYPE_CHECKING or not vllm_version_is('0.23.0')",
        "if current_platform.is_rocm()",
        "if not current_platform.is_out_of_tree()",
    ],
)
def test_a_flag_that_a_release_decides(tmp_path: Path, text: str) -> None:
    shadow = why(info(tmp_path, {"vllm_ascend/mod.py": text + HERE}), "vllm_ascend/mod.py::here")
    assert shadow is not None and (shadow.verdict, shadow.condition) == ("IDLE", "")


def test_modules_that_only_dead_branches_import(tmp_path: Path) -> None:
    found = info(
        tmp_path,
        {
            "vllm_ascend/platform.py": """
            from vllm_ascend import used
            from vllm_ascend.utils import is_310p, vllm_version_is
            if not vllm_version_is("0.23.0"):
                from vllm_ascend import newer
            def f():
                if is_310p():
                    import vllm_ascend.small
            """,
            "vllm_ascend/used.py": "from vllm_ascend.deep import x\n",
            "vllm_ascend/deep.py": "x = 1\n",
            "vllm_ascend/newer.py": "from vllm_ascend.newest import y\n",
            "vllm_ascend/newest.py": "def y(): ...\n",
            "vllm_ascend/small.py": "def z(): ...\n",
            "vllm_ascend/loaded_by_name.py": "def w(): ...\n",
        },
    )
    for file in ("newer", "newest"):
        shadow = why(found, f"vllm_ascend/{file}.py")
        assert shadow is not None and (shadow.kind, shadow.condition) == ("dead-module", ""), file
    small = why(found, "vllm_ascend/small.py::z")
    assert small is not None and small.condition == "only with 310P"
    for file in ("used", "deep", "loaded_by_name"):
        assert why(found, f"vllm_ascend/{file}.py") is None, file


def test_files_that_are_not_python_have_no_shadow(tmp_path: Path) -> None:
    assert why(info(tmp_path, {"csrc/a.cpp": "int f() { return 0; }"}), "csrc/a.cpp::f") is None


def test_a_file_that_does_not_parse_is_no_crash(tmp_path: Path) -> None:
    found = info(tmp_path, {"vllm_ascend/patch/platform/patch_always.py": "def ("})
    assert why(found, "vllm::vllm/sched.py::Scheduler.schedule") is None


def test_kept_answers_end_with_the_content(tmp_path: Path) -> None:
    trees = make_trees(tmp_path / "trees", {"vllm_ascend/a.py": "x = 1\n"})
    store = ShadowStore(tmp_path / "cache", trees, VERSION)
    answer = [Shadow("assigned", "SHADOWED", "a.py:1", "because", "sometimes")]
    store.put("q", answer)
    store.save()
    assert ShadowStore(tmp_path / "cache", trees, VERSION).get("q") == answer
    assert ShadowStore(tmp_path / "cache", trees, "0.24.0").get("q") is None
    trees.path("vllm-ascend", "vllm_ascend/a.py").write_text("x = 22\n")
    assert ShadowStore(tmp_path / "cache", trees, VERSION).get("q") is None


def test_odd_names_and_links_are_no_crash(tmp_path: Path) -> None:
    trees = make_trees(tmp_path / "trees", {"vllm_ascend/a.py": "x = 1\n"})
    package = trees.roots["vllm-ascend"] / "vllm_ascend"
    (package / "gone.py").symlink_to("nowhere")
    (package / "loop.py").symlink_to("loop.py")
    (package / os.fsdecode(b"\xff.py")).touch()
    assert ShadowStore(tmp_path / "cache", trees, VERSION).get("q") is None


def test_a_damaged_store_counts_as_empty(tmp_path: Path) -> None:
    trees = make_trees(tmp_path / "trees", {})
    store = ShadowStore(tmp_path / "cache", trees, VERSION)
    store.put("q", [])
    store.save()
    for path in (tmp_path / "cache").iterdir():
        path.write_text('{"q": [{"wrong": 1}]}')
    assert ShadowStore(tmp_path / "cache", trees, VERSION).get("q") is None


# --- the real trees


@pytest.fixture(scope="module")
def real(real_trees: Trees) -> ShadowInfo:
    return shadow_map(real_trees, VERSION)


@pytest.mark.sources
def test_counts_on_the_release(real: ShadowInfo) -> None:
    """Against a published count of 202 names, 189 of them vLLM's, made without following aliases.

    Ours has eight more, all vLLM's: four reached through a local alias (``X = module.Class``,
    ``sys.modules.get``), four through setattr with a named constant. The thirteen outside vLLM are torch's,
    torchair's and vllm-ascend's own.
    """
    targets = {a.target for a in real.assignments}
    ours = {t for t in targets if t.startswith("vllm.")}
    through_alias = {
        "vllm.distributed.device_communicators.shm_broadcast.MessageQueue.ReadTimeoutWithWarnings.timeout_ms",
        "vllm.distributed.device_communicators.shm_broadcast.MessageQueue.acquire_read",
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.forward",
        "vllm.v1.core.kv_cache_manager.get_kv_cache_coordinator",
    }
    through_constant = {
        "vllm.model_executor.layers.minimax_rms_norm.MiniMaxText01RMSNormTP._normalize_qk",
        "vllm.model_executor.layers.minimax_rms_norm.MiniMaxText01RMSNormTP.forward_qk",
        "vllm.sampling_params.SamplingParams._vllm_ascend_original_validate_structured_outputs",
        "vllm.v1.structured_output.StructuredOutputManager._vllm_ascend_original_grammar_init",
    }
    assert through_alias | through_constant <= ours
    assert len(targets) - 8 == 202
    assert len(ours) - 8 == 189
    kinds = {a.target: a.kind for a in real.assignments if a.target in ours}
    counted = {
        k: sum(1 for v in kinds.values() if v == k) for k in ("defined", "imported", "inherited", "added")
    }
    assert counted == {"defined": 102, "imported": 23, "inherited": 22, "added": 49}
    assert sum(1 for t in ours if any(a.target == t and not a.dead for a in real.assignments)) == 167


@pytest.mark.sources
@pytest.mark.parametrize(
    ("at", "verdict", "conditional"),
    [
        ("vllm::vllm/v1/core/sched/scheduler.py::Scheduler.update_from_output", "SHADOWED", True),
        ("vllm::vllm/v1/core/sched/scheduler.py::Scheduler.schedule", "SHADOWED", True),
        ("vllm::vllm/v1/core/sched/scheduler.py::Scheduler.add_request", "", False),
        ("vllm::vllm/v1/sample/rejection_sampler.py::rejection_sample", "SHADOWED", False),
        ("vllm::vllm/v1/sample/rejection_sampler.py::RejectionSampler.forward", "SHADOWED", False),
        ("vllm::vllm/v1/sample/sampler.py::Sampler.forward", "", False),
        ("vllm::vllm/v1/sample/sampler.py::Sampler.greedy_sample", "SHADOWED", False),
        ("vllm::vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.execute_model", "SHADOWED", False),
        ("vllm::vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.__init__", "", False),
        ("vllm::vllm/model_executor/layers/layernorm.py::RMSNorm.forward_cuda", "IDLE", False),
        ("vllm::vllm/model_executor/layers/layernorm.py::RMSNorm.forward_native", "IDLE", True),
        ("vllm_ascend/ops/fused_moe/fused_moe.py::AscendMoERunner._forward_shared_experts", "IDLE", False),
        ("vllm_ascend/ops/fused_moe/fused_moe_0_23_0.py::AscendFusedMoE._forward_shared_experts", "", False),
        ("vllm_ascend/worker/v2/model_runner.py::NPUModelRunner.execute_model", "IDLE", True),
        ("vllm_ascend/_310p/worker_310p.py::NPUWorker310", "IDLE", True),
        ("vllm_ascend/worker/model_runner_v1.py::NPUModelRunner._prepare_inputs", "", False),
        ("vllm_ascend/patch/platform/patch_dp_device_ids.py", "IDLE", False),
    ],
)
def test_verdicts_on_the_release(real: ShadowInfo, at: str, verdict: str, conditional: bool) -> None:
    shadow = why(real, at)
    assert (shadow.verdict if shadow else "", bool(shadow and shadow.condition)) == (verdict, conditional)
