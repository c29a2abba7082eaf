// The software device: memory, streams, generators (device.cpp) and its kernels (kernels.cpp).
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include "clocks.h"

namespace soft {

struct Options {
  int devices = 1;
  int64_t memory = int64_t{8} << 30;  // bytes of each device
  bool tracks_order = false;          // report races
  bool poisons = false;               // fresh and released device memory is NaN
  bool shares_generator = false;      // the device draws what the CPU would
  int own_device = -1;                // report memory on any other; -1: all are fine
};
extern Options options;

c10::DeviceIndex current_device();
c10::Stream current_stream(c10::DeviceIndex device);  // -1: of the current device
c10::Stream new_stream(c10::DeviceIndex device);
int number(const c10::Stream& stream);
void synchronize_stream(const c10::Stream& stream);

c10::Allocator& device_memory();
bool is_page_locked(const void* data);
Allocation* allocation_of(const c10::StorageImpl* storage);  // null: not the device's
// Device memory over what a storage on the host holds.
c10::DataPtr adopt(c10::Storage storage, c10::DeviceIndex device);

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator host_generator(const at::Generator& generator);

at::Tensor host_alias(const at::Tensor& tensor);  // a tensor of the host over the same memory
// Note that a kernel which was launched on `stream` at `time` reads or writes a tensor.
void note_access(const at::Tensor& tensor, int stream, uint64_t time, bool writes, const std::string& kernel);
void grow(c10::StorageImpl* storage, size_t size);
int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                         bool, std::optional<double>, bool);

}  // namespace soft
