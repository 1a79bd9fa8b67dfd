// Paged attention: decode and chunked prefill in one kernel.
namespace OCTAVO_ISA {

constexpr decltype(octavo::Kernels::store_kv) store_kv = nullptr;
constexpr decltype(octavo::Kernels::attend) attend = nullptr;

}  // namespace OCTAVO_ISA
