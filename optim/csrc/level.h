// Instruction levels. The *_level.cpp files are compiled once a level, each time into a namespace of its own, with
// contraction off: every level gives the same bits, faster ones just take more elements at once.
#pragma once

#include <string>
#include <vector>

#ifndef GEMINI_LEVEL
#define GEMINI_LEVEL portable
#endif

namespace gemini {

enum class Level { portable, avx2, avx512 };

// The levels that this machine has, best first.
std::vector<Level> levels();
const char* name_of(Level level);
// Throws std::invalid_argument for a level that this machine lacks.
Level level_called(const std::string& name);

}  // namespace gemini
