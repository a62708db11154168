"""Bugs for the kernels for Hopper, and the cases that must see them: for test_cuda_mutants.py."""

# ruff: noqa: E501  (source lines are quoted whole)
from __future__ import annotations

from dataclasses import replace

from test_cuda_hopper import OWN, PACKED

from fastattn.testing import Case
from fastattn.testing.varlen import VarlenCase

# Forward only. Between them: one head and groups, all kinds of tiles, each branch of the pipeline.
NAMES = """tiles-64 width-64-64-full width-72-96-options width-136-192-causal width-256-256-causal
group-3-bottom_right group-5-bottom_right-options tiles-that-see-nothing keys-1 keys-161-wide
nan-after-64 nan-before-64 nan-masked-64 nan-rows-64 nan-after-128 layout-expanded_heads""".split()
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
]

FORWARD, SHARED, HOST = "hopper_forward.h", "hopper.h", "hopper_host.h"
_STEP = "      await_values();\n      wgmma_wait<1>();\n      if (j > 0) end_values();"
_LAST = "      await_values();\n      wgmma_wait<0>();\n      if (j > 0) end_values();"
_OPTIONS = "        begin_scores(scores[0]);\n        wgmma_wait<0>();\n        end_scores(scores[0]);\n        if (j > 0) end_values();\n        if (j + 1 == work.count) release(k.q_empty);\n"
# name, file, old, new and, if nothing can see it here, why.
MUTANTS: list[tuple[str, ...]] = [
    # barriers of the consumers
    ("K is not waited for", FORWARD, "      mbarrier_wait(k.k_full + k_ring.stage, k_ring.parity);\n", ""),
    ("K of the phase before", FORWARD, "k.k_full + k_ring.stage, k_ring.parity)", "k.k_full + k_ring.stage, k_ring.parity ^ 1)"),
    ("V is not waited for", FORWARD, "      mbarrier_wait(k.v_full + v_ring.stage, v_ring.parity);\n", ""),
    ("V of the phase before", FORWARD, "k.v_full + v_ring.stage, v_ring.parity)", "k.v_full + v_ring.stage, v_ring.parity ^ 1)"),
    ("Q is not waited for", FORWARD, "        mbarrier_wait(k.q_full, q_ring.parity);\n", ""),
    ("Q of the first tile", FORWARD, "mbarrier_wait(k.q_full, q_ring.parity)", "mbarrier_wait(k.q_full, 0)"),
    ("Q is the same for all tiles", FORWARD, "        q_ring.advance();\n      }\n      finish", "      }\n      finish"),
    # what is released too early, or never
    ("K is released while it is read", FORWARD, "                                  b + Shape::KTile::columns_at(step), step > 0);\n      wgmma_commit();\n    }\n\n    // It has been computed.\n    FASTATTN_DEVICE void end_scores(Scores& s) {\n      wgmma_arrived(s);\n      release(k.k_empty + k_ring.stage);", "                                  b + Shape::KTile::columns_at(step), step > 0);\n      wgmma_commit();\n      release(k.k_empty + k_ring.stage);\n    }\n\n    // It has been computed.\n    FASTATTN_DEVICE void end_scores(Scores& s) {\n      wgmma_arrived(s);"),
    ("V is released while it is read", FORWARD, _STEP, "      await_values();\n      if (j > 0) end_values();\n      wgmma_wait<1>();"),
    ("the V that comes is released", FORWARD, "release(k.v_empty + v_ring.previous())", "release(k.v_empty + v_ring.stage)"),
    ("Q is released while it is read", FORWARD, _OPTIONS, "        begin_scores(scores[0]);\n        if (j + 1 == work.count) release(k.q_empty);\n        wgmma_wait<0>();\n        end_scores(scores[0]);\n        if (j > 0) end_values();\n"),
    ("Q is never released", FORWARD, "      release(k.q_empty);\n      float shrink", "      float shrink"),
    ("every thread releases", FORWARD, "if (lane == 0) mbarrier_arrive(barrier);", "mbarrier_arrive(barrier);"),
    ("one consumer is enough", FORWARD, "kConsumerWarps = 4 * hopper::kConsumers", "kConsumerWarps = 4"),
    # products
    ("P V of the step before is not waited for", FORWARD, _STEP, "      await_values();\n      wgmma_wait<2>();\n      if (j > 0) end_values();"),
    ("the next S is not waited for", FORWARD, "      wgmma_wait<1>();\n      end_scores(next);", "      wgmma_wait<2>();\n      end_scores(next);"),
    ("the first S is not waited for", FORWARD, "        wgmma_wait<0>();\n        end_scores(scores[0]);\n        if", "        end_scores(scores[0]);\n        if"),
    ("the first S is not waited for, overlapped", FORWARD, "      wgmma_wait<0>();\n      end_scores(scores[0]);\n      await", "      end_scores(scores[0]);\n      await"),
    ("the last P V but one is not waited for", FORWARD, _LAST, "      await_values();\n      if (j > 0) end_values();"),
    ("the last P V is not waited for", FORWARD, "        wgmma_wait<0>();\n        end_values();", "        end_values();"),
    ("O has one factor for both rows", FORWARD, "shrink[e / 2 % 2]", "shrink[0]"),
    ("S adds to what was there", FORWARD, "b + Shape::KTile::columns_at(step), step > 0)", "b + Shape::KTile::columns_at(step), true)"),
    ("weights of the buffer that comes", FORWARD, "        step(work, j + 1, scores[1], scores[0]);", "        step(work, j + 1, scores[0], scores[1]);"),
    ("both consumers have the first queries", FORWARD, "of_rows() + 64 * 128 * consumer", "of_rows()"),
    # turns
    ("a turn is kept", FORWARD, "      pass_turn();\n      release(k.q_empty);", "      release(k.q_empty);"),
    ("a turn is left", FORWARD, "  if (Shape::kOverlapped && consumer == 0) me.await_turn();\n", ""),
    # the producer
    ("Q is loaded too early", FORWARD, "      mbarrier_wait(q_empty, q_ring.parity ^ 1);\n", ""),
    ("K is loaded too early", FORWARD, "          mbarrier_wait(k_empty + k_ring.stage, k_ring.parity ^ 1);\n", ""),
    ("V is loaded too early", FORWARD, "        mbarrier_wait(v_empty + v_ring.stage, v_ring.parity ^ 1);\n", ""),
    ("a step too few", FORWARD, "for (int j = 0; j <= work.count; ++j)", "for (int j = 0; j < work.count; ++j)"),
    ("a panel is announced", SHARED, "rows * 128 * kPanels", "rows * 128"),
    ("rows that do not come are announced", FORWARD, "q_full, given.tile_rows * given.group,", "q_full, hopper::kRows,"),
    ("K of the first sequence", FORWARD, "work.p.k_row + work.key(j), work", "work.key(j), work"),
    ("V of the first sequence", FORWARD, "work.p.k_row + work.key(j - 1), work", "work.key(j - 1), work"),
    ("queries of the first sequence", FORWARD, "work.p.q_row + work.i0,", "work.i0,"),
    ("a head that repeats itself is the next", HOST, "operand.head_step = d.size[1] > 1", "operand.head_step = 1"),
    ("buffers of K and V meet", FORWARD, "v_tiles = k_tiles + Shape::kKStages *", "v_tiles = k_tiles + (Shape::kKStages - 1) *"),
    # clearing
    ("nothing is cleared", FORWARD, "return work.keys.has(work.key(j) + row);", "return true;"),
    ("no edge on the left", FORWARD, "return first < keys.begin ||", "return"),
    ("no edge on the right", FORWARD, "|| (keys.end < last && keys.end < rows)", ""),
    ("an edge of one key is none", FORWARD, "(keys.end < last &&", "(keys.end + 1 < last &&"),
    ("the edge of the wrong step", FORWARD, "work.is_edge(j - 1, given.Lk) ? v_landed", "work.is_edge(j, given.Lk) ? v_landed"),
    ("one parity for both stages", FORWARD, "landed ^= 1 << ring.stage", "landed ^= 1"),
    ("edges alone are counted", FORWARD, "mbarrier_arrive(v_full + ring.stage);\n        }\n        ring.advance();", "mbarrier_arrive(v_full + ring.stage);\n        ring.advance();\n        }"),
    ("flags are read too early", FORWARD, "      barrier_sync(kBarrier, kCount);\n      for", "      for"),
    ("values are read before all are cleared", FORWARD, "      fence_proxy_async();\n      barrier_sync(kBarrier, kCount);\n", ""),
    ("flags stay", FORWARD, "next[key] = 0", "next[key] = 1"),
    # which pairs are seen
    ("steps at the left edge are all seen", FORWARD, "(of_last.begin - work.begin + kKeys - 1) / kKeys", "(of_last.begin - work.begin) / kKeys"),
    ("steps at the right edge are all seen", FORWARD, "(of_first.end - work.begin) / kKeys", "(of_first.end - work.begin + kKeys - 1) / kKeys"),
    ("the first query for the last", FORWARD, "(64 * consumer + 63) / k.given.group", "64 * consumer / k.given.group"),
    ("no left edge", FORWARD, "else if (!visible.has(key))", "else if (key >= visible.end)"),
    ("the next key", FORWARD, "const int key = j0 + column_of(n, e);", "const int key = j0 + 1 + column_of(n, e);"),
    ("a step too few is seen", FORWARD, "(length + kKeys - 1) / kKeys;", "length / kKeys;"),
    ("steps begin at the first key", FORWARD, "work.keys.begin / kKeys * kKeys", "work.keys.begin"),
    # which row is which
    ("heads one after the other", FORWARD, "k.given.group + row(r) % k.given.group", "k.given.group + row(r) / k.given.tile_rows"),
    ("a row too many", FORWARD, "const bool there = i[r] < work.last_query", "const bool there = i[r] <= work.last_query"),
    ("draws of the first step", FORWARD, "options.words(i[r], work.key(j) + 8 * n)", "options.words(i[r], 8 * n)"),
    ("half of an exchange", "softmax.h", "for (int bit = 1; bit < 4; bit *= 2)", "for (int bit = 1; bit < 2; bit *= 2)"),
    ("an exchange the other way", "softmax.h", "const bool upper = (lane & bit) != 0;", "const bool upper = (lane & bit) == 0;"),
    ("a row that sees nothing is NaN", "softmax.h", "max_of_row(most) * unit_log2);\n      // In a row that has seen nothing, -inf - m must not be NaN.\n      const float from = most == minus_infinity() ? 0.0f : most;", "max_of_row(most) * unit_log2);\n      const float from = most;"),
    ("lse in bits", "softmax.h", "m[r] * kLn2 + log", "m[r] + log"),
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
