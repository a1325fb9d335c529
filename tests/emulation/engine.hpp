// Runs GPU kernels on a CPU: one fiber per GPU thread ("lane"), 32-lane warps (simdgroups), blocks
// (threadgroups) with barriers, and strict checks. The language shims are built on it.
//
// What it refuses, naming the line: a barrier or warp operation that some lanes do not reach, lanes
// of one warp in different warp operations, masks that name exited lanes, a shuffle from a lane
// that takes no part. Lanes run in an order that the caller chooses (forward, reverse, shuffled
// anew after every switch); a result that depends on it is a race. races.cpp finds races and stray
// accesses one by one. What it cannot show: speed, registers, the memory model inside a warp,
// contraction of floating-point operations, alignment (x86 tolerates it; the shims check it).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__) && !defined(GPUEMU_UCONTEXT)
#define GPUEMU_ASM 1  // 16 ns for a switch there and back; swapcontext takes 870
#else
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace gpuemu {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 128 * 1024;
constexpr size_t SHARED_GAP = 256;  // between shared arrays, so that an index beyond one is seen

struct u3 {
    unsigned x, y, z;
};

enum class St : uint8_t { Ready, WaitWarp, WaitGroup, Done };
enum class Order : int { Forward = 0, Reverse = 1, Shuffle = 2 };

// A place in the source. A plain line number will do where the file is clear.
struct Where {
    const char* file;
    int line;
    Where(int line) : file(""), line(line) {}
    Where(const char* file, int line) : file(file), line(line) {}
    static Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
    bool operator==(const Where& o) const { return line == o.line && (file == o.file || !strcmp(file, o.file)); }
    bool operator!=(const Where& o) const { return !(*this == o); }
    std::string text() const {
        const char* slash = strrchr(file, '/');
        const std::string name = slash ? slash + 1 : file;
        return name.empty() ? "line " + std::to_string(line) : name + ":" + std::to_string(line);
    }
};

[[noreturn]] inline void fail(const std::string& message) {
    throw std::runtime_error("gpuemu: " + message);
}

// One GPU thread: its fiber, its place in the group, and what it waits for.
struct Lane {
    void* sp = nullptr;  // of the suspended fiber
    char* stack = nullptr;
    St st = St::Done;
    u3 tid{};
    unsigned lin = 0;              // linear index in the group
    uint32_t want = 0;             // mask of the warp operation it waits in; 0: all live lanes
    uint32_t part = 0;             // the lanes that took part in the last one
    int op = 0;                    // what it waits in, so that different operations do not meet
    bool orders = false;           // the operation orders memory
    Where where{0};
    unsigned count = 0;            // warp operations so far; its parity chooses the slot
    unsigned shared_seen = 0;      // shared arrays met so far
    uint64_t warp_sync = 0;        // tick of the last operation that ordered its warp's memory
    alignas(16) unsigned char slot[2][64];
#ifndef GPUEMU_ASM
    ucontext_t context;
#endif
};

// A shared array of the group that runs: the n-th that each lane declares is the same one.
struct SharedArray {
    size_t offset, bytes;
    Where where;
};

// One block (threadgroup) while it runs.
struct Group {
    std::vector<Lane> lanes;
    u3 gid{}, tg{}, tg_nominal{}, ngroups{}, grid{};
    const std::function<void()>* body = nullptr;
    std::exception_ptr err;
    std::vector<unsigned char> dyn;     // dynamic shared memory
    size_t dyn_bytes = 0;
    std::vector<unsigned char> shared;  // declared arrays, filled with 0xFF at the start
    size_t shared_used = 0, shared_limit = 48 * 1024;
    std::vector<SharedArray> arrays;
    uint64_t start = 0, phase = 0;      // ticks of its start and of its last barrier
    uint64_t acquired = 0;              // what other groups wrote before this tick it may read
    void* scheduler_sp = nullptr;
#ifndef GPUEMU_ASM
    ucontext_t scheduler;
#endif
};

inline Group*& grp() {
    static thread_local Group* group = nullptr;
    return group;
}
inline Lane*& self() {
    static thread_local Lane* lane = nullptr;
    return lane;
}
// Counts synchronisations of everything that runs on this OS thread; see races.cpp.
inline uint64_t& tick() {
    static thread_local uint64_t now = 1;
    return now;
}

// ---- fibers -------------------------------------------------------------------------------------

#ifdef GPUEMU_ASM
// Saves the registers that a call must keep, and the stack pointer in *save; continues at `to`.
extern "C" void gpuemu_switch(void** save, void* to);
asm(R"(
.text
.weak gpuemu_switch
.type gpuemu_switch,@function
gpuemu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size gpuemu_switch,.-gpuemu_switch
)");
#endif

inline void yield_to_main() {
#ifdef GPUEMU_ASM
    gpuemu_switch(&self()->sp, grp()->scheduler_sp);
#else
    swapcontext(&self()->context, &grp()->scheduler);
#endif
}

inline void lane_main() {
    try {
        (*grp()->body)();
    } catch (...) {
        if (!grp()->err) grp()->err = std::current_exception();
    }
    self()->st = St::Done;
    for (;;) yield_to_main();
}

inline void start_lane(Lane& lane) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(lane.stack, STACK_BYTES);  // frames before never returned
#endif
#ifdef GPUEMU_ASM
    void** top = reinterpret_cast<void**>(lane.stack + STACK_BYTES - 64);
    *--top = nullptr;  // where lane_main would return to: keeps the stack aligned as in a call
    *--top = reinterpret_cast<void*>(&lane_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    lane.sp = top;
#else
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack;
    lane.context.uc_stack.ss_size = STACK_BYTES;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, lane_main, 0);
#endif
    lane.st = St::Ready;
    lane.count = lane.shared_seen = 0;
}

