"""Would the case tables see it? Each mutant is a bug put into the CPU kernels on purpose.

Slow: of every one a source is compiled again, for the strongest instruction set or for emulated
tiles, and cases run until one of them fails.
"""

# ruff: noqa: E501  (source lines are quoted whole)
from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc/cpu/kernels"
BUILD = ROOT / "build/native/cpu"
ATTENTION = "scaled_dot_product_attention"
DTYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}  # in params.h
DTYPES["int8"] = "f32"  # caches of it, of queries in bf16


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    op: str = ATTENTION  # whose cases are to find it
    source: str = ""  # what is compiled; default: the file
    dtype: str = "float32"
    isa: str = ""  # default: the strongest

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"

    @property
    def compiled(self) -> str:
        return self.source or self.file.removesuffix(".cpp")


FORWARD, BACKWARD = "sdpa_forward", "sdpa_backward"
MUTANTS = (
    Mutant("a_sum_is_not_rescaled", "sdpa_forward.cpp", "store(l + n * W, load(buf.alpha + n * W) * load(l + n * W) + sum[n])", "store(l + n * W, load(l + n * W) + sum[n])"),
    Mutant("an_output_is_not_rescaled", "sdpa_forward.cpp", "store(o, load(buf.alpha + n * W) * load(o) + x)", "store(o, load(o) + x)"),
    Mutant("a_row_of_nothing_is_nan", "sdpa_forward.cpp", "select<T>(after == -kInf<T>, Vec<T>{}, after)", "after"),
    Mutant("hidden_nan_spreads", "sdpa_forward.cpp", "const bool leaky = excludes && !all_finite", "const bool leaky = false && !all_finite"),
    Mutant("an_excluded_key_has_a_tiny_weight", "../simd/math.h", "splat(-127.0f)", "splat(-126.0f)", source=FORWARD, isa="avx2"),
    Mutant("the_wrong_key_head", "sdpa_forward.cpp", "const int64_t hk = h / (p.Hq / p.Hkv), q1", "const int64_t hk = h % p.Hkv, q1"),
    Mutant("hidden_weights_are_not_zeroed", "sdpa_forward.cpp", "hide(b, h, i0, i1, {r.end, p.Lk});", ""),
    Mutant("pairs_begin_at_an_odd_key", "sdpa_forward.cpp", "range.begin = range.begin / P::kPerWord * P::kPerWord;  // pairs of keys begin at even ones", "", dtype="bfloat16", isa="avx512_bf16"),
    Mutant("a_diagonal_off_by_one", "scores.h", "static_cast<T>(j - p.offset - p.window_right - i0)", "static_cast<T>(j - p.offset - p.window_right - i0 + 1)", source=FORWARD),
    Mutant("a_window_off_by_one", "scores.h", "static_cast<T>(j - p.offset + p.window_left - i0)", "static_cast<T>(j - p.offset + p.window_left - i0 - 1)", source=FORWARD),
    Mutant("alibi_has_a_sign", "scores.h", "s -= lanes.slope(n) * select<T>(d < T(0), -d, d);", "s -= lanes.slope(n) * d;", source=FORWARD),
    Mutant("a_row_of_nothing_has_lse_0", "scores.h", "splat(-kInf<double>), lse)", "VecD{}, lse)", source=FORWARD),
    Mutant("a_logarithm_of_half_the_sum", "../simd/math.h", "(0x1p52 + 1023)", "(0x1p52 + 1024)", source=FORWARD),
    Mutant("a_row_after_eight_is_skipped", "tile.h", "r0 += 8;", "r0 += 9;", source=FORWARD),
    Mutant("a_capped_maximum_is_stale", "scores.h", "FASTATTN_UNROLL for (int n = 0; n < kVectors; ++n) maximum[n] = minus_inf; }", "}", source=FORWARD),
    Mutant("dropout_keeps_one_more", "scores.h", "draw < static_cast<int32_t>(d.threshold)", "draw <= static_cast<int32_t>(d.threshold)", source=FORWARD),
    Mutant("a_round_of_philox_less", "scores.h", "round = 3; round < 10", "round = 3; round < 9", source=FORWARD),
    Mutant("padding_is_trimmed_too_far", "mask.h", "while (r.begin < r.end && keys[r.begin] == -kInf<T>) ++r.begin;", "while (r.begin < r.end && keys[r.begin] == -kInf<T>) r.begin += 2;", source=FORWARD),
    Mutant("a_gradient_of_keys_is_not_scaled", "sdpa_backward.h", "write_rows(f.dk, dp, p.D, static_cast<T>(p.scale)", "write_rows(f.dk, dp, p.D, T(1)", source=BACKWARD),
    Mutant("a_later_chunk_is_forgotten", "sdpa_backward.h", "for (int64_t j = 0; j < pairs; j += chain)", "for (int64_t j = 0; j < min_of(pairs, chain); j += chain)", source=BACKWARD),
    Mutant("a_fully_masked_row_passes_nan", "sdpa_backward.h", "clear_query(f, i);", ";", source=BACKWARD),
    Mutant("weights_have_no_gradient", "sdpa_gradients.h", "store(f.ds + x, load(f.ds + x) + load(f.grad_w + x))", "store(f.ds + x, load(f.ds + x))", source=BACKWARD),
    Mutant("a_sink_is_forgotten", "scores.h", "return {sink, T(1)};", "return {-kInf<T>, T(0)};", source=FORWARD),
    Mutant("a_sink_counts_twice", "decode.h", "void begin(T* state) const { for (int64_t i = 0; i < rows * dim_v; ++i) state[i] = T(0); for (int64_t r = 0; r < rows; ++r) maxima(state)[r] = -kInf<T>, sums(state)[r] = T(0);", "void begin(T* state) const { for (int64_t i = 0; i < rows * dim_v; ++i) state[i] = T(0); for (int64_t r = 0; r < rows; ++r) { const FirstState<T> first = first_state<T>(p, rule, 0, r / p.Lq); maxima(state)[r] = first.maximum, sums(state)[r] = first.sum; }", source=FORWARD),
    Mutant("a_sink_has_another_unit", "scores.h", "h * p.sinks_stride[1]] / rule.unit;", "h * p.sinks_stride[1]];", source=FORWARD),
    Mutant("a_row_is_normalised_without_its_sink", "sdpa_gradients.h", "rows[n] = sink_weight(rule, sink, high[n], low[n], inverse[n]);", "rows[n] = Vec<T>{};", source=BACKWARD),
    Mutant("a_sink_has_no_delta", "sdpa_gradients.h", "sums[n] = -rows[n] * center[n];", "", source=BACKWARD),
    Mutant("a_sink_alone_has_no_gradient", "sdpa_gradients.h", "if (rows.high[i] == kInf<T>) total += grad_lse[i];", "", source=BACKWARD),
    Mutant("a_row_with_its_sink_alone_passes_nan", "sdpa_gradients.h", "if (!all_excluded(bias, j1 - j)) return false;", "return false;", source=BACKWARD),
    Mutant("sinks_of_another_sequence", "varlen.h", "s.sinks = moved(s.sinks, b * s.sinks_stride[0]);", "s.sinks = moved(s.sinks, s.sinks_stride[1]);", "varlen_attention", FORWARD),
    Mutant("the_middle_of_a_table_off_by_one", "relative_bias.h", "h * st[1] + p.relative_bias_size / 2;", "h * st[1] + (p.relative_bias_size - 1) / 2 - (p.relative_bias_size > 1);", source=FORWARD),
    Mutant("a_distance_has_the_wrong_sign", "relative_bias.h", "const T* from = table + first - position(p, j);", "const T* from = table + position(p, j) - first;", source=FORWARD),
    Mutant("a_table_of_the_first_head", "relative_bias.h", "b * st[0] + h * st[1] + p.relative_bias_size", "b * st[0] + p.relative_bias_size", source=FORWARD),
    Mutant("a_run_of_positions_is_too_long", "relative_bias.h", "position(p, end + p.offset) == first + end - i", "position(p, end + p.offset) >= first", source=FORWARD),
    Mutant("a_mask_under_a_relative_bias_is_lost", "relative_bias.h", "add ? sum_of_biases<T>(load_first(to + x, count), bias) : bias", "bias", source=FORWARD),
    Mutant("a_decoded_query_is_at_the_first_key", "relative_bias.h", "(p, b, h) + position(p, i + p.offset);", "(p, b, h) + position(p, i);", source=FORWARD),
    Mutant("a_gradient_of_a_table_is_off_by_one", "relative_bias.h", "T* to = table + i0 + p.offset - (j1 - 1);", "T* to = table + i0 + p.offset - j1 + (j1 - j0 < 2);", source=BACKWARD),
    Mutant("a_lane_has_no_gradient", "relative_bias.h", "*to += sum[0][0];", "", source=BACKWARD),
    Mutant("the_last_sums_are_lost", "relative_bias.h", "store(to + n * W, load(to + n * W) + sum[n]);", ";", source=BACKWARD),
    Mutant("positions_of_a_gradient_are_of_the_first_keys", "relative_bias.h", "table[position(p, i + p.offset)", "table[position(p, i)", source=BACKWARD),
    Mutant("a_gradient_of_a_table_is_capped", "sdpa_gradients.h", "if (p.grad_relative_bias != nullptr) add_relative", "for (int64_t x = 0; x < nk * L && rule.softcap > 0; x += W) store(f.ds + x, load(f.ds + x) * load(f.cap + x)); if (p.grad_relative_bias != nullptr) add_relative", source=BACKWARD),
    Mutant("an_interval_begins_a_key_late", "mask_program.h", "(load_integers(x + i) <= key)", "(load_integers(x + i) < key)", source=FORWARD),
    Mutant("an_interval_ends_a_key_late", "mask_program.h", "j < second_[n][i]", "j <= second_[n][i]", source=FORWARD),
    Mutant("part_of_an_interval_is_all_of_it", "mask_program.h", "{low.most, high.least}", "{low.most, high.most}", source=FORWARD),
    Mutant("the_outside_of_an_interval_is_whole", "mask_program.h", "min_of<int64_t>(keys.end, low.least)}", "min_of<int64_t>(keys.end, low.most)}", source=FORWARD),
    Mutant("documents_are_compared_in_part", "mask_program.h", "e.least == e.most ? keys : none", "true ? keys : none", source=FORWARD),
    Mutant("a_document_of_another_sequence", "mask_program.h", "(p.index + b) % s.batch", "0", source=FORWARD),
    Mutant("blocks_of_another_head", "mask_program.h", "s.heads + h % s.heads", "s.heads", source=FORWARD),
    Mutant("an_empty_block_is_whole", "mask_program.h", "seen - (cursor.state == 1 ? 1 : 0)", "seen - 1", source=FORWARD),
    Mutant("the_bits_of_a_block_are_those_of_a_key", "mask_program.h", "cursor.word += words_of(s);", "", source=FORWARD),
    Mutant("a_negated_leaf_is_not", "mask_program.h", "return s.negated ? ~seen : seen;", "return seen;", source=BACKWARD),
    Mutant("a_biased_row_is_taken_as_it_is", "scores.h", "!all_change && !edge && !biased", "!all_change && !edge", source=FORWARD),
    Mutant("a_part_of_a_region_is_all_of_it", "mask_program.h", "same(r.whole, keys)", "r.whole.begin < r.whole.end", source=FORWARD),
    Mutant("one_operand_is_enough", "mask_program.h", "together ? all", "true ? all", source=FORWARD),
    Mutant("keys_of_one_operand_are_clear", "mask_program.h", "common(a.whole, b.whole)", "longer(a.whole, b.whole)", source=FORWARD),
    Mutant("a_hole_between_whole_blocks_is_clear", "mask_program.h", "every && run.end == c ? run.begin : c", "every && run.end > 0 ? run.begin : c", source=FORWARD),
    Mutant("a_key_that_some_see_is_clear", "mask_program.h", "every &= bits == own;", "every &= bits != 0;", source=FORWARD),
    Mutant("the_first_query_of_a_word_is_forgotten", "mask_program.h", "~0u << first % 32", "~1u << first % 32", source=FORWARD),
    Mutant("a_key_too_many_is_clear", "mask.h", "*clear = whole;", "*clear = {whole.begin, whole.end + 1};", source=BACKWARD),
    Mutant("keys_after_the_clear_ones_have_no_mask", "mask.h", "{whole.end, j1}", "{j1, j1}", source=FORWARD),
    Mutant("a_block_of_the_backward_has_no_mask", "sdpa_backward.h", "if (seen == Seen::some) bias.tile = f.bias;", "", source=BACKWARD),
    Mutant("weights_have_no_mask", "sdpa_weights.h", "if (seen == Seen::some) bias.tile = buf.bias;", "", source=FORWARD),
    Mutant("a_packed_query_has_the_mask_of_the_first", "mask_program.h", "data_[n] = first + p.mask_query;", "data_[n] = first;", "varlen_attention", FORWARD),
    Mutant("a_packed_key_has_the_document_of_the_first", "mask_program.h", "? p.mask_key : p.mask_query", "? 0 : p.mask_query", "varlen_attention", FORWARD),
    Mutant("a_part_of_a_table_has_another_middle", "varlen.h", "s.relative_bias_size / 2 - size / 2", "0", "varlen_attention", FORWARD),
    Mutant("all_sequences_add_to_one_table", "varlen.h", "moved(s.grad_relative_bias, t.bias_starts[s.index])", "s.grad_relative_bias", "varlen_attention", BACKWARD),
    Mutant("a_cache_has_the_mask_of_the_first", "mask_program.h", "(p.index + b) % s.batch", "b % s.batch", "decode_attention", FORWARD),
    Mutant("a_page_too_far", "decode.h", "base + p.pages[page] * x.stride[0]", "base + p.pages[page == 0 ? 0 : page - 1] * x.stride[0]", "decode_attention", FORWARD),
    Mutant("padding_of_the_first_sequence", "varlen.h", "s.k_begin = t.k_begins[b]", "s.k_begin = t.k_begins[0]", "decode_attention", FORWARD),
    Mutant("padding_has_a_weight", "scores.h", "Range r{p.k_begin, p.Lk}; if (p.window_left >= 0) r.begin = max_of(p.k_begin, i0", "Range r{0, p.Lk}; if (p.window_left >= 0) r.begin = max_of<int64_t>(0, i0", "decode_attention", FORWARD),
    Mutant("values_have_the_scales_of_keys", "decode.h", "scales_of(p.v_scales,", "scales_of(p.k_scales,", "decode_attention", FORWARD),
    Mutant("scales_of_the_first_page", "scales.h", "x.pages[page] * x.page_stride", "x.pages[0] * x.page_stride", "decode_attention", FORWARD),
    Mutant("scales_of_the_first_head", "scales.h", "static_cast<const X*>(x.data) + hk * x.stride[1]", "static_cast<const X*>(x.data)", "decode_attention", FORWARD),
    Mutant("gathers_the_first_head", "gather.cpp", "static_cast<S*>(p.values) + (b * p.Hkv + h) * p.N * p.Dv", "static_cast<S*>(p.values) + b * p.Hkv * p.N * p.Dv", "decode_attention"),
    Mutant("gathers_without_scales", "gather.cpp", "load_as<T>(from + d, n) * factor", "load_as<T>(from + d, n)", "decode_attention", dtype="int8"),
    Mutant("gathers_the_rows_before", "gather.cpp", "write(from + n * cache.stride[2], j + n,", "write(from, j + n,", "decode_attention"),
    Mutant("sines_have_another_sign", "append.cpp", "store_as<T>(to.at + r, a * cos - b * sin, n);", "store_as<T>(to.at + r, a * cos + b * sin, n);", "append_to_cache"),
    Mutant("pairs_have_another_sign", "append.cpp", "store(f.b + r, a * sin + b * cos);", "store(f.b + r, b * cos - a * sin);", "append_to_cache"),
    Mutant("all_tokens_have_the_position_of_the_first", "append.cpp", "if (pairs > 0) read_angles(p.positions[b * p.L + i], buf); for (int64_t h = 0; h < p.Hkv; ++h) { const Row<S> key", "if (pairs > 0) read_angles(p.positions[b * p.L], buf); for (int64_t h = 0; h < p.Hkv; ++h) { const Row<S> key", "append_to_cache"),
    Mutant("a_query_is_the_first_of_the_new_tokens", "append.cpp", "const int64_t query = i - (p.L - p.Lq);", "const int64_t query = i < p.Lq ? i : -1;", "append_to_cache"),
    Mutant("columns_without_an_angle_are_lost", "append.cpp", "copy(from, to, 2 * pairs, p.D);", "copy(from, to, 2 * pairs, p.D - 1);", "append_to_cache"),
    Mutant("a_value_has_the_scale_of_its_key", "append.cpp", "*new_scale(1, b, i, h), to, h, p.Dv, buf)", "*new_scale(0, b, i, h), to, h, p.Dv, buf)", "append_to_cache"),
    Mutant("quantised_numbers_are_cut", "append.cpp", "x = (x + kRounds) - kRounds;", "x = x * T(0.99);", "append_to_cache"),
    Mutant("e4m3_has_the_scale_of_int8", "append.cpp", "largest(params.float8 ? 448 : 127)", "largest(127)", "append_to_cache"),
    Mutant("e4m3_is_cut", "../simd/convert.h", "0x7ffff + ((magnitude >> 20) & 1)", "0", "append_to_cache", "append"),
    Mutant("a_subnormal_of_e4m3_is_a_normal_number", "../simd/convert.h", "magnitude < 0x3c800000u ?", "false ?", "append_to_cache", "append"),
    *(
        Mutant(name, "decode_integers.h", old, new, "decode_attention", FORWARD, "int8", "avx512_bf16")
        for name, old, new in (
            ("a_low_byte_is_unsigned", "upper = (x + 128) >> 8;", "upper = x >> 8;"),
            ("low_bytes_of_queries_are_lost", "low[r][c] = add_bytes(low[r][c], x[c], lower);", ""),
            ("a_bias_is_that_of_the_first_row", "low[r][c] - q.bias[r0 + r]", "low[r][c] - q.bias[r0]"),
            ("a_key_keeps_its_sign", "load_bytes(row[n] + d, D - d) ^ static_cast<int32_t>(0x80808080)", "load_bytes(row[n] + d, D - d)"),
            ("low_bytes_of_weights_are_lost", "(high[r][c] << 8) + low[r][c], VecF)", "high[r][c] << 8, VecF)"),
            ("a_unit_is_that_of_the_first_row", "w.unit[r0 + r] * sum", "w.unit[r0] * sum"),
            ("columns_are_not_reordered", "from + d + 16 * i + 4 * n", "from + d + 16 * n + 4 * i"),
            ("the_last_key_is_not_there", "row[n] = v[min_of(nk - 1, j + n)];", "row[n] = v[min_of(max_of<int64_t>(0, nk - 2), j + n)];"),
            ("an_output_is_not_rescaled", "alpha[r] * load(to) + w.unit", "load(to) + w.unit"),
        )
    ),
    Mutant("an_e4m3_number_is_an_f16", "decode.h", "store(to + n, load(to + n) * kE4m3Unit);", ";", "decode_attention", FORWARD),
    Mutant("the_last_of_an_e4m3_row_have_no_sign", "../simd/convert.h", "(x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7", "(x.bits & 0x7f) << 7", "decode_attention", FORWARD),
    Mutant("a_sign_of_e4m3_is_in_the_exponent", "../simd/convert.h", "_mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16(~0x4000)))", "_mm256_cvtph_ps(half)", "decode_attention", FORWARD, isa="avx2"),
    Mutant("a_sign_of_sixteen_e4m3_is_in_the_exponent", "../simd/convert.h", "_mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16(~0x4000)))", "_mm512_cvtph_ps(half)", "decode_attention", FORWARD, isa="avx512_bf16"),
    Mutant("e4m3_has_another_unit_without_avx", "../simd/convert.h", "static_cast<int32_t>(0x87f00000)) * 0x1p112f", "static_cast<int32_t>(0x87f00000)) * 0x1p111f", "decode_attention", FORWARD, isa="baseline"),
    Mutant("a_hidden_row_is_read", "memory_hops_blocks.h", "count += seen;", "count += 1;", "memory_hop_attention", "memory_hops"),
    Mutant("a_bias_is_not_added", "memory_hops_rows.h", "if (block.biased) x += load(block.bias + i);", "", "memory_hop_attention", "memory_hops"),
    Mutant("kept_weights_are_of_the_first_hop", "memory_hops_short.h", "static_cast<const T*>(p.weights) + (hop.row * p.K + hop.k) * p.N", "static_cast<const T*>(p.weights) + hop.row * p.K * p.N", "memory_hop_attention", "memory_hops"),
    Mutant("the_last_row_has_no_gradient", "memory_hops_rows.h", "for (int64_t n = whole; n < n1; ++n) {", "for (int64_t n = whole + 1; n < n1; ++n) {", "memory_hop_attention", "memory_hops"),
    Mutant("the_last_rows_have_no_score", "rows.h", "const Rows<S> rows{base, stride, nullptr};\n  if (i < count)", "const Rows<S> rows{base, stride, nullptr};\n  if (i < 0)", "memory_hop_attention", "memory_hops"),
    Mutant("the_last_rows_are_those_before", "rows.h", "min_of(i, count - W)", "min_of(i, count - W - 1)", "memory_hop_attention", "memory_hops"),
    Mutant("a_few_rows_are_the_first", "rows.h", "rows[min_of<int64_t>(i + r, count - 1)];", "rows[min_of<int64_t>(r, count - 1)];", "memory_hop_attention", "memory_hops"),
    Mutant("delta_is_0", "memory_hops_rows.h", "return row_product<T>(trace(hop.row, 2 * hop.k + 1), p.D, f.g);", "return T(0);", "memory_hop_attention", "memory_hops"),
    Mutant("delta_of_panels_is_0", "memory_hops_panels_backward.h", "store(f.delta + panel * L + x, delta);", "store(f.delta + panel * L + x, Vec<T>{});", "memory_hop_attention", "memory_hops"),
    Mutant("the_rest_of_delta_is_lost", "memory_hops_stream.h", "delta += f.part[c * (dp + W)];", ";", "memory_hop_attention", "memory_hops"),
    Mutant("the_rest_of_delta_of_a_block_is_lost", "memory_hops_short.h", "delta += sum_lanes<T>(this->missing(s, ds, block.count, delta));", ";", "memory_hop_attention", "memory_hops"),
    Mutant("a_block_has_scores_past_its_end", "memory_hops_rows.h", "store(end, select<T>(first_lanes<T>(rest), load(end), splat<T>(-kInf<T>)));", "(void)end;", "memory_hop_attention", "memory_hops"),
    Mutant("a_piece_is_not_summed", "rows.h", "rest[a] += piece_of<T>(weight) * load_piece(row + kVectors * W, last);", ";", "memory_hop_attention", "memory_hops"),
    Mutant("a_piece_is_not_multiplied", "rows.h", "padded<T>(load_piece(column[r], last) * y)", "Vec<T>{}", "memory_hop_attention", "memory_hops"),
    Mutant("a_piece_reaches_into_the_next_row", "rows.h", "load_piece(column[r], last)", "load_piece(column[r], kPiece<T>)", "memory_hop_attention", "memory_hops"),
    Mutant("a_list_of_rows_is_those_in_order", "rows.h", "kList ? column + list[i] * stride : next", "next", "memory_hop_attention", "memory_hops"),
    Mutant("the_rest_of_delta_of_panels_is_lost", "memory_hops_panels_backward.h", "store(delta, load(delta) + load(part(f, panel, c) + x));", ";", "memory_hop_attention", "memory_hops"),
    Mutant("weights_of_panels_have_no_gradient", "memory_hops_panels_backward.h", "t.ds[i * L + l] += t.row[", "t.ds[i * L + l] += T(0) * t.row[", "memory_hop_attention", "memory_hops"),
    Mutant("a_widened_block_is_of_another_memory", "memory_hops_blocks.h", "wide->from == rows.base;", "wide->from != nullptr;", "memory_hop_attention", "memory_hops", "bfloat16"),
    Mutant("a_projection_is_not_widened", "memory_hops.cpp", "if (p.proj.data == nullptr || p.dtype == kStoredAs<T>) return;", "return;", "memory_hop_attention", "memory_hops", "bfloat16"),
    Mutant("the_last_row_of_a_gradient_is_not_rounded", "memory_hops_rows.h", "write_elements(wide.rows, rows * p.D,", "write_elements(wide.rows, (rows - 1) * p.D,", "memory_hop_attention", "memory_hops", "bfloat16"),
    Mutant("a_time_of_padding", "encode_memory.cpp", "p.temporal.data && count > 0 ?", "p.temporal.data ?", "encode_memory"),
    Mutant("a_gradient_of_time_is_lost", "encode_memory.cpp", "load_first(at, lanes(i)) + g[i], lanes(i)", "load_first(at, lanes(i)), lanes(i)", "encode_memory"),
    Mutant("cosines_change_their_sign", "sinusoidal.cpp", "^ sign ^ second_bit", "^ second_bit", "sinusoidal_encoding"),
    Mutant("padding_has_a_position", "sinusoidal.cpp", "if (tile->position[r] != p.padding_idx) continue;", "continue;", "sinusoidal_encoding"),
    Mutant("the_last_key_has_no_gradient", "local_attention.cpp", "min_of(j1, first + p.W)", "min_of(j1, first + p.W - 1)", "luong_attention"),
    Mutant("a_bell_is_forgotten", "local_attention.cpp", "f.s[n] *= f.z[n];", "", "luong_attention"),
    Mutant("a_position_has_half_a_gradient", "local_attention.cpp", "T(4) * grad_position", "T(2) * grad_position", "luong_attention"),
    Mutant("a_window_begins_too_late", "local_attention.cpp", "(static_cast<T>(truncated) < low)", "1", "luong_attention"),
    Mutant("padding_in_a_window_is_read", "local_attention.cpp", "if (padding != nullptr && padding[j] != 0) continue; f.off", "f.off", "luong_attention"),
    Mutant("two_empty_states_are_one", "merge_states.cpp", "const bool of_a = block.is_empty_b(r)", "const bool of_a = !block.is_empty_a(r)", "merge_states"),
    Mutant("a_gradient_of_lse_has_the_wrong_sign", "merge_states.cpp", "a * h + both", "a * h - both", "merge_states"),
    Mutant("merged_sums_are_not_rescaled", "softmax_state.h", "*l = *l * share.mine + its_l * share.its;", "*l = *l + its_l;", "merge_states", "merge_states"),
    Mutant("an_infinite_state_is_nan", "softmax_state.h", "select<T>(x == reference, Vec<T>{}, x - reference)", "x - reference", "merge_states", "merge_states"),
    Mutant("a_part_is_whole", "sdpa_backward.h", "whole(params.Lk <= Bk && !params.partial)", "whole(params.Lk <= Bk)", source=BACKWARD),
    Mutant("a_part_is_normalised_by_itself", "sdpa_weights.h", "if (!again || p.partial) return;", "if (!again) return;", source=BACKWARD, dtype="float64"),
    Mutant("draws_begin_at_key_0", "scores.h", "j0 += d.first_key;", "", source=FORWARD),
    Mutant("draws_begin_at_query_0", "scores.h", "d.first_query + i0 + l", "i0 + l", source=BACKWARD),
    Mutant("draws_begin_at_head_0", "scores.h", "d.first_head + head", "head", source=FORWARD),
    Mutant("no_bias_beyond_tanh", "additive.h", "load(k + a * k_panel) + load(bias + a * kLanes<T>)", "load(k + a * k_panel)", "additive_attention", "additive"),
)  # fmt: skip
TILES = "tiles/sdpa_forward"
MUTANTS += tuple(
    Mutant(name, file, old, new, source=TILES, dtype="bfloat16", isa="amx_bf16_emulated")
    for name, file, old, new in (
        ("a_tile_has_15_rows", "../simd/tiles.h", "rows[16] = {16, 16,", "rows[16] = {16, 15,"),
        ("tiles_are_not_configured", "../simd/tiles.h", "Tiles::configure(TileConfig{});", ""),
        ("tiles_are_not_released", "../simd/tiles.h", "~TileScope() { Tiles::release(); }", "~TileScope() {}"),
        ("the_wrong_tile_is_multiplied", "tiles/squares.h", "multiply<2, 6, 5>", "multiply<2, 7, 5>"),
        ("a_product_is_left_out", "tiles/squares.h", "Format::template multiply<1, 7, 4>();", ""),
        ("a_tile_is_loaded_too_early", "tiles/squares.h", "if (new_right) Tiles::load<5>(right(n) + 16, kSquareBytes); between(); if (first) start<1>(sum, x.add); Format::template multiply<1, 7, 4>(); if (next_right) Tiles::load<4>(right(n + 1), kSquareBytes);", "if (new_right) Tiles::load<5>(right(n) + 16, kSquareBytes); between(); if (next_right) Tiles::load<4>(right(n + 1), kSquareBytes); if (first) start<1>(sum, x.add); Format::template multiply<1, 7, 4>();"),
        ("a_quarter_goes_to_the_wrong_place", "tiles/squares.h", "return T % 2 * 16 * kLanesOfSquare + T / 2 * 16;", "return T / 2 * 16 * kLanesOfSquare + T % 2 * 16;"),
        ("sums_stay_in_tiles", "tiles/squares.h", "FASTATTN_INLINE void flush() {", "FASTATTN_INLINE void flush() { return;"),
        ("outputs_are_not_added", "tiles/sdpa_products.h", "!state.fresh}", "false}"),
        ("pairs_are_in_the_wrong_order", "tiles/sdpa_products.h", "split_pairs(even, odd, parts)", "split_pairs(odd, even, parts)"),
        ("keys_beyond_the_last_have_weights", "tiles/sdpa_rows.h", "store(s + r, splat(-kInf<float>));", "{}"),
        ("an_edge_on_the_left_is_missed", "tiles/sdpa_rows.h", "j0 < panel.all.begin || ", ""),
        ("an_edge_on_the_right_is_missed", "tiles/sdpa_rows.h", " || j0 + keys > panel.all.end", ""),
        ("a_late_query_has_no_reference", "tiles/sdpa_rows.h", "state.waiting = any(still);", "state.waiting = false;"),
        ("nothing_is_computed_again", "tiles/sdpa_products.h", "if (!safe) compute_exactly(task, count);", ""),
        ("hidden_values_spread", "tiles/sdpa_products.h", "kParts > 1 || rows.excludes() ? rows_apart(v[half])", "kParts > 1 ? rows_apart(v[half])"),
        ("an_odd_pair_of_draws_is_even", "scores.h", "word[n] = before >> 16 | own << 16;", "word[n] = own;"),
        ("dropout_is_of_the_next_query", "tiles/sdpa_rows.h", "dropout_mask<2>(dropout, panel.i0,", "dropout_mask<2>(dropout, panel.i0 + 1,"),
        ("the_wrong_query_head", "tiles/sdpa_forward.h", "task.hk * group + n / panels", "task.hk + n / panels * p.Hkv"),
        ("channels_of_the_tail_are_stale", "tiles/pack.h", "_mm512_maskz_loadu_epi16(first_bits(count), from)", "_mm512_mask_blend_epi16(first_bits(count), _mm512_set1_epi16(0x3f80), _mm512_maskz_loadu_epi16(first_bits(count), from))"),
        ("a_block_has_no_mask", "tiles/sdpa_rows.h", "kQueries, buf.bias) != Seen::all)", "kQueries, buf.bias) == Seen::none)"),
        ("blocks_that_another_query_sees_are_left_out", "tiles/sdpa_rows.h", "visible_by_program(p, panel.b, panel.h, panel.i0, panel.i1,", "visible_by_program(p, panel.b, panel.h, panel.i0, panel.i0 + 1,"),
        ("keys_of_one_query_are_those_of_a_panel", "tiles/sdpa_rows.h", "visible_by_program(p, b, h, i0, i1, visible", "visible_by_program(p, b, h, i0, i0 + 1, visible"),
        ("values_lose_a_channel", "tiles/pack.h", "evens[i] + 1;", "evens[i];"),
        ("keys_lose_their_upper_half", "tiles/pack.h", "pack_left<Format>(rows[half], steps,", "pack_left<Format>(rows[0], steps,"),
    )
)  # fmt: skip
MUTANTS += tuple(
    Mutant(name, file, old, new, source="tiles/sdpa_backward", dtype="bfloat16", isa="amx_bf16_emulated")
    for name, file, old, new in (
        ("the_wrong_tile_is_added", "tiles/sdpa_backward.h", "multiply<2, 5, 6>", "multiply<2, 5, 7>"),
        ("sums_are_not_stored", "tiles/sdpa_backward.h", "f.pending = c;", ""),
        ("the_last_step_is_left_out", "tiles/sdpa_backward.h", "for (int64_t k = 1; k < steps; ++k)", "for (int64_t k = 1; k < steps - 1; ++k)"),
        ("rows_are_joined_in_another_order", "tiles/operands.h", "from.template at<Format>(r, d, a), from.template at<Format>(r + 16, d, b);", "from.template at<Format>(2 * r, d, a), from.template at<Format>(2 * r + 1, d, b);"),
        ("queries_of_a_pair_are_swapped", "tiles/sdpa_gradients.h", "stored(w[half][0]), stored(w[half][1]),", "stored(w[half][1]), stored(w[half][0]),"),
        ("queries_are_reduced_as_keys", "tiles/sdpa_gradients.h", "keep_parts<GradFormat>(ds[0][half], ds[1][half],", "keep_parts<GradFormat>(ds[half][0], ds[half][1],"),
        ("a_row_of_squares_is_dropped", "tiles/sdpa_backward.h", "for (int64_t row = 0; row < kRows; ++row) { const Range c", "for (int64_t row = 0; row < kRows - 1; ++row) { const Range c"),
        ("dq_gets_only_three_rows", "tiles/sdpa_backward.h", "--end; if (begin == end) continue;", "--end; end = min_of<int64_t>(end, begin + 3); if (begin == end) continue;"),
        ("a_right_edge_is_missed", "tiles/sdpa_gradients.h", "|| keys.end > all.end;", ";"),
        ("a_left_edge_is_missed", "tiles/sdpa_gradients.h", "|| keys.begin < all.begin ||", "||"),
        ("a_first_bit_is_lost", "tiles/pack.h", "(1u << n) - 1;", "(1u << n) - 2;"),
        ("a_mask_of_16_queries", "tiles/sdpa_gradients.h", "return low | high << 16;", "return low | low << 16;"),
        ("padding_has_weights", "tiles/sdpa_gradients.h", "(key_mask && f.keys[j] == -kInf<T>)", "false"),
        ("hidden_squares_keep_old_weights", "tiles/sdpa_backward.h", "gradients.clear(f.gradients, row, column); continue;", "continue;"),
        ("hidden_keys_spread", "tiles/sdpa_backward.h", "some.taken &= ~(f.k_apart[row] = rows_apart(k));", ";"),
        ("a_masked_query_spreads_nan", "tiles/sdpa_backward.h", "q.taken &= ~(1u << r);", ";"),
        ("delta_is_0", "tiles/sdpa_gradients.h", "f.delta[n] = prepared.delta[row + i];", ""),
        ("every_panel_has_the_first_dq", "tiles/sdpa_backward.h", "x.dq = dq + i * dp;", "x.dq = dq;"),
        ("a_sum_of_values_is_as_wide_as_keys", "tiles/sdpa_backward.h", "x.dv = f.dv + (j - keys.begin) * dvp;", "x.dv = f.dv + (j - keys.begin) * dp;"),
        ("a_query_head_of_another_group", "tiles/sdpa_backward.h", "x.h = hk * group + g,", "x.h = hk + g * p.Hkv,"),
        ("a_square_has_no_mask", "tiles/sdpa_gradients.h", "s.biased = pairs == Seen::some;", "s.biased = false;"),
        ("a_square_has_an_old_mask", "tiles/sdpa_gradients.h", "s.biased = pairs == Seen::some;", "s.biased = has_bias_of_pairs(p);"),
        ("keys_of_one_query_are_those_of_all", "tiles/sdpa_backward.h", "r = visible_by_program(p, x.b, x.h, i, end, r);", "r = visible_by_program(p, x.b, x.h, i, i + 1, r);"),
        ("queries_of_a_mask_are_left_out", "tiles/sdpa_backward.h", "hidden(x, x.i0, x.i1)", "hidden(x, x.i0, x.i0 + 1)"),
        ("a_table_of_each_group_is_one", "tiles/sdpa_backward.h", "relative_of(dq + g * dq_size());", "relative_of(dq);"),
        ("sums_of_a_table_are_those_of_dq", "tiles/sdpa_backward.h", "return dq + round_up(p.Lq, kSide) * dp;", "return dq + round_up(p.Lq, kSide) * p.D;"),
        ("dk_is_not_scaled", "tiles/sdpa_backward.h", "write_rows(f.all_dk, dp, p.D, static_cast<T>(p.scale)", "write_rows(f.all_dk, dp, p.D, T(1)"),
    )
)  # fmt: skip
MUTANTS += tuple(
    Mutant(name, file, old, new, "decode_attention", TILES, dtype, "amx_bf16_emulated")
    for name, file, old, new, dtype in (
        ("a_stacked_row_is_at_the_first_query", "tiles/decode.h", "static_cast<float>(row.i)", "0.0f", "bfloat16"),
        ("a_slope_of_the_first_head", "tiles/decode.h", "alibi_slope<float>(p, head / p.Hkv, row.h)", "alibi_slope<float>(p, head / p.Hkv, 0)", "bfloat16"),
        ("a_sink_of_the_first_head", "tiles/decode.h", "first_state<float>(p, rule, head / p.Hkv, row.h)", "first_state<float>(p, rule, head / p.Hkv, 0)", "bfloat16"),
        ("a_sink_joins_each_chunk", "tiles/decode.h", "s.sinks = nullptr;", "", "bfloat16"),
        ("a_chunk_is_forgotten", "tiles/decode.h", "for (int64_t c = 0; c < chunks_; ++c) { chunk(", "for (int64_t c = 0; c < min_of<int64_t>(1, chunks_); ++c) { chunk(", "bfloat16"),
        ("merged_outputs_are_not_rescaled", "tiles/decode.h", "merge_outputs<float>(share,", "merge_outputs<float>(Shares<float>{share.mine, VecF{} + 1.0f},", "bfloat16"),
        ("a_window_begins_with_a_chunk", "tiles/decode.h", "max_of(c * kBlocks, seen.begin / kBlockKeys)", "max_of(c * kBlocks, (seen.begin + kBlockKeys - 1) / kBlockKeys)", "bfloat16"),
        ("an_output_of_another_head", "tiles/decode.h", "__builtin_memcpy(out + row.h * st[1]", "__builtin_memcpy(out + (row.h + 1) % p.Hq * st[1]", "bfloat16"),
        ("a_page_of_another_key", "tiles/sdpa_rows.h", "p.pages[j / p.page_size]", "p.pages[begin / p.page_size]", "bfloat16"),
        ("values_are_copied_over_keys", "tiles/sdpa_rows.h", "buf.values = a.take<Storage>(p.pages != nullptr ? kBlockKeys * p.Dv : 0);", "buf.values = buf.keys;", "bfloat16"),
        ("a_chunk_without_a_key_has_an_output", "tiles/sdpa_rows.h", "state.fresh ? VecF{} : load(state.o + at) * factor", "load(state.o + at) * factor", "bfloat16"),
        ("a_merged_sum_has_a_rounded_reference", "tiles/sdpa_rows.h", "store(l_out + n * W, load(state.l + n * W) * factor);", "store(l_out + n * W, load(state.l + n * W));", "float32"),
    )
)  # fmt: skip
MUTANTS += tuple(
    Mutant(f"of_floats_{name}", file, old, new, source=TILES, isa="amx_bf16_emulated")
    for name, file, old, new in (
        ("a_part_meets_the_wrong_one", "tiles/parts.h", "right[] = {2, 1, 1, 0, 0, 0}", "right[] = {2, 1, 0, 0, 0, 0}"),
        ("a_product_is_missing", "tiles/parts.h", "count = 6, left[] = {0, 0, 1, 1, 2, 0}, right[] = {2, 1, 1, 0, 0, 0}", "count = 5, left[] = {0, 0, 1, 2, 0}, right[] = {2, 1, 1, 0, 0}"),
        ("a_small_product_is_missing", "tiles/parts.h", "count = 6, left[] = {0, 0, 1, 1, 2, 0}, right[] = {2, 1, 1, 0, 0, 0}", "count = 5, left[] = {0, 0, 1, 1, 0}, right[] = {2, 1, 1, 0, 0}"),
        ("a_part_is_cut_elsewhere", "tiles/parts.h", "static_cast<int32_t>(0xffff0000)", "static_cast<int32_t>(0xfffe0000)"),
        ("the_last_part_is_lost", "tiles/parts.h", "kParts == 3 ? join(a, b)", "kParts == 3 ? join(VecF{}, VecF{})"),
        ("a_pair_is_swapped", "tiles/parts.h", "a = without_upper(a), b = without_upper(b);", "const VecF rest = without_upper(a); a = without_upper(b), b = rest;"),
        ("parts_lie_on_each_other", "tiles/sdpa_rows.h", "(pair / 16 * kParts + part) * 16", "(pair / 16 * kParts) * 16"),
        ("parts_of_dropped_weights_stay", "tiles/sdpa_rows.h", "for (int64_t part = 0; part < kParts; ++part)", "for (int64_t part = 0; part < 1; ++part)"),
        ("nan_that_no_query_sees_spreads", "tiles/pack.h", "if (apart) found |= 1u << r;", ";"),
        ("a_sum_of_outputs_is_lost", "tiles/sdpa_rows.h", "state.totalled ? load(state.total + at) + o : o", "o"),
        ("the_last_outputs_are_lost", "tiles/sdpa_rows.h", "state.fresh ? total : total + load(state.o + at)", "total"),
        ("weights_are_those_of_bf16", "tiles/exp2.h", "kCoarse ?", "true ?"),
        ("the_left_tiles_of_another_square_stay", "tiles/squares.h", "more && left(n + 1) != left(n)", "more && right(n + 1) != right(n)"),
        ("a_right_tile_of_another_square_stays", "tiles/squares.h", "if (new_right) Tiles::load<5>", "if (n == begin) Tiles::load<5>"),
    )
)  # fmt: skip
MUTANTS += tuple(
    Mutant(f"of_floats_{name}", file, old, new, source="tiles/sdpa_backward", isa="amx_bf16_emulated")
    for name, file, old, new in (
        ("scores_are_those_of_vectors", "tiles/sdpa_backward.h", "static constexpr bool forward_scores() { return true; }", "static constexpr bool forward_scores() { return false; }"),
        ("a_side_is_not_loaded", "tiles/sdpa_backward.h", "Products::left[i] != Products::left[before]", "false"),
        ("another_part_is_loaded", "tiles/sdpa_backward.h", "b.at + Products::right[i] * b.part", "b.at + Products::left[i] * b.part"),
        ("parts_lie_on_each_other", "tiles/sdpa_gradients.h", "_mm512_storeu_si512(to + part * kTileElements, parts[part])", "_mm512_storeu_si512(to, parts[part])"),
        ("a_sum_of_queries_is_lost", "tiles/sdpa_backward.h", "store(to + at, load(to + at) + load(from + at));", "store(to + at, load(from + at));"),
        ("nan_that_no_query_sees_spreads", "tiles/pack.h", "if (apart) found |= 1u << r;", ";"),
    )
)  # fmt: skip

