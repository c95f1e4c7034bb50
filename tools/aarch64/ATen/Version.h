// Stands in for torch's header, of which dispatch.cpp needs nothing for DEFAULT alone.
#pragma once

#include <string>
