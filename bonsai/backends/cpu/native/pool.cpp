// A job is a counter of items left. Whoever lowers it owns an item, so a worker that wakes late
// finds nothing and nobody waits for it. Idle workers spin briefly, since the next op of a forward
// follows within microseconds, and then sleep.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#endif
#if defined(_M_X64) || defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bonsai {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than the Python between two ops, shorter than anyone notices on a laptop's battery.
constexpr auto kSpin = std::chrono::microseconds(100);

void pause() {
#if defined(_M_X64) || defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    __asm__ volatile("yield");
#endif
}

// True as soon as `ready` is; false after kSpin.
template <class Ready>
bool spin_until(Ready&& ready) {
    const auto end = Clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (Clock::now() < end);
    return false;
}

}  // namespace

// What callers and workers of one size share. Workers hold it, so it outlives a resize.
struct Pool::Team {
    // High half: number of the job, so that no two states are alike. Low half: items left.
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> unfinished{0};
    std::atomic<int> sleeping{0};
    std::atomic<bool> stop{false};
    std::atomic<bool> out_of_memory{false};
    std::mutex mutex;
    std::condition_variable wake;
    // Of the current job; read only while owning one of its items.
    Call call = nullptr;
    void* context = nullptr;
    int64_t items = 0;

    bool idle() const { return uint32_t(ticket.load()) == 0 && !stop.load(); }

    // Works on items of the current job until none is left.
    void work() {
        uint64_t state = ticket.load(std::memory_order_acquire);
        while (uint32_t(state) != 0) {
            if (!ticket.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel))
                continue;
            const int64_t item = items - int64_t(uint32_t(state));
            try {
                call(context, item);
            } catch (const std::bad_alloc&) {
                out_of_memory = true;
            }
            unfinished.fetch_sub(1, std::memory_order_acq_rel);
            state = ticket.load(std::memory_order_acquire);
        }
    }

    void sleep() {
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1);
        // The publisher stores the ticket before it reads `sleeping`: one of us sees the other.
        wake.wait(lock, [this] { return !idle(); });
        sleeping.fetch_sub(1);
    }

    void wake_all() {
        if (sleeping.load() == 0) return;
        {
            std::lock_guard<std::mutex> lock(mutex);
        }
        wake.notify_all();
    }

    void loop() {
        while (!stop.load()) {
            if (!spin_until([this] { return !idle(); })) sleep();
            work();
        }
    }
};

struct Pool::Shared {
    std::mutex turn;  // held while a job runs
    std::atomic<int> threads{1};
    std::shared_ptr<Team> team;

    void start() {
        team = std::make_shared<Team>();
        for (int i = 1; i < threads; ++i) {
            try {
                // Detached: at exit the process ends them, asleep or not; joining in a static
                // destructor would hang on Windows.
                std::thread([team = team] { team->loop(); }).detach();
            } catch (const std::system_error&) {
                return;  // fewer workers are slower, not wrong
            }
        }
    }

    void dismiss() {
        if (!team) return;
        team->stop = true;
        team->wake_all();
        team.reset();
    }
};

Pool::Pool() : shared_(new Shared) {}

namespace {

// Never destroyed: workers may still look at it while the process exits.
std::atomic<Pool*> pool{nullptr};

}  // namespace

Pool& Pool::shared() {
    static const bool created = [] {
        pool = new Pool;
#ifndef _WIN32
        // The parent's pool may be locked and has no threads here, so the child forgets it.
        pthread_atfork(nullptr, nullptr, [] {
            Pool* fresh = new Pool;
            fresh->shared_->threads = pool.load()->threads();
            pool = fresh;
        });
#endif
        return true;
    }();
    (void)created;
    return *pool.load();
}

int Pool::threads() const { return shared_->threads; }

void Pool::resize(int threads) {
    if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be 1 to 1024");
    std::lock_guard<std::mutex> lock(shared_->turn);
    if (threads == shared_->threads) return;
    shared_->dismiss();
    shared_->threads = threads;
}

void Pool::run_erased(int64_t items, Call call, void* context) {
    if (items <= 0) return;
    std::unique_lock<std::mutex> lock(shared_->turn, std::defer_lock);
    if (items > 1) lock.lock();
    if (items == 1 || shared_->threads == 1 || items > INT32_MAX) {
        for (int64_t item = 0; item < items; ++item) call(context, item);
        return;
    }
    if (!shared_->team) shared_->start();
    Team& team = *shared_->team;
    team.call = call;
    team.context = context;
    team.items = items;
    team.unfinished.store(items, std::memory_order_relaxed);
    const uint64_t job = (team.ticket.load(std::memory_order_relaxed) >> 32) + 1;
    team.ticket.store((job << 32) | uint64_t(items));
    team.wake_all();
    team.work();
    const auto done = [&team] { return team.unfinished.load(std::memory_order_acquire) == 0; };
    if (!spin_until(done)) {
        while (!done()) std::this_thread::yield();
    }
    if (team.out_of_memory.exchange(false)) throw std::bad_alloc();
}

}  // namespace bonsai
