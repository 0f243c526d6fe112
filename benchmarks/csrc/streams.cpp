// How fast memory can be walked over as an update does it: each stream read, written or both, with one integer add for
// arithmetic. Benchmarks only. `increment` is 0 at run time, so memory that is read and written keeps its content.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t LINE = 64;  // bytes of a cache line, and of a vector
typedef uint32_t Vec __attribute__((vector_size(LINE), may_alias));

volatile uint32_t runtime_zero = 0;
volatile uint32_t sink = 0;

enum Mode : int64_t { READ = 0, READ_WRITE = 1, WRITE = 2 };

struct Stream {
    unsigned char* data;
    int64_t itemsize;
    int64_t mode;
};

template <bool NONTEMPORAL>
inline void store(unsigned char* at, Vec value) {
#if defined(__AVX512F__)
    if (NONTEMPORAL) return _mm512_stream_si512(reinterpret_cast<__m512i*>(at), reinterpret_cast<__m512i&>(value));
#elif defined(__AVX__)
    if (NONTEMPORAL) {
        __m256i halves[2];
        std::memcpy(halves, &value, LINE);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(at), halves[0]);
        return _mm256_stream_si256(reinterpret_cast<__m256i*>(at) + 1, halves[1]);
    }
#endif
    *reinterpret_cast<Vec*>(at) = value;
}

inline Vec spread(uint32_t value) { return Vec{} + value; }

template <bool NONTEMPORAL>
void walk(const Stream* streams, int64_t num_streams, int64_t begin, int64_t end, int64_t block, int64_t ahead) {
    const Vec increment = spread(runtime_zero);
    Vec seen = increment;
    for (int64_t at = begin; at < end; at += block) {
        const int64_t count = at + block < end ? block : end - at;
        for (int64_t s = 0; s < num_streams; ++s) {
            unsigned char* data = streams[s].data + at * streams[s].itemsize;
            const int64_t num_bytes = count * streams[s].itemsize;
            if (ahead) {
                for (int64_t i = 0; i < num_bytes; i += LINE) __builtin_prefetch(data + i + ahead, 0, 3);
            }
            switch (streams[s].mode) {
                case READ:
#pragma GCC unroll 4
                    for (int64_t i = 0; i < num_bytes; i += LINE) seen += *reinterpret_cast<Vec*>(data + i);
                    break;
                case READ_WRITE:
#pragma GCC unroll 4
                    for (int64_t i = 0; i < num_bytes; i += LINE)
                        store<NONTEMPORAL>(data + i, *reinterpret_cast<Vec*>(data + i) + increment);
                    break;
                default:
#pragma GCC unroll 4
                    for (int64_t i = 0; i < num_bytes; i += LINE) store<NONTEMPORAL>(data + i, increment);
            }
        }
    }
    sink = seen[0];
}

void sum(const unsigned char* data, int64_t num_bytes, int64_t lanes, int64_t ahead) {
    // `lanes` places are walked at once, each with accumulators of its own
    const int64_t stride = num_bytes / lanes / (4 * LINE) * (4 * LINE);
    Vec seen[4] = {spread(runtime_zero), spread(runtime_zero), spread(runtime_zero), spread(runtime_zero)};
    for (int64_t i = 0; i < stride; i += 4 * LINE) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
            const unsigned char* at = data + lane * stride + i;
            for (int k = 0; k < 4; ++k) {
                if (ahead) __builtin_prefetch(at + k * LINE + ahead, 0, 3);
                seen[k] += *reinterpret_cast<const Vec*>(at + k * LINE);
            }
        }
    }
    for (int64_t i = lanes * stride; i < num_bytes; i += LINE) seen[0] += *reinterpret_cast<const Vec*>(data + i);
    sink = seen[0][0] + seen[1][0] + seen[2][0] + seen[3][0];
}

template <typename Part>
void in_threads(int64_t num_items, int64_t granule, int64_t num_threads, Part part) {
    // contiguous parts, as a static schedule cuts them; this thread takes the first
    const int64_t share = (num_items / num_threads + granule - 1) / granule * granule;
    std::vector<std::thread> others;
    for (int64_t t = 1; t < num_threads; ++t) {
        const int64_t begin = t * share, end = begin + share < num_items ? begin + share : num_items;
        if (begin < end) others.emplace_back([=] { part(begin, end); });
    }
    part(int64_t{0}, share < num_items ? share : num_items);
    for (auto& other : others) other.join();
}

}  // namespace

extern "C" {

// 1 if stores past the cache are compiled in.
int has_nontemporal() {
#if defined(__AVX__)
    return 1;
#else
    return 0;
#endif
}

// Each stream: numel elements, 64-byte aligned; numel and block are multiples of 64. `ahead`: bytes, 0 for no prefetch.
void update_streams(const Stream* streams, int64_t num_streams, int64_t numel, int64_t num_threads, int64_t block,
                    int64_t ahead, int nontemporal) {
    in_threads(numel, block, num_threads, [=](int64_t begin, int64_t end) {
        if (nontemporal)
            walk<true>(streams, num_streams, begin, end, block, ahead);
        else
            walk<false>(streams, num_streams, begin, end, block, ahead);
#if defined(__AVX__)
        if (nontemporal) _mm_sfence();
#endif
    });
}

// num_bytes: a multiple of 64; data 64-byte aligned.
void read_stream(const unsigned char* data, int64_t num_bytes, int64_t num_threads, int64_t lanes, int64_t ahead) {
    in_threads(num_bytes, 4096, num_threads,
               [=](int64_t begin, int64_t end) { sum(data + begin, end - begin, lanes, ahead); });
}

}
