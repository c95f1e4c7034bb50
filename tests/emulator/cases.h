// Runs a table of cases, each in every schedule, and prints what came of it: for test_emulator.py.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "device.h"

namespace cases {

constexpr int kN = 256;

struct Data {
  const float* in;   // [kN], not writable
  float* out;        // [kN]
  float* workspace;  // [4 * kN], to be written before it is read
  unsigned* ticket;  // zero
  float sum;         // of in
};

struct Case {
  const char* name;
  const char* report;  // part of what must be reported, or " or " another; empty: nothing, and out[i] is
                       // want(data, i)
  std::function<void(const Data&)> run;
  std::function<float(const Data&, int)> want = {};
};

inline std::string outcome(const Case& c) {
  // On the heap, each on its own.
  const std::unique_ptr<float[]> in(new float[kN]), out(new float[kN]()), workspace(new float[4 * kN]);
  const std::unique_ptr<unsigned> ticket(new unsigned(0));
  for (int i = 0; i < kN; ++i) in[i] = static_cast<float>(i % 7);
  const Data data{in.get(), out.get(), workspace.get(), ticket.get(), std::accumulate(&in[0], &in[kN], 0.f)};
  using emulator::Contents;
  emulator::clear_buffers();
  emulator::register_buffer(data.in, kN * sizeof(float), "in", Contents::kInput);
  emulator::register_buffer(data.out, kN * sizeof(float), "out", Contents::kInOut);
  emulator::register_buffer(data.workspace, 4 * kN * sizeof(float), "workspace", Contents::kOutput);
  emulator::register_buffer(data.ticket, sizeof(unsigned), "ticket", Contents::kInOut);
  try {
    c.run(data);
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  for (int i = 0; c.want && i < kN; ++i) {
    if (out[i] != c.want(data, i)) return "wrong value " + std::to_string(out[i]) + " at " + std::to_string(i);
  }
  return "";
}

// One line per case and schedule: name, expected report, schedule, report.
inline int run(const std::vector<Case>& table) {
  using emulator::Order;
  const auto in_schedule = [&](const char* schedule, Order order, uint64_t seed, unsigned blocks) {
    for (const Case& c : table) {
      emulator::options() = {};
      emulator::options().order = order;
      emulator::options().seed = seed;
      emulator::options().concurrent_blocks = blocks;
      std::string report = outcome(c);
      for (char& letter : report) letter = letter == '\n' ? '|' : letter;
      std::printf("%s\t%s\t%s %d\t%s\n", c.name, c.report, schedule, static_cast<int>(seed), report.c_str());
    }
  };
  in_schedule("forward", Order::kForward, 0, 1);
  in_schedule("reverse", Order::kReverse, 0, 1);
  for (uint64_t seed = 1; seed <= 6; ++seed) in_schedule("random", Order::kRandom, seed, 4);
  return 0;
}

}  // namespace cases
