// Turns code addresses in reports into functions and lines, with binutils' addr2line.
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <sstream>

#include "machine.h"

namespace emulator {
namespace {

// The output of addr2line, line by line.
std::vector<std::string> addr2line(const char* options, uintptr_t pc) {
  Dl_info module{};
  if (!dladdr(reinterpret_cast<void*>(pc), &module)) return {};
  std::ostringstream command;
  command << "addr2line " << options << " -e '" << module.dli_fname << "' 0x" << std::hex
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

// "row.cuh:35 < forward.cu:147": where the access is, then where that was inlined. The spelling of the
// language itself is left out.
std::string source_lines(uintptr_t pc) {
  static std::map<uintptr_t, std::string> seen;
  std::string& text = seen[pc];
  if (!text.empty()) return text;
  for (std::string frame : addr2line("-si", pc)) {
    frame = frame.substr(0, frame.find(' '));  // no discriminator
    const std::string file = frame.substr(0, frame.find(':'));
    if (file == "cuda_on_cpu.h" || file == "device.h") continue;
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

std::string kernel_name(const void* kernel) {
  static std::map<const void*, std::string> seen;
  std::string& name = seen[kernel];
  if (name.empty()) {
    const auto lines = addr2line("-fC", reinterpret_cast<uintptr_t>(kernel));
    name = lines.empty() ? "??" : lines[0].substr(0, lines[0].rfind('('));
    if (name.starts_with("void ")) name.erase(0, 5);
  }
  return name;
}

}  // namespace emulator
