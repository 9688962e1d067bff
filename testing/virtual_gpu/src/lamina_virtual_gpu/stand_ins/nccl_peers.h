// NCCL between processes, and between threads of one: ranks meet in memory that they share, and bytes really move.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "machine.h"
#include "nccl_numbers.h"

namespace virtual_gpu {

struct UniqueId {
  char bytes[128];
};

// The number that a premultiplied sum multiplies by.
struct Factor {
  char value[8];
  const void *on_device = nullptr;  // where it is read when the sum runs, in place of `value`
};

// One call of NCCL: `to` and `from` as NCCL names them, `count` elements as NCCL counts them there.
struct Call {
  enum Kind { all_gather, reduce_scatter, all_reduce, broadcast, reduce, all_to_all, gather, send, receive } kind;
  const void *from;
  void *to;
  size_t count;
  int type, operation = 0;
  int peer = 0;  // the root, or the other end of a message
  std::shared_ptr<Factor> factor = nullptr;
};

struct Exchange;
struct Segment;

// One rank's end of a communicator.
class Peers : public std::enable_shared_from_this<Peers> {
 public:
  static bool make_id(UniqueId *out);
  // Null if the process that has made the id is gone. The others may come later: `are_there` says when all have.
  static std::shared_ptr<Peers> join(const UniqueId &id, int ranks, int rank);
  ~Peers();

  bool are_there() const;
  void wait_for_all() const;
  // Work of a stream: all calls together, as one group. Every rank's calls on a communicator run in the order in which they were made.
  Work work(std::vector<Call> calls);
  // Collective over `members` of this communicator, and without the stream: those of one colour make a new one, in the order of their keys.
  std::shared_ptr<Peers> divide(const std::vector<int> &members, int colour, int key);
  void meet();       // collective: returns when all ranks have come
  void finish();     // returns when this rank's calls have ended
  void abort();      // ends them, whatever the others do
  const int ranks, rank;

 private:
  Peers(Segment *segment, int ranks, int rank) : ranks(ranks), rank(rank), segment_(segment) {}
  bool advance(const std::shared_ptr<Exchange> &exchange);
  bool advance_part(struct Part &part);
  bool send(struct Part &part), receive(struct Part &part), reduce(struct Part &part);
  struct Channel &channel(int from, int to) const;

  Segment *segment_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Exchange>> waiting_;  // what this rank has called and what has not ended
  bool aborted_ = false;
  uint64_t meetings_ = 0;
  std::vector<char> scratch_;
};

}  // namespace virtual_gpu
