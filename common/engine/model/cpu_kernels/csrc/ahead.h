// Memory that a later phase will read, asked for by one that computes longer than it reads.
//
// A decode step of some rows alternates between matrices (multiplications, the memory idles) and attention (a read of
// the cache, the multipliers idle). So the matrices ask for the cache's next blocks on their way.
#pragma once
#include <cstdint>
#include <vector>

namespace pd {

// Each thread's pieces of memory, in the order they will be read.
class Ahead {
 public:
  explicit Ahead(int threads) : lists_(threads) {}

  void clear() {
    for (auto& list : lists_) list.pieces.clear();
  }
  void add(int thread, const char* piece) { lists_[thread].pieces.push_back(piece); }
  int64_t num_pieces(int thread) const { return lists_[thread].pieces.size(); }
  // From now on the pieces are those `offset` behind the ones that were added, `piece_bytes` each.
  void start(int64_t offset, int64_t piece_bytes) {
    offset_ = offset, piece_bytes_ = piece_bytes;
    for (auto& list : lists_) list.piece = list.at = 0;
  }
  // The next `bytes` of this thread's pieces, or what is left of one; null: nothing is left.
  const char* next(int thread, int64_t bytes) {
    List& list = lists_[thread];
    if (list.piece == int64_t(list.pieces.size())) return nullptr;
    const char* found = list.pieces[list.piece] + offset_ + list.at;
    list.at += bytes;
    if (list.at + bytes > piece_bytes_) list.piece++, list.at = 0;
    return found;
  }

 private:
  struct alignas(64) List {
    std::vector<const char*> pieces;
    int64_t piece = 0, at = 0;
  };
  std::vector<List> lists_;
  int64_t offset_ = 0, piece_bytes_ = 0;
};

}  // namespace pd
