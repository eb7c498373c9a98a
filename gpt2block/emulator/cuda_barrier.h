// cuda::barrier, cuda::pipeline and cuda::memcpy_async. A copy that belongs to a barrier arrives when a thread waits
// for the barrier's phase: see async_copies.h.
#pragma once
#include <aligned_size.h>
#include <cuda_atomic.h>
#include <cuda_pipeline.h>

#define CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace cuda {

template <thread_scope SCOPE>
class barrier {
    struct State {
        unsigned short expected, pending;
        unsigned phase;
    };
    alignas(8) State state_;

    struct Token {
        unsigned phase;
    };

    // Changes the numbers of expected and pending threads, and begins the next phase if no thread is pending.
    __forceinline__ Token update(int drops, int arrivals, const char* file, int line) {
        cuda_on_cpu::fence(SCOPE < thread_scope_block);
        cuda_on_cpu::atomic(&state_, sizeof state_);
        const State old = cuda_on_cpu::modified(&state_, [&](const State& old) -> State {
            State now = old;
            now.expected -= drops;
            now.pending -= arrivals;
            if (now.pending == 0) now.pending = now.expected, ++now.phase;
            return now;
        });
        if (old.expected > 1024) cuda_on_cpu::stop("cuda::barrier: it is used before init()", file, line);
        if (old.pending < arrivals) {
            cuda_on_cpu::stop("cuda::barrier: more arrivals than the number that init() expects", file, line);
        }
        return {old.phase};
    }

public:
    typedef Token arrival_token;

    barrier() = default;
    barrier(const barrier&) = delete;
    __forceinline__ explicit barrier(::std::ptrdiff_t count) { init(this, count); }

    friend __forceinline__ void init(barrier* self, ::std::ptrdiff_t count) {
        self->state_.expected = count;
        self->state_.pending = count;
        self->state_.phase = 0;
    }

    __forceinline__ Token arrive(::std::ptrdiff_t arrivals = 1, CALL_SITE) { return update(0, arrivals, file, line); }
    __forceinline__ void arrive_and_drop(CALL_SITE) { update(1, 1, file, line); }
    __forceinline__ void arrive_and_wait(CALL_SITE) { wait(arrive(1, file, line)); }

    __forceinline__ unsigned phase() const {
        cuda_on_cpu::atomic_read(&state_, sizeof state_);
        const State now = cuda_on_cpu::modified(const_cast<State*>(&state_), [](const State& old) { return old; });
        return now.phase;
    }
    // Returns whether the phase of the token is complete.
    __forceinline__ bool try_wait(const Token& token) const {
        const unsigned now = phase();
        if (now == token.phase) return false;
        cuda_on_cpu_pipeline::finish_bound(this, now);
        return true;
    }
    __forceinline__ void wait(const Token& token) const {
        while (!try_wait(token)) cuda_on_cpu::sleep();
    }
    __forceinline__ bool try_wait_parity(bool parity) const {
        const unsigned now = phase();
        return now % 2 != parity && try_wait({now - 1});
    }
    __forceinline__ void wait_parity(bool parity) const {
        while (!try_wait_parity(parity)) cuda_on_cpu::sleep();
    }
};

namespace std {
template <typename = void>
using barrier = cuda::barrier<thread_scope_system>;
}  // namespace std

template <thread_scope SCOPE, unsigned STAGES>
struct pipeline_shared_state {
    struct Stage {
        barrier<SCOPE> produced, consumed;
    } stages[STAGES];
    unsigned producers;
};

enum class pipeline_role { producer, consumer };

template <thread_scope SCOPE>
class pipeline {
    typedef typename pipeline_shared_state<SCOPE, 1>::Stage Stage;
    Stage* stages_;
    unsigned count_, head_ = 0, tail_ = 0;  // head_, tail_: numbers of commits and of releases

public:
    pipeline(Stage* stages, unsigned count) : stages_(stages), count_(count) {}
    pipeline(pipeline&&) = default;

    // The stage that the producers fill.
    barrier<SCOPE>& filled() const { return stages_[head_ % count_].produced; }

    __forceinline__ void producer_acquire() { stages_[head_ % count_].consumed.wait_parity(head_ / count_ % 2 == 0); }
    __forceinline__ void producer_commit(CALL_SITE) { filled().arrive(1, file, line), ++head_; }
    __forceinline__ void consumer_wait() { stages_[tail_ % count_].produced.wait_parity(tail_ / count_ % 2); }
    __forceinline__ void consumer_release(CALL_SITE) { stages_[tail_++ % count_].consumed.arrive(1, file, line); }
    bool quit() { return true; }
};

