// The sets of rates under which the virtual clock runs: VGPU_RATES names each, "name: link=60 kernels=0.8; other: link=1e6".
#include "times.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <sstream>

#include "machine.h"

namespace virtual_gpu {

namespace {

[[noreturn]] void refuse(const std::string &set, const char *reason) {
  fprintf(stderr, "virtual GPU: VGPU_RATES has \"%s\": %s.\nWrite \"name: link=60 network=40 kernels=0.8; name: ...\" (GB/s, GB/s, a factor)\n", set.c_str(),
          reason);
  _exit(2);
}

Rates parsed(const std::string &text, const Rates &own) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) refuse(text, "no name");
  Rates set = own;
  set.name = text.substr(text.find_first_not_of(' '), colon - text.find_first_not_of(' '));
  std::istringstream words(text.substr(colon + 1));
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const double value = equals == std::string::npos ? 0 : atof(word.c_str() + equals + 1);
    if (value <= 0) refuse(text, "a rate that is not above 0");
    if (key == "link") set.link = value * kGiga;
    else if (key == "network") set.network = value * kGiga;
    else if (key == "kernels") set.kernels = value;
    else refuse(text, "a rate that is none of link, network, kernels");
  }
  return set;
}

}  // namespace

const std::vector<Rates> &rates() {
  static const auto *made = [] {
    const Rates own{"own", settings().link_rate, settings().network_rate, 1};
    auto *sets = new std::vector<Rates>{own};
    const char *given = getenv("VGPU_RATES");
    std::istringstream all(given ? given : "");
    for (std::string set; std::getline(all, set, ';');) {
      if (set.find_first_not_of(' ') == std::string::npos) continue;
      if (sets->size() == kMostRates) refuse(set, "one set of rates more than there is room for");
      sets->push_back(parsed(set, own));
    }
    return sets;
  }();
  return *made;
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

// ---- what Python calls (recording.py)

// Returns the names of the sets, one a line.
EXPORT const char *vgpu_rates() {
  static const auto *text = [] {
    auto *names = new std::string;
    for (const Rates &set : rates()) *names += set.name + "\n";
    return names;
  }();
  return text->c_str();
}

// Writes the host's times, or, of a stream, those at which its work ends, under each set of rates.
EXPORT void vgpu_times(Stream *stream, bool of_host, double *out) {
  LOCKED;
  const Times times = of_host ? host_times() : later(stream_of(stream)->time, host_times());
  under_each([&](size_t set) { out[set] = times.under[set]; });
}
