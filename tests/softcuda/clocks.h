// The order of what runs on streams, kept as vector clocks. Nothing of torch is in here.
//
// Kernels of the software device run at once, in program order. A GPU may run two of them in another order, or at the
// same time, unless an event, a stream or the host orders them. The clocks say what is ordered; `touch`, `released` and
// `reused` report what is not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace soft {

using Clock = std::vector<uint64_t>;  // by stream: how many of its kernels are known to be over

constexpr int kMaxDevices = 64;  // the default stream of device d has the number d, others begin here

struct Access {
  size_t begin, end;  // bytes of the allocation
  int stream;
  uint64_t time;  // of the kernel, in its stream
  bool writes;
  std::string kernel;
  int64_t stack;
};

// What is known about one allocation.
struct Allocation {
  size_t size = 0;
  int device = 0;
  int stream = 0;  // the stream that allocated it, in whose order the memory is used again
  std::vector<Access> accesses;
  std::set<int> recorded;  // streams of record_stream
};

using Reporter = void (*)(const char* text);
using StackNumber = int64_t (*)();

// Give reports to `reporter`. `stack` numbers the Python stack of the caller; a report names stacks as "@NUMBER".
void set_reporter(Reporter reporter, StackNumber stack);
void report(const std::string& text);
int64_t stack_number();

int new_stream();
uint64_t launch(int stream);  // start a kernel, and return its time
Clock clock_of(int stream);
Clock clock_of_all_streams();
void stream_waits(int stream, const Clock& clock);
void host_waits(const Clock& clock);
bool host_knows(int stream, uint64_t time);
bool host_knows(const Clock& clock);
bool is_over(int stream, uint64_t time, const Clock& clock);
// Call `function` whenever the host waits: before it counts as having waited, and afterwards.
void before_host_waits(std::function<void(const Clock&)> function);
void after_host_waits(std::function<void()> function);

void touch(Allocation& allocation, Access access);   // report a race with an earlier access
void released(const Allocation& allocation);         // remember who may still use the memory
void reused(int stream, size_t size);                // report memory that is used again too early
void record_stream(Allocation& allocation, int stream);

}  // namespace soft