MUTANTS += tuple(
    Mutant(f"of_f16_{name}", file, old, new, source=source, dtype="float16", isa="amx_bf16_emulated")
    for name, source, file, old, new in (
        ("products_are_those_of_bf16", TILES, "tiles/parts.h", "Tiles::multiply_f16<C, A, B>();", "Tiles::multiply_bf16<C, A, B>();"),
        ("a_pair_is_swapped", TILES, "tiles/parts.h", "_mm512_cvtepu16_epi32(halves(a)), _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(b)), 16)", "_mm512_cvtepu16_epi32(halves(b)), _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(a)), 16)"),
        ("sums_are_not_rescaled", TILES, "tiles/sdpa_rows.h", "store(state.l + n * W, load(state.l + n * W) * factor);", ""),
        ("outputs_are_not_rescaled", TILES, "tiles/sdpa_products.h", "rows.rescale(state);", "state.raised = false;"),
        ("outputs_are_rescaled_before_the_last_square", TILES, "tiles/sdpa_products.h", "squares.flush(); rows.rescale(state);", "rows.rescale(state);"),
        ("every_query_is_rescaled", TILES, "tiles/sdpa_rows.h", "select<float>(higher, exp2_any<false>(raised - minus_m), splat(1.0f))", "exp2_any<false>(minus_reference(top[n]) - minus_m)"),
        ("a_sink_has_another_reference", TILES, "tiles/sdpa_rows.h", "select<float>(alone, minus_reference(m), load(state.minus_m + n * W))", "select<float>(m == -kInf<float>, VecF{}, m * -rule.exponent)"),
        ("stored_weights_keep_their_scale", "tiles/sdpa_backward", "tiles/sdpa_backward.h", "1 / gradients.weight_scale", "T(1)"),
        ("parts_of_queries_lie_on_each_other", "tiles/sdpa_backward", "tiles/sdpa_backward.h", "f.q_rows + n * dp * kGradParts);", "f.q_rows + n * dp * kParts);"),
    )
)  # fmt: skip

