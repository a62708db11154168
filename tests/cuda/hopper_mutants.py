"""Bugs for the kernels for Hopper, and the cases that must see them: for test_cuda_mutants.py."""

# ruff: noqa: E501  (source lines are quoted whole)
from __future__ import annotations

from dataclasses import replace

from test_cuda_hopper import OWN, PACKED

from fastattn.testing import Case
from fastattn.testing.varlen import VarlenCase

# Forward alone. Between them: one head and groups, all kinds of tiles, each branch of the pipeline.
NAMES = """tiles-64 width-64-64-full width-72-96-options width-136-192-causal width-256-256-causal
group-3-bottom_right group-5-bottom_right-options tiles-that-see-nothing keys-1 keys-161-wide
nan-after-64 nan-before-64 nan-masked-64 nan-rows-64 nan-after-128 layout-expanded_heads
sinks""".split()
BACKWARD_NAMES = [name for name in NAMES if name not in ("keys-1", "keys-161-wide")]
EDGE = Case("edge", heads=2, q_len=50, k_len=290, head_dim=64, poison=True)
CASES: list[Case | VarlenCase] = [
    *(replace(case, grads=(), slow=False) for case in OWN if case.name in NAMES),
    # One key beyond a step, or one short of it, is hidden.
    replace(EDGE, name="edge-95", causal="upper_left", q_len=95, grads=()),
    replace(EDGE, name="edge-97", causal="upper_left", q_len=97, grads=()),
    replace(EDGE, name="edge-left", window=(60, 20), q_len=290, grads=()),
    replace(EDGE, name="edge-wide", window=(150, -1), q_len=290, grads=()),
    replace(EDGE, name="edge-dropout", window=(60, 20), q_len=290, dropout_p=0.3, grads=()),
    # A warp that is late with its part of the clearing is rare.
    *(
        replace(EDGE, name=f"masked-{n}", mask="padding", mask_dims="bk", grads=())
        for n in range(12)
    ),
    replace(PACKED[0], grads=()),
    replace(PACKED[1], grads=(), after=(90, 40)),
    replace(EDGE, name="steepest", scale=1e12, grads=()),
]

