"""Would the emulator see it? Each mutant is a bug put into the kernels on purpose.

Slow: of every one a source is compiled, and cases run until one of them fails. All must be
caught but those that are named, with the reason: at most 5 %.
"""

# ruff: noqa: E501  (source lines are quoted whole)
from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import emulator
import hopper_mutants
import mutants
import pytest
import torch
from emulated import Emulated
from test_cuda import NAMES, ONE_KEY, inexact_gradients
from test_cuda_hopper import NAN_QUERY, nan_query_faults
from test_cuda_operators import TABLES

from fastattn.testing import CASES, Case, Verdict, check
from fastattn.testing.varlen import VarlenCase, check_varlen

KERNELS = emulator.ROOT / "csrc/cuda/kernels"


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    survives: str = ""  # why nothing could see it here
    table: str = "attention"  # of cases: this or one of test_cuda_operators.py
    sources: tuple[str, ...] = ()  # what is compiled with it; the other kernels stay as they are
    element: str = "Bf16"  # of them; float32 where an error is too small for bfloat16

    @property
    def compiled(self) -> tuple[str, ...]:
        own = self.file.removesuffix(".h")
        alone = own if (KERNELS / f"{own}.cu").exists() else self.table
        return self.sources or (USER.get(own, alone),)


# Of the headers of attention, the source whose kernels show what is wrong with them.
USER = dict.fromkeys(("softmax", "tile", "scores", "philox", "varlen"), "sdpa_forward")
USER |= dict.fromkeys(("sdpa_rows", "relative_bias"), "sdpa_weights")
USER["mask_program"] = "sdpa_forward"
FORWARD, BACKWARD, WEIGHTS = "sdpa_forward.h", "sdpa_backward.h", "sdpa_weights.h"
MASKS = "mask_program.h"
K_WAIT = "cp_async_wait<0>(); __syncthreads(); // K has arrived"
V_WAIT = "cp_async_wait<0>(); __syncthreads(); // V has arrived"
# Of the operators beside attention: name, old, new.
OPERATORS = {
    "sinusoidal": [
        ("a row too few", "n + r < last) add", "n + r + 1 < last) add"),
        ("the wrong partner", "c0 / 2 + i", "c0 / 2 + i + 1"),
        ("quadrants change their sign", "sign ^ (odd ? 0x80000000u : 0u)", "sign"),
        ("padding is a position", "position == p.padding_idx", "false"),
        ("heads do not wrap", "if (++h == p.H) h = 0, ++b", "++h"),
    ],
    "decode": [
        ("K is not waited for", "cp_async_wait<0>(); __syncthreads(); // K has", "__syncthreads(); // K has"),
        ("V is not waited for", "cp_async_wait<0>(); __syncthreads(); // V has", "__syncthreads(); // V has"),
        ("V changes while it is read", "__syncthreads();  // K has arrived", "// K has arrived"),
        ("the next page", "pages[j / page_size]", "pages[j / page_size + 1]"),
        ("entries in order", "const int64_t entry = p.entries == nullptr ? b : p.entries[b]", "const int64_t entry = b"),
        ("the options of the first head", "h_kv * group + there % group", "h_kv * group"),
        ("queries of heads", "(row0 + r) / group, h =", "(row0 + r) / group / 2, h ="),
        ("warps add at once", "} } __syncthreads(); }", "} } }"),
        ("m of one warp", "m = fmaxf(m, stats[2 * (from", "m = (stats[2 * (from"),
        ("l as it is", "l += from[1] * shrink_to(from[0], m)", "l += from[1]"),
        ("a sink of the sequence", "sink_of(p, b, h)", "sink_of(p, b, 0)"),
        ("a mask is not read", "if ((seen >> column & 1) == 0) x = minus_infinity();", ""),
        ("a tile in part is whole", "mask_tiles.at(first_query, j0) == Seen::all", "mask_tiles.at(first_query, j0) != Seen::none"),
        ("the mask of the first warp", "keys(i, j0 + key0,", "keys(i, j0,"),
        ("a split too few", "(p.Lk + p.split_keys - 1) / p.split_keys", "p.Lk / p.split_keys"),
        ("splits as they are", "p.Dv + d] * shrink_to(stats[2 * s], most)", "p.Dv + d]"),
    ],
    "additive": [
        ("no guard", "kFactoredLimit = 21.0f", "kFactoredLimit = 1e30f"),
        ("q and bias are added first", "? exp_twice(q[n]) * bias_factor", "? exp_twice(q[n])"),
        ("tiles are read too early", "__syncthreads();  // the tiles are loaded\n float part[4][4]", "float part[4][4]"),
        ("tiles are overwritten too early", "__syncthreads(); FASTATTN_UNROLL for (int n = 0; n < kAdditiveWarps; ++n) x = fmaxf", "FASTATTN_UNROLL for (int n = 0; n < kAdditiveWarps; ++n) x = fmaxf"),
        ("the reciprocal of the other", "v * (n0 * (d1 * both))", "v * (n0 * (d0 * both))"),
        ("no delta", "(gradients[j] - delta)", "gradients[j]"),
        ("dropped gradients stay", "dp = z == 0.0f ? 0.0f : dp * z", "dp = z == 2.0f ? 0.0f : dp"),
        ("nothing is marked", "seen ? w : no_part()", "seen ? w : 0.0f"),
        ("the slope of another", "if (!kOfKeys) slope += w0 * (e0 - 1.0f)", "if (!kOfKeys) slope += w0 * (e1 - 1.0f)"),
        ("G is not transposed", "kOfKeys ? n % kRows * kPitch + n / kRows", "kOfKeys ? n / kRows * kPitch + n % kRows"),
        ("causal queries begin too late", "tile * kRows < last ? tile * kRows : last", "tile * kRows + kRows < last ? tile * kRows + kRows : last"),
        ("what is excluded is computed", "if (gj == 0.0f) continue;", ""),
    ],
    "encode_memory": [
        ("padding is a word", "token == p.padding_idx", "false"),
        ("T without a word", "p.temporal.data != nullptr && any", "p.temporal.data != nullptr && (any || true)"),
        ("the factor of another place", "factors[j * p.factor_stride + c * kN + e] * x[e]", "factors[(j + 1) % p.J * p.factor_stride + c * kN + e] * x[e]"),
        ("one sentence", "n = place / p.J % p.N", "n = place / p.J % 2"),
        ("a warp too few", "for (int n = 0; n < kEncodeWarps; ++n)", "for (int n = 1; n < kEncodeWarps; ++n)"),
        ("sums are read too early", "} __syncthreads(); auto* result", "} auto* result"),
        ("empty sentences count", "if (sentences[b * p.N] == 0) continue;", "if (sentences[b * p.N] == 2) continue;"),
    ],
    "merge_states": [
        ("an empty state is read", "if (state.has_a) x = load(p.out_a, c);", "x = load(p.out_a, c);"),
        ("a sum of half the lanes", "for (int m = p.lanes / 2; m > 0; m /= 2) d +=", "for (int m = p.lanes / 2; m > 1; m /= 2) d +="),
    ],
    "hopfield": [
        ("all rest at once", "moves = by > least", "moves = by > least + 1e300"),
        ("the state before is lost", "ends[d] = room.u[d];", ""),
        ("the state is read too early", "for (int d = thread; d < width; d += kHopThreads) room.u[d] = ends[width + d]; __syncthreads();", "for (int d = thread; d < width; d += kHopThreads) room.u[d] = ends[width + d];"),
        ("one query of those together", "state[d * p.query.stride[3]]", "state[0]"),
    ],
    "memory_hops": [
        ("a sum of three warps", "for (int n = 0; n < kHopWarps; ++n) sum += sums", "for (int n = 1; n < kHopWarps; ++n) sum += sums"),
        ("excluded rows are read", "if (!takes_part(w)) continue;", ""),
        ("a bias of -inf is a number", "more == minus_infinity() ? more : s + more", "s + more"),
        ("a memory resides in another order", "store(room + n * kN)", "store(room + (n ^ 1) * kN)"),
        ("the old state", "const float before = p.settles ? 0.0f : p.proj.data != nullptr ? y[d] : u[d]", "const float before = u[d]"),
        ("the slope of tanh", "return 1.0f - y * y", "return 1.0f"),
        ("no delta", "weight * (dp - delta)", "weight * (dp - 0.0f * delta)"),
        ("H is not read", "before += sums[n * width + d]", "before = g[d]"),
        ("a stack is not shifted", "which == 1 && p.stack ? 1 : 0", "0"),
        ("the state changes too early", "y[d] = dot; }); __syncthreads();", "y[d] = dot; });"),
    ],
}  # fmt: skip
MUTANTS = [
    Mutant("K is not waited for", FORWARD, K_WAIT, "__syncthreads();  // K"),
    Mutant("no barrier after K", FORWARD, K_WAIT, "cp_async_wait<0>();  // K"),
    Mutant("V is not waited for", FORWARD, V_WAIT, "__syncthreads();  // V"),
    Mutant("no barrier after V", FORWARD, V_WAIT, "cp_async_wait<0>();  // V"),
    Mutant("the next K is not committed", FORWARD, "following, keys.begin, keys.end); cp_async_commit();", "following, keys.begin, keys.end);"),
    Mutant("a block too few", FORWARD, "j0 < keys.end; j0 = following", "j0 + 64 < keys.end; j0 = following"),
    Mutant("blocks begin at the first key", FORWARD, "keys.begin / Shape::kKeys * Shape::kKeys", "keys.begin"),
    Mutant("no mask at the right edge", FORWARD, "j0 + Shape::kKeys <= v", "j0 <= v"),
    Mutant("one factor for both rows", FORWARD, "shrink[n / 2 % 2]", "shrink[0]"),
    Mutant("rows go out too early", FORWARD, "__syncwarp();", ";"),
    Mutant("hidden values stay", FORWARD, "v_tile.template clear_rows", "if (0) v_tile.template clear_rows"),
    Mutant("flags are read too early", FORWARD, "but always 1\n __syncthreads();", "but always 1"),
    Mutant("lse without the sum", "softmax.h", "most + log(static_cast<double>(sum))", "most"),
    Mutant("a small sink has no weight", "softmax.h", "1.0f / (l + less)", "1.0f / l"),
    Mutant("a large sink leaves the sum", "softmax.h", "sum = l * less + 1.0f", "sum = l + 1.0f"),
    Mutant("the sink of the first head", "scores.h", "p.sinks_stride[0] + h * p.sinks_stride[1]", "p.sinks_stride[0]"),
    Mutant("the sink of the first batch entry", "scores.h", "b * p.sinks_stride[0] + h", "h", element="F32"),
    Mutant("rows after the last sequence have a sink", "scores.h", "|| b >= p.B) return minus_infinity()", ") return minus_infinity()", table="varlen"),
    Mutant("a row with a sink alone passes NaN", "sdpa_rows.h", "p.sinks != nullptr && sees_only_sink", "false && sees_only_sink"),
    Mutant("an exact delta has no sink", "sdpa_rows.h", "- hi) - lo) * kLog2e) * delta", "- hi) - lo) * kLog2e) * 0.0f", element="F32"),
    Mutant("the greatest of two lanes", "softmax.h", "return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));", "return x;"),
    Mutant("the sum of two lanes", "softmax.h", "return x + __shfl_xor_sync(0xffffffffu, x, 2);", "return x;"),
    Mutant("inf - inf", "softmax.h", "most == minus_infinity() ? 0.0f : most; shrink[r] = exp2_approx((", "most; shrink[r] = exp2_approx(("),
    Mutant("one row too many", "tile.h", "row0 + r < last ?", "row0 + r <= last ?"),
    Mutant("one row too many, element by element", "tile.h", "row < last &&", "row <= last &&"),
    Mutant("a: chunks of other lanes", "tile.h", "2 * k + (lane >> 4)", "2 * k + (lane >> 3 & 1)"),
    Mutant("b: chunks of other lanes", "tile.h", "2 * k + (lane >> 3 & 1)", "2 * k + (lane >> 4)"),
    Mutant("V is not transposed", "tile.h", "ldmatrix_x4_transposed(r, chunk(", "ldmatrix_x4(r, chunk("),
    Mutant("half of the swizzle", "tile.h", "(c ^ (row & 7))", "(c ^ (row & 3))", "both sides of a tile use it, so all is right; bank conflicts are not modelled", sources=("sdpa_forward", "sdpa_backward", "sdpa_weights", "decode")),
    Mutant("causal by one", "scores.h", "i + p.window_end, 0", "i + p.window_end - 1, 0"),
    Mutant("window by one", "scores.h", "i + p.window_begin, 0", "i + p.window_begin + 1, 0"),
    Mutant("queries of keys by one", "scores.h", "+ 1 - p.window_end", "+ 2 - p.window_end", sources=("sdpa_backward",)),
    Mutant("ALiBi to the other side", "scores.h", "s.value -= alibi", "s.value += alibi"),
    Mutant("a relative bias of the other side", "scores.h", "int64_t(position(p, i + p.offset)) - position(p, j)", "int64_t(position(p, j)) - position(p, i + p.offset)"),
    Mutant("a relative bias without an offset", "scores.h", "position(p, i + p.offset)", "position(p, i)"),
    Mutant("positions are those of a sequence", "scores.h", "p.positions == nullptr ? static_cast<int>(n) : p.positions[n]", "static_cast<int>(n)"),
    Mutant("the table of the first batch entry", "scores.h", "b * p.relative_bias_stride[0] +", ""),
    Mutant("the table of the first head", "scores.h", "h * p.relative_bias_stride[1] +", ""),
    Mutant("a mask hides the relative bias", "scores.h", "sum = entry == minus_infinity() ? entry : sum + entry", "sum = p.mask.data != nullptr ? sum : entry"),
    Mutant("a table has no middle", "relative_bias.h", "+ p.relative_bias_size / 2", ""),
    Mutant("a diagonal too few", "relative_bias.h", "q_blocks + k_blocks - 1", "q_blocks + k_blocks - 2"),
    Mutant("a diagonal lacks a tile", "relative_bias.h", "clamp_int(begin + kBlock, 0, keys)", "clamp_int(begin + kBlock / 2, 0, keys)"),
    Mutant("the diagonal of another row", "relative_bias.h", "last + i0 - int64_t(diagonal) * kBlock", "last - i0 + int64_t(diagonal) * kBlock"),
    Mutant("the table of another head", "relative_bias.h", "+ h * p.result_stride[1]", "+ 0 * p.result_stride[1]"),
    Mutant("diagonals share a table", "relative_bias.h", "(diagonal & 1) * p.odd_diagonals + h", "h", "blocks run one after another here: none reads a number that another one is about to write"),
    Mutant("equal positions have one place", "relative_bias.h", "other < own || (other == own && m < n)", "other < own"),
    Mutant("the first of equal positions alone", "relative_bias.h", "tile.query_positions[m] == wanted; ++m", "tile.query_positions[m] == wanted && m == r; ++m"),
    Mutant("the next position", "relative_bias.h", "tile.query_positions[r] < wanted) ++r", "tile.query_positions[r] <= wanted) ++r"),
    Mutant("positions are not sorted", "relative_bias.h", "if (!sorted) {", "if (sorted) {"),
    Mutant("positions are sorted too late", "relative_bias.h", "__syncthreads();  // the places are written", ""),
    Mutant("pairs are added too early", "relative_bias.h", "__syncthreads();  // the pairs are written", ""),
    Mutant("diagonals of two sequences", "relative_bias.h", "/ kBlock + b;", "/ kBlock;", table="varlen"),
    Mutant("no diagonals of a last sequence", "relative_bias.h", "/ kBlock + p.B;", "/ kBlock;", table="varlen"),
    Mutant("sequences share their queries' distances", "relative_bias.h", "p.q_row + p.k_row + (p.Lk - 1)", "p.q_row + (p.Lk - 1)", table="varlen"),
    Mutant("distances without an offset", "relative_bias.h", "(p.Lk - 1) - p.offset;", "(p.Lk - 1);", table="varlen"),
    Mutant("a sum of even diagonals", "relative_bias.h", "diagonal < 2; ++diagonal", "diagonal < 1; ++diagonal", table="varlen"),
    Mutant("a distance of the next sequence", "relative_bias.h", "d >= p.offset + p.Lq)", "d > p.offset + p.Lq + 1)", table="varlen"),
    Mutant("a sum of one sequence", "relative_bias.h", "b < given.B; ++b", "b < 1; ++b", table="varlen"),
    Mutant("pairs are written too early", WEIGHTS, "__syncthreads();  // the tiles are read", ""),
    Mutant("pairs of the tile before", WEIGHTS, "set_zero(sum); } }", "} }"),
    Mutant("one operand is enough", MASKS, "stack = stack >> width & (stack | below);", "stack = stack >> width | (stack & ~below);"),
    Mutant("any operand is needed", MASKS, "stack = stack >> width | (stack & ~below);", "stack = stack >> width & (stack | below);"),
    Mutant("an interval begins a key late", MASKS, "~ones(int64_t(of_query[0]) - j)", "~ones(int64_t(of_query[0]) + 1 - j)"),
    Mutant("an interval ends a key late", MASKS, "ones(int64_t(of_query[step.second]) - j)", "ones(int64_t(of_query[step.second]) + 1 - j)"),
    Mutant("ids of queries alone", MASKS, "ids[k] == own", "data[j + k] == own"),
    Mutant("a negated leaf is not", MASKS, "return step.negated ? ~seen : seen;", "return seen;"),
    Mutant("a negated tile is not", MASKS, "return step.negated ? (every ? 0 : 1) | (any ? 0 : 2) : (any", "return (any", sources=("sdpa_weights",)),
    Mutant("the leaf of the first batch entry", MASKS, "static_cast<unsigned>(n) % static_cast<unsigned>(count)", "0"),
    Mutant("the blocks of the first head", MASKS, "repeated(h, step.heads)", "repeated(0, step.heads)"),
    Mutant("the bits of one key", MASKS, "++m, bits += words", "++m"),
    Mutant("the bits of another block", MASKS, "int64_t(state - 2) * block_k", "int64_t(state - 1) * block_k"),
    Mutant("an empty block is whole", MASKS, "if (state == 1) seen", "if (state <= 1) seen"),
    Mutant("a part of a block is whole", MASKS, "every &= state == 1", "every &= state != 0", sources=("sdpa_weights",)),
    Mutant("the beginning of an interval is all", MASKS, "every &= low <= j0 && high >= j1", "every &= low <= j0", sources=("sdpa_weights",)),
    Mutant("one equal pair is enough", MASKS, "every &= equal;", "", sources=("sdpa_weights",)),
    Mutant("the rows of one lane", MASKS, "found |= __shfl_xor_sync(0xffffffffu, found, lane);", "", sources=("sdpa_weights",)),
    Mutant("a stack that is too wide", MASKS, "table.width * deepest > 64", "table.width * deepest > 128", sources=("sdpa_weights",)),
    Mutant("a program of no sequences", MASKS, "p, p.q_starts != nullptr)", "p, false)", table="varlen", sources=("sdpa_weights",)),
    Mutant("bounds of the first sequence", MASKS, "of_query = data + p.q_row + i; if (step.kind == MaskKind::interval) return", "of_query = data + i; if (step.kind == MaskKind::interval) return", table="varlen", sources=("sdpa_forward",)),
    Mutant("ids of the first sequence", MASKS, "step.second + p.k_row + j, own", "step.second + j, own", table="varlen", sources=("sdpa_forward",)),
    Mutant("tiles by the ids of the first sequence", MASKS, "data[step.second + p.k_row + j]", "data[step.second + j]", table="varlen", sources=("sdpa_weights",)),
    Mutant("tiles by the bounds of the first sequence", MASKS, "of_query = data + p.q_row + i; if (step.kind == MaskKind::interval) {", "of_query = data + i; if (step.kind == MaskKind::interval) {", table="varlen", sources=("sdpa_weights",)),
    Mutant("tiles of the first sequence", MASKS, ": p.q_row / kMaskTile + b;", ": b;", table="varlen", sources=("sdpa_forward",)),
    Mutant("tiles of the first head", MASKS, "of_heads ? h : 0", "of_heads ? 0 : 0"),
    Mutant("tiles of the first batch entry", MASKS, "of_batch ? b : 0", "of_batch ? 0 : 0"),
    Mutant("tiles that are hidden come next", FORWARD, "following = next(j0 + Shape::kKeys)", "following = j0 + Shape::kKeys"),
    Mutant("a tile in part is seen as a whole", FORWARD, "if (partly) apply_program(t);", ""),
    Mutant("values that a program hides stay", FORWARD, "if (kGeneral && (partly || has_bias(p)))", "if (kGeneral && has_bias(p))"),
    Mutant("hidden pairs have a gradient of Q", BACKWARD, "if (kGeneral && (hidden >> at & 1) != 0) pair = {0.0f, 0.0f, 0.0f}; if (exact)", "if (exact)"),
    Mutant("hidden pairs have a gradient of K", BACKWARD, "if ((hidden >> n & 1) != 0) s[n] = dp[n] = 0.0f;", ";"),
    Mutant("hidden pairs have a weight", WEIGHTS, "if ((hidden >> at & 1) != 0) pair = {0.0f, 0.0f, 0.0f};", ""),
    Mutant("keys that a program hides stay", BACKWARD, "kGeneral && (partly || has_bias(p))", "kGeneral && has_bias(p)"),
    Mutant("rows and columns are exchanged", BACKWARD, "bits.has(kTransposed ? column : row, kTransposed ? row : column)", "bits.has(row, column)"),
    Mutant("queries of hidden tiles", BACKWARD, "if (visible_here == Seen::none) continue; const bool partly = visible_here == Seen::some; __syncthreads();  // the previous queries", "const bool partly = visible_here == Seen::some; __syncthreads();  // the previous queries"),
    Mutant("a sink sees what a program hides", "sdpa_rows.h", "program_sees(p, b, h, i, j) && options.bias", "options.bias"),
    Mutant("large scores of what a program hides", "sdpa_rows.h", "if (!program_sees(p, b, h, i, j)) return minus_infinity();", ""),
    Mutant("softcap has slope 1", "scores.h", "1.0f - t * t", "1.0f", sources=("sdpa_backward",)),
    Mutant("the mask of another row", "scores.h", "i * p.mask.stride[2]", "(i + 1) * p.mask.stride[2]"),
    Mutant("draws of four keys", "scores.h", "static_cast<uint32_t>(j) / 8", "static_cast<uint32_t>(j) / 4"),
    Mutant("halves of a draw", "philox.h", "words.x[3] : words.x[2]", "words.x[2] : words.x[3]"),
    Mutant("nine rounds", "philox.h", "n < 10", "n < 9"),
    Mutant("the heads of another group", FORWARD, "h / static_cast<int>(p.Hq / p.Hkv)", "h % static_cast<int>(p.Hkv)"),
    Mutant("keys change while they are read", BACKWARD, "__syncthreads();  // the previous keys", "// the previous keys"),
    Mutant("queries change while they are read", BACKWARD, "__syncthreads();  // the previous queries", "// the previous queries"),
    Mutant("dK is not scaled", BACKWARD, "column0, dk, p.scale_float", "column0, dk, 1.0f"),
    Mutant("columns of dQ of another warp", BACKWARD, "kColumns;  // of dQ", "0;  // of dQ"),
    Mutant("columns of dK of another warp", BACKWARD, "kColumns;  // of dK", "0;  // of dK"),
    Mutant("delta is that of the rounded output", BACKWARD, "kGeneral && p.exact_delta", "false"),
    Mutant("delta is not exact in float32", BACKWARD, "sizeof(Storage) == 4 ||", "", element="F32"),
    Mutant("an exact delta loses d lse", BACKWARD, "rest[r] + sum_of_row", "sum_of_row"),
    Mutant("dK has another delta", BACKWARD, "(p, b, h, i) * 4 + 3] = stats[r].rest", "(p, b, h, i) * 4 + 3] = rest[r]"),
    Mutant("hidden keys stay", BACKWARD, "k_tile.template clear_rows<kThreads>(seen);", ""),
    Mutant("keys are hidden too early", BACKWARD, "% 2)] = 1; __syncthreads();", "% 2)] = 1;"),
    Mutant("blind queries stay", BACKWARD, "q_tile.template clear_rows<kThreads>(seen);", ""),
    Mutant("gradients of blind queries stay", BACKWARD, "g_tile.template clear_rows<kThreads>(seen);", ""),
    Mutant("copies outlive their block", BACKWARD, "cp_async_commit();  // without visible keys, the first copies are still pending\n cp_async_wait<0>(); __syncthreads(); put<kColumns / 8>(q_tile", "__syncthreads(); put<kColumns / 8>(q_tile"),
    Mutant("one head of a group", BACKWARD, "h < (h_kv + 1) * group", "h < h_kv * group + 1"),
    Mutant("draws of the pair transposed", BACKWARD, "words = options.words(i, j);", "words = options.words(j, i);"),
    Mutant("the score is rounded first", "sdpa_pairs.h", "fmaf(dot, p.scale_float, -row.hi)", "dot * p.scale_float - row.hi", sources=("sdpa_backward",), element="F32"),
    Mutant("weights of rounded scores", "sdpa_pairs.h", "p.plain ? plain_score(p, dot, row) : s.value - row.hi", "s.value - row.hi", sources=("sdpa_weights",), element="F32"),
    Mutant("dropped pairs have no gradient", "sdpa_pairs.h", "weight * (-row.delta - row.rest)", "0.0f", sources=("sdpa_backward",)),
    Mutant("gradients of averaged weights", "sdpa_pairs.h", "g / static_cast<float>(p.Hq)", "g", sources=("sdpa_backward", "sdpa_weights"), element="F32"),
    Mutant("d lse has the wrong sign", "sdpa_rows.h", "-static_cast<float>(p.grad_lse", "static_cast<float>(p.grad_lse"),
    Mutant("large scores lose their sum", "sdpa_rows.h", "else if (fabs(lse) > kExact)", "else if (false)"),
    Mutant("large scores are summed again", "sdpa_rows.h", "kWide ? 32 : 40", "22"),
    Mutant("large scores of float32 are summed again", "sdpa_rows.h", "kWide ? 32 : 40", "22", element="F32"),
    Mutant("weights of a block too few", WEIGHTS, "j0 >= visible_to_block.end", "j0 + kKeys >= visible_to_block.end"),
    Mutant("a sum of one row", WEIGHTS, "sums_rows ? kQueries : r + 1", "r + 1"),
    Mutant("splits keep their own maximum", "memory_hops_stream.h", "shrink_to(partial_of(hops, n)[width], m)", "shrink_to(m, m)", table="memory_hops"),
    Mutant("the last split is whole", "memory_hops_stream.h", "sum += factor(n) * partial_of(hops, n)[d]", "sum += partial_of(hops, n)[d]", table="memory_hops"),
    Mutant("one delta", "memory_hops_stream.h", "delta += partial_of(hops, n)[width]", "delta = partial_of(hops, n)[width]", table="memory_hops"),
    Mutant("scores are read too early", "memory_hops.h", "room.s[n] = hops.score(dot, k, n); }); __syncthreads();", "room.s[n] = hops.score(dot, k, n); });", "the maximum alone is read before the next barrier, and a softmax is right from that of some rows on, too", table="memory_hops"),
    Mutant("depths are mixed up", "product.h", "rest / p.depth[1] * stride[0]", "rest / p.depth[1] * stride[1]", table="memory_hops"),
    Mutant("groups are not added", "columns.h", "int m = lanes; m < 32", "int m = 32; m < 32", table="memory_hops"),
    Mutant("infinity times nothing", "product.h", "__syncthreads_or(kMarked && odd)", "__syncthreads_or(false)", table="additive"),
    Mutant("a block too few of all", "varlen.h", "rows / kRows + batch + 1", "rows / kRows + batch", table="varlen"),
    Mutant("blocks of two sequences", "varlen.h", "start_of(p.q_starts, b, p.Lq) / kRows + b", "start_of(p.q_starts, b, p.Lq) / kRows", table="varlen"),
    Mutant("keys of two sequences", "varlen.h", "start_of(p.k_starts, b, p.Lk) / kRows + b", "start_of(p.k_starts, b, p.Lk) / kRows", table="varlen", sources=("sdpa_backward",)),
    Mutant("the next sequence's first row", "varlen.h", "end < begin ? begin : end", "end < begin ? begin : end + 1", table="varlen"),
    Mutant("what is left sees keys", "varlen.h", "if (b == p.B) p.Lk = 0;", "", table="varlen"),
    Mutant("no diagonal of its own", "varlen.h", "set_window(p);", "", table="varlen"),
    Mutant("lse of the first sequence", "varlen.h", "stats_stride[1] + p.q_row + i", "stats_stride[1] + i", table="varlen"),
    Mutant("a key of the next split", "decode.h", "first + p.split_keys) keys.end =", "first + p.split_keys) keys.end = 1 +", table="decode", element="F32"),
    Mutant("the low word is lost", "sinusoidal.h", "static_cast<float>(static_cast<uint32_t>(angle)) * 0x1p-64f", "0.0f", "of what the bound compares, the greatest error, it is no part: it keeps the relative error of small angles", table="sinusoidal", element="F32"),
    *(
        Mutant(name, f"{table}.h", old, new, table=table)
        for table, mutants in OPERATORS.items()
        for name, old, new in mutants
    ),
    *(
        Mutant(*fields, table="hopper", sources=("hopper/sdpa_forward",))
        for fields in hopper_mutants.MUTANTS
    ),
    *(
        Mutant(*fields, table="hopper_backward", sources=("hopper/sdpa_backward",))
        for fields in hopper_mutants.BACKWARD
    ),
]  # fmt: skip

