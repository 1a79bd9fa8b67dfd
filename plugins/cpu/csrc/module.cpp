// The Python module: addresses and numbers in, nothing of torch. octavo_cpu/native.py is its only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels.h"
#include "pack.h"

namespace nb = nanobind;

namespace octavo {

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// What `rows` rows of `columns` numbers with a stride (both in elements) span.
Range span(const void* begin, int64_t rows, int64_t stride, int64_t columns, int64_t size = 4) {
  return {begin, ((rows - 1) * stride + columns) * size};
}

Rows rows_at(Address address, int64_t stride) { return {at<const float>(address), stride}; }
Out out_at(Address address, int64_t stride) { return {at<float>(address), stride}; }

// Runs or records. Long ones let other Python threads run meanwhile; giving up the lock costs more than a short one takes.
void emit(int64_t rows, bool lengthy, Operation operation) {
  if (lengthy) {
    nb::gil_scoped_release release;
    Engine::get().emit(rows, std::move(operation));
  } else {
    Engine::get().emit(rows, std::move(operation));
  }
}

Operation operation(const char* name, std::vector<Range> reads, std::vector<Range> writes,
                    std::function<void(const Context&)> run) {
  Operation made;
  made.name = name, made.reads = std::move(reads), made.writes = std::move(writes), made.run = std::move(run);
  return made;
}

constexpr int64_t kLengthy = 1 << 24;  // multiplications, about a millisecond

void linear(const Weight& weight, const Inputs* inputs, Address x, int64_t x_stride, int64_t rows, Address out,
            int64_t out_stride) {
  Engine& engine = Engine::get();
  const int64_t most = engine.max_rows(rows);
  const Weight w = weight;
  const Rows from = rows_at(x, x_stride);
  const Out to = out_at(out, out_stride);
  const Kernels* table = &kernels();
  Operation made = operation(inputs ? "linear_int8" : "linear_float", {span(from.data, most, x_stride, w.in)},
                             {span(to.data, most, out_stride, w.out)}, nullptr);
  if (inputs) {
    const Inputs how = *inputs;
    made.scratch_bytes = linear_int8_scratch(w, how, most, engine.threads());
    made.run = [=](const Context& c) { table->linear_int8(w, how, from, to, c); };
  } else {
    made.scratch_bytes = linear_float_scratch(w, most, engine.threads());
    made.run = [=](const Context& c) { table->linear_float(w, from, to, c); };
  }
  emit(rows, rows * w.in * w.out > kLengthy, std::move(made));
}

void rms_norm(Address x, int64_t x_stride, int64_t rows, int64_t inner, int64_t inner_stride, int64_t size, Address weight,
              float eps, Address out) {
  const int64_t most = Engine::get().max_rows(rows);
  const Kernels* table = &kernels();
  const Rows from = rows_at(x, x_stride);
  const Out to = out_at(out, inner * size);
  const auto* scale = at<const float>(weight);
  emit(rows, false,
       operation("rms_norm", {span(from.data, most, x_stride, (inner - 1) * inner_stride + size)},
                 {span(to.data, most, inner * size, inner * size)}, [=](const Context& c) {
                   table->rms_norm(from, inner, size, inner_stride, scale, eps, to, c);
                 }));
}

void add_rms_norm(Address x, int64_t x_stride, Address residual, int64_t residual_stride, int64_t rows, int64_t size,
                  Address weight, float eps, Address out, Address total) {
  const int64_t most = Engine::get().max_rows(rows);
  const Kernels* table = &kernels();
  const Rows from = rows_at(x, x_stride), stream = rows_at(residual, residual_stride);
  const Out to = out_at(out, size), sum = out_at(total, size);
  const auto* scale = at<const float>(weight);
  emit(rows, false,
       operation("add_rms_norm", {span(from.data, most, x_stride, size), span(stream.data, most, residual_stride, size)},
                 {span(to.data, most, size, size), span(sum.data, most, size, size)}, [=](const Context& c) {
                   table->add_rms_norm(from, stream, size, scale, eps, to, sum, c);
                 }));
}

void rotate(Address x, int64_t x_stride, int64_t rows, int64_t heads, int64_t head_dim, int64_t half, Address cos, Address sin,
            int64_t table_stride, Address out) {
  const int64_t most = Engine::get().max_rows(rows);
  const Kernels* table = &kernels();
  const Rows from = rows_at(x, x_stride), cosines = rows_at(cos, table_stride), sines = rows_at(sin, table_stride);
  const int64_t size = heads * head_dim;
  const Out to = out_at(out, size);
  emit(rows, false,
       operation("rotate",
                 {span(from.data, most, x_stride, size), span(cosines.data, most, table_stride, half),
                  span(sines.data, most, table_stride, half)},
                 {span(to.data, most, size, size)}, [=](const Context& c) {
                   table->rotate(from, heads, head_dim, half, cosines, sines, to, c);
                 }));
}

void gated(Address x, int64_t x_stride, int64_t rows, int64_t size, int activation, Address divisor, Address out) {
  const int64_t most = Engine::get().max_rows(rows);
  const Kernels* table = &kernels();
  const Rows from = rows_at(x, x_stride);
  const Out to = out_at(out, size);
  const auto* by = at<const float>(divisor);
  emit(rows, rows * size > kLengthy / 8,
       operation("gated", {span(from.data, most, x_stride, 2 * size)}, {span(to.data, most, size, size)},
                 [=](const Context& c) { table->gated(from, size, activation, by, to, c); }));
}

void gather(Address rows_of, int storage, int64_t row_stride, int64_t size, Address indices, int64_t rows, Address out) {
  Engine& engine = Engine::get();
  const int64_t most = engine.max_rows(rows);
  const Kernels* table = &kernels();
  const void* from = at<const void>(rows_of);
  const Indices which = engine.indices(at<const int64_t>(indices));
  const Out to = out_at(out, size);
  emit(rows, false,
       operation("gather", {span(which.data, which.data ? most : 0, 1, 1, 8)}, {span(to.data, most, size, size)},
                 [=](const Context& c) { table->gather(from, storage, row_stride, size, which.of(c), to, c); }));
}

void gather_packed(const Weight& weight, Address indices, int64_t rows, Address out) {
  Engine& engine = Engine::get();
  const int64_t most = engine.max_rows(rows);
  const Kernels* table = &kernels();
  const Weight w = weight;
  const Indices which = engine.indices(at<const int64_t>(indices));
  const Out to = out_at(out, w.in);
  emit(rows, false,
       operation("gather_packed", {span(which.data, which.data ? most : 0, 1, 1, 8)}, {span(to.data, most, w.in, w.in)},
                 [=](const Context& c) { table->gather_packed(w, which.of(c), to, c); }));
}

void argmax(Address x, int64_t x_stride, int64_t rows, int64_t size, Address out) {
  const Kernels* table = &kernels();
  const Rows from = rows_at(x, x_stride);
  auto* to = at<int64_t>(out);
  emit(rows, false, operation("argmax", {span(from.data, rows, x_stride, size)}, {span(to, rows, 1, 1, 8)},
                              [=](const Context& c) { table->argmax(from, size, to, c); }));
}

void store_kv(const Attention& attention, const KVBlocks& kv, const Batch& batch, Address key, int64_t key_stride,
              Address value, int64_t value_stride) {
  Engine& engine = Engine::get();
  const int64_t most = engine.max_rows(batch.tokens), size = attention.kv_heads * attention.head_dim;
  const Kernels* table = &kernels();
  const Rows keys = rows_at(key, key_stride), values = rows_at(value, value_stride);
  const Batch* given = engine.batch(&batch);
  emit(batch.tokens, false,
       operation("store_kv", {span(keys.data, most, key_stride, size), span(values.data, most, value_stride, size)},
                 {{kv.key, 1}}, [=](const Context& c) {
                   table->store_kv(attention, kv, given ? *given : *c.step.batch, keys, values, c);
                 }));
}

void attend(const Attention& attention, const KVBlocks& kv, const Batch& batch, Address query, int64_t query_stride,
            Address out) {
  Engine& engine = Engine::get();
  const int64_t most = engine.max_rows(batch.tokens), size = attention.heads * attention.head_dim;
  const Kernels* table = &kernels();
  const Rows queries = rows_at(query, query_stride);
  const Out to = out_at(out, size);
  const Batch* given = engine.batch(&batch);
  Operation made = operation("attend", {{kv.key, 1}, span(queries.data, most, query_stride, size)},
                             {span(to.data, most, size, size)}, [=](const Context& c) {
                               table->attend(attention, kv, given ? *given : *c.step.batch, queries, to, c);
                             });
  made.scratch_bytes = batch.scratch(engine.threads());  // a tape's step brings its own need
  emit(batch.tokens, batch.tokens > 16, std::move(made));
}

Step step_of(int64_t tokens, Address token_ids, Address positions, const Batch* batch) {
  return {tokens, at<const int64_t>(token_ids), at<const int64_t>(positions), batch};
}

}  // namespace

}  // namespace octavo

