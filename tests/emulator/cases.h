// Runs a table of cases, each in every schedule, and prints the reports for test_emulator.py.
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
  const float* in;   // [kN], read-only
  float* out;        // [kN]
  float* workspace;  // [kN], uninitialized
  float sum;         // of in
};

struct Case {
  const char* name;
  const char* report;  // part of the expected report, or several separated by " or "; empty: none, and out[i] is
                       // expected(data, i)
  std::function<void(const Data&)> run;
  std::function<float(const Data&, int)> expected = {};
};

inline std::string outcome(const Case& c) {
  const std::unique_ptr<float[]> in(new float[kN]), out(new float[kN]()), workspace(new float[kN]);
  for (int i = 0; i < kN; ++i) in[i] = static_cast<float>(i % 7);
  const Data data{in.get(), out.get(), workspace.get(), std::accumulate(&in[0], &in[kN], 0.f)};
  using emulator::Contents;
  emulator::clear_buffers();
  emulator::register_buffer(data.in, kN * sizeof(float), "in", Contents::kInput);
  emulator::register_buffer(data.out, kN * sizeof(float), "out", Contents::kInOut);
  emulator::register_buffer(data.workspace, kN * sizeof(float), "workspace", Contents::kOutput);
  try {
    c.run(data);
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  for (int i = 0; c.expected && i < kN; ++i) {
    if (out[i] != c.expected(data, i)) return "wrong value " + std::to_string(out[i]) + " at " + std::to_string(i);
  }
  return "";
}

// Prints one line per case and schedule: name, expected report, schedule, report.
inline int run(const std::vector<Case>& table) {
  using emulator::Order;
  const auto in_schedule = [&](Order order, uint64_t seed, unsigned blocks) {
    for (const Case& c : table) {
      emulator::options() = {order, seed, blocks};
      std::string report = outcome(c);
      for (char& letter : report) letter = letter == '\n' ? '|' : letter;
      std::printf("%s\t%s\t%d %d\t%s\n", c.name, c.report, static_cast<int>(order), static_cast<int>(seed),
                  report.c_str());
    }
  };
  in_schedule(Order::kForward, 0, 1);
  in_schedule(Order::kReverse, 0, 1);
  for (uint64_t seed = 1; seed <= 6; ++seed) in_schedule(Order::kRandom, seed, 4);
  return 0;
}

}  // namespace cases