FORWARD, SHARED, HOST = "hopper/sdpa_forward.h", "hopper/common.h", "hopper/host.h"
_STEP = "await_values(); wgmma_wait<1>(); if (j > 0) end_values();"
_LAST = "await_values(); wgmma_wait<0>(); if (j > 0) end_values();"
_OPTIONS = "begin_scores(scores[0]); wgmma_wait<0>(); end_scores(scores[0]); if (j > 0) end_values(); if (j + 1 == work.count) release(&kernel.shared.q_empty);"
# name, file, old, new and, if nothing can see it here, why.
MUTANTS: list[tuple[str, ...]] = [
    # barriers of the consumers
    ("K is not waited for", FORWARD, "mbarrier_wait(kernel.shared.k_full + k_ring.stage, k_ring.parity);", ""),
    ("K of the phase before", FORWARD, "kernel.shared.k_full + k_ring.stage, k_ring.parity)", "kernel.shared.k_full + k_ring.stage, k_ring.parity ^ 1)"),
    ("V is not waited for", FORWARD, "mbarrier_wait(kernel.shared.v_full + v_ring.stage, v_ring.parity);", ""),
    ("V of the phase before", FORWARD, "kernel.shared.v_full + v_ring.stage, v_ring.parity)", "kernel.shared.v_full + v_ring.stage, v_ring.parity ^ 1)"),
    ("Q is not waited for", FORWARD, "mbarrier_wait(&kernel.shared.q_full, q_ring.parity);", ""),
    ("Q of the first tile", FORWARD, "mbarrier_wait(&kernel.shared.q_full, q_ring.parity)", "mbarrier_wait(&kernel.shared.q_full, 0)"),
    ("Q is the same for all tiles", FORWARD, "q_ring.advance(); } finish", "} finish"),
    ("the sink of another head", FORWARD, "sink_of(kernel.given, work.b, h)", "sink_of(kernel.given, work.b, work.h_kv)"),
    # what is released too early, or never
    ("K is released while it is read", FORWARD, "                                  b + Shape::KTile::columns_at(step), step > 0);\n      wgmma_commit();\n    }\n\n    // S is complete.\n    FASTATTN_DEVICE void end_scores(Scores& s) {\n      wgmma_arrived(s);\n      release(kernel.shared.k_empty + k_ring.stage);", "                                  b + Shape::KTile::columns_at(step), step > 0);\n      wgmma_commit();\n      release(kernel.shared.k_empty + k_ring.stage);\n    }\n\n    // S is complete.\n    FASTATTN_DEVICE void end_scores(Scores& s) {\n      wgmma_arrived(s);"),
    ("V is released while it is read", FORWARD, _STEP, "await_values(); if (j > 0) end_values(); wgmma_wait<1>();"),
    ("the V that comes is released", FORWARD, "release(kernel.shared.v_empty + v_ring.previous())", "release(kernel.shared.v_empty + v_ring.stage)"),
    ("Q is released while it is read", FORWARD, _OPTIONS, "begin_scores(scores[0]); if (j + 1 == work.count) release(&kernel.shared.q_empty); wgmma_wait<0>(); end_scores(scores[0]); if (j > 0) end_values();"),
    ("Q is never released", FORWARD, "pass_turn(); release(&kernel.shared.q_empty); float", "pass_turn(); float"),
    ("every thread releases", FORWARD, "if (lane == 0) mbarrier_arrive(barrier);", "mbarrier_arrive(barrier);"),
    ("one consumer is enough", FORWARD, "kConsumerWarps = 4 * hopper::kConsumers", "kConsumerWarps = 4"),
    # products
    ("P V of the step before is not waited for", FORWARD, _STEP, "await_values(); wgmma_wait<2>(); if (j > 0) end_values();"),
    ("the next S is not waited for", FORWARD, "wgmma_wait<1>(); end_scores(next);", "wgmma_wait<2>(); end_scores(next);"),
    ("the first S is not waited for", FORWARD, "wgmma_wait<0>(); end_scores(scores[0]); if", "end_scores(scores[0]); if"),
    ("the first S is not waited for, overlapped", FORWARD, "wgmma_wait<0>(); end_scores(scores[0]); await", "end_scores(scores[0]); await"),
    ("the last P V but one is not waited for", FORWARD, _LAST, "await_values(); if (j > 0) end_values();"),
    ("the last P V is not waited for", FORWARD, "wgmma_wait<0>(); end_values();", "end_values();"),
    ("O has one factor for both rows", FORWARD, "shrink[e / 2 % 2]", "shrink[0]"),
    ("S adds to what was there", FORWARD, "b + Shape::KTile::columns_at(step), step > 0)", "b + Shape::KTile::columns_at(step), true)"),
    ("weights of the buffer that comes", FORWARD, "step(work, j + 1, scores[1], scores[0]);", "step(work, j + 1, scores[0], scores[1]);"),
    ("both consumers have the first queries", FORWARD, "of_rows() + 64 * 128 * consumer", "of_rows()"),
    # turns
    ("a turn is kept", FORWARD, "pass_turn(); release(&kernel.shared.q_empty);", "release(&kernel.shared.q_empty);"),
    ("a turn is left", FORWARD, "if (Shape::kOverlapped && consumer == 0) me.await_turn();", ""),
    # the producer
    ("Q is loaded too early", FORWARD, "mbarrier_wait(&shared.q_empty, q_ring.parity ^ 1);", ""),
    ("K is loaded too early", FORWARD, "mbarrier_wait(shared.k_empty + k_ring.stage, k_ring.parity ^ 1);", ""),
    ("V is loaded too early", FORWARD, "mbarrier_wait(shared.v_empty + v_ring.stage, v_ring.parity ^ 1);", ""),
    ("a lane is phases behind", SHARED, "__syncwarp(); if ((threadIdx.x & 31) == 0) {", "if ((threadIdx.x & 31) == 0) {"),
    ("a step too few", FORWARD, "for (int j = 0; j <= work.count; ++j)", "for (int j = 0; j < work.count; ++j)"),
    ("a panel is announced", SHARED, "rows * 128 * kPanels", "rows * 128"),
    ("rows that do not come are announced", FORWARD, "&shared.q_full, given.tile_rows * given.group,", "&shared.q_full, hopper::kRows,"),
    ("K of the first sequence", FORWARD, "work.p.k_row + work.key(j), work", "work.key(j), work"),
    ("V of the first sequence", FORWARD, "work.p.k_row + work.key(j - 1), work", "work.key(j - 1), work"),
    ("queries of the first sequence", FORWARD, "work.p.q_row + work.i0,", "work.i0,"),
    ("a head that repeats itself is the next", HOST, "operand.head_step = d.size[1] > 1", "operand.head_step = 1"),
    ("buffers of K and V meet", FORWARD, "k_tiles[kKStages];", "k_tiles[kKStages - 1];"),
    # clearing
    ("nothing is cleared", SHARED, "return work.keys.has(work.key(j) + row);", "return true;"),
    ("no edge on the left", SHARED, "return first < keys.begin ||", "return"),
    ("no edge on the right", SHARED, "|| (keys.end < last && keys.end < tensor_rows - p.k_row)", ""),
    ("an edge of one key is none", SHARED, "(keys.end < last &&", "(keys.end + 1 < last &&"),
    ("the edge of the wrong step", FORWARD, "work.is_edge(j - 1, given.Lk) ? shared.v_landed", "work.is_edge(j, given.Lk) ? shared.v_landed"),
    ("one parity for both stages", SHARED, "parities ^= 1 << ring.stage", "parities ^= 1"),
    ("edges alone are counted", SHARED, "mbarrier_arrive(full + ring.stage); } ring.advance();", "mbarrier_arrive(full + ring.stage); ring.advance(); }"),
    ("flags are read too early", SHARED, "barrier_sync(kClearBarrier, kConsumerThreads); for", "for"),
    ("values are read before all are cleared", SHARED, "fence_proxy_async(); barrier_sync(kClearBarrier, kConsumerThreads);", ""),
    ("flags stay", SHARED, "next[key] = 0", "next[key] = 1"),
    # which pairs are seen
    ("steps at the left edge are all seen", SHARED, "(of_last.begin - tile.begin + kKeys - 1) / kKeys", "(of_last.begin - tile.begin) / kKeys"),
    ("steps at the right edge are all seen", SHARED, "(of_first.end - tile.begin) / kKeys", "(of_first.end - tile.begin + kKeys - 1) / kKeys"),
    ("the first query for the last", SHARED, "(64 * consumer + 63) / given.group", "64 * consumer / given.group"),
    ("no left edge", FORWARD, "else if (!visible.has(key))", "else if (key >= visible.end)"),
    ("the next key", FORWARD, "const int key = j0 + column_of(n, e);", "const int key = j0 + 1 + column_of(n, e);"),
    ("a step too few is seen", SHARED, "(length + kKeys - 1) / kKeys;", "length / kKeys;"),
    ("steps begin at the first key", SHARED, "tile.keys.begin / kKeys * kKeys", "tile.keys.begin"),
    # which row is which
    ("heads one after the other", SHARED, "given.group + row % given.group", "given.group + row / given.tile_rows"),
    ("a row too many", FORWARD, "const bool there = i[r] < work.last_query", "const bool there = i[r] <= work.last_query"),
    ("draws of the first step", FORWARD, "options.words(i[r], work.key(j) + 8 * n)", "options.words(i[r], 8 * n)"),
    ("half of an exchange", "softmax.h", "for (int bit = 1; bit < 4; bit *= 2)", "for (int bit = 1; bit < 2; bit *= 2)"),
    ("an exchange the other way", "softmax.h", "const bool upper = (lane & bit) != 0;", "const bool upper = (lane & bit) == 0;"),
    ("a row that sees nothing is NaN", "softmax.h", "from[r] = now[r] == minus_infinity() ? 0.0f : now[r];", "from[r] = now[r];"),
    ("lse in bits", "softmax.h", "most / exponents_per_score(unit), l[r]", "most, l[r]"),
    # large scores
    ("the rounding error of a maximum is lost", "softmax.h", "fabsf(m) >= kExact && m", "false && m"),
    ("that of a smaller maximum is taken", "softmax.h", "m[r] == from ? before : minus_infinity()", "minus_infinity()"),
    ("it is not kept", "softmax.h", "low = after;", ""),
    # tiles
    ("the way back is one off", SHARED, "blocks - 1 - block : block", "blocks - block : block"),
    ("tiles begin with one that is not there", SHARED, "tiles - 1 - rest / heads", "tiles - rest / heads"),
    ("heads for batch entries", SHARED, "block = {head / kv_heads, head % kv_heads, n * rows};", "block = {head % kv_heads, head / kv_heads, n * rows};"),
    ("tiles of two sequences", SHARED, "start_of(starts, b, all) / rows + b", "start_of(starts, b, all) / rows"),
    ("what is left sees keys", SHARED, "if (b == p.B) (kOfQueries ? p.Lk : p.Lq) = 0;", ""),
    ("the narrower values", HOST, "p.D <= 192 && p.Dv <= 128", "p.D <= 192"),
    # descriptors
    ("panels are one", SHARED, "step / 4 * kPanelBytes + step % 4 * 32", "step * 32"),
    ("half of the rows", SHARED, "return step * 2048;", "return step * 1024;"),
    ("panels one after the other", SHARED, "kPanelBytes, 1024);", "1024, 1024);"),
    ("eight rows too far", SHARED, "describe_matrix(shared_address_of(data), 16, 1024)", "describe_matrix(shared_address_of(data), 16, 2048)"),
]  # fmt: skip