# Prints the first case that finds the bug, if one does.
_JUDGE = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("fastattn._cpu", sys.argv[1])
module = sys.modules["fastattn._cpu"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from fastattn.testing import Target
from fastattn.verify import PROOFS
judge, int8 = PROOFS[sys.argv[2]], sys.argv[3] == "int8"
dtype = torch.bfloat16 if int8 else getattr(torch, sys.argv[3])
target = Target("cpu", sys.argv[4])
for case in judge.cases:
    if int8 and case.quantised is not torch.int8:
        continue
    if dtype in case.dtypes and not case.slow:
        verdict = judge(case, dtype, target)
        if verdict.severity >= 2:  # what is right has half a bound of its own
            print(f"caught by {case.name}: {verdict.severity:.3g}, {verdict.faults[0]}", flush=True)
            break
"""


def _ninja(*words: str) -> str:
    """What ninja tells of the build of the native core."""
    import ninja

    command = [str(Path(ninja.BIN_DIR, "ninja")), "-C", str(BUILD), "-t", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _strongest(isas: list[str], mutant: Mutant) -> str:
    """The last of these instruction sets that compiles the mutant's source for its dtype."""
    built = {line.partition(":")[0] for line in _ninja("targets", "all").splitlines()}
    for isa in reversed(isas):
        name = f"{mutant.compiled}.{isa}.o"
        if name in built:
            only = re.search(r"-DFASTATTN_ONLY_DTYPE=(\w+)", _ninja("commands", "-s", name))
            if only is None or only[1] == DTYPES[mutant.dtype]:
                return isa
    raise AssertionError(f"{mutant.compiled}.cpp is not compiled for {', '.join(isas)}")


def _made_again(target: str, new: dict[str, str], *more: str) -> None:
    """Run the command that made a file of the build, with some of its words changed, and more."""
    words = shlex.split(_ninja("commands", "-s", target))
    command = [new.get(word, word) for word in words] + list(more)
    subprocess.run(command, cwd=BUILD, check=True, capture_output=True, text=True)


def _judged(library: str, op: str, dtype: str, isa: str) -> str:
    """By which case it is caught, or "survived"; a mutant may also crash."""
    command = [sys.executable, "-c", _JUDGE, library, op, dtype, isa]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    if done.returncode < 0:
        return f"caught: it died of signal {-done.returncode}"
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip() or "survived"


def test_mutants_are_of_what_there_is() -> None:
    for mutant in MUTANTS:
        mutant.changed((KERNELS / mutant.file).read_text())
        assert (KERNELS / f"{mutant.compiled}.cpp").exists(), mutant.name


@pytest.mark.slow
@pytest.mark.skipif(not BUILD.exists(), reason="the native core was not built here: make build")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    import fastattn._cpu as native

    info = native.build_info()
    isa = mutant.isa or _strongest(info["supported"], mutant)
    if f"{isa}_emulated" in info["emulated"] and isa not in info["supported"]:
        isa = f"{isa}_emulated"
    elif isa not in info["emulated"] and isa.removesuffix("_emulated") in info["supported"]:
        isa = isa.removesuffix("_emulated")  # emulated only where the processor lacks it
    if isa not in {*info["supported"], *info["emulated"]}:
        pytest.skip(f"this processor cannot run {isa}")
    name = f"{mutant.compiled}.{isa}.o"
    # The kernels include their headers by the way from their own folder, so all of them move.
    shutil.copytree(ROOT / "csrc/cpu", tmp_path / "csrc/cpu")
    shutil.copy2(ROOT / "csrc/params.h", tmp_path / "csrc")
    mutant.put_into(tmp_path / "csrc/cpu/kernels")
    changed, library = str(tmp_path / name), str(tmp_path / "_cpu.so")
    Path(changed).parent.mkdir(parents=True, exist_ok=True)
    source = f"csrc/cpu/kernels/{mutant.compiled}.cpp"
    original = os.path.relpath(ROOT / source, BUILD)
    _made_again(
        name,
        {original: str(tmp_path / source), name: changed, f"{name}.d": f"{changed}.d"},
        f"-DFASTATTN_ONLY_DTYPE={DTYPES[mutant.dtype]}",
    )
    whole = _ninja("targets", "rule", "link")
    _made_again(whole, {name: changed, whole: library})
    verdict = _judged(library, mutant.op, mutant.dtype, isa)
    print(f"{mutant}: {verdict}")
    assert verdict.startswith("caught"), verdict
