// Scratch memory that only grows, aligned to cache lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace bonsai {

class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(raw_); }

    // At least `count` values; what was there before is lost. Raises std::bad_alloc.
    template <class T>
    T* get(int64_t count) {
        const size_t bytes = size_t(count) * sizeof(T) + kAlign;
        if (bytes > bytes_) {
            std::free(raw_);
            bytes_ = 0;
            raw_ = std::malloc(bytes);
            if (!raw_) throw std::bad_alloc();
            bytes_ = bytes;
        }
        const auto address = reinterpret_cast<uintptr_t>(raw_);
        return reinterpret_cast<T*>((address + kAlign - 1) & ~uintptr_t(kAlign - 1));
    }

private:
    static constexpr size_t kAlign = 64;
    void* raw_ = nullptr;
    size_t bytes_ = 0;
};

// Bytes rounded up to cache lines.
inline int64_t lines(int64_t bytes) { return (bytes + 63) & ~int64_t(63); }

}  // namespace bonsai
