"""The grammar on the hardest places of the real sources: placed, composed, compiled and written on a copy."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from series_tools import VERSION, make_series
from strata.apply import already_applied, compile_check, revert, write
from strata.model import At
from strata.plan import Plan, plan_series
from strata.series import load_series
from strata.trees import Trees

pytestmark = pytest.mark.sources

RUNNER = "vllm_ascend/worker/model_runner_v1.py"
FUSED = "vllm_ascend/ops/fused_moe/fused_moe_0_23_0.py"
CONTEXT = "vllm_ascend/ascend_forward_context.py"
DISPATCHER = "vllm_ascend/ops/fused_moe/token_dispatcher.py"
BUILTIN = "vllm::vllm/v1/sample/logits_processor/builtin.py"
HERE = "vllm_ascend.strata"

# name -> (edits, text that the result must hold, spelled as ast.unparse does for Python)
SITES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "prepare-inputs-guards": (
        [
            {"at": RUNNER, "import": f"from {HERE} import decode_state"},
            {
                "at": f"{RUNNER}::NPUModelRunner._prepare_inputs",
                "find": "self.input_batch.block_table.commit_block_table(num_reqs)",
                "wrap": "if decode_state.need_block_table(self):\n    $BODY",
            },
            {
                "at": f"{RUNNER}::NPUModelRunner._prepare_inputs",
                "find": "self.query_start_loc.gpu[num_reqs + 1 :].fill_(-1)",
                "wrap": "if decode_state.need_tail(self, num_reqs):\n    $BODY",
            },
            {
                "at": f"{RUNNER}::NPUModelRunner._prepare_inputs",
                "find": "self.req_indices.np[:total_num_scheduled_tokens] = $V\n"
                "self.req_indices.copy_to_gpu(total_num_scheduled_tokens)",
                "wrap": "if decode_state.need_indices(self, $V):\n    $BODY",
            },
        ],
        [
            "if decode_state.need_block_table(self):\n            self.input_batch",
            "if decode_state.need_indices(self, req_indices):\n            self.req_indices.np",
        ],
    ),
    "prepare-inputs-positions": (
        [
            {
                "at": f"{RUNNER}::NPUModelRunner._prepare_inputs",
                "find": "if cp_async_rebuild.positions_ready_on_device:\n    pass\n"
                "elif $PCP:\n    $$$COPY\nelse:\n    $$$GATHER",
                "replace": "if cp_async_rebuild.positions_ready_on_device:\n    pass\n"
                "elif $PCP or decode_state.cpu_positions_hold(self):\n    $$$COPY\nelse:\n    $$$GATHER",
            },
            {"at": RUNNER, "import": f"from {HERE} import decode_state"},
        ],
        ["elif (self.pcp_size > 1 or cp_async_rebuild.rebuilt) or decode_state.cpu_positions_hold(self):"],
    ),
    "execute-model-state": (
        [
            {"at": f"{RUNNER}::ExecuteModelState", "append": "presampled: torch.Tensor | None = None"},
            {
                "at": f"{RUNNER}::NPUModelRunner.execute_model",
                "find": "ExecuteModelState($$$FIELDS)",
                "add_item": {"value": "presampled.take(self)"},
            },
            {
                "at": f"{RUNNER}::NPUModelRunner.execute_model",
                "find": "logits = self.model.compute_logits(sample_hidden_states)",
                "next_to": "sample_hidden_states = hidden_states[logits_indices]",
                "in": "if not self.broadcast_pp_output:\n    $$$COMMON\nelse:\n    $$$RARE",
                "nth": 1,
                "replace": "logits = presampled.logits(self, sample_hidden_states)",
            },
            {"at": RUNNER, "import": f"from {HERE} import presampled"},
        ],
        [
            "batch_desc: BatchDescriptor\n    presampled: torch.Tensor | None = None",
            "batch_desc, presampled.take(self))",
            "logits = presampled.logits(self, sample_hidden_states)",
        ],
    ),
    "execute-model-mamba": (
        [
            {
                "at": f"{RUNNER}::NPUModelRunner.execute_model",
                "find": "mamba_utils.do_mamba_copy_block($BUFS)",
                "replace": "mamba_copy.start($BUFS, mamba_utils.do_mamba_copy_block)",
            },
            {
                "at": f"{RUNNER}::NPUModelRunner.execute_model",
                "find": "hidden_states = self._model_forward($$$ARGS)",
                "before": "mamba_copy.wait()",
            },
            {"at": RUNNER, "import": f"from {HERE} import mamba_copy"},
        ],
        [
            "mamba_copy.start(preprocess_bufs, mamba_utils.do_mamba_copy_block)\n            mamba_copy.wait()\n"
        ],
    ),
    "shared-experts": (
        [
            {"at": FUSED, "import": f"from {HERE} import shared_overlap"},
            {
                "at": f"{FUSED}::AscendFusedMoE._forward_shared_experts",
                "find": "shared_out = self._shared_experts_part2($$$ARGS)",
                "after": "shared_out = shared_overlap.reduce_here(self, shared_out)",
            },
            {
                "at": f"{FUSED}::AscendFusedMoE._forward_shared_experts",
                "find": "tensor_model_parallel_all_reduce(shared_out)",
                "replace": "shared_overlap.reduce_late(self, tensor_model_parallel_all_reduce, shared_out)",
            },
            {
                "at": f"{FUSED}::AscendFusedMoE._forward_shared_experts.maybe_wait_event",
                "find": "evt is not None",
                "replace": "evt is not None and not shared_overlap.idle(evt)",
            },
            {
                "at": f"{FUSED}::AscendFusedMoE._forward_shared_experts",
                "find": "maybe_wait_event(fused_moe_evts.before_combine)",
                "in": "with npu_stream_switch($$$HOW):",
                "count": 3,
                "before": "shared_overlap.mark()",
            },
        ],
        [
            "shared_out = shared_overlap.reduce_here(self, shared_out)",
            "if evt is not None and (not shared_overlap.idle(evt)):",
            "shared_overlap.mark()\n                maybe_wait_event(fused_moe_evts.before_combine)",
        ],
    ),
    "extra-attrs": (
        [{"at": f"{CONTEXT}::_ExtraForwardContextProxy.extra_attrs", "add_item": {"value": '"skip_events"'}}],
        ["'eplb_heat_collection_status', 'skip_events')"],
    ),
    "token-dispatcher": (
        [
            {
                "at": f"{DISPATCHER}::TokenDispatcherWithAllGather.token_dispatch",
                "find": "DeviceOperator.npu_moe_init_routing($$$ARGS)",
                "replace": "init_routing.call(DeviceOperator.npu_moe_init_routing, $$$ARGS)",
            },
            {
                "at": f"{DISPATCHER}::TokenDispatcherWithAllGather.token_dispatch",
                "find": "group_list_type = 1",
                "after": "expert_tokens, group_list_type = init_routing.lists(expert_tokens, group_list_type)",
            },
            {"at": DISPATCHER, "import": f"from {HERE} import init_routing"},
        ],
        [
            "init_routing.call(DeviceOperator.npu_moe_init_routing, hidden_states, topk_ids, scale=dynamic_scale,"
        ],
    ),
    "min-tokens": (
        [
            {
                "at": f"{BUILTIN}::MinTokensLogitsProcessor.__init__",
                "add_param": {"name": "cache", "annotation": "object", "default": "None", "place": "last"},
            },
            {"at": f"{BUILTIN}::MinTokensLogitsProcessor.__init__", "append": "self.cache = cache"},
            {
                "at": f"{BUILTIN}::MinTokensLogitsProcessor.add_request",
                "decorate": {"with": "functools.wraps(len)", "place": "inner"},
            },
            {"at": BUILTIN, "import": "import functools"},
            {
                "at": f"{BUILTIN}::MinTokensLogitsProcessor.update_state",
                "find": "if self.min_toks:\n    $$$BODY",
                "wrap": "if self.cache is None:\n    $BODY",
            },
        ],
        [
            "is_pin_memory: bool, cache: object=None)",
            "@staticmethod\n    @functools.wraps(len)\n    def add_request(",
            "if self.cache is None:\n            if self.min_toks:",
        ],
    ),
    "csrc-options": (
        [
            {
                "at": "csrc/CMakeLists.txt",
                "find": "list(APPEND OPS_COMPILE_OPTIONS -Wno-ignored-attributes)",
                "after": "list(APPEND OPS_COMPILE_OPTIONS -DSTRATA)",
            },
            {
                "at": "csrc/CMakeLists.txt",
                "find": "list(APPEND OPS_COMPILE_OPTIONS -include${VLLM_ASCEND_CANN_COMPAT_HEADER})",
                "replace": "strata_relocate(OPS_COMPILE_OPTIONS)",
            },
        ],
        [
            "-Wno-ignored-attributes)\nlist(APPEND OPS_COMPILE_OPTIONS -DSTRATA)\nstrata_relocate(OPS_COMPILE_OPTIONS)"
        ],
    ),
    "csrc-operator-list": (
        [
            {
                "at": "csrc/build_aclnn.sh",
                "between": ['"$SOC_VERSION" =~ ^ascend910_93 ]]; then', 'SOC_ARG="ascend910_93"'],
                "find": "CUSTOM_OPS_ARRAY=(",
                "add_item": {"value": '"strata_op"', "place": 'after "store_kv_block"'},
            }
        ],
        ['"store_kv_block"\n        "strata_op"\n        "store_kv_block_metadata"\n    )'],
    ),
    "csrc-binding": (
        [
            {
                "at": "csrc/torch_binding.cpp",
                "find": '#include "moe/add_rms_norm_bias/add_rms_norm_bias_torch_adpt.h"',
                "after": '#include "strata/strata_op_torch_adpt.h"',
            },
            {
                "at": "csrc/torch_binding.cpp",
                "find": 'ops.impl("npu_recurrent_gated_delta_rule", torch::kPrivateUse1, '
                "&vllm_ascend::npu_recurrent_gated_delta_rule);",
                "after": 'ops.def("strata_op(Tensor x) -> Tensor");',
            },
        ],
        [
            '#include "strata/strata_op_torch_adpt.h"',
            '&vllm_ascend::npu_recurrent_gated_delta_rule);\n\n    ops.def("strata_op(Tensor x) -> Tensor");',
        ],
    ),
}


def files_of(*names: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys(At.parse(e["at"]).path for n in names for e in SITES[n][0]))


def planned(tmp_path: Path, trees: Trees, *names: str) -> Plan:
    series = make_series(tmp_path / "root", {n: {"edits": SITES[n][0]} for n in names})
    plan = plan_series(series, trees, VERSION)
    assert not plan.faults, "\n\n".join(f.finding.render() for f in plan.faults)
    return plan


def squeezed(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("name", SITES)
def test_a_hard_site(name: str, real_trees: Trees, tmp_path: Path) -> None:
    plan = planned(tmp_path, real_trees, name)
    compile_check(plan)
    assert set(plan.files) == set(files_of(name))
    texts = {f: ast.unparse(ast.parse(t)) if f.endswith(".py") else t for (_, f), t in plan.files.items()}
    for wanted in SITES[name][1]:
        assert any(squeezed(wanted) in squeezed(t) for t in texts.values()), wanted
    for path, text in plan.files.items():
        before = plan.original[path] or ""
        kept = [line.strip() for line in text.splitlines()]
        lost = [line for line in before.splitlines() if line.strip() and line.strip() not in kept]
        assert len(lost) <= 4, lost  # comments and code outside the spans stay as they are


def test_all_hard_sites_together_on_a_copy(
    real_trees: Trees, tree_copy: Callable[..., Trees], tmp_path: Path
) -> None:
    names = list(SITES)
    trees = tree_copy(*files_of(*names))
    before = {path: trees.read(*path) for path in files_of(*names)}
    plan = planned(tmp_path, trees, *names)
    written = write(plan, trees)
    assert len(written) == len(files_of(*names))
    for name in names:
        for tree, file in files_of(name):
            if file.endswith(".py"):
                compile(trees.read(tree, file) or "", file, "exec")
    series = load_series(tmp_path / "root")
    assert already_applied(series, trees)
    assert write(plan, trees) == []
    revert(trees)
    assert {path: trees.read(*path) for path in before} == before


def test_a_named_tuple_field_comes_last_and_has_a_default(real_trees: Trees, tmp_path: Path) -> None:
    plan = planned(tmp_path, real_trees, "execute-model-state")
    tree = ast.parse(plan.files["vllm-ascend", RUNNER])
    state = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "ExecuteModelState")
    fields = [s for s in state.body if isinstance(s, ast.AnnAssign)]
    assert ast.unparse(fields[-1]) == "presampled: torch.Tensor | None = None"
    assert all(f.value is None for f in fields[:-1])


def test_patches_of_one_function_in_every_order(real_trees: Trees, tmp_path: Path) -> None:
    names = [
        "prepare-inputs-guards",
        "prepare-inputs-positions",
        "execute-model-state",
        "execute-model-mamba",
    ]
    results = set()
    for shift in range(len(names)):
        order = names[shift:] + names[:shift]
        plan = planned(tmp_path / str(shift), real_trees, *order)
        tree = ast.parse(plan.files["vllm-ascend", RUNNER])
        # only the order of the imports follows the series
        tree.body = sorted(tree.body, key=ast.dump)
        results.add(ast.dump(tree))
    assert len(results) == 1


def test_every_symbol_of_a_large_file_is_found_by_its_name(real_trees: Trees) -> None:
    from strata.python_symbols import module_of

    source = real_trees.read("vllm-ascend", RUNNER)
    assert source is not None
    module = module_of(source)
    names = [e.qualname for e in module.entries]
    assert len(names) == len(set(names)) > 100
    assert all(module.find(n).qualname == n for n in names)


def test_a_statement_of_every_kind_is_found_by_its_own_text(real_trees: Trees) -> None:
    """Each statement of the hardest functions, given as its own pattern, matches where it stands."""
    from strata.python_find import candidates, scope_of
    from strata.python_patterns import Matcher, parse_pattern
    from strata.python_symbols import module_of

    source = real_trees.read("vllm-ascend", RUNNER)
    assert source is not None
    module = module_of(source)
    total = 0
    for symbol in ("NPUModelRunner._prepare_inputs", "NPUModelRunner.execute_model"):
        scope = scope_of(module, symbol)
        for statement in scope.all_statements()[1:]:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            pattern = parse_pattern(ast.unparse(statement), "the test")
            hits = candidates(scope, pattern, Matcher())
            nodes = [scope.statement_of(m.nodes[0]) for m in hits]
            assert statement in nodes, ast.unparse(statement)
            total += 1
    assert total > 250


def test_the_whole_series_is_planned(real_trees: Trees) -> None:
    root = Path(__file__).resolve().parents[2]
    series = load_series(root)
    plan = plan_series(series, real_trees, VERSION)
    compile_check(plan)
    assert not plan.faults, "\n\n".join(f.finding.render() for f in plan.faults)
    assert plan.files
