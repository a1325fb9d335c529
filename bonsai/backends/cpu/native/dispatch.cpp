// Built without ISA flags: this runs before anything is known about the CPU.
#include "dispatch.h"

#if defined(_MSC_VER) && defined(_M_X64)
#include <intrin.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define BONSAI_X86
#endif

namespace bonsai {

extern const Kernels kPortable;
#ifdef BONSAI_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512Vnni;
#endif

namespace {

#ifdef BONSAI_X86

struct Registers {
    uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r{};
#ifdef _MSC_VER
    int out[4];
    __cpuidex(out, int(leaf), int(subleaf));
    r = {uint32_t(out[0]), uint32_t(out[1]), uint32_t(out[2]), uint32_t(out[3])};
#else
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
#endif
    return r;
}

// The register state that the OS saves: bit 1 SSE, bit 2 AVX, bits 5 to 7 AVX-512.
uint64_t enabled_state() {
#ifdef _MSC_VER
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
#endif
}

bool has(uint32_t value, int bit) { return (value >> bit) & 1u; }

bool has_avx2() {
    if (cpuid(0, 0).eax < 7) return false;
    const Registers basic = cpuid(1, 0);
    const bool fma = has(basic.ecx, 12), osxsave = has(basic.ecx, 27), f16c = has(basic.ecx, 29);
    if (!fma || !osxsave || !f16c || (enabled_state() & 6) != 6) return false;
    return has(cpuid(7, 0).ebx, 5);
}

bool has_avx512vnni() {
    if (!has_avx2() || (enabled_state() & 0xe6) != 0xe6) return false;
    const Registers more = cpuid(7, 0);
    const bool f = has(more.ebx, 16), dq = has(more.ebx, 17), bw = has(more.ebx, 30);
    const bool vl = has(more.ebx, 31), vnni = has(more.ecx, 11);
    return f && dq && bw && vl && vnni;
}

#endif

std::vector<const Kernels*> supported() {
    std::vector<const Kernels*> found;
#ifdef BONSAI_X86
    if (has_avx512vnni()) found.push_back(&kAvx512Vnni);
    if (has_avx2()) found.push_back(&kAvx2);
#endif
    found.push_back(&kPortable);
    return found;
}

}  // namespace

const std::vector<const Kernels*>& compiled_kernels() {
    static const std::vector<const Kernels*> all{
#ifdef BONSAI_X86
        &kAvx512Vnni,
        &kAvx2,
#endif
        &kPortable,
    };
    return all;
}

const std::vector<const Kernels*>& supported_kernels() {
    static const std::vector<const Kernels*> found = supported();
    return found;
}

const Kernels* find_kernels(const std::string& name) {
    for (const Kernels* kernels : supported_kernels()) {
        if (name == kernels->name) return kernels;
    }
    return nullptr;
}

}  // namespace bonsai