inline void resume(Group& g, Lane& lane) {
    self() = &lane;
#ifdef GPUEMU_ASM
    gpuemu_switch(&g.scheduler_sp, lane.sp);
#else
    swapcontext(&g.scheduler, &lane.context);
#endif
}

// Stacks are kept by each OS thread from launch to launch.
struct Stacks {
    std::vector<char*> all;
    char* get(size_t i) {
        while (all.size() <= i)
            all.push_back(static_cast<char*>(::aligned_alloc(4096, STACK_BYTES)));
        return all[i];
    }
    ~Stacks() {
        for (char* stack : all) std::free(stack);
    }
};

// ---- what the shims use -------------------------------------------------------------------------

inline unsigned lane_id() { return self()->lin % WARP; }

inline void group_barrier(Where where) {
    Lane* lane = self();
    lane->st = St::WaitGroup;
    lane->where = where;
    lane->op = 1;
    yield_to_main();
}

// The values that the lanes of a warp operation published.
struct Peers {
    Lane* base;
    unsigned par, n;  // slot, lanes in this warp
    uint32_t mask;
    Where where;
    bool in(unsigned i) const { return i < n && (mask >> i & 1); }
    template <class T>
    T get(unsigned i) const {
        if (!in(i)) {
            fail("warp operation at " + where.text() + " reads lane " + std::to_string(i) +
                 ", which takes no part");
        }
        T value;
        memcpy(&value, base[i].slot[par], sizeof(T));
        return value;
    }
};

// A warp operation: publishes `value`, waits for every lane of `mask` (0: every live lane).
// `orders`: it also orders the memory accesses of these lanes, as __syncwarp does and shuffles
// do not.
template <class T>
inline Peers exchange(const T& value, int op, Where where, uint32_t mask = 0,
                      bool orders = false) {
    static_assert(sizeof(T) <= 64, "larger than a slot");
    Lane* lane = self();
    const unsigned par = lane->count++ & 1;
    memcpy(lane->slot[par], &value, sizeof(T));
    if (mask && !(mask >> lane_id() & 1))
        fail("warp operation at " + where.text() + ": its mask leaves out the calling lane");
    lane->want = mask;
    lane->op = op;
    lane->where = where;
    lane->orders = orders;
    lane->st = St::WaitWarp;
    yield_to_main();
    Group& g = *grp();
    const unsigned first = lane->lin / WARP * WARP;
    const unsigned n = unsigned(g.lanes.size()) - first;
    return Peers{&g.lanes[first], par, n < WARP ? n : WARP, lane->part, where};
}

// Memory for the next shared array that this lane declares; all lanes must declare the same ones.
inline void* shared_bytes(size_t bytes, Where where) {
    Group& g = *grp();
    const unsigned i = self()->shared_seen++;
    if (i == g.arrays.size()) {
        const size_t offset = g.shared_used;
        g.shared_used += (bytes + 127) / 128 * 128 + SHARED_GAP;
        size_t total = bytes;
        for (const SharedArray& a : g.arrays) total += a.bytes;
        if (total > g.shared_limit || g.shared_used > g.shared.size() - 128)
            fail("shared arrays of " + std::to_string(total) + " bytes at " + where.text());
        g.arrays.push_back({offset, bytes, where});
    }
    const SharedArray& a = g.arrays[i];
    if (a.bytes != bytes || a.where != where)
        fail("lanes declare different shared arrays: " + where.text() + ", " + a.where.text());
    const uintptr_t base = (reinterpret_cast<uintptr_t>(g.shared.data()) + 127) & ~uintptr_t(127);
    return reinterpret_cast<void*>(base + a.offset);
}

