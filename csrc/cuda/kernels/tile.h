// A block of a matrix in shared memory: loading it, and reading a warp's fragments from it.
//
// Rows are divided into chunks of 16 bytes; chunk c of row r is stored at c ^ (r % 8). So the 8
// rows of one column that ldmatrix reads at a time are in 8 different groups of banks.
#pragma once
#include "../ptx/copy.h"
#include "../ptx/matrix.h"
#include "element.h"

namespace fastattn {
namespace cuda {

// [L, D] of one head in global memory.
template <class Storage>
struct Matrix {
  Storage* data;
  int64_t stride, column_stride;  // in elements
  int columns;                    // D
  bool aligned;                   // every row is aligned to 16 bytes, and column_stride is 1
};

template <class T, int kRows, int kColumns>
struct Tile {
  using Storage = typename T::Storage;
  using Multiply = Product<T>;
  static constexpr int kChunk = 16 / sizeof(Storage);  // elements per chunk
  static constexpr int kChunks = kColumns / kChunk;    // chunks per row
  static constexpr int kBytes = kRows * kColumns * static_cast<int>(sizeof(Storage));
  static_assert(kChunks % 8 == 0, "the swizzle exchanges 8 chunks");

  Storage* data;  // [kRows, kColumns], swizzled

  // Chunk c of a row. Chunks are permuted, so that a column of them is in different banks.
  FASTATTN_DEVICE Storage* chunk(int row, int c) const {
    return data + row * kColumns + (c ^ (row & 7)) * kChunk;
  }
  FASTATTN_DEVICE Storage* at(int row, int column) const {
    return chunk(row, column / kChunk) + column % kChunk;
  }

  // tile[r] = from[row0 + r]. Rows outside [first, last) and columns from D on are zeros. The
  // caller waits with cp_async_wait and a barrier.
  template <int kThreads>
  FASTATTN_DEVICE void load(const Matrix<const Storage>& from, int row0, int first,
                            int last) const {
    if (from.aligned) return load_chunks<kThreads>(from, row0, first, last);
    for (int n = static_cast<int>(threadIdx.x); n < kRows * kColumns; n += kThreads) {
      const int r = n / kColumns, column = n % kColumns, row = row0 + r;
      const bool inside = row >= first && row < last && column < from.columns;
      *at(r, column) =
          inside ? from.data[row * from.stride + column * from.column_stride] : Storage(0);
    }
  }

  template <int kThreads>
  FASTATTN_DEVICE void load_chunks(const Matrix<const Storage>& from, int row0, int first,
                                   int last) const {
    // Each thread copies one column of chunks, so that one pointer advances from row to row.
    static_assert(kThreads % kChunks == 0, "a thread has one column of chunks");
    constexpr int kStep = kThreads / kChunks;
    const int thread = anew(threadIdx.x), c = thread % kChunks;
    const int left = (from.columns - c * kChunk) * static_cast<int>(sizeof(Storage));
    const int present = left < 0 ? 0 : left > 16 ? 16 : left;
    int r = thread / kChunks;
    const Storage* source = from.data + (row0 + r) * from.stride + c * kChunk;
    FASTATTN_UNROLL_BY(4)
    for (; r < kRows; r += kStep) {
      const int bytes = row0 + r >= first && row0 + r < last ? present : 0;
      // Nothing is read if bytes is 0, but the address must be aligned even then.
      cp_async_16(chunk(r, c), bytes > 0 ? source : from.data, bytes);
      source += kStep * from.stride;
    }
  }

  // Rows row0..+15 and the columns of step k, as the left operand.
  FASTATTN_DEVICE typename Multiply::A a(int lane, int row0, int k) const {
    uint32_t r[4];
    ldmatrix_x4(r, chunk(row0 + (lane & 15), 2 * k + (lane >> 4)));
    return Multiply::a_of(r);
  }

