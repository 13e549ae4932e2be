// A pretended accelerator for machines without one: torch treats it as a device, and its memory is the CPU's.
//
// Each allocation is mapped twice. torch holds the address of the protected mapping, which the process can't access.
// This file computes with the second mapping. So code that uses a device address on the CPU crashes at once, as it does
// on a real device. Operands on several devices are refused, as CUDA refuses them.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---------------------------------------------------------------------------------------------------------- memory

// The accessible mapping of each protected one, by the address that torch holds. It is never destroyed, because tensors
// outlive static objects.
std::mutex lock;
auto& open_at = *new std::map<char*, char*>;

struct Pages {
  char* forbidden;
  char* open;
  size_t size;
};

void release(void* held) {
  auto* pages = static_cast<Pages*>(held);
  {
    const std::lock_guard guard(lock);
    open_at.erase(pages->forbidden);
  }
  munmap(pages->forbidden, pages->size);
  munmap(pages->open, pages->size);
  delete pages;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, [](void*) {}, kDevice};
    const int file = memfd_create("pretended", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "pretended: out of memory");
    auto map = [&](int may) { return mmap(nullptr, size, may, MAP_SHARED, file, 0); };
    void *forbidden = map(PROT_NONE), *open = map(PROT_READ | PROT_WRITE);
    close(file);
    TORCH_CHECK(forbidden != MAP_FAILED && open != MAP_FAILED, "pretended: out of memory");
    auto* pages = new Pages{static_cast<char*>(forbidden), static_cast<char*>(open), size};
    const std::lock_guard guard(lock);
    open_at[pages->forbidden] = pages->open;
    return {pages->forbidden, pages, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "pretended: never copied raw"); }
};

Memory memory;

char* open_address(void* address) {
  const std::lock_guard guard(lock);
  const auto at = std::prev(open_at.upper_bound(static_cast<char*>(address)));
  return at->second + (static_cast<char*>(address) - at->first);
}

// Return the same memory as a CPU tensor. A lazy conjugation or negation of `tensor` isn't applied.
Tensor on_cpu(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const auto options = at::TensorOptions(c10::kCPU).dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(open_address(tensor.mutable_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// ------------------------------------------------------------------------------------------------------ the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Wraps a generator of the CPU, because operations that fall back to the CPU draw from that.
struct Randomness final : c10::GeneratorImpl {
  explicit Randomness(at::Generator source)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), source(std::move(source)) {}
  void set_current_seed(uint64_t seed) override { source.set_current_seed(seed); }
  uint64_t current_seed() const override { return source.current_seed(); }
  uint64_t seed() override { return source.seed(); }
  void set_offset(uint64_t offset) override { source.set_offset(offset); }
  uint64_t get_offset() const override { return source.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { source.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return source.unsafeGetGeneratorImpl()->get_state();
  }
  Randomness* clone_impl() const override { return new Randomness(source.clone()); }

  at::Generator source;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator global = at::make_generator<Randomness>(at::detail::getDefaultCPUGenerator());
    return global;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Randomness>(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto held = memory.allocate(size);
    if (const auto kept = std::min(size, storage.nbytes()))
      std::memcpy(open_address(held.get()), open_address(storage.mutable_data()), kept);
    storage.set_data_ptr_noswap(std::move(held));
    storage.set_nbytes(size);
  }
};

// ----------------------------------------------------------------------------------- operations that handle memory

Tensor empty(IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  auto from = on_cpu(self);
  if (!self.is_cpu() && self.is_conj()) from = from.conj();
  if (!self.is_cpu() && self.is_neg()) from = at::_neg_view(from);
  on_cpu(to).copy_(from);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& self, SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {count}, {});
}

at::Scalar item(const Tensor& self) { return at::_local_scalar_dense(on_cpu(self)); }

bool is_set_to(const Tensor& one, const Tensor& other) { return on_cpu(one).is_set_to(on_cpu(other)); }

// ----------------------------------------------------------------------------------------- all other operations

// Operations that accept operands on the CPU in addition to the device.
constexpr std::array kMixed{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_to_copy"};

void require_one_device(const std::string& name, const Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || !tensor.is_cpu() || tensor.dim() == 0,
              "Expected all tensors to be on the same device, but found at least two devices, ", kDevice, " and cpu! (",
              name, ")");
}

at::Generator source_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kType, "Expected a '", kDevice, "' device type for generator but found '",
              generator.device(), "'");
  return static_cast<Randomness*>(generator.unsafeGetGeneratorImpl())->source;
}

void elsewhere(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& name = operation.schema().name();
  const bool mixed = std::find(kMixed.begin(), kMixed.end(), name) != kMixed.end();
  const auto count = operation.schema().arguments().size();
  for (auto at = stack->end() - static_cast<int64_t>(count); at != stack->end(); ++at) {
    if (at->isGenerator()) *at = source_of(at->toGenerator());
    if (at->isTensor() && !mixed) require_one_device(name, at->toTensor());
    if (!at->isTensorList() || mixed) continue;
    for (const Tensor& tensor : at->toTensorVector()) require_one_device(name, tensor);
  }
  at::native::cpu_fallback(operation, stack);
}

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kType, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&elsewhere>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("_local_scalar_dense", &item);
  library.impl("is_set_to", &is_set_to);
}

// `_copy_from` itself applies conjugation and negation, so these keys must not do it first.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
