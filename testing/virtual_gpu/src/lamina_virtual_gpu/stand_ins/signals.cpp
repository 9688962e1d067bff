// The kernels of torch's symmetric memory by which ranks wait for each other. Each rank has a pad of words in memory that all ranks map; a signal
// sets a word that is 0, and whoever waits for it clears it.
#include <time.h>

#include "machine.h"

namespace virtual_gpu {

struct Signal {
  uint32_t *word;
  bool sets;
};

static double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static Work exchange(std::vector<Signal> signals, size_t timeout_ms) {
  keep_running();  // the peers' streams wait for this one
  return [=]() -> Step {
    return [left = signals, end = -1.0, timeout_ms]() mutable {
      if (end < 0) end = seconds() + 1e-3 * (double)timeout_ms;
      std::vector<Signal> late;
      for (const Signal &signal : left)
        if (uint32_t old = !signal.sets; !__atomic_compare_exchange_n(signal.word, &old, signal.sets, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
          late.push_back(signal);
      left = std::move(late);
      if (left.empty()) return true;
      if (!timeout_ms || seconds() < end) return false;
      fail("a barrier of symmetric memory", "its time is over, and a peer has not come");  // the kernel traps
      return true;
    };
  };
}

// The work of a kernel that only signals, and nothing for any other.
Work work_of_signals(const std::string &name, void **arguments) {
  if (!queues_work() || name.find("symmetric_memory::") == std::string::npos) return nullptr;
  auto number = [&](int place) { return *(int *)arguments[place]; };
  auto is = [&](const char *kernel) { return name.find(kernel) != std::string::npos; };
  auto pads = [&] { return *(uint32_t ***)arguments[0]; };
  if (is("::barrier_kernel(")) {
    const int channel = number(1), rank = number(2), ranks = number(3);
    std::vector<Signal> signals;
    for (int peer = 0; peer < ranks; peer++) {
      if (peer == rank) continue;
      signals.push_back({pads()[peer] + ranks * channel + rank, true});
      signals.push_back({pads()[rank] + ranks * channel + peer, false});
    }
    return exchange(signals, *(size_t *)arguments[4]);
  }
  if (!is("::put_signal_kernel(") && !is("::wait_signal_kernel(")) return nullptr;
  const int peer = number(1), channel = number(2), rank = number(3), ranks = number(4);
  const bool sets = is("::put_signal_kernel(");
  return exchange({{sets ? pads()[peer] + ranks * channel + rank : pads()[rank] + ranks * channel + peer, sets}}, *(size_t *)arguments[5]);
}

}  // namespace virtual_gpu
