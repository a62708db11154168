"""Would the case tables see it? Each mutant is a bug put into the Triton kernels on purpose.

Slow: the package is copied and changed, and a process of its own interprets the kernels on the
named cases until one of them fails.
"""

# ruff: noqa: E501  (source lines are quoted whole)
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mutants
import pytest

from fastattn.verify import PROOFS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fastattn"
ATTENTION = "scaled_dot_product_attention"
ADDITIVE, DECODE, VARLEN = "additive_attention", "decode_attention", "varlen_attention"
ENCODE, SINUSOIDAL = "encode_memory", "sinusoidal_encoding"
APPEND = "append_to_cache"
HOPS, HOPFIELD = "memory_hop_attention", "hopfield_retrieve"
MERGE = "merge_states"


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    cases: str  # one of them has to find it
    op: str = ATTENTION
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


FORWARD, BACKWARD, OF_BIASES = "_sdpa_forward.py", "_sdpa_backward.py", "_sdpa_backward_biases.py"
HOP_KERNELS = "_memory_hops_kernels.py"
MUTANTS = (
    Mutant("a_sum_is_not_rescaled", "_core.py", "l * shrink + tl.sum(p, axis=1)", "l + tl.sum(p, axis=1)", "results-0-out-lse"),
    Mutant("an_output_is_not_rescaled", FORWARD, "acc * shrink[:, None]", "acc", "results-0-out-lse", dtype="bfloat16"),
    Mutant("lse_lacks_the_maximum", "_core.py", "top + tl.log(total)", "tl.log(total)", "results-0-out-lse"),
    Mutant("a_diagonal_off_by_one", "_core.py", "visible & (d >= -o.right)", "visible & (d > -o.right - 2)", "lengths-33x33-upper_left lengths-33x65-bottom_right"),
    Mutant("a_window_off_by_one", "_core.py", "visible & (d <= o.left)", "visible & (d < o.left)", "window-3-5-65x65-full"),
    Mutant("the_last_key_before_the_diagonal_is_lost", "_core.py", "last + at.offset + o.right + 1), 0)", "last + at.offset + o.right), 0)", "results-0-out-lse-causal"),
    Mutant("a_tile_on_the_diagonal_is_not_checked", "_core.py", "first + at.offset + o.right + 1), 0)", "last + at.offset + o.right + 1), 0)", "results-0-out-lse-causal"),
    Mutant("the_tail_is_not_excluded", "_core.py", "(o_n < at.k_len)[None, :]", "(o_n >= 0)[None, :]", "results-0-out-lse"),
    Mutant("queries_before_the_diagonal_are_lost", "_core.py", "tl.maximum(first - at.offset - o.right, 0) // BM * BM", "tl.maximum(first - at.offset - o.right, 0) // BM * BM + BM", "results-0-out-lse-causal"),
    Mutant("the_wrong_value_head", FORWARD, "load_rows(v, at.k_at, i_h // o.group,", "load_rows(v, at.k_at, i_h % (o.heads // o.group),", "heads-4-2"),
    Mutant("one_head_of_a_group", BACKWARD, "i_hkv * o.group + o.group)", "i_hkv * o.group + 1)", "heads-4-2", dtype="float16"),
    Mutant("a_row_of_the_mask_is_shifted", "_core.py", "tl.cast(row, tl.int64) * x.l", "tl.cast(tl.maximum(row - 1, 0), tl.int64) * x.l", "mask-bool-qk"),
    Mutant("a_row_of_a_boolean_mask_is_shifted", "_core.py", "load_pairs(o.seen, at, i_h, row,", "load_pairs(o.seen, at, i_h, tl.maximum(row - 1, 0),", "mask-bool-qk"),
    Mutant("nan_that_no_query_sees_spreads", FORWARD, "m_n = m_n & keys_visible(visible)", "m_n = m_n", "mask-padding-poison"),
    Mutant("a_huge_maximum_hides_the_sum", BACKWARD, "if tl.max(huge.to(tl.int32), axis=0) > 0:", "if tl.max(huge.to(tl.int32), axis=0) > 1:", "mask-finfo-min"),
    Mutant("alibi_has_a_sign", "_core.py", "s = s - slope_of_head", "s = s + slope_of_head", "alibi-h-window"),
    Mutant("a_softcap_has_slope_1", "_core.py", "slope = 1.0 - t * t", "slope = 1.0", "softcap-0.5"),
    Mutant("halves_of_dropout_are_swapped", "_core.py", "tl.join(words & 0xFFFF, words >> 16)", "tl.join(words >> 16, words & 0xFFFF)", "dropout-0.5"),
    Mutant("draws_of_dropout_are_shifted", "_core.py", "blocks = first // 8 + tl.arange", "blocks = first // 8 + 1 + tl.arange", "dropout-0.5"),
    Mutant("gradients_of_kept_weights_are_not_scaled", BACKWARD, "tl.where(keep, dp * o.kept_scale, 0.0)", "tl.where(keep, dp, 0.0)", "dropout-0.5"),
    Mutant("delta_is_0", BACKWARD, "tl.sum(b_out * b_do.to(tl.float32), axis=1)", "tl.zeros([BM], tl.float32)", "results-0-out-lse", dtype="bfloat16"),
    Mutant("delta_lacks_the_weights", BACKWARD, "delta += rest", "delta += 0.0 * rest", "results-1-out-weights"),
    Mutant("d_lse_has_the_wrong_sign", BACKWARD, "delta -= tl.load(p_gl", "delta += tl.load(p_gl", "results-0-out-lse"),
    Mutant("dq_is_not_scaled", BACKWARD, "store_rows(grad_q, at.q_at, i_h, o_m, m_m, acc * o.scale", "store_rows(grad_q, at.q_at, i_h, o_m, m_m, acc", "results-0-out-lse"),
    Mutant("a_mask_of_all_heads_has_the_gradient_of_one", OF_BIASES, "i_mask % mask_heads + n % head_sum", "i_mask % mask_heads", "mask-float-bqk"),
    Mutant("a_distance_has_the_wrong_sign", "_relative_bias.py", "o.middle + at_m[:, None] - at_n[None, :]", "o.middle - at_m[:, None] + at_n[None, :]", "relative-65x16"),
    Mutant("queries_of_a_window_are_at_its_first_keys", "_relative_bias.py", "at.q_len - 1) + at.offset", "at.q_len - 1)", "relative-grid-decode"),
    Mutant("a_table_of_the_first_head", "_relative_bias.py", "at.i_b * o.table.b + i_h * o.table.h", "at.i_b * o.table.b", "relative-65x16"),
    Mutant("the_last_keys_of_an_entry_are_lost", OF_BIASES, "o.middle + last + at.offset - begin + 1)", "o.middle + last + at.offset - begin + 1 - BN)", "relative-65x16"),
    Mutant("a_tile_reads_one_entry", OF_BIASES, "range(least, most + 1)", "range(least, least + 1)", "relative-65x16"),
    Mutant("the_gradient_of_a_table_is_capped", OF_BIASES, "tl.where(b_e == e, ds, 0.0)", "tl.where(b_e == e, ds * slope, 0.0)", "relative-softcap"),
    Mutant("an_interval_begins_a_key_late", "_mask_program.py", "(low[:, None] <= o_n[None, :])", "(low[:, None] < o_n[None, :])", "program-window"),
    Mutant("a_tile_of_an_interval_needs_every_query", "_mask_program.py", "some = tl.max((begun < ended)", "some = tl.min((begun < ended)", "program-window"),
    Mutant("part_of_an_interval_is_all_of_it", "_mask_program.py", "every = tl.min(", "every = tl.max(", "program-causal"),
    Mutant("documents_that_share_a_number_are_apart", "_mask_program.py", "(least_k <= most_q)", "(least_k < most_q)", "program-documents_b"),
    Mutant("documents_are_compared_in_part", "_mask_program.py", "equal = (least_q == most_k) &", "equal = (least_q == most_k) |", "program-documents_b"),
    Mutant("documents_of_another_sequence", "_mask_program.py", "p_ids = p_data + at.i_b % batch * width", "p_ids = p_data", "program-documents_b"),
    Mutant("blocks_of_another_head", "_mask_program.py", "(at.i_b % batch * heads + i_h % heads)", "(at.i_b % batch * heads)", "program-function"),
    Mutant("the_bits_of_a_block_are_those_of_the_next_query", "_mask_program.py", "(word >> (lane % 32)[:, None])", "(word >> ((lane + 1) % 32)[:, None])", "program-function"),
    Mutant("a_partial_block_is_whole", "_mask_program.py", "(tl.max(most, axis=0) == 1)", "(tl.max(most, axis=0) >= 1)", "program-block_mask"),
    Mutant("pairs_of_a_negated_leaf_are_not", "_mask_program.py", "value = TOP - value if OF_PAIRS", "value = value if OF_PAIRS", "program-not_window"),
    Mutant("tiles_of_a_negated_leaf_are_not", "_mask_program.py", "tl.where(value == SOME, SOME, TOP - value)", "value", "program-not_window"),
    Mutant("one_operand_is_enough", "_mask_program.py", "(stack >> BITS) & (stack | (-1 - TOP))", "(stack >> BITS) | (stack & TOP)", "program-chunks"),
    Mutant("both_operands_are_needed", "_mask_program.py", "(stack >> BITS) | (stack & TOP)", "(stack >> BITS) & (stack | (-1 - TOP))", "program-many"),
    Mutant("every_leaf_has_the_first_data", "_mask_program.py", "p_data += size", "p_data += 0 * size", "program-chunks"),
    Mutant("a_row_whose_keys_a_program_hides_sees_one", BACKWARD, "visible = visible & pairs_seen(", "visible = visible | pairs_seen(", "program-sinks-nan-queries"),
    Mutant("averaged_weights_are_a_sum", FORWARD, "total = total / o.heads", "total = total", "results-2-out-weights"),
    Mutant("gradients_of_averaged_weights_are_a_sum", BACKWARD, "0.0, BM, BN).to(tl.float32) * weight_share", "0.0, BM, BN).to(tl.float32)", "results-2-out-weights"),
    Mutant("a_sink_is_in_another_unit", "_core.py", "sink = sink / o.scale", "sink = sink", "sinks-1x1"),
    Mutant("delta_lacks_the_sink", BACKWARD, "rest = -sink_weight * delta", "rest = 0.0 * delta", "sinks-1x1"),
    Mutant("a_row_with_a_sink_alone_hands_on_nan", BACKWARD, "found = marked > 0", "found = marked >= 0", "sinks-nan-queries"),
    Mutant("a_sink_alone_has_no_gradient", BACKWARD, "share += tl.load(p_gl", "share += 0.0 * tl.load(p_gl", "sinks-40x1-causal"),
    Mutant("offsets_of_queries_in_a_cache_are_off_by_one", "_decode_kernels.py", "k_len - o.q_len, i_b, i_b)", "k_len - o.q_len + 1, i_b, i_b)", "window", DECODE),
    Mutant("all_keys_are_in_the_first_page", "_decode_kernels.py", "p_table + o_n // cache.length", "p_table + o_n * 0", "page-7", DECODE),
    Mutant("chunks_keep_their_own_maximum", "_decode_kernels.py", "m, _, share, shrink = update_softmax(m, l, tops, unit, o)", "m, _, share, shrink = update_softmax(m, l, tops, unit, o); share = tl.where(tops == -INF, 0.0, 1.0)", "long", DECODE),
    Mutant("chunks_are_not_rescaled", "_decode_kernels.py", "acc = acc * shrink[:, None] + tl.sum(parts", "acc = acc + tl.sum(parts", "many-chunks", DECODE),
    Mutant("sums_of_chunks_are_not_rescaled", "_decode_kernels.py", "l = l * shrink + tl.sum(share", "l = l + tl.sum(share", "many-chunks", DECODE),
    Mutant("all_tiles_have_the_first_chunks", "_decode_kernels.py", "o_c = first + tl.arange(0, BN)", "o_c = begin + tl.arange(0, BN)", "many-chunks", DECODE),
    Mutant("chunks_before_a_window_count", "_decode_kernels.py", "end = tl.cdiv(hi, CHUNK)", "end = tl.cdiv(hi - lo, CHUNK)", "many-chunks", DECODE),
    Mutant("heads_and_queries_are_swapped", "_decode_kernels.py", "i_hkv * o.group + o_r // o.q_len", "i_hkv * o.group + o_r % o.group", "softcap-alibi", DECODE),
    Mutant("a_tile_of_the_sequence_before", "_core.py", "(starts // BLOCK + o_b <= n)", "(starts // BLOCK + o_b < n)", "plain", VARLEN),
    Mutant("lse_of_the_first_sequence", "_core.py", "tl.cast(i_h, tl.int64) * o.q_len + at.q_at", "tl.cast(i_h, tl.int64) * o.q_len", "plain", VARLEN),
    Mutant("a_corner_off_by_one", "_core.py", "offset = 0 if o.offset is None: offset = k_len - q_len", "offset = 0\n        if o.offset is None:\n            offset = k_len - q_len + 1", "causal-bottom-right", VARLEN),
    Mutant("a_mask_of_the_first_sequence", "_mask_program.py", "before = rows", "before = rows * 0", "program-documents", VARLEN),
    Mutant("keys_of_the_rows_of_queries", "_mask_program.py", "_before(at.k_at, o)", "_before(at.q_at, o)", "program-documents", VARLEN),
    Mutant("data_of_packed_sequences_is_as_long_as_theirs", "_mask_program.py", "length = length + PADDING", "length = length", "program-prefix", VARLEN),
    Mutant("a_table_has_the_gradient_of_the_first_sequences", OF_BIASES, "o.batch, parts)", "o.batch - 1, parts)", "relative-cross", VARLEN),
    Mutant("the_last_queries_of_an_entry_are_lost", OF_BIASES, "end - at_query + at.k_len - 1)", "end - at_query)", "relative-cross", VARLEN),
    Mutant("a_table_begins_at_distance_0", "_relative_bias.py", "tl.maximum(entry, 0)", "tl.maximum(entry, o.middle)", "relative-cross", VARLEN),
    Mutant("data_for_a_cache_is_as_long_as_a_sequence", "_mask_program.py", "_padded(o.k_len, o)", "_padded(at.k_len, o)", "program-documents", DECODE),
    Mutant("pairs_of_a_cache_are_all_visible", "_decode_kernels.py", "visible = visible & allowed", "visible = visible", "program-causal", DECODE),
    Mutant("tiles_of_a_cache_are_asked_about_the_first_query", "_decode_kernels.py", "tile_seen_by(at, i_hkv, o_m,", "tile_seen_by(at, i_hkv, o_m * 0,", "program-causal program-many relative-gathered", DECODE),
    Mutant("a_table_of_the_first_head_of_a_group", "_decode_kernels.py", "tl.minimum(i_h, o.heads - 1)[:, None]", "(i_hkv * o.group + 0 * i_h)[:, None]", "relative", DECODE),
    Mutant("a_bias_of_a_cache_has_a_sign", "_decode_kernels.py", "s = s + bias", "s = s - bias", "relative", DECODE),
    Mutant("new_rows_are_one_row", "_decode_kernels.py", "tl.load(cache.p_lengths + i_b) + o_l", "tl.load(cache.p_lengths + i_b) + 0 * o_l", "plain", APPEND),
    Mutant("no_bias", "_additive_kernels.py", "x if p_bias is None else x + tl.load(p_bias + a)", "x", "plain", ADDITIVE),
    Mutant("a_derivative_of_tanh", "_additive_kernels.py", "de * (1.0 - t * t)", "de * (1.0 - t)", "plain", ADDITIVE),
    Mutant("delta_of_additive_is_0", "_additive_kernels.py", "delta += rest", "delta += 0.0 * rest", "plain", ADDITIVE),
    Mutant("dropped_weights_are_not_rescaled", "_additive_kernels.py", "w * o.kept_scale", "w", "dropout-mask", ADDITIVE),
    Mutant("delta_of_hops_is_0", HOP_KERNELS, "delta += tl.sum(tl.where(visible, p * dp, 0.0), axis=1)", "delta += 0.0 * tl.sum(p, axis=1)", "plain", HOPS),
    Mutant("relu_passes_all_gradients", HOP_KERNELS, "tl.where(b_y > 0.0, b_g, 0.0)", "tl.where(b_y >= 0.0, b_g, 0.0)", "rows=17-width=15-in_memory=BKN-hop_proj=-activation=relu", HOPS),
    Mutant("a_sigmoid_has_slope_y", HOP_KERNELS, "b_g * b_y * (1.0 - b_y)", "b_g * b_y", "rows=17-width=31-activation=sigmoid-weights=True", HOPS),
    Mutant("linear_scores_have_the_gradient_of_a_softmax", HOP_KERNELS, "tl.where(visible, dp, 0.0)", "tl.where(visible, p * dp, 0.0)", "normalize=none-scale=0.2", HOPS),
    Mutant("a_common_memory_has_the_gradient_of_one_group", HOP_KERNELS, "end = begin + groups", "end = begin + 1", "batch=5-rows=20-width=12-in_memory=1N", HOPS),
    Mutant("a_slot_has_the_gradient_of_the_next_hop", HOP_KERNELS, "tl.maximum(slot - out_first, 0)", "tl.maximum(slot - out_first - 1, 0)", "rows=64-width=16-hops=3-in_memory=BKN-out_memory=BKN", HOPS),
    Mutant("a_step_is_not_rescaled", HOP_KERNELS, "tl.dot(p.to(b_c.dtype), b_c, acc * shrink[:, None]", "tl.dot(p.to(b_c.dtype), b_c, acc", "queries=4-rows=40-width=65-steps=2-bias=BHLN", HOPFIELD),
    Mutant("padding_is_a_word", "encode_memory.py", "counts = counts & (token != padding)", "counts = counts", "3x4x5x11x8-position", ENCODE),
    Mutant("a_time_of_padding", "encode_memory.py", "mask=any_word[:, None] & m_d", "mask=m_n[:, None] & m_d", "3x4x5x11x8-position", ENCODE),
    Mutant("gradients_of_words_have_one_factor", "encode_memory.py", "i_j = place % words", "i_j = place * 0", "3x4x5x11x8-position", ENCODE),
    Mutant("an_empty_state_is_read", "merge_states.py", "m_a = (a != -INF)[:, None] & (o_d < width)", "m_a = m_row[:, None] & (o_d < width)", "empty-a-poison", MERGE),
    Mutant("a_gradient_of_lse_has_the_wrong_sign", "merge_states.py", "share_a * h + rest", "share_a * h - rest", "plain", MERGE),
    Mutant("a_quadrant_has_the_wrong_sign", "sinusoidal.py", "tl.where(quadrant >= 2", "tl.where(quadrant > 2", "interleaved-16", SINUSOIDAL),
    Mutant("padding_has_a_position", "sinusoidal.py", "tl.where((position == padding)[:, None], 0.0, encoding)", "encoding", "interleaved-negative", SINUSOIDAL),
)  # fmt: skip

