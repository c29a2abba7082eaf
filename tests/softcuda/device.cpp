// A CUDA device with values on a machine that has none: its memory is the host's, its kernels are the CPU's.
//
// A tensor on it has a storage that says `cuda:N` over host memory. This file has that memory, the streams and events,
// the random generators, and the functions that torch looks up where it is built without CUDA.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

using at::Device, at::DeviceIndex, at::DeviceType, c10::DataPtr, c10::Storage, c10::Stream, c10::StreamId;

namespace soft {

Options options;

namespace {

thread_local DeviceIndex current = 0;
thread_local StreamId current_streams[kMaxDevices] = {};

DeviceIndex index_or_current(DeviceIndex device) { return device < 0 ? current : device; }

// ---- memory of the device --------------------------------------------------------------------------------------------

constexpr int kFresh = 0xFF;     // NaN in every floating dtype
constexpr int kReleased = 0xFB;

struct Counts {
  std::atomic<int64_t> bytes{0}, peak{0}, allocations{0};
};
Counts counts[kMaxDevices];

// One allocation: memory of its own, or a storage on the host that a kernel has returned.
struct Block {
  Allocation allocation;
  DataPtr own;
  Storage adopted;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  counts[block->allocation.device].bytes -= static_cast<int64_t>(block->allocation.size);
  if (options.tracks_order) released(block->allocation);
  if (options.poisons && block->own && block->allocation.size) std::memset(block->own.get(), kReleased, block->allocation.size);
  delete block;
}

DataPtr as_device_memory(Block* block, void* data, size_t size, DeviceIndex device) {
  Allocation& allocation = block->allocation;
  allocation.size = size;
  allocation.device = index_or_current(device);
  allocation.stream = number(current_stream(device));
  if (options.own_device >= 0 && allocation.device != options.own_device && size) {
    report("memory on cuda:" + std::to_string(allocation.device) + ", which is another rank's @" + std::to_string(stack_number()));
  }
  if (options.tracks_order && size) reused(allocation.stream, size);
  Counts& count = counts[allocation.device];
  ++count.allocations;
  const int64_t bytes = count.bytes += static_cast<int64_t>(size);
  int64_t peak = count.peak;
  while (bytes > peak && !count.peak.compare_exchange_weak(peak, bytes)) {
  }
  return {data, block, &release, Device(DeviceType::CUDA, static_cast<DeviceIndex>(allocation.device))};
}

struct DeviceMemory final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    const int64_t free = options.memory - counts[current].bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, static_cast<int64_t>(size) <= free, "CUDA out of memory. Tried to allocate ", size,
                     " bytes. GPU ", static_cast<int>(current), " has ", free, " bytes free (software device)");
    auto* block = new Block;
    block->own = c10::GetCPUAllocator()->allocate(size);
    void* data = block->own.get();
    if (options.poisons && size) std::memset(data, kFresh, size);
    DataPtr made = as_device_memory(block, data, size, current);
    if (options.tracks_order && size) {
      // The allocator gives memory to a stream whose earlier kernels may still be using it.
      const int stream = block->allocation.stream;
      const uint64_t time = launch(stream);
      touch(block->allocation, {0, size, stream, time, true, "an earlier user of this memory", stack_number()});
    }
    return made;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* source, size_t size) const override { std::memcpy(dest, source, size); }
} memory;

// ---- page-locked memory of the host ----------------------------------------------------------------------------------

std::mutex page_lock;
std::map<uintptr_t, size_t> page_locked;  // begin -> size

void release_pages(void* context) {
  auto* data = static_cast<DataPtr*>(context);
  {
    std::lock_guard guard(page_lock);
    page_locked.erase(reinterpret_cast<uintptr_t>(data->get()));
  }
  delete data;
}

struct PageLockedMemory final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    auto* data = new DataPtr(c10::GetCPUAllocator()->allocate(size));
    void* address = data->get();
    if (address) {
      std::lock_guard guard(page_lock);
      page_locked[reinterpret_cast<uintptr_t>(address)] = size;
    }
    return {address, data, &release_pages, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* source, size_t size) const override { std::memcpy(dest, source, size); }
} page_locked_memory;

}  // namespace

bool is_page_locked(const void* data) {
  std::lock_guard guard(page_lock);
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto next = page_locked.upper_bound(address);
  if (next == page_locked.begin()) return false;
  auto [begin, size] = *std::prev(next);
  return address < begin + std::max<size_t>(size, 1);
}

c10::Allocator& device_memory() { return memory; }

Allocation* allocation_of(const c10::StorageImpl* storage) {
  const DataPtr& data = storage->data_ptr();
  return data.get_deleter() == &release ? &static_cast<Block*>(data.get_context())->allocation : nullptr;
}

DataPtr adopt(Storage storage, DeviceIndex device) {
  auto* block = new Block;
  block->adopted = std::move(storage);
  void* data = const_cast<void*>(block->adopted.data());
  return as_device_memory(block, data, block->adopted.nbytes(), device);
}

