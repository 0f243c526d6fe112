#include "level.h"

#include <stdexcept>

namespace gemini {

std::vector<Level> levels() {
    std::vector<Level> found;
#ifdef GEMINI_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        found.push_back(Level::avx512);
    if (avx2) found.push_back(Level::avx2);
#endif
    found.push_back(Level::portable);
    return found;
}

const char* name_of(Level level) {
    switch (level) {
        case Level::avx512: return "avx512";
        case Level::avx2: return "avx2";
        default: return "portable";
    }
}

Level level_called(const std::string& name) {
    std::string known;
    for (Level level : levels()) {
        if (name == name_of(level)) return level;
        known += std::string(known.empty() ? "" : ", ") + name_of(level);
    }
    throw std::invalid_argument("level must be one that this machine has (" + known + "), found \"" + name + "\"");
}

}  // namespace gemini
