// Threads that share the items of one job at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace bonsai {

class Pool {
public:
    // The process's pool. After a fork the child gets a fresh one, since threads are not inherited.
    static Pool& shared();

    // Threads that work on a job, the caller included.
    int threads() const;

    // Raises std::invalid_argument outside 1 to 1024. Workers start when a job first needs them.
    void resize(int threads);

    // Calls work(item) for every item in [0, items), here and on the workers; returns when all are
    // done. Items are handed out one at a time from the first on. Callers on several threads take
    // turns. `work` must not call `run`. Raises std::bad_alloc if an item did.
    template <class Work>
    void run(int64_t items, Work&& work) {
        using Type = std::remove_reference_t<Work>;
        run_erased(
            items, [](void* context, int64_t item) { (*static_cast<Type*>(context))(item); },
            const_cast<void*>(static_cast<const void*>(&work)));
    }

    using Call = void (*)(void* context, int64_t item);

private:
    Pool();
    void run_erased(int64_t items, Call call, void* context);

    struct Team;
    struct Shared;
    std::unique_ptr<Shared> shared_;
};

}  // namespace bonsai
