// Rows of GGUF blocks into tiles of 8 rows x 32 inputs (see cpu_weights.py): what cpu_gguf.py does with NumPy, for types
// whose codes already lie in the order of a tile. A plain C function: weights are repacked before jax has any array.
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kRows = 8;

template <int kWords>  // 4-byte words of codes in a block
void repack(const uint8_t* blocks, int64_t rows, int64_t row_blocks, uint32_t* data, uint16_t* scale,
            uint16_t* offset) {
  const int64_t codes_at = offset ? 4 : 2, block_bytes = codes_at + 4 * kWords;
  for (int64_t first = 0; first < rows; first += kRows) {
    for (int64_t b = 0; b < row_blocks; ++b) {
      for (int64_t r = 0; r < kRows; ++r) {
        uint32_t words[kWords] = {};
        uint16_t halves[2] = {};
        if (first + r < rows) {  // else padding: zeros
          const uint8_t* block = blocks + ((first + r) * row_blocks + b) * block_bytes;
          std::memcpy(halves, block, codes_at);
          std::memcpy(words, block + codes_at, sizeof(words));
        }
        for (int w = 0; w < kWords; ++w) data[w * kRows + r] = words[w];
        scale[r] = halves[0];
        if (offset) offset[r] = halves[1];
      }
      data += kWords * kRows;
      scale += kRows;
      if (offset) offset += kRows;
    }
  }
}

}  // namespace

// blocks: [rows, row_blocks] of a f16 scale, a f16 offset unless `offset` is null, and 32 codes of 4 or 8 bits.
// data: u8[rows / 8, row_blocks, bits, 8, 4]; scale, offset: f16[rows / 8, row_blocks, 8].
extern "C" __attribute__((visibility("default"))) void repack_blocks(const uint8_t* blocks, int64_t rows,
                                                                     int64_t row_blocks, int64_t bits, uint32_t* data,
                                                                     uint16_t* scale, uint16_t* offset) {
  (bits == 8 ? repack<8> : repack<4>)(blocks, rows, row_blocks, data, scale, offset);
}
