// Finds the source lines of code addresses and the names of functions, with addr2line of binutils.
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <sstream>

#include "machine.h"

namespace emulator {
namespace {

std::vector<std::string> addr2line(const char* options, uintptr_t address) {
  Dl_info module{};
  if (!dladdr(reinterpret_cast<void*>(address), &module)) return {};
  std::ostringstream command;
  command << "addr2line " << options << " -e '" << module.dli_fname << "' 0x" << std::hex
          << address - reinterpret_cast<uintptr_t>(module.dli_fbase) << " 2>/dev/null";
  std::vector<std::string> lines;
  FILE* pipe = popen(command.str().c_str(), "r");
  if (pipe == nullptr) return {};
  char line[4096];
  while (std::fgets(line, sizeof line, pipe)) {
    lines.emplace_back(line);
    lines.back().resize(lines.back().find_first_of("\n"));
  }
  pclose(pipe);
  return lines;
}

}  // namespace

std::string at(const void* pc) {
  static std::map<const void*, std::string> seen;
  std::string& text = seen[pc];
  if (!text.empty()) return text;
  for (std::string frame : addr2line("-si", reinterpret_cast<uintptr_t>(pc) - 1)) {  // pc is a return address
    frame = frame.substr(0, frame.find(' '));                                        // no discriminator
    if (frame.starts_with("device.h:")) continue;
    text += (text.empty() ? "" : " < ") + frame;
  }
  if (text.empty()) text = "an unknown line";
  return text;
}

std::string function_name(const void* function) {
  const std::vector<std::string> lines = addr2line("-fC", reinterpret_cast<uintptr_t>(function));
  return lines.empty() ? "??" : lines[0];
}

}  // namespace emulator
