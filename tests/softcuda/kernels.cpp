// Kernels of the software device: one boxed function under torch's CUDA key.
//
// It gives the CPU's kernel aliases of its arguments (the same memory, another device) and puts what comes back on the
// device again. A few operators that torch has no such kernel for stand below it.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_set>

using at::Device, at::DeviceIndex, at::DeviceType, at::Tensor, c10::DispatchKey, c10::DispatchKeySet, c10::IValue;
using c10::Storage, c10::StorageImpl, c10::Stream;

namespace soft {
namespace {

// ---- arguments and results -------------------------------------------------------------------------------------------

// The tensors of one call, on the device and on the host. One alias for each tensor and each storage: a kernel may ask
// whether two arguments are the same.
struct Aliases {
  struct StoragePair {
    Storage device, host;
  };
  struct TensorPair {
    Tensor device, host;
  };
  c10::SmallVector<StoragePair, 6> storages;
  c10::SmallVector<TensorPair, 6> tensors;
  c10::SmallVector<StoragePair, 2> results;
  DeviceIndex device = -1;

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (const TensorPair& pair : tensors) {
      if (pair.device.is_same(tensor)) return pair.host;
    }
    TORCH_CHECK(tensor.has_storage(), "software CUDA device: a tensor without storage (", tensor.toString(), ")");
    if (device < 0) device = tensor.device().index();
    DispatchKeySet keys(DispatchKey::CPU);
    if (tensor._is_zerotensor()) keys = keys.add(DispatchKey::ZeroTensor);
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(storage_on_host(tensor.storage()), keys, tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    copy_marks(tensor, alias);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.push_back({tensor, alias});
    return alias;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) return tensor;
    for (const TensorPair& pair : tensors) {
      if (pair.host.is_same(tensor)) return pair.device;
    }
    Storage storage = storage_on_device(tensor.storage());
    // A view has the keys of its base: in inference mode a view of what was made outside is no inference tensor.
    const Tensor* base = nullptr;
    for (const TensorPair& pair : tensors) {
      if (!base && pair.device.storage().is_alias_of(storage)) base = &pair.device;
    }
    DispatchKeySet keys(DispatchKey::CUDA);
    if (base) keys = base->key_set() - DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});
    if (tensor._is_zerotensor()) keys = keys.add(DispatchKey::ZeroTensor);
    Tensor made = base ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, tensor.dtype())
                       : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    copy_marks(tensor, made);
    return made;
  }

  // Give arguments what the kernel gave their aliases: other memory (resize_), another shape.
  void take_over() {
    for (const StoragePair& pair : storages) {
      if (pair.host.data() == pair.device.data() && pair.host.nbytes() == pair.device.nbytes()) continue;
      StorageImpl* impl = pair.device.unsafeGetStorageImpl();
      std::vector<Access> accesses;
      if (Allocation* before = allocation_of(impl)) accesses = before->accesses;
      c10::DataPtr replaced = impl->set_data_ptr(adopt(pair.host, device));
      impl->set_nbytes(pair.host.nbytes());
      allocation_of(impl)->accesses = std::move(accesses);
    }
    for (const TensorPair& pair : tensors) {
      auto* impl = pair.device.unsafeGetTensorImpl();
      const bool same = impl->sizes() == pair.host.sizes() && impl->strides() == pair.host.strides() &&
                        impl->storage_offset() == pair.host.storage_offset();
      if (!same) impl->set_sizes_and_strides(pair.host.sizes(), pair.host.strides(), pair.host.storage_offset());
    }
  }

 private:
  static void copy_marks(const Tensor& from, const Tensor& to) {
    if (from.is_conj()) to._set_conj(true);
    if (from.is_neg()) to._set_neg(true);
  }

  Storage storage_on_host(const Storage& storage) {
    for (const StoragePair& pair : storages) {
      if (pair.device.is_alias_of(storage)) return pair.host;
    }
    c10::DataPtr data(const_cast<void*>(storage.data()), Device(DeviceType::CPU));  // not owned
    Storage alias(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
                                                   c10::GetCPUAllocator(), /*resizable=*/true));
    storages.push_back({storage, alias});
    return alias;
  }

  Storage storage_on_device(const Storage& storage) {
    for (const StoragePair& pair : storages) {
      if (pair.host.is_alias_of(storage)) return pair.device;
    }
    for (const StoragePair& pair : results) {
      if (pair.host.is_alias_of(storage)) return pair.device;
    }
    Storage made(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(), adopt(storage, device),
                                                  &device_memory(), /*resizable=*/true));
    results.push_back({made, storage});
    return made;
  }
};

