// Linear layers on inputs quantised to int8: products and sums within a segment are exact integers.
namespace OCTAVO_ISA {

struct Int8Call {
  const Weight& w;
  const Inputs& inputs;
  Rows x;
  Out out;
  const Context& c;
  octavo::Int8Plan plan;
  int64_t tiles;
  Layout layout;
  std::byte* own;         // this member's part of the scratch
  std::byte* quantized;   // the rows' codes and terms

  int64_t first_row(int64_t tile) const { return c.rows * tile / tiles; }
  int64_t block_bytes() const { return w.padded_in * (w.code == Code::u2 ? 4 : w.code == Code::u4 ? 8 : 16); }

  Tile tile(int64_t row) const {
    return {reinterpret_cast<int8_t*>(quantized + plan.codes_at) + row * w.padded_in,
            reinterpret_cast<SegmentTerms*>(quantized + plan.terms_at) + row * w.num_segments,
            reinterpret_cast<RowTerms*>(quantized + plan.rows_at) + row, out.data + row * out.stride, out.stride};
  }

  void quantize(int64_t first, int64_t last) const {
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = first_row(t), end = first_row(t + 1), rows = end - begin;
      const Tile to = tile(begin);
      for (int64_t row = begin > first ? begin : first; row < (end < last ? end : last); ++row) {
        const int64_t r = row - begin;
        quantize_row(w, inputs, x.data + row * x.stride, const_cast<int8_t*>(to.q) + 4 * r, 4 * rows,
                     const_cast<SegmentTerms*>(to.terms) + r, rows, const_cast<RowTerms*>(to.rows)[r]);
      }
    }
  }

  const int32_t* sum(int64_t block, int64_t blocks) const {
    if (inputs.symmetric) return nullptr;
    auto* to = reinterpret_cast<int32_t*>(own + plan.sums_at);
    switch (w.code) {
      case Code::u2: sum_codes<2>(w, block, blocks, to); break;
      case Code::u4: sum_codes<4>(w, block, blocks, to); break;
      default: sum_codes<8>(w, block, blocks, to);
    }
    return to;
  }

  // Blocks [first, last) for one tile: each code is read once, so it is unpacked in registers.
  void stream(int64_t first, int64_t last) const {
    const int64_t step = inputs.symmetric ? last - first : plan.panel_blocks;
    const Tile to = tile(0);
    for (int64_t block = first; block < last; block += step) {
      const int64_t blocks = last - block < step ? last - block : step;
      const uint8_t* codes = w.codes + block * block_bytes();
      multiply_panel(w, layout, {codes, block_bytes(), block, sum(block, blocks)}, blocks, to, c.rows);
    }
  }

  // The same for some of several tiles: codes are unpacked to bytes first.
  void reuse(int64_t first, int64_t last, int64_t first_tile, int64_t last_tile) const {
    for (int64_t block = first; block < last; block += plan.panel_blocks) {
      const int64_t blocks = last - block < plan.panel_blocks ? last - block : plan.panel_blocks;
      const uint8_t* codes = w.codes + block * block_bytes();
      Panel panel{codes, w.padded_in * kLanes, block, sum(block, blocks)};
      if (w.code != Code::u8) {
        auto* bytes = reinterpret_cast<uint8_t*>(own + plan.panel_at);
        if (w.code == Code::u4) unpack_codes<4>(codes, blocks * block_bytes(), bytes);
        if (w.code == Code::u2) unpack_codes<2>(codes, blocks * block_bytes(), bytes);
        panel.codes = bytes;
      }
      for (int64_t t = first_tile; t < last_tile; ++t)
        multiply_panel(w, layout, panel, blocks, tile(first_row(t)), first_row(t + 1) - first_row(t));
    }
  }
};

inline void linear_int8(const Weight& w, const Inputs& inputs, Rows x, Out out, const Context& c) {
  const octavo::Int8Plan plan = octavo::plan_linear_int8(w, c.rows, c.members);
  std::byte* own = c.scratch + plan.member_at + c.member * plan.member_size;
  const int64_t tiles = (c.rows + kDotRows - 1) / kDotRows;
  Layout layout = w.code == Code::u8 ? Layout::u8 : Layout::bytes;
  if (tiles == 1) layout = w.code == Code::u2 ? Layout::u2 : w.code == Code::u4 ? Layout::u4 : Layout::u8;
  const Int8Call call{w, inputs, x, out, c, plan, tiles, layout, own, plan.one_each ? own : c.scratch};

  if (plan.one_each) {
    call.quantize(0, c.rows);
  } else {
    int64_t first, last;
    c.share(c.rows, 1, first, last);
    call.quantize(first, last);
    c.barrier();
  }
  if (tiles == 1) {
    int64_t first, last;
    c.share(w.blocks(), kDotBlocks, first, last);
    call.stream(first, last);
    return;
  }
  // Where there are few outputs for so many members, rows are divided too.
  const int64_t panels = (w.blocks() + kDotBlocks - 1) / kDotBlocks;
  int64_t parts = (2 * c.members + panels - 1) / panels;
  if (parts > tiles) parts = tiles;
  if (panels >= 2 * c.members) parts = 1;
  int64_t first, last;
  c.share(parts * panels, 1, first, last);
  while (first < last) {
    const int64_t part = first / panels, panel = first % panels;
    const int64_t end = last - first < panels - panel ? panel + last - first : panels;
    const int64_t block = end * kDotBlocks < w.blocks() ? end * kDotBlocks : w.blocks();
    call.reuse(panel * kDotBlocks, block, tiles * part / parts, tiles * (part + 1) / parts);
    first += end - panel;
  }
}

}  // namespace OCTAVO_ISA