# Prints how wrong each case is, until one is clearly so.
_JUDGE = """
import sys
sys.path.append(sys.argv[1])
import torch, triton_interpreter
from fastattn.testing import Target
from fastattn.verify import PROOFS
import fastattn
print(fastattn.__file__)
triton_interpreter.mend()
judge, dtype = PROOFS[sys.argv[2]], getattr(torch, sys.argv[3])
with triton_interpreter.quiet():
    for case in judge.cases:
        if case.name in sys.argv[4:]:
            verdict = judge(case, dtype, Target("triton"))
            assert not verdict.declined, verdict.declined
            print(f"{verdict.severity:.3g} {case.name}", *verdict.faults[:1])
            if verdict.severity >= 2:  # what is right has half a bound of its own
                break
"""


def _copied(to: Path) -> Path:
    """A copy of the package, without what is compiled; returns the folder of the kernels."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "results")
    shutil.copytree(PACKAGE, to / "fastattn", ignore=ignored)
    return to / "fastattn/backends/triton"


def _judged(folder: Path, op: str, dtype: str, cases: list[str]) -> dict[str, float]:
    """How wrong each case is by the package in ``folder``, the last of them the worst."""
    command = [sys.executable, "-c", _JUDGE, str(ROOT / "tests/support"), op, dtype, *cases]
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    imported, *lines = done.stdout.splitlines()
    assert Path(imported).is_relative_to(folder), imported
    print(f"{op} {dtype}", *lines, sep="\n")
    return {name: float(severity) for severity, name, *_ in map(str.split, lines)}


def test_mutants_are_of_what_there_is() -> None:
    for mutant in MUTANTS:
        mutant.changed((PACKAGE / "backends/triton" / mutant.file).read_text())
        assert mutant.new, mutant.name
        names = {case.name for case in PROOFS[mutant.op].cases}
        assert names.issuperset(mutant.cases.split()), mutant.name


@pytest.mark.slow
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("op", sorted({mutant.op for mutant in MUTANTS}))
def test_what_is_not_a_mutant_is_right(op: str, tmp_path: Path) -> None:
    """Otherwise a copy that cannot run would count as a mutant that was caught."""
    _copied(tmp_path)
    for dtype in sorted({mutant.dtype for mutant in MUTANTS if mutant.op == op}):
        cases = {
            name
            for mutant in MUTANTS
            if (mutant.op, mutant.dtype) == (op, dtype)
            for name in mutant.cases.split()
        }
        found = _judged(tmp_path, op, dtype, sorted(cases))
        assert found.keys() == cases
        assert max(found.values()) <= 1, found


@pytest.mark.slow
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.put_into(_copied(tmp_path))
    found = _judged(tmp_path, mutant.op, mutant.dtype, mutant.cases.split())
    assert max(found.values()) >= 2, found