void grow(c10::StorageImpl* storage, size_t size) {  // as resize_bytes_cuda: other memory, the old contents
  DataPtr made = memory.allocate(size);
  std::memcpy(made.get(), storage->data(), std::min<size_t>(size, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(size);
}

// ---- streams and events ------------------------------------------------------------------------------------------------

DeviceIndex current_device() { return current; }

Stream current_stream(DeviceIndex device) {
  device = index_or_current(device);
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), current_streams[device]);
}

Stream new_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index_or_current(device)), soft::new_stream());
}

int number(const Stream& stream) {
  return stream.id() == 0 ? index_or_current(stream.device_index()) : static_cast<int>(stream.id());
}

void synchronize_stream(const Stream& stream) { host_waits(clock_of(number(stream))); }

namespace {

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
  bool was_asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, current}; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < options.devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = index_or_current(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(options.devices); }

  Stream getStream(Device device) const override { return current_stream(device.index()); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index_or_current(device.index())), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return new_stream(device.index()); }
  Stream getNewStream(Device device, int) const override { return new_stream(device.index()); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = current_stream(stream.device_index());
    current_streams[index_or_current(stream.device_index())] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { synchronize_stream(stream); }
  void synchronizeDevice(const DeviceIndex) const override { host_waits(clock_of_all_streams()); }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {clock_of(number(stream)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event) stream_waits(number(stream), static_cast<Event*>(event)->clock);
  }
  // The first answer is no where the host does not know yet: what gives up after one question must not go on.
  bool queryEvent(void* event) const override {
    auto* asked = static_cast<Event*>(event);
    if (!asked) return true;
    if (options.tracks_order && !std::exchange(asked->was_asked, true) && !host_knows(asked->clock)) return false;
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time).count();
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    if (data.get_deleter() == &release) record_stream(static_cast<Block*>(data.get_context())->allocation, number(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- random generators -------------------------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator own;
  bool is_default;
  Generator(DeviceIndex device, at::Generator own, bool is_default)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        own(std::move(own)),
        is_default(is_default) {}
  // The generator of the host that the device's kernels draw from.
  at::Generator host() const { return is_default && options.shares_generator ? at::detail::getDefaultCPUGenerator() : own; }
  void set_current_seed(uint64_t seed) override { host().set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host().current_seed(); }
  uint64_t seed() override { return host().seed(); }
  void set_state(const c10::TensorImpl& state) override { host().unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host().unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), host().clone(), false); }
};

at::Generator make_generator(DeviceIndex device, bool is_default = false) {
  auto own = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  return at::make_generator<Generator>(device, std::move(own), is_default);
}

}  // namespace

const at::Generator& default_generator(DeviceIndex device) {
  static const auto all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex index = 0; index < kMaxDevices; ++index) made.push_back(make_generator(index, true));
    return made;
  }();
  return all[index_or_current(device)];
}

at::Generator host_generator(const at::Generator& generator) {
  if (!generator.device().is_cuda()) return generator;
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host();
}

}  // namespace soft

// ---- what torch looks up -----------------------------------------------------------------------------------------------

namespace at {
struct SoftwareCUDAHooks final : CUDAHooksInterface {
  SoftwareCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(soft::options.devices); }
  int getNumGPUs() const override { return soft::options.devices; }
  DeviceIndex current_device() const override { return soft::current; }
  DeviceIndex getCurrentDevice() const override { return soft::current; }
  void setCurrentDevice(DeviceIndex device) const override { soft::current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(soft::current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return std::exchange(soft::current, device); }
  bool isPinnedPtr(const void* data) const override { return soft::is_page_locked(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &soft::page_locked_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &soft::memory; }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, soft::current}; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return soft::default_generator(device); }
  Generator getNewGenerator(DeviceIndex device) const override { return soft::make_generator(soft::index_or_current(device)); }
  void deviceSynchronize(DeviceIndex) const override { soft::host_waits(soft::clock_of_all_streams()); }
  std::string showConfig() const override { return "software CUDA device"; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SoftwareCUDAHooks)
}  // namespace at

namespace {
struct Start {
  Start() {
    c10::SetAllocator(c10::DeviceType::CUDA, &soft::device_memory(), 1);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&soft::attention_choice);
  }
} start;
}  // namespace

extern "C" {
void soft_configure(int devices, int64_t memory, int tracks_order, int poisons, int shares_generator, int own_device) {
  soft::options = {devices, memory, tracks_order != 0, poisons != 0, shares_generator != 0, own_device};
}
int soft_num_devices() { return soft::options.devices; }
int soft_current_device() { return soft::current; }
void soft_use_device(int device) { soft::current = static_cast<DeviceIndex>(device); }
int64_t soft_current_stream(int device) { return soft::current_stream(static_cast<DeviceIndex>(device)).id(); }
void soft_use_stream(int64_t stream, int device) { soft::current_streams[device] = stream; }
int64_t soft_allocated(int device) { return soft::counts[device].bytes; }
int64_t soft_peak(int device) { return soft::counts[device].peak; }
int64_t soft_num_allocations(int device) { return soft::counts[device].allocations; }
void soft_reset_peak(int device) { soft::counts[device].peak = soft::counts[device].bytes.load(); }
void soft_set_reporter(soft::Reporter reporter, soft::StackNumber stack) { soft::set_reporter(reporter, stack); }
}