# With gradients, too; of single outputs those of all.
GRADIENTS: list[Case | VarlenCase] = [
    *(replace(case, slow=False) for case in OWN if case.name in BACKWARD_NAMES),
    replace(EDGE, name="edge-95", causal="upper_left", q_len=95),
    replace(EDGE, name="edge-97", causal="upper_left", q_len=97),
    replace(EDGE, name="edge-left", window=(60, 20), q_len=290),
    replace(EDGE, name="edge-wide", window=(150, -1), q_len=290),
    replace(EDGE, name="edge-128", window=(70, 30), q_len=290, head_dim=128),
    replace(EDGE, name="edge-right-1", window=(100, 62), q_len=290, head_dim=128, scale=0.3),
    replace(EDGE, name="edge-dropout", window=(60, 20), q_len=290, dropout_p=0.3),
    *(replace(EDGE, name=f"masked-{n}", mask="padding", mask_dims="bk") for n in range(4)),
    PACKED[0],
    replace(PACKED[1], after=(90, 40)),
    # Gradients of more than the output, rows that see nothing and hold NaN, large scores.
    replace(EDGE, name="lse", q_len=150, grads=("out", "lse")),
    replace(EDGE, name="mask", q_len=150, mask="float_inf", mask_grad=True, grads=("out", "lse")),
    replace(EDGE, name="weights", softcap=2.0, weights=2, grads=("out", "lse", "weights")),
    replace(EDGE, name="queries", q_len=290, k_len=100, causal="bottom_right", poison_queries=True),
    *(
        replace(EDGE, name=f"queries-{n}", q_len=150, mask="bool_rows", poison_queries=True)
        for n in range(10)  # a lane that is late with it is rare
    ),
    replace(EDGE, name="steep", scale=1e4),
    replace(EDGE, name="steeper", scale=3e6),
    # Of few keys outputs are large, and so is delta beside the products that it is subtracted from.
    replace(EDGE, name="few-keys", q_len=150, k_len=3, mask="float", mask_grad=True, weights=1),
]
KV, Q = "hopper/sdpa_backward_kv.h", "hopper/sdpa_backward_q.h"
_SUM = "mbarrier_wait(&kernel.shared.k_full, k_ring.parity); kernel.for_each_step"
_FULL = "mbarrier_wait(kernel.shared.full + stage, ring.parity);"
_LANDED = "mbarrier_wait(kernel.shared.landed + stage, ring.parity);"
_ENDS = "wgmma_wait<0>(); if (kDv) wgmma_arrived(dv); if (kDk) wgmma_arrived(dk); release(kernel.shared.empty + stage);"
_SCORES = "begin_scores(); wgmma_wait<0>(); wgmma_arrived(s); wgmma_arrived(dp);"
_FREE = "if (j + 1 == work.count) release(&kernel.shared.q_empty);"
BACKWARD: list[tuple[str, ...]] = [
    # dK and dV: barriers
    ("K and V are not waited for", KV, _SUM, "        kernel.for_each_step"),
    ("K and V of the first tile", KV, "mbarrier_wait(&kernel.shared.k_full, k_ring.parity)", "mbarrier_wait(&kernel.shared.k_full, 0)"),
    ("K and V are the same for all tiles", KV, "k_ring.advance(); } } FASTATTN_DEVICE void store", "} } FASTATTN_DEVICE void store"),
    ("K and V are never released", KV, "release(&kernel.shared.k_empty);", ""),
    ("K is enough", KV, "mbarrier_init(&shared.k_full, 2);", "mbarrier_init(&shared.k_full, 1);"),
    ("Q is enough", KV, "mbarrier_init(shared.landed + n, 2);", "mbarrier_init(shared.landed + n, 1);"),
    ("Q and dO are not waited for", KV, _LANDED + _FULL, ""),
    ("stats are not waited for", KV, _FULL, ""),
    ("Q and dO of the phase before", KV, _LANDED + _FULL, _LANDED + _FULL.replace("parity", "parity ^ 1")),
    ("Q and dO are released while they are read", KV, _ENDS, "release(kernel.shared.empty + stage);" + _ENDS.replace("release(kernel.shared.empty + stage);", "")),
    ("the last products are not waited for", KV, _ENDS, _ENDS.replace("wgmma_wait<0>();", "")),
    ("dP is not waited for", KV, "wgmma_wait<0>(); wgmma_arrived(s);", "wgmma_wait<1>(); wgmma_arrived(s);"),
    ("S is not waited for", KV, "wgmma_wait<kDk ? 1 : 0>();", "wgmma_wait<2>();"),
    ("K and V are loaded too early", KV, "mbarrier_wait(&shared.k_empty, k_ring.parity ^ 1);", ""),
    ("Q and dO are loaded too early", KV, "mbarrier_wait(shared.empty + ring.stage, ring.parity ^ 1); const int first", "const int first"),
    ("stats are brought too early", KV, "mbarrier_wait(shared.empty + ring.stage, ring.parity ^ 1); int blind", "int blind"),
    ("what lands is cleared before it lands", KV, "mbarrier_wait(shared.landed + ring.stage, ring.parity);", ""),
    ("stats are there when one lane's are", KV, "__syncwarp(); if (lane == 0) mbarrier_arrive(shared.full", "if (lane == 0) mbarrier_arrive(shared.full"),
    # clearing
    ("queries outside are not cleared", KV, "return work.queries.has(i0 + n) && of", "return of"),
    ("queries that see nothing are not cleared", KV, "&& of_stage[n].hi != float_of_bits(0x7f800000u)", ""),
    ("no query is cleared", KV, "if (blind) {", "if (false) {"),
    ("a lane clears alone", KV, "for (int n = 16; n > 0; n /= 2) blind", "for (int n = 16; n > 16; n /= 2) blind"),
    ("Q is not cleared", KV, "q_tile(ring.stage).template clear_rows<32>(lane, sees);", ""),
    ("dO is not cleared", KV, "g_tile(ring.stage).template clear_rows<32>(lane, sees);", ""),
    # which pairs
    ("a key too many is seen by all", KV, "first + 64 <= visible_keys", "first + 63 <= visible_keys"),
    ("queries that are not there see all", KV, "return last < work.p.Lq && visible", "return visible"),
    ("the first query's left edge", KV, "visible_keys(work.p, last).begin <= first", "visible_keys(work.p, i0).begin <= first"),
    ("the query before", KV, "!sees.has(i0 + column)", "!sees.has(i0 + column + 1)"),
    ("what is not seen is multiplied", KV, "return kEdge && weight == 0.0f ? 0.0f : weight", "return weight"),
    ("keys see every query", KV, "{j, j + sees[r].has(i)}", "{j, j + 1}"),
    ("stats of the other step", KV, "kernel.shared.stats + ring.stage * kQueries; wgmma", "kernel.shared.stats + (1 - ring.stage) * kQueries; wgmma"),
    ("the neighbour's delta", KV, "gradient[1] - delta[1]", "gradient[1] - delta[0]"),
    ("the draws of the first key", KV, "options.words(i, j)", "options.words(i, j0)"),
    ("stats in other units", KV, "hopper::prepared<kGeneral>", "hopper::prepared<true>"),
    ("both have the first keys", KV, "return Shape::kDivided ? 0 : 64 * consumer;", "return 0;"),
    ("each has keys of its own, of 64", KV, "return Shape::kDivided ? 0 : 64 * consumer;", "return 64 * consumer;"),
    ("the first head's queries for all", KV, "f(work.h_kv * given.group + n, i0)", "f(work.h_kv * given.group, i0)"),
    ("queries of the first sequence", KV, "work.p.q_row + i0;", "i0;"),
    ("keys of the first sequence", KV, "work.p.k_row + work.j0;", "work.j0;"),
    # sums
    ("sums go on from tile to tile", KV, "kDv && n < Shape::kV / 2; ++n) dv", "kDv && n < 1; ++n) dv"),
    ("dK has no scale", KV, "dk + 2 * r, work.p.scale_float", "dk + 2 * r, 1.0f"),
    ("a key too many is written", KV, "work.p.grad_v, work.b, work.h_kv, row,\n                                          work.p.Dv, j < work.last_key", "work.p.grad_v, work.b, work.h_kv, row,\n                                          work.p.Dv, j <= work.last_key"),
    ("keys that nobody sees have no gradient", KV, "    for_each_tile<true>", "    for_each_tile<false>"),
    ("the first tile is written", KV, "find(anew(static_cast<unsigned>(tile)), again);", "find(0, again);"),
    ("both sum dK", KV, "kernel.template consume<false, true>(consumer);", "kernel.template consume<true, false>(consumer);"),
    # dQ: barriers
    ("Q and dO of dQ are not waited for", Q, "mbarrier_wait(&kernel.shared.q_full, q_ring.parity);", ""),
    ("Q and dO of the first tile", Q, "mbarrier_wait(&kernel.shared.q_full, q_ring.parity)", "mbarrier_wait(&kernel.shared.q_full, 0)"),
    ("Q is enough for dQ", Q, "mbarrier_init(&shared.q_full, 2);", "mbarrier_init(&shared.q_full, 1);"),
    ("K is not waited for", Q, "mbarrier_wait(kernel.shared.k_full + ring.stage, ring.parity);", ""),
    ("V is not waited for", Q, "mbarrier_wait(kernel.shared.v_full + ring.stage, ring.parity);", ""),
    ("K of the phase before", Q, "kernel.shared.k_full + ring.stage, ring.parity)", "kernel.shared.k_full + ring.stage, ring.parity ^ 1)"),
    ("Q and dO of dQ are released while they are read", Q, _SCORES + "if (j > 0) end_product();" + _FREE, "begin_scores();" + _FREE + _SCORES.replace("begin_scores();", "") + "if (j > 0) end_product();"),
    ("Q and dO of dQ are never released", Q, _FREE + "if (!kGeneral", "if (!kGeneral"),
    ("Q and dO of dQ are loaded too early", Q, "mbarrier_wait(&shared.q_empty, q_ring.parity ^ 1);", ""),
    ("K is loaded too early", Q, "mbarrier_wait(shared.empty + stage, ring.parity ^ 1);", ""),
    ("the K that comes is released", Q, "release(kernel.shared.empty + ring.previous())", "release(kernel.shared.empty + ring.stage)"),
    ("the last product is not waited for", Q, "wgmma_wait<0>(); end_product();", "end_product();"),
    ("S and dP are not waited for", Q, _SCORES + "if (j", _SCORES.replace("<0>", "<1>") + "if (j"),
    ("dP adds to what was there", Q, "of_v + Shape::VTile::columns_at(step), step > 0)", "of_v + Shape::VTile::columns_at(step), true)"),
    ("both have the first queries", Q, "kernel.q_tile().of_rows() + 64 * 128 * consumer", "kernel.q_tile().of_rows()"),
    ("both have the first dO", Q, "kernel.g_tile().of_rows() + 64 * 128 * consumer", "kernel.g_tile().of_rows()"),
    ("dQ goes on from tile to tile", Q, "n < Shape::kQ / 2; ++n) dq", "n < 1; ++n) dq"),
    ("rows that do not come are announced", Q, "g_tile().load(g.map, &shared.q_full, given.tile_rows * group,", "g_tile().load(g.map, &shared.q_full, hopper::kRows,"),
    # dQ: clearing, and which pairs
    ("keys are not cleared", SHARED, "return work.keys.has(work.key(j) + row);", "return true;"),
    ("one parity for both stages", SHARED, "parities ^= 1 << ring.stage", "parities ^= 1"),
    ("edges are no edges for K", Q, "(work.is_edge(j, given.Lk) ? shared.k_landed : shared.k_full)", "shared.k_full"),
    ("keys behind a mask are not cleared", Q, "if (masked) hopper::clear_unseen", "if (false) hopper::clear_unseen"),
    ("flags have one buffer", Q, "flags ^= 1", "flags"),
    ("no delta", Q, "weight * (dp[at] - row.delta)", "weight * dp[at]"),
    ("the next step is all seen", Q, "all_seen.has(j))", "all_seen.has(j + 1))"),
    ("the next key is seen", Q, "visible[r].has(key))", "visible[r].has(key + 1))"),
    ("draws of the first step", Q, "options.words(i[r], j0 + 8 * n)", "options.words(i[r], 8 * n)"),
    ("a softcap has slope 1", Q, "pair.gradient * pair.slope;", "pair.gradient;"),
    ("dQ has no scale", Q, "work.p.scale_float, work.p.grad_q", "1.0f, work.p.grad_q"),
    ("queries that see nothing have no gradient", Q, "for_each_query_tile<Shape::kKeys, true>", "for_each_query_tile<Shape::kKeys, false>"),
    # delta, summed anew
    ("the lse has no gradient", Q, "const float sum = rest[r] + ", "const float sum = "),
    ("lse's gradient counts twice", Q, "stats[0].rest = stats[1].rest = 0.0f;", ""),
    ("delta of one lane", Q, "sum_of_row(sums[r])", "sums[r]"),
    ("delta of a row too many", Q, "if ((lane & 3) == 0 && i[r] < work.last_query)", "if ((lane & 3) == 0)"),
    ("delta in the place of another", Q, "i[r]) * 4 + 3] = sum", "i[r]) * 4 + 2] = sum"),
    # the units of the exponent
    ("lse's gradient is left out", SHARED, "row.delta + row.rest, 0.0f}", "row.delta, 0.0f}"),
    ("half of the lse is lost", SHARED, "static_cast<double>(row.hi) + static_cast<double>(row.lo)", "static_cast<double>(row.lo)"),
    ("the low word of the lse is lost", SHARED, "fmaf(dot, unit, -row.hi) - row.lo", "fmaf(dot, unit, -row.hi)"),
    ("a row of the low word alone", SHARED, "finite ? static_cast<float>(lse - hi) : 0.0f", "static_cast<float>(lse - hi)"),
]  # fmt: skip