template <typename Change>
IValue map_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(change(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      made.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    return made;
  }
  return value;
}

// Operators whose CUDA kernels take tensors of both sides.
const std::unordered_set<std::string> kTakesBothSides = {
    "aten::copy_", "aten::_copy_from", "aten::copy", "aten::_to_copy", "aten::_foreach_copy_", "aten::index",
    "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put",
    "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_foreach_add_", "aten::_foreach_mul_", "aten::_foreach_div_",
    "aten::_has_same_storage_numel", "aten::resize_as_", "aten::tensor_split", "aten::is_set_to",
    "aten::_amp_foreach_non_finite_check_and_unscale_"};
// Operators whose results the host reads, or whose sizes it must know.
const std::unordered_set<std::string> kHostWaits = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::repeat_interleave"};
// Operators that touch no element.
const std::unordered_set<std::string> kNoKernel = {"aten::set_", "aten::resize_", "aten::record_stream", "aten::is_set_to",
                                                   "aten::_reshape_alias", "aten::view"};

// ---- copies that are on their way ------------------------------------------------------------------------------------

struct ToHost {  // its contents come as the host has waited for it; until then it reads NaN
  Tensor dest, contents;
  int stream;
  uint64_t time;
};
struct FromHost {  // a GPU reads it some time before the host knows that the copy is over
  Tensor source, contents;
  int stream;
  uint64_t time;
  int64_t stack;
};
std::mutex copies_lock;
std::deque<ToHost> to_host;
std::deque<FromHost> from_host;

void finish_copies() {
  std::vector<ToHost> arrived;
  std::vector<FromHost> read;
  {
    std::lock_guard guard(copies_lock);
    const auto take = [](auto& all, auto& over) {
      for (auto copy = all.begin(); copy != all.end();) {
        if (!host_knows(copy->stream, copy->time)) {
          ++copy;
          continue;
        }
        over.push_back(std::move(*copy));
        copy = all.erase(copy);
      }
    };
    take(to_host, arrived);
    take(from_host, read);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (ToHost& copy : arrived) copy.dest.copy_(copy.contents);
  for (FromHost& copy : read) {
    if (std::memcmp(copy.source.const_data_ptr(), copy.contents.const_data_ptr(), copy.source.nbytes()) != 0) {
      report("the host has changed page-locked memory before its copy to the device was known to be over @" + std::to_string(copy.stack));
    }
  }
}

// Forget copies from memory that this stream writes after them: it is not the host that changes it.
void forget_reads(const Tensor& dest, int stream) {
  const Clock known = clock_of(stream);
  const auto* begin = static_cast<const char*>(dest.const_data_ptr());
  const auto* end = begin + dest.nbytes();
  std::lock_guard guard(copies_lock);
  std::erase_if(from_host, [&](const FromHost& copy) {
    const auto* source = static_cast<const char*>(copy.source.const_data_ptr());
    const bool meets = source < end && begin < source + copy.source.nbytes();
    return meets && is_over(copy.stream, copy.time, known);
  });
}

// Handle a copy between host and device as the order of streams has it. Returns whether the contents come later.
bool copy_in_order(Aliases& aliases, const Tensor& dest, const Tensor& source, bool non_blocking, const Stream& stream, uint64_t time) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (dest.is_cpu() && source.is_cuda()) {
    const bool waits = !non_blocking || dest.numel() == 0 || !is_page_locked(dest.const_data_ptr());
    if (waits) {
      synchronize_stream(stream);
      return false;
    }
    forget_reads(dest, number(stream));
    // of the destination's dtype and layout
    Tensor contents = at::empty_like(dest).copy_(aliases.to_host(source));
    if (dest.is_contiguous()) std::memset(dest.mutable_data_ptr(), 0xFF, dest.nbytes());
    std::lock_guard guard(copies_lock);
    to_host.push_back({dest, contents, number(stream), time});
    return true;
  }
  if (dest.is_cuda() && source.is_cpu()) {
    const bool waits = !non_blocking || source.numel() == 0 || !source.is_contiguous() || !is_page_locked(source.const_data_ptr());
    if (waits) {
      synchronize_stream(stream);
      return false;
    }
    FromHost copy{source.detach(), source.clone(), number(stream), time, stack_number()};
    std::lock_guard guard(copies_lock);
    from_host.push_back(std::move(copy));
  }
  return false;
}