  // Rows row0..+15 of the tile as columns of the right operand: for x tile^T.
  FASTATTN_DEVICE typename Multiply::B b_of_rows(int lane, int row0, int k) const {
    uint32_t r[4];
    ldmatrix_x4(r, chunk(row0 + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
    return Multiply::b_of(r);
  }

  // Columns column0..+15 and the rows of step k as the right operand: for x tile, where x is
  // a_of_accumulators.
  FASTATTN_DEVICE typename Multiply::B b_of_columns(int lane, int k, int column0) const {
    uint32_t r[4];
    if constexpr (sizeof(Storage) == 2) {
      ldmatrix_x4_transposed(r, chunk(16 * k + (lane & 15), column0 / kChunk + (lane >> 4)));
    } else {
      const int row = 8 * k + (lane & 3) * 2, column = column0 + (lane >> 2);
      r[0] = bits_of_float(*at(row, column));
      r[1] = bits_of_float(*at(row + 1, column));
      r[2] = bits_of_float(*at(row, column + 8));
      r[3] = bits_of_float(*at(row + 1, column + 8));
    }
    return Multiply::b_of(r);
  }

  // Zeroes the rows whose flag is 0.
  template <int kThreads>
  FASTATTN_DEVICE void clear_rows(const int* flags) const {
    for (int n = static_cast<int>(threadIdx.x); n < kRows * kColumns; n += kThreads)
      if (flags[n / kColumns] == 0) data[n] = Storage(0);
  }

  // Stores two neighbouring elements; `column` is even.
  FASTATTN_DEVICE void store_pair(int row, int column, float x, float y) const {
    if constexpr (sizeof(Storage) == 2) {
      *reinterpret_cast<uint32_t*>(at(row, column)) = T::pack(x, y);
    } else {
      Storage* to = at(row, column);
      to[0] = x;
      to[1] = y;
    }
  }

  // to[row0 + r] = tile[r] for the warp's own rows first..+count that exist in `to`.
  FASTATTN_DEVICE void store_rows(const Matrix<Storage>& to, int row0, int rows, int first,
                                  int count) const {
    struct alignas(16) Chunk {
      uint32_t x[4];
    };
    const int lane = threadIdx.x & 31;
    for (int n = lane; n < count * kChunks; n += 32) {
      const int r = first + n / kChunks, c = n % kChunks;
      const int left = to.columns - c * kChunk;
      if (row0 + r >= rows || left <= 0) continue;
      Storage* target = to.data + (row0 + r) * to.stride + c * kChunk * to.column_stride;
      if (to.aligned && left >= kChunk) {
        *reinterpret_cast<Chunk*>(target) = *reinterpret_cast<const Chunk*>(chunk(r, c));
      } else {
        for (int e = 0; e < kChunk && e < left; ++e) target[e * to.column_stride] = chunk(r, c)[e];
      }
    }
  }
};

// d[tile of 8 columns][4] += x[row0..+15] y[column0..]^T, over kColumns columns of both tiles.
template <int kSteps, int kTiles, bool kTransposed = false, class X, class Y>
FASTATTN_DEVICE void add_product_of_rows(float (&d)[kTiles * 4], const X& x, int row0, const Y& y) {
  const int lane = anew(threadIdx.x & 31);
  FASTATTN_UNROLL_BY(X::kChunk / 2)  // more unrolling needs registers for addresses
  for (int k = 0; k < kSteps; ++k) {
    const auto a = x.a(lane, row0, k);
    FASTATTN_UNROLL
    for (int n = 0; n < kTiles; n += 2)
      X::Multiply::template add<kTransposed>(d + 4 * n, a, y.b_of_rows(lane, 8 * n, k));
  }
}

// d += p y[., column0..], where p holds accumulators of kRows columns.
template <int kRows, int kTiles, class Y>
FASTATTN_DEVICE void add_product_of_columns(float (&d)[kTiles * 4], const float* p, const Y& y,
                                            int column0) {
  using Multiply = typename Y::Multiply;
  const int lane = anew(threadIdx.x & 31);
  FASTATTN_UNROLL
  for (int k = 0; k < kRows / Multiply::kDepth; ++k) {
    const auto a = Multiply::a_of_accumulators(p + k * Multiply::kDepth / 2);
    FASTATTN_UNROLL
    for (int n = 0; n < kTiles; n += 2)
      Multiply::add(d + 4 * n, a, y.b_of_columns(lane, k, column0 + 8 * n));
  }
}

}  // namespace cuda
}  // namespace fastattn