TOO_LONG = ("long", "queries=70-rows=300-width=33-steps=2-bias=LN")
NARROW = Case("window-dropout", q_len=100, k_len=200, window=(20, 5), dropout_p=0.3)
STEEP = Case("steep", q_len=100, k_len=90, scale=3e6, weights=1)


DTYPES = {"Bf16": torch.bfloat16, "F32": torch.float32}


HOPPER = "attention_forward_hopper"
HOPPER_BACKWARD = "attention_backward_q_hopper", "attention_backward_kv_hopper"


def _judge_on_hopper(case: Case | VarlenCase, dtype: torch.dtype, target: Emulated) -> Verdict:
    """As `check`, by the kernels for Hopper and by no other of attention."""
    native = target.adapter._cuda
    native.allow_hopper(True)
    native.take_launches()
    if isinstance(case, VarlenCase):
        verdict = check_varlen(case, dtype, target)  # type: ignore[arg-type]
    else:
        verdict = check(case, dtype, target)  # type: ignore[arg-type]
    launches, wanted = set(native.take_launches()), {HOPPER, *(HOPPER_BACKWARD * bool(case.grads))}
    if not wanted <= launches or launches & {"attention_forward", "attention_backward"}:
        verdict.faults.append("another kernel ran")
    return verdict


