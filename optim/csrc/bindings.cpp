// optim._cpu: the kernels as Python functions on addresses. optim/cpu_adam.py and optim/cpu_norm.py check the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "adam.h"
#include "norm.h"
#include "pool.h"

namespace nb = nanobind;

namespace gemini {

AdamRange adam_range(Level level) {
    switch (level) {
#ifdef GEMINI_X86
        case Level::avx512: return avx512::adam_update;
        case Level::avx2: return avx2::adam_update;
#endif
        default: return portable::adam_update;
    }
}

NormTiles norm_tiles(Level level) {
    switch (level) {
#ifdef GEMINI_X86
        case Level::avx512: return avx512::add_squares;
        case Level::avx2: return avx2::add_squares;
#endif
        default: return portable::add_squares;
    }
}

namespace {

constexpr int64_t least_elements = 1 << 15;  // that are worth a thread
constexpr int64_t least_tiles = 1 << 8;

// Two shares a thread, long runs of memory each: a thread that is late leaves one to the others.
int64_t share_of(int64_t count, int num_threads, int64_t least) {
    return std::max(least, (count / (2 * int64_t(num_threads)) / 64 + 1) * 64);
}

// weight, grad, exp_avg, exp_avg_sq, half, remainder, numel, grad type, layout, moments, their scales, key and first
using RawPiece = std::array<uint64_t, 14>;
// The address of the entries, then borders, powers, sizes, first and top: of exp_avg, then of exp_avg_sq.
using RawMap = std::pair<uint64_t, std::array<float, 24>>;
using RawMaps = std::array<RawMap, 2>;

template <class T>
T* at(uint64_t address) {
    return reinterpret_cast<T*>(uintptr_t(address));
}

AdamPiece piece_of(const RawPiece& raw) {
    return AdamPiece{at<void>(raw[0]),      at<const void>(raw[1]), at<void>(raw[2]),       at<void>(raw[3]),
                     at<void>(raw[4]),      at<int16_t>(raw[5]),    int64_t(raw[6]),        GradType(int(raw[7])),
                     Layout(int(raw[8])),   Moments(int(raw[9])),   at<float>(raw[10]),     at<float>(raw[11]),
                     raw[12],               raw[13]};
}

DynamicMap map_of(const RawMap& raw) {
    DynamicMap map{at<const float>(raw.first), {}, {}, {}, int32_t(raw.second[22]), int32_t(raw.second[23])};
    std::copy_n(raw.second.begin(), 8, map.borders);
    std::copy_n(raw.second.begin() + 8, 7, map.powers);
    std::copy_n(raw.second.begin() + 15, 7, map.sizes);
    return map;
}

// A border between two threads' elements: blocks of moments are not cut.
int64_t border_of(const AdamPiece& piece, int64_t element) {
    if (piece.moments != Moments::blocks) return element;
    return std::min(piece.numel, (element + moment_block - 1) / moment_block * moment_block);
}

AdamScalars scalars_of(const std::array<float, 11>& s) {
    return AdamScalars{s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10]};
}

// The pieces lie one after the other in one range of elements, which is cut without regard to their borders.
void adam(const std::vector<RawPiece>& raw, const std::array<float, 11>& numbers, const RawMaps& raw_maps, int num_threads,
          const std::string& level) {
    const AdamRange update = adam_range(level_called(level));
    const AdamScalars scalars = scalars_of(numbers);
    const DynamicMaps maps{map_of(raw_maps[0]), map_of(raw_maps[1])};
    std::vector<AdamPiece> pieces;
    std::vector<int64_t> ends;
    int64_t total = 0;
    for (const RawPiece& each : raw) {
        pieces.push_back(piece_of(each));
        ends.push_back(total += pieces.back().numel);
    }
    parallel_for(total, share_of(total, num_threads, least_elements), num_threads, [&](int64_t begin, int64_t end) {
        auto number = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
        while (begin < end) {
            const AdamPiece& piece = pieces[number];
            const int64_t start = ends[number] - piece.numel, stop = std::min(end, ends[number]);
            const int64_t first = border_of(piece, begin - start), last = border_of(piece, stop - start);
            if (first < last) update(piece, scalars, maps, first, last);
            begin = std::max(begin, stop);
            ++number;
        }
    });
}

// Adds to the limbs at `limbs`; returns the index of the first element that is not finite, or -1.
int64_t sum_of_squares(uint64_t limbs, uint64_t values, int64_t numel, int type, int num_threads, const std::string& level) {
    const NormTiles add = norm_tiles(level_called(level));
    std::mutex mutex;
    int64_t first_bad = -1;
    const int64_t num_tiles = (numel + tile_numel - 1) / tile_numel;
    parallel_for(num_tiles, share_of(num_tiles, num_threads, least_tiles), num_threads, [&](int64_t first, int64_t last) {
        std::array<int64_t, num_limbs> local{};
        const int64_t bad = add(at<const void>(values), ValueType(type), numel, first, last, local.data());
        std::lock_guard<std::mutex> lock(mutex);
        for (int i = 0; i < num_limbs; ++i) at<int64_t>(limbs)[i] += local[size_t(i)];
        if (bad >= 0 && (first_bad < 0 || bad < first_bad)) first_bad = bad;
    });
    return first_bad;
}

std::vector<std::string> level_names() {
    std::vector<std::string> names;
    for (Level level : levels()) names.emplace_back(name_of(level));
    return names;
}

}  // namespace

}  // namespace gemini

NB_MODULE(_cpu, m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.doc() = "Kernels of optim on addresses; see optim.cpu_adam and optim.cpu_norm.";
    m.def("levels", &gemini::level_names);
    m.def("adam", &gemini::adam, nb::arg("pieces"), nb::arg("scalars"), nb::arg("maps"), nb::arg("num_threads"), nb::arg("level"),
          release());
    m.def("sum_of_squares", &gemini::sum_of_squares, nb::arg("limbs"), nb::arg("values"), nb::arg("numel"),
          nb::arg("type"), nb::arg("num_threads"), nb::arg("level"), release());
}
