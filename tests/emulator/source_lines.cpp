// Finds the source lines of code addresses and the names of kernels, with addr2line and nm of binutils.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string_view>

#include "machine.h"

namespace emulator {
namespace {

std::vector<std::string> addr2line(uintptr_t pc) {
  Dl_info module{};
  if (!dladdr(reinterpret_cast<void*>(pc), &module)) return {};
  std::ostringstream command;
  command << "addr2line -si -e '" << module.dli_fname << "' 0x" << std::hex
          << pc - reinterpret_cast<uintptr_t>(module.dli_fbase) << " 2>/dev/null";
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

// Returns "tile.cuh:35 < forward.cu:147": the line of the access, then the lines into which that was inlined.
std::string source_lines(uintptr_t pc) {
  static std::map<uintptr_t, std::string> seen;
  std::string& text = seen[pc];
  if (!text.empty()) return text;
  for (std::string frame : addr2line(pc)) {
    frame = frame.substr(0, frame.find(' '));  // no discriminator
    const std::string file = frame.substr(0, frame.find(':'));
    if (file == "device.h") continue;
    text += (text.empty() ? "" : " < ") + frame;
  }
  if (text.empty()) text = "an unknown line";
  return text;
}

}  // namespace

std::string at(const void* pc) {
  std::ostringstream s;
  s << "@" << pc << "@";
  return s.str();
}

std::string explain(const std::string& text) {
  std::string out;
  size_t begin = 0;
  for (size_t open = text.find("@0x"); open != std::string::npos; open = text.find("@0x", begin)) {
    const size_t close = text.find('@', open + 1);
    const uintptr_t return_address = std::stoull(text.substr(open + 1, close), nullptr, 16);
    out += text.substr(begin, open - begin) + source_lines(return_address - 1);
    begin = close + 1;
  }
  return out + text.substr(begin);
}

// The output of nm is kept beside the module, because it takes long.
std::string kernel_name(const void* kernel) {
  static std::map<uintptr_t, std::string> names;
  Dl_info module{};
  if (!dladdr(kernel, &module)) return "??";
  if (names.empty()) {
    const std::string list = std::string(module.dli_fname) + ".names", own = list + std::to_string(getpid());
    if (access(list.c_str(), R_OK) != 0) {
      const std::string command = std::string("nm -C --defined-only '") + module.dli_fname + "' > '" + own + "'";
      if (std::system(command.c_str()) != 0 || std::rename(own.c_str(), list.c_str()) != 0) return "??";
    }
    std::ifstream file(list);
    for (std::string line; std::getline(file, line);) {
      const size_t name = line.find(' ') + 3;  // after the address and the kind
      if (name >= line.size()) continue;
      names[std::stoull(line, nullptr, 16)] = line.substr(name);
    }
  }
  const auto found = names.find(reinterpret_cast<uintptr_t>(kernel) - reinterpret_cast<uintptr_t>(module.dli_fbase));
  if (found == names.end()) return "??";
  std::string plain = found->second.starts_with("void ") ? found->second.substr(5) : found->second;
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  for (size_t at; (at = plain.find(kAnonymous)) != std::string::npos;) plain.erase(at, kAnonymous.size());
  return plain.substr(0, plain.find('('));  // without parameters
}

}  // namespace emulator