def verdict_on(library: Path, table: str, element: str) -> str:
    """The first thing that is wrong, or "survived"."""
    adapter = emulator.load_from(library)
    work: list[tuple[Any, int]]
    if table == "attention":
        named = {case.name: case for case in CASES["scaled_dot_product_attention"]}
        judge: Callable[..., Verdict] = check
        chosen = [
            *map(named.__getitem__, NAMES),
            NARROW,
            STEEP,
            *(ONE_KEY if element == "F32" else ()),
        ]
        work = [(c, seed) for seed in (0, 5, 9) for c in chosen]
    elif table == "hopper":
        judge = _judge_on_hopper
        work = [(c, seed + n) for seed in (1, 40) for n, c in enumerate(hopper_mutants.CASES)]
        work += [(c, 0) for c in hopper_mutants.CASES]
    elif table == "hopper_backward":
        judge = _judge_on_hopper
        work = [(c, n) for n, c in enumerate(hopper_mutants.GRADIENTS)]
        work += [(c, 0 if n % 2 else 40 + n) for n, c in enumerate(hopper_mutants.GRADIENTS)]
    else:
        judge, cases, long = TABLES[table].check, TABLES[table].cases, TABLES[table].long
        work = [(c, seed) for n, c in enumerate(cases) if not long(c) for seed in (5 + n, 0)]
        work += [(c, 3) for c in cases if long(c) and c.name not in TOO_LONG]
    for case, seed in work:
        try:
            verdict = judge(case, DTYPES[element], Emulated(adapter, seed))
        except RuntimeError as error:
            verdict = Verdict(faults=[str(error)])
        if verdict.severity >= 2:  # what is right has half a bound of its own
            return f"caught by {case.name}: {verdict.severity:.3g}, {verdict.faults[0]}"
        if case in ONE_KEY and inexact_gradients(verdict):
            return f"caught by {case.name}: gradients that are not 0"
    if table == "hopper_backward":  # which cases, whose results are finite, cannot ask
        adapter._cuda.allow_hopper(True)
        for name in NAN_QUERY:
            if faults := nan_query_faults(adapter, name):
                return f"caught by NaN in a query, {name}: {faults[0]}"
    return "survived"