// ---- how often each operator has run ------------------------------------------------------------------------------------

std::mutex counts_lock;
std::map<std::string, int64_t> counts;

void count(const std::string& name) {
  std::lock_guard guard(counts_lock);
  ++counts[name];
}

// ---- the kernel of all operators -------------------------------------------------------------------------------------

void run_on_host(const c10::OperatorHandle& op, DispatchKeySet, c10::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  const bool tracks = options.tracks_order && !kNoKernel.count(name);
  const bool is_copy = name == "aten::copy_";
  Tensor dest, source;
  bool non_blocking = false;
  if (is_copy) {
    dest = (*stack)[begin].toTensor();
    source = (*stack)[begin + 1].toTensor();
    non_blocking = (*stack)[begin + 2].toBool();
  }

  const bool first_is_on_device = !arguments.empty() && (*stack)[begin].isTensor() && (*stack)[begin].toTensor().is_cuda();
  Aliases aliases;
  std::string argument_on_host;
  struct Touched {
    Tensor tensor;
    bool writes;
  };
  c10::SmallVector<Touched, 8> touched;
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = (*stack)[begin + i];
    const auto* alias = arguments[i].alias_info();
    const bool writes = alias && alias->isWrite();
    const bool is_view = alias && !alias->isWrite();
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      value = map_tensors(value, [&](const Tensor& tensor) {
        const bool is_scalar = tensor.defined() && tensor.dim() == 0 && !writes;
        if (tensor.defined() && tensor.is_cpu() && !is_scalar) argument_on_host = arguments[i].name();
        if (tracks && !is_view && tensor.defined() && tensor.is_cuda()) touched.push_back({tensor, writes});
        return aliases.to_host(tensor);
      });
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (aliases.device < 0 && value.toDevice().has_index()) aliases.device = value.toDevice().index();
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator()) {
      value = host_generator(value.toGenerator());
    } else if (value.isNone() && arguments[i].name() == "generator") {
      value = host_generator(default_generator(aliases.device));
    } else {
      TORCH_CHECK(!value.isStorage(), "software CUDA device: ", name, " takes a storage");
    }
  }
  const bool is_collective = name.compare(0, 5, "c10d:") == 0;
  TORCH_CHECK(argument_on_host.empty() || aliases.tensors.empty() || kTakesBothSides.count(name) || is_collective,
              "Expected all tensors to be on the same device, but found at least two devices, cuda:",
              static_cast<int>(aliases.device), " and cpu! (", name, ", argument ", argument_on_host, ")");
  const bool indexes = name.find("index") != std::string::npos && kTakesBothSides.count(name);
  TORCH_CHECK(!indexes || first_is_on_device, "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
  if (aliases.device < 0) aliases.device = current_device();
  if (!kNoKernel.count(name)) count(name);

  // A kernel runs on the current stream of its tensors' device, whatever the thread's device is.
  const Stream stream = current_stream(aliases.device);
  uint64_t time = 0;
  if (tracks) {
    time = launch(number(stream));
    for (const Touched& each : touched) note_access(each.tensor, number(stream), time, each.writes, name);
  }
  if (tracks && is_copy && copy_in_order(aliases, dest, source, non_blocking, stream, time)) {
    torch::jit::drop(*stack, arguments.size());
    torch::jit::push(*stack, dest);
    return;
  }
  // NCCL's sends are on the clocks too, whether or not races are looked for
  if (kHostWaits.count(name) || (is_copy && dest.is_cpu() && !tracks)) synchronize_stream(stream);

  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  aliases.take_over();
  const size_t num_results = schema.returns().size();
  const size_t first = stack->size() - num_results;
  for (size_t i = 0; i < num_results; ++i) {
    IValue& value = (*stack)[first + i];
    if (is_copy) {
      value = dest;
      continue;
    }
    const bool is_new = !schema.returns()[i].alias_info();
    value = map_tensors(value, [&](const Tensor& tensor) {
      Tensor made = aliases.to_device(tensor);
      if (tracks && is_new && made.defined() && made.is_cuda()) note_access(made, number(stream), time, true, name);
      return made;
    });
  }
}

