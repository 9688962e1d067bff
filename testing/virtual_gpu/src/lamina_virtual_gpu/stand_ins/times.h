// The virtual clock runs under several sets of rates at once (VGPU_RATES). The first is the device's own: it decides what has
// ended, and so what the program and torch's allocator see. The others say how long the same work would have taken.
#pragma once
#include <array>
#include <string>
#include <vector>

#pragma GCC visibility push(default)  // the libraries use what is in libcudart

namespace virtual_gpu {

constexpr size_t kMostRates = 16;

struct Rates {
  std::string name;
  double link, network;  // bytes in a second
  double kernels;        // how fast kernels are, beside those of the first set
};
const std::vector<Rates> &rates();

// A time, or a length of time, under each set of rates, in seconds.
struct Times {
  std::array<double, kMostRates> under = {};

  double own() const { return under[0]; }
};

// Calls `act` with the number of each set of rates.
template <class Act>
void under_each(Act act) {
  for (size_t set = 0; set < rates().size(); set++) act(set);
}

inline Times everywhere(double seconds) {
  Times times;
  times.under.fill(seconds);
  return times;
}
inline Times later(Times a, const Times &b) {
  under_each([&](size_t set) { a.under[set] = a.under[set] < b.under[set] ? b.under[set] : a.under[set]; });
  return a;
}
inline Times operator+(Times a, const Times &b) {
  under_each([&](size_t set) { a.under[set] += b.under[set]; });
  return a;
}
// How long a kernel takes that takes so many seconds at the first set of rates.
inline Times of_kernel(double seconds) {
  Times times;
  under_each([&](size_t set) { times.under[set] = seconds / rates()[set].kernels; });
  return times;
}

}  // namespace virtual_gpu

#pragma GCC visibility pop