template <>
class pipeline<thread_scope_thread> {
    unsigned head_ = 0, tail_ = 0;

public:
    pipeline() = default;
    pipeline(pipeline&&) = default;

    void producer_acquire() {}
    void producer_commit() { __pipeline_commit(), ++head_; }
    __forceinline__ void consumer_wait() {
        if (head_ != tail_) __pipeline_wait_prior(head_ - ++tail_);
    }
    void consumer_release() {}
    bool quit() { return true; }
    __forceinline__ void wait_prior(unsigned later) {
        __pipeline_wait_prior(later);
        tail_ = head_ - later;
    }
};

inline pipeline<thread_scope_thread> make_pipeline() { return {}; }

template <unsigned LATER>
__forceinline__ void pipeline_consumer_wait_prior(pipeline<thread_scope_thread>& pipe) {
    pipe.wait_prior(LATER);
}

template <typename Group, thread_scope SCOPE, unsigned STAGES>
__forceinline__ pipeline<SCOPE> make_pipeline(const Group& group, pipeline_shared_state<SCOPE, STAGES>* state,
                                              ::std::size_t producers, ::std::size_t consumers, CALL_SITE) {
    if (group.thread_rank() == 0) {
        for (auto& stage : state->stages) {
            init(&stage.produced, producers);
            init(&stage.consumed, consumers);
        }
    }
    group.sync(file, line);
    return {reinterpret_cast<typename pipeline_shared_state<SCOPE, 1>::Stage*>(state->stages), STAGES};
}

template <typename Group, thread_scope SCOPE, unsigned STAGES>
__forceinline__ pipeline<SCOPE> make_pipeline(const Group& group, pipeline_shared_state<SCOPE, STAGES>* state,
                                              CALL_SITE) {
    return make_pipeline(group, state, group.size(), group.size(), file, line);
}

template <typename Group, thread_scope SCOPE, unsigned STAGES>
__forceinline__ pipeline<SCOPE> make_pipeline(const Group& group, pipeline_shared_state<SCOPE, STAGES>* state,
                                              ::std::size_t producers, CALL_SITE) {
    return make_pipeline(group, state, producers, group.size() - producers, file, line);
}

template <typename Group, thread_scope SCOPE, unsigned STAGES>
__forceinline__ pipeline<SCOPE> make_pipeline(const Group& group, pipeline_shared_state<SCOPE, STAGES>* state,
                                              pipeline_role role, CALL_SITE) {
    if (group.thread_rank() == 0) state->producers = 0;
    group.sync(file, line);
    const atomic_ref<unsigned, SCOPE> count(state->producers);
    if (role == pipeline_role::producer) count.fetch_add(1);
    group.sync(file, line);
    return make_pipeline(group, state, ::std::size_t(count.load()), file, line);
}

// Copies by a group. The last argument is a barrier or a pipeline.
template <typename Group, typename Size, thread_scope SCOPE>
__forceinline__ void memcpy_async(const Group& group, void* to, const void* from, Size size, barrier<SCOPE>& barrier,
                                  CALL_SITE) {
    cuda_on_cpu_sizes::check(to, from, size, file, line);
    cuda_on_cpu_pipeline::begin_shared(group, to, from, size, &barrier, barrier.phase());
}

template <typename Group, typename Size, thread_scope SCOPE>
__forceinline__ void memcpy_async(const Group& group, void* to, const void* from, Size size, pipeline<SCOPE>& pipe,
                                  CALL_SITE) {
    if constexpr (SCOPE == thread_scope_thread) {
        cuda_on_cpu_sizes::check(to, from, size, file, line);
        cuda_on_cpu_pipeline::begin_shared(group, to, from, size);
    } else {
        memcpy_async(group, to, from, size, pipe.filled(), file, line);
    }
}

// Copies by one thread.
template <typename Size, typename Completion>
__forceinline__ void memcpy_async(void* to, const void* from, Size size, Completion& completion, CALL_SITE) {
    memcpy_async(cuda_on_cpu_pipeline::ThisThread(), to, from, size, completion, file, line);
}

}  // namespace cuda

#undef CALL_SITE
