#include <nanobind/nanobind.h>
NB_MODULE(_native, m) { m.attr("abi") = 1; }
