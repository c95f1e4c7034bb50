// Stands in for torch's header, of which dispatch.cpp needs nothing without LAYERNORM_X86.
#pragma once

#include <string>
