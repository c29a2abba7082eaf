#include "clocks.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <mutex>

namespace soft {
namespace {

// A report calls Python, which may wait for a thread that wants this lock: never report with it held.
std::recursive_mutex lock;
std::vector<Clock> clocks;  // by stream: what is over before its next kernel
Clock host_clock;
int num_streams = kMaxDevices;
Reporter reporter = nullptr;
StackNumber numbered = nullptr;
std::vector<std::function<void(const Clock&)>> before;
std::vector<std::function<void()>> after;

// Memory that was released while another stream may still use it: an error once its own stream gets it again.
struct Released {
  size_t size;
  int stream;
  std::vector<Access> accesses;
  int64_t stack;
};
std::deque<Released> waiting;
constexpr size_t kMostWaiting = 1000;

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t stream = 0; stream < other.size(); ++stream) into[stream] = std::max(into[stream], other[stream]);
}

Clock& clock(int stream) {
  if (clocks.size() <= static_cast<size_t>(stream)) clocks.resize(stream + 1);
  Clock& found = clocks[stream];
  if (found.size() <= static_cast<size_t>(stream)) found.resize(stream + 1);
  return found;
}

std::string at(int64_t stack) { return " @" + std::to_string(stack); }

std::string on(int stream) { return " on stream " + std::to_string(stream); }

}  // namespace

void set_reporter(Reporter new_reporter, StackNumber stack) {
  reporter = new_reporter;
  numbered = stack;
}

void report(const std::string& text) {
  if (reporter) {
    reporter(text.c_str());
  } else {
    fprintf(stderr, "softcuda: %s\n", text.c_str());
  }
}

int64_t stack_number() { return numbered ? numbered() : 0; }

int new_stream() {
  std::lock_guard guard(lock);
  return num_streams++;
}

uint64_t launch(int stream) {
  std::lock_guard guard(lock);
  Clock& of_stream = clock(stream);
  join(of_stream, host_clock);
  return ++of_stream[stream];
}

Clock clock_of(int stream) {
  std::lock_guard guard(lock);
  Clock& of_stream = clock(stream);
  join(of_stream, host_clock);
  return of_stream;
}

Clock clock_of_all_streams() {
  std::lock_guard guard(lock);
  Clock all = host_clock;
  for (const Clock& each : clocks) join(all, each);
  return all;
}

void stream_waits(int stream, const Clock& other) {
  std::lock_guard guard(lock);
  join(clock(stream), other);
}

void host_waits(const Clock& other) {
  for (auto& function : before) function(other);
  {
    std::lock_guard guard(lock);
    join(host_clock, other);
  }
  for (auto& function : after) function();
}

bool is_over(int stream, uint64_t time, const Clock& other) {
  return other.size() > static_cast<size_t>(stream) && other[stream] >= time;
}

bool host_knows(int stream, uint64_t time) {
  std::lock_guard guard(lock);
  return is_over(stream, time, host_clock);
}

bool host_knows(const Clock& other) {
  std::lock_guard guard(lock);
  for (size_t stream = 0; stream < other.size(); ++stream) {
    if (!is_over(static_cast<int>(stream), other[stream], host_clock) && other[stream] > 0) return false;
  }
  return true;
}

void before_host_waits(std::function<void(const Clock&)> function) { before.push_back(std::move(function)); }
void after_host_waits(std::function<void()> function) { after.push_back(std::move(function)); }

void touch(Allocation& allocation, Access access) {
  std::vector<std::string> races;
  {
    std::lock_guard guard(lock);
    const Clock& known = clock(access.stream);
    auto& all = allocation.accesses;
    for (auto earlier = all.begin(); earlier != all.end();) {
      const bool meets = earlier->begin < access.end && access.begin < earlier->end;
      const bool ordered = is_over(earlier->stream, earlier->time, known);
      if (meets && !ordered && (access.writes || earlier->writes)) {
        races.push_back("race: " + access.kernel + (access.writes ? " writes" : " reads") + on(access.stream) + " what " +
                        earlier->kernel + (earlier->writes ? " writes" : " reads") + on(earlier->stream) +
                        ", in no order" + at(earlier->stack) + at(access.stack));
        earlier = all.erase(earlier);
        continue;
      }
      // whoever is ordered after this access is ordered after the earlier one as well
      const bool covers = access.begin <= earlier->begin && earlier->end <= access.end;
      const bool stands_for = access.writes || (!earlier->writes && earlier->stream == access.stream);
      if (ordered && covers && stands_for) {
        earlier = all.erase(earlier);
      } else {
        ++earlier;
      }
    }
    all.push_back(std::move(access));
  }
  for (const std::string& race : races) report(race);
}

void released(const Allocation& allocation) {
  const int64_t stack = stack_number();
  std::lock_guard guard(lock);
  Clock known = clock(allocation.stream);
  join(known, host_clock);
  std::vector<Access> late;
  for (const Access& access : allocation.accesses) {
    const bool waits = allocation.recorded.count(access.stream) > 0 || access.stream == allocation.stream;
    if (!waits && !is_over(access.stream, access.time, known)) late.push_back(access);
  }
  if (!late.empty()) waiting.push_back({allocation.size, allocation.stream, std::move(late), stack});
  if (waiting.size() > kMostWaiting) waiting.pop_front();
}

void reused(int stream, size_t size) {
  std::vector<std::string> found;
  int64_t stack = 0;
  {
    std::lock_guard guard(lock);
    if (waiting.empty()) return;
  }
  stack = stack_number();
  {
    std::lock_guard guard(lock);
    Clock known = clock(stream);
    join(known, host_clock);
    for (auto block = waiting.begin(); block != waiting.end();) {
      if (block->stream != stream) {
        ++block;
        continue;
      }
      std::erase_if(block->accesses, [&](const Access& access) { return is_over(access.stream, access.time, known); });
      if (!block->accesses.empty() && size > block->size) {
        ++block;  // too small for what is asked for
        continue;
      }
      if (!block->accesses.empty()) {
        const Access& access = block->accesses.front();
        found.push_back("memory of stream " + std::to_string(stream) + " is used again while " + access.kernel +
                        on(access.stream) + " may still " + (access.writes ? "write" : "read") +
                        " it (no record_stream, no wait)" + at(access.stack) + " released" + at(block->stack) +
                        " used again" + at(stack));
      }
      block = waiting.erase(block);
    }
  }
  for (const std::string& text : found) report(text);
}

void record_stream(Allocation& allocation, int stream) {
  std::lock_guard guard(lock);
  allocation.recorded.insert(stream);
}

}  // namespace soft
