// Which instruction sets are compiled in, and which of them this CPU and its OS support.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace bonsai {

// All tables in this binary, best first.
const std::vector<const Kernels*>& compiled_kernels();

// Those that run here, best first; never empty, since "portable" always does.
const std::vector<const Kernels*>& supported_kernels();

// Null when there is no table of that name that runs here.
const Kernels* find_kernels(const std::string& name);

}  // namespace bonsai