template <class T>
inline T& shared(Where where) {
    return *static_cast<T*>(shared_bytes(sizeof(T), where));
}

inline void* dyn_smem() {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(grp()->dyn.data()) + 127) &
                                   ~uintptr_t(127));
}

// The calling group may from now on read what groups wrote that have done this before it; what an
// atomic operation after a fence amounts to.
inline void acquire() { grp()->acquired = ++tick(); }

// ---- the scheduler ------------------------------------------------------------------------------

struct Shuffler {
    Order order;
    uint64_t state;
    // `list` becomes the order in which `count` things run.
    void permute(std::vector<unsigned>& list, unsigned count) {
        list.resize(count);
        for (unsigned i = 0; i < count; ++i) list[i] = order == Order::Reverse ? count - 1 - i : i;
        if (order != Order::Shuffle) return;
        for (unsigned i = count; i > 1; --i) {
            state = state * 6364136223846793005ULL + 1442695040888963407ULL;
            std::swap(list[i - 1], list[(state >> 33) % i]);
        }
    }
};

// Lets go every set of lanes whose warp operation is complete; true if there was one.
inline bool release_warp(Lane* lanes, unsigned n) {
    const uint32_t all = n == WARP ? ~0u : (1u << n) - 1;
    uint32_t live = 0, waiting = 0;
    for (unsigned i = 0; i < n; ++i) {
        live |= uint32_t(lanes[i].st != St::Done) << i;
        waiting |= uint32_t(lanes[i].st == St::WaitWarp) << i;
    }
    bool released = false;
    for (unsigned i = 0; i < n; ++i) {
        const Lane& lead = lanes[i];  // what is read of it does not change on release
        if (lead.st != St::WaitWarp) continue;
        if (lead.want & ~live & all)
            fail("warp operation at " + lead.where.text() + ": its mask names exited lanes");
        const uint32_t need = (lead.want ? lead.want : live) & all;
        if ((need & waiting) != need) continue;
        const uint64_t now = lead.orders ? ++tick() : 0;
        for (unsigned j = 0; j < n; ++j) {
            if (!(need >> j & 1)) continue;
            Lane& peer = lanes[j];
            if (peer.op != lead.op || peer.where != lead.where || peer.want != lead.want) {
                fail("divergent warp operation: lane " + std::to_string(i) + " at " +
                     lead.where.text() + " but lane " + std::to_string(j) + " at " +
                     peer.where.text() + (peer.want != lead.want ? " (masks differ)" : ""));
            }
            if (lead.orders) peer.warp_sync = now;
            peer.st = St::Ready;
            peer.part = need;
            waiting &= ~(1u << j);
        }
        released = true;
    }
    return released;
}

// Runs one warp until it is done or waits for the whole group; true if any lane ran.
inline bool run_warp(Group& g, unsigned first, Shuffler& shuffler, std::vector<unsigned>& order) {
    const unsigned left = unsigned(g.lanes.size()) - first, n = left < WARP ? left : WARP;
    bool ran = false;
    do {
        shuffler.permute(order, n);
        for (unsigned i : order) {
            Lane& lane = g.lanes[first + i];
            if (lane.st != St::Ready) continue;
            resume(g, lane);
            ran = true;
            if (g.err) std::rethrow_exception(g.err);
        }
    } while (release_warp(&g.lanes[first], n));
    return ran;
}

// After all warps ran as far as they can: opens the barrier, or says what is wrong. False: done.
inline bool pass_barrier(Group& g, bool ran) {
    unsigned alive = 0, waiting = 0;
    const Lane *at = nullptr, *stuck = nullptr;
    for (const Lane& lane : g.lanes) {
        alive += lane.st != St::Done;
        if (lane.st == St::WaitGroup) ++waiting, at = &lane;
        if (lane.st == St::WaitWarp) stuck = &lane;
    }
    if (!alive) return false;
    if (waiting == alive) {
        if (alive != g.lanes.size())
            fail("barrier at " + at->where.text() + " not reached by threads that exited early");
        for (Lane& lane : g.lanes) {
            if (lane.where != at->where)
                fail("threads wait at different barriers, " + at->where.text() + " and " +
                     lane.where.text());
        }
        for (Lane& lane : g.lanes) lane.st = St::Ready;
        g.phase = ++tick();
    } else if (!ran) {
        std::string text = "deadlock: a warp operation at " + stuck->where.text();
        text += at ? " and a barrier at " + at->where.text() + " wait for each other's lanes"
                   : " waits for lanes that do not come";
        fail(text);
    }
    return true;
}

