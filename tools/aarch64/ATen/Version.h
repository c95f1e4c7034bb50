// Replaces torch's header, of which dispatch.cpp needs nothing if DEFAULT is the only instruction set.
#pragma once

#include <string>
