// Access to register values of all lanes of a warp, for mma instructions. Included by mma.h and mma_ptx.h.
#pragma once

// Turns off checks in functions that access only registers of lanes, where a kernel cannot cause an invalid access.
#define UNCHECKED __attribute__((no_sanitize("address", "undefined", "thread")))

// The values of all lanes of a warp, which the lanes pass to the constructor together. The value of a lane that has
// returned is bytes of 0xFF.
template <typename V>
class OfWarp {
  public:
    UNCHECKED explicit OfWarp(const V& own, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        count_ = ++counts_[thread];
        lanes_ = &given_[count_ % 2][thread / 32 * 32];
        given_[count_ % 2][thread] = {own, count_};
        // After this exchange all lanes have read the previous values, whose memory the next values reuse.
        cuda_on_cpu::gather(0xffffffffu, 0, file, line);
    }

    UNCHECKED const V& operator[](int lane) const {
        const Given& given = lanes_[lane];
        return given.count == count_ ? given.value : none_;
    }

  private:
    struct Given {
        V value;
        unsigned count;  // number of values that the lane has passed so far
    };

    static V none() {
        V value;
        std::memset(&value, 0xFF, sizeof value);
        return value;
    }

    static inline const V none_ = none();
    static inline Given given_[2][1024];
    static inline unsigned counts_[1024];

    unsigned count_;
    const Given* lanes_;
};