inline void run_group(Group& g, Order order, uint64_t seed) {
    Shuffler shuffler{order, seed * 6364136223846793005ULL + 1442695040888963407ULL};
    std::vector<unsigned> warps, lanes;
    const unsigned count = (unsigned(g.lanes.size()) + WARP - 1) / WARP;
    bool ran;
    do {
        shuffler.permute(warps, count);
        ran = false;
        for (unsigned w : warps) ran |= run_warp(g, w * WARP, shuffler, lanes);
    } while (pass_barrier(g, ran));
}

struct Cfg {
    Order order = Order::Forward;
    uint64_t seed = 1;
    int threads = 1;                       // OS threads that share the groups
    size_t shared_limit = 48 * 1024;       // bytes of declared shared arrays a group may have
};

inline void set_up_group(Group& g, uint64_t i, Stacks& stacks) {
    g.gid = u3{unsigned(i % g.ngroups.x), unsigned(i / g.ngroups.x % g.ngroups.y),
               unsigned(i / g.ngroups.x / g.ngroups.y)};
    const auto cut = [](unsigned size, unsigned grid, unsigned id) {
        return grid - size * id < size ? grid - size * id : size;
    };
    const u3 t = g.tg_nominal;
    g.tg = u3{cut(t.x, g.grid.x, g.gid.x), cut(t.y, g.grid.y, g.gid.y), cut(t.z, g.grid.z, g.gid.z)};
    g.lanes.resize(size_t(g.tg.x) * g.tg.y * g.tg.z);
    g.dyn.assign(g.dyn_bytes + 128 + SHARED_GAP, 0xFF);
    memset(g.shared.data(), 0xFF, g.shared.size());
    g.arrays.clear();
    g.shared_used = 0;
    g.start = g.phase = ++tick();
    for (unsigned k = 0; k < g.lanes.size(); ++k) {
        Lane& lane = g.lanes[k];
        lane.lin = k;
        lane.tid = u3{k % g.tg.x, k / g.tg.x % g.tg.y, k / g.tg.x / g.tg.y};
        lane.stack = stacks.get(k);
        lane.warp_sync = g.start;
        start_lane(lane);
    }
}

// Runs `body` once for every thread of a grid, which is given in THREADS (as Metal's
// dispatchThreads does; a CUDA launch passes blocks * block). Throws what the checks find.
inline void launch(u3 grid, u3 tg, const std::function<void()>& body, Cfg cfg,
                   size_t dyn_bytes = 0) {
    const u3 n{(grid.x + tg.x - 1) / tg.x, (grid.y + tg.y - 1) / tg.y, (grid.z + tg.z - 1) / tg.z};
    const uint64_t total = uint64_t(n.x) * n.y * n.z;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> stop{false};
    std::exception_ptr first;
    const auto worker = [&] {
        static thread_local Stacks stacks;
        Group g;
        Group* const outer = grp();
        grp() = &g;
        g.tg_nominal = tg, g.ngroups = n, g.grid = grid, g.body = &body, g.dyn_bytes = dyn_bytes;
        g.shared_limit = cfg.shared_limit;
        g.shared.resize(2 * cfg.shared_limit + 64 * SHARED_GAP);
        const uint64_t begun = ++tick();
        try {
            for (uint64_t i; (i = next++) < total && !stop;) {
                if (cfg.order == Order::Reverse) i = total - 1 - i;
                g.acquired = begun;
                set_up_group(g, i, stacks);
                run_group(g, cfg.order, cfg.seed + i);
            }
        } catch (...) {
            if (!stop.exchange(true)) first = std::current_exception();
        }
        grp() = outer;
    };
    std::vector<std::thread> others;
    for (int i = 1; i < cfg.threads; ++i) others.emplace_back(worker);
    worker();
    for (std::thread& thread : others) thread.join();
    if (first) std::rethrow_exception(first);
}

}  // namespace gpuemu