// ---- operators of their own ------------------------------------------------------------------------------------------

Device with_index(std::optional<Device> device) {
  return {DeviceType::CUDA, device && device->has_index() ? device->index() : current_device()};
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic_symint(size, &device_memory(), DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_symint_generic(size, stride, &device_memory(), DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& set_storage_at(Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device_type() == DeviceType::CUDA, "set_: expected a storage on cuda, not on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  std::vector<int64_t> sizes, strides;
  for (const c10::SymInt& each : size) sizes.push_back(each.expect_int());
  for (const c10::SymInt& each : stride) strides.push_back(each.expect_int());
  if (strides.empty()) {
    const auto contiguous = c10::contiguous_strides(sizes);
    strides.assign(contiguous.begin(), contiguous.end());
  }
  impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  const size_t needed = at::detail::computeStorageNbytes(sizes, strides, self.element_size(), offset.expect_int());
  if (needed > source.nbytes()) grow(source.unsafeGetStorageImpl(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_at(self, source, 0, {c10::SymInt(numel)}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_at(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  Storage none(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), 0, device_memory().allocate(0), &device_memory(), true));
  return set_storage_at(self, none, 0, {c10::SymInt(0)}, {});
}

void record_stream_of(Tensor& self, Stream stream) {
  if (Allocation* allocation = allocation_of(self.storage().unsafeGetStorageImpl())) record_stream(*allocation, number(stream));
}

Tensor zeros_without_memory(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<Device> device, std::optional<bool>) {
  struct NoMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t) override { return {nullptr, Device(DeviceType::CUDA, current_device())}; }
    void copy_data(void*, const void*, size_t) const override {}
  };
  static NoMemory no_memory;
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(size, &no_memory, DispatchKeySet({DispatchKey::CUDA, DispatchKey::ZeroTensor}),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

// CUDA counts integers too, which transformers' experts rely on.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  synchronize_stream(current_stream(self.device().index()));
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor values = host_alias(self);
  if (!values.is_floating_point()) values = values.to(at::kDouble);
  count("aten::histc");
  return at::histc(values, bins, min, max).to(self.scalar_type()).to(self.device());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream_of);
  m.impl("histc", histc);
  m.impl("_efficientzerotensor", zeros_without_memory);
  // composite, and their composite bodies ask tables that have no CUDA kernels here
  for (const char* name : {"copy_", "convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

struct Start {
  Start() { after_host_waits(&finish_copies); }
} start;

}  // namespace

int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // SDPBackend::math, which is made of operators that the CPU has
}

Tensor host_alias(const Tensor& tensor) { return Aliases().to_host(tensor); }

void note_access(const Tensor& tensor, int stream, uint64_t time, bool writes, const std::string& kernel) {
  if (!options.tracks_order || !tensor.defined() || !tensor.is_cuda() || !tensor.has_storage() || tensor.numel() == 0) return;
  Allocation* allocation = allocation_of(tensor.storage().unsafeGetStorageImpl());
  if (!allocation) return;
  const size_t item = tensor.element_size();
  const size_t begin = tensor.storage_offset() * item;
  size_t last = begin;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim) * item;
  touch(*allocation, {begin, last + item, stream, time, writes, kernel, stack_number()});
}

}  // namespace soft

// Register the kernel by itself for operators that have a composite body too, which would allocate and call `.out`.
// After torch has registered its own; returns how many.
extern "C" int soft_register_kernels() {
  static std::vector<c10::RegistrationHandleRAII> kept;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
    const bool has_body = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                          op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    if (!has_body || !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    auto kernel = c10::KernelFunction::makeFromBoxedFunction<&soft::run_on_host>();
    kept.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "softcuda"));
  }
  return static_cast<int>(kept.size());
}

// All counts as one JSON object, `{"aten::mm": 3, ...}`; valid until the next call.
extern "C" const char* soft_kernel_counts() {
  static std::string text;
  std::lock_guard guard(soft::counts_lock);
  text = "{";
  for (const auto& [name, times] : soft::counts) {
    text += (text.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(times);
  }
  text += "}";
  return text.c_str();
}