NB_MODULE(_native, m) {
  using namespace octavo;
  nb::set_leak_warnings(false);  // a registry that outlives the interpreter's modules is no leak

  m.def("isa", [] { return std::string(kernels().name); });
  m.def("set_isa", [](const std::string& name) { set_isa(name.c_str()); });
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Kernels* k : {avx512vnni_kernels(), avx2_kernels(), &portable_kernels()})
      if (k) names.emplace_back(k->name);
    return names;
  });
  m.def("threads", [] { return Engine::get().threads(); });
  m.def("set_threads", [](int count, std::vector<int> cpus) {
    nb::gil_scoped_release release;
    Engine::get().set_threads(count, std::move(cpus));
  }, nb::arg("count"), nb::arg("cpus") = std::vector<int>{});

  nb::class_<Weight>(m, "Weight")
      .def("__init__",
           [](Weight* w, int code, int64_t in, int64_t out, int64_t padded_in, int64_t num_segments, Address segment_starts,
              Address source, Address codes, int scale_code, Address scales, Address zeros, Address offsets, Address bias,
              bool has_zero, int zero) {
             new (w) Weight{static_cast<Code>(code), in, out, padded_in, num_segments, at<const int32_t>(segment_starts),
                            at<const int32_t>(source), at<const uint8_t>(codes), static_cast<Code>(scale_code),
                            at<const void>(scales), at<const uint8_t>(zeros), has_zero, at<const float>(offsets), zero,
                            at<const float>(bias)};
           });
  nb::class_<Inputs>(m, "Inputs").def("__init__", [](Inputs* i, int kind, bool symmetric, float scale, float zero) {
    new (i) Inputs{static_cast<Inputs::Kind>(kind), symmetric, scale, zero};
  });
  nb::class_<Attention>(m, "Attention")
      .def("__init__", [](Attention* a, int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, int64_t window,
                          float soft_cap) { new (a) Attention{heads, kv_heads, head_dim, scale, window, soft_cap}; });
  nb::class_<KVBlocks>(m, "KVBlocks")
      .def("__init__", [](KVBlocks* kv, int storage, Address key, Address value, int scale_storage, Address key_scale,
                          Address value_scale, Address key_static, Address value_static) {
        new (kv) KVBlocks{static_cast<KVBlocks::Storage>(storage), at<void>(key), at<void>(value), at<void>(key_scale),
                          at<void>(value_scale), static_cast<KVBlocks::Storage>(scale_storage), at<const float>(key_static),
                          at<const float>(value_static)};
      });
  nb::class_<Batch>(m, "Batch")
      .def("__init__", [](Batch* b, int64_t requests, int64_t tokens, int64_t block_size, Address query_start_loc,
                          Address seq_lens, Address block_tables, int64_t table_stride, Address slot_mapping) {
        new (b) Batch{requests, tokens, block_size, at<const int32_t>(query_start_loc), at<const int32_t>(seq_lens),
                      at<const int32_t>(block_tables), table_stride, at<const int64_t>(slot_mapping), {}, 0};
      })
      .def("plan", [](Batch& batch, const Attention& attention) { plan_attention(attention, batch); });

  m.def("packed_bytes", [](int code, int64_t padded_in, int64_t out) {
    return packed_bytes(static_cast<Code>(code), padded_in, out);
  });
  m.def("pack", [](int code, Address codes, int64_t in, int64_t out, int64_t padded_in, Address source, Address packed) {
    nb::gil_scoped_release release;
    pack(static_cast<Code>(code), at<const void>(codes), in, out, padded_in, at<const int32_t>(source), at<uint8_t>(packed));
  });

  m.def("linear", &linear, nb::arg("weight"), nb::arg("inputs").none(), nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"),
        nb::arg("out"), nb::arg("out_stride"));
  m.def("rms_norm", &rms_norm);
  m.def("add_rms_norm", &add_rms_norm);
  m.def("rotate", &rotate);
  m.def("gated", &gated);
  m.def("gather", &gather);
  m.def("gather_packed", &gather_packed);
  m.def("argmax", &argmax);
  m.def("store_kv", &store_kv);
  m.def("attend", &attend);

  nb::class_<Program>(m, "Program").def(nb::init<int64_t>()).def("__len__", &Program::size);
  m.def("begin", [](std::shared_ptr<Program> program, int64_t tokens, Address token_ids, Address positions,
                    const Batch& batch) { Engine::get().begin(program, step_of(tokens, token_ids, positions, &batch)); });
  m.def("end", [] { Engine::get().end(); });
  m.def("replay", [](const Program& program, int64_t tokens, Address token_ids, Address positions, const Batch& batch) {
    nb::gil_scoped_release release;
    Engine::get().replay(program, step_of(tokens, token_ids, positions, &batch));
  });
  m.def("profile", [](const Program& program, int64_t tokens, Address token_ids, Address positions, const Batch& batch) {
    nb::gil_scoped_release release;
    return Engine::get().profile(program, step_of(tokens, token_ids, positions, &batch));
  });
}
