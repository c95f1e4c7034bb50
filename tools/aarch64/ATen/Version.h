// Replaces the header of torch. dispatch.cpp needs nothing of it if DEFAULT is the only instruction set.
#pragma once

#include <string>
