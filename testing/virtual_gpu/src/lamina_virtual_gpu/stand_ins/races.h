// Which work is ordered by waits: vector clocks of streams, and who touched which bytes (races.cpp).
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

struct Stream;

namespace virtual_gpu {

// How much of each stream's work comes before something; streams have places in it.
using Clock = std::vector<uint64_t>;

// Bytes that a piece of work reads, or writes.
struct Access {
  const void *at;
  size_t bytes;
  bool writes;
};
using Accesses = std::vector<Access>;

// Where the host called: lines of Python, the innermost first.
struct Line {
  const std::string *place;  // file and function
  int number;
};
using Stack = std::vector<Line>;

// A piece of work, as others are compared with it.
struct Node {
  const Stream *stream;
  size_t place;
  uint64_t number;  // on its stream
  const char *what;
  Clock clock;
  Stack stack;
};
using NodePointer = std::shared_ptr<const Node>;

bool watches_races();  // VGPU_RACES, or an adversary
Stack python_lines();  // WITHOUT the lock: it takes Python's

// With the lock:
NodePointer begin_work(Stream *stream, const char *what, Stack stack);
void touch(const NodePointer &node, const Accesses &accesses);
void note_given_out(const void *at, size_t bytes, Stack stack);  // the allocator of the program gave this memory out there
void forget(const void *at, size_t bytes);                       // it is unmapped
Clock clock_of(Stream *stream);
void comes_after(Stream *stream, const Clock &clock);
void host_comes_after(const Clock &clock);
void host_comes_after_all();

}  // namespace virtual_gpu

#pragma GCC visibility pop