# A mutant may die, or never end: each is judged in a process of its own, forked from one that has
# imported all that takes long.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fastattn.verify"])


def _answer(library: Path, table: str, element: str, to: Connection) -> None:
    to.send(verdict_on(library, table, element))


def judged(library: Path, table: str, element: str = "Bf16") -> str:
    receiver, sender = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=_answer, args=(library, table, element, sender))
    child.start()
    sender.close()
    try:
        if not receiver.poll(600):
            return "caught: it never ends"
        return str(receiver.recv())
    except EOFError:
        child.join()
        return f"caught: it died, status {child.exitcode}"
    finally:
        child.kill()
        child.join()


def test_every_mutant_changes_the_source() -> None:
    for mutant in MUTANTS:
        mutant.changed((KERNELS / mutant.file).read_text())
        assert all((KERNELS / f"{name}.cu").exists() for name in mutant.compiled), mutant.name
    assert len([m for m in MUTANTS if m.survives]) <= len(MUTANTS) * 0.05


@pytest.mark.slow
@pytest.mark.parametrize("table", sorted({mutant.table for mutant in MUTANTS}))
def test_what_is_not_a_mutant_survives(table: str) -> None:
    assert judged(emulator.build(), table) == "survived"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.table}: {mutant.name}")
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(emulator.ROOT / "csrc/cuda", csrc / "cuda")
    for header in ("both.h", "mask_program.h", "params.h"):
        shutil.copy2(emulator.ROOT / "csrc" / header, csrc)
    mutant.put_into(csrc / "cuda/kernels")
    library = emulator.build_changed(csrc, tmp_path / "out", mutant.compiled, mutant.element)
    verdict = judged(library, mutant.table, mutant.element)
    print(f"{mutant.table}: {mutant.name}: {verdict}")
    if mutant.survives:
        assert verdict == "survived"
    else:
        assert verdict.startswith("caught"), verdict
