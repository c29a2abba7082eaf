// "nccl" on the software device: gloo moves the bytes, under NCCL's rules.
//
// - Tensors lie on the device, and are dense.
// - An operation runs on a stream of its communicator, behind what the caller's stream had been given. `wait` makes the
//   caller's stream wait, not the host (but for barriers).
// - One communicator at a time: all operations of a process run in the order in which they were launched. Ranks that
//   launch them in different orders never finish.
// - Messages have no names: `tag` is ignored. A send that is not part of a batch holds all that was launched after it
//   until its receiver has taken it.
// - The first collective or batch of a group makes its communicator, which takes all ranks.
#include "device.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <ATen/detail/CUDAHooksInterface.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <future>
#include <mutex>
#include <thread>

using at::Tensor;
using c10d::OpType;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

namespace soft {
namespace {

constexpr int kTagMessage = 1, kTagTaken = 2, kTagBatch = 3, kTagExchange = 4;

// Wait without Python's lock, which another rank's thread or this process's queue may need.
template <typename Future>
void wait_without_gil(const Future& future) {
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  future.wait();
}

// Runs what it is given one after the other, on a thread of its own that ends with the process.
class Queue {
 public:
  void add(std::function<void()> function) {
    std::lock_guard guard(mutex_);
    if (!started_) std::thread([this] { run(); }).detach();  // not before: a process may be copied until then
    started_ = true;
    functions_.push_back(std::move(function));
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock guard(mutex_);
        changed_.wait(guard, [this] { return !functions_.empty(); });
        next = std::move(functions_.front());
        functions_.pop_front();
      }
      next();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> functions_;
  bool started_ = false;
};

Queue& queue() {
  static auto* only = new Queue;  // never destroyed: its thread may be in the middle of something
  return *only;
}

// Operations that may still run. The host waits for them where it waits for a stream that waits for them.
struct Unfinished {
  int stream;
  uint64_t time;
  std::shared_future<void> done;
};
std::mutex unfinished_lock;
std::vector<Unfinished> unfinished;

void wait_for_operations(const Clock& clock) {
  std::vector<Unfinished> over;
  {
    std::lock_guard guard(unfinished_lock);
    for (auto operation = unfinished.begin(); operation != unfinished.end();) {
      if (!is_over(operation->stream, operation->time, clock)) {
        ++operation;
        continue;
      }
      over.push_back(std::move(*operation));
      operation = unfinished.erase(operation);
    }
  }
  for (const Unfinished& operation : over) {
    wait_without_gil(operation.done);
    operation.done.get();  // throws what it threw
  }
}

struct SoftWork final : c10d::Work {
  Clock over;  // of its stream, once the operation is over
  c10::DeviceIndex device = 0;
  bool is_send = false;
  std::vector<Tensor> outputs, kept;  // `kept` until the caller's stream waits
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::shared_future<void> done;

  SoftWork(int rank, OpType type) : Work(rank, type) {}
  bool isCompleted() override { return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    // Values are here only once it has run; a GPU's stream would wait for them. What is sent is already copied.
    if (!is_send) {
      wait_without_gil(done);
      done.get();
    }
    stream_waits(number(current_stream(device)), over);
    kept.clear();
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  std::vector<Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

class SoftNccl final : public c10d::Backend {
 public:
  PyObject* options = nullptr;  // kept for ever

  SoftNccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return false; }
  void shutdown() override {}
  void abort() override {}
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPointer broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    const bool is_root = getRank() == options.rootRank;
    auto run = [=, this, host = on_host(tensors)]() mutable { gloo_->broadcast(host, options)->wait(); };
    std::vector<Tensor> none;
    return collective(OpType::BROADCAST, "nccl:broadcast", is_root ? tensors : none, is_root ? none : tensors, tensors, run);
  }

  WorkPointer allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    auto run = [=, this, host = on_host(tensors)]() mutable {
      for (Tensor& each : host) reduce_everywhere(each, options.reduceOp);
    };
    return collective(OpType::ALLREDUCE, "nccl:all_reduce", {}, tensors, tensors, run);
  }

  WorkPointer allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto run = [=, this, host = on_host(tensors)]() mutable {
      for (Tensor& each : host) reduce_everywhere(each, options.reduceOp);
    };
    return collective(OpType::ALLREDUCE_COALESCED, "nccl:all_reduce_coalesced", {}, tensors, tensors, run);
  }

  WorkPointer reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    const bool is_root = getRank() == options.rootRank;
    auto run = [=, this, host = on_host(tensors)]() mutable {
      for (Tensor& each : host) {
        // gloo works in the memory of all ranks, NCCL writes the root's alone
        std::vector<Tensor> work{is_root ? each : each.clone()};
        c10d::ReduceOptions summed = options;
        summed.reduceOp = without_mean(options.reduceOp);
        gloo_->reduce(work, summed)->wait();
        if (is_root && is_mean(options.reduceOp)) each.div_(getSize());
      }
    };
    std::vector<Tensor> none;
    return collective(OpType::REDUCE, "nccl:reduce", is_root ? none : tensors, is_root ? tensors : none, tensors, run);
  }

  WorkPointer allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                        const c10d::AllgatherOptions&) override {
    std::vector<Tensor>& parts = outputs.at(0);
    const int64_t numel = inputs[0].numel();
    const bool even = std::all_of(parts.begin(), parts.end(), [&](const Tensor& part) { return part.numel() == numel; });
    auto run = [=, this, to = on_host(parts), from = on_host(inputs)]() mutable {
      if (even) {
        std::vector<std::vector<Tensor>> lists{to};
        gloo_->allgather(lists, from, {})->wait();
        return;
      }
      for (int root = 0; root < getSize(); ++root) {
        if (root == getRank()) to[root].copy_(from[0]);
        std::vector<Tensor> part{to[root]};
        c10d::BroadcastOptions options;
        options.rootRank = root;
        gloo_->broadcast(part, options)->wait();
      }
    };
    return collective(OpType::ALLGATHER, "nccl:all_gather", inputs, parts, parts, run);
  }

  WorkPointer _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(output.numel() == input.numel() * getSize(), "output tensor size must be equal to world_size times input tensor size");
    auto run = [=, this, to = host_alias(output), from = host_alias(input)]() mutable { gather_into(to, from); };
    return collective(OpType::_ALLGATHER_BASE, "nccl:all_gather_into_tensor", {input}, {output}, {output}, run);
  }

  WorkPointer allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                              const c10d::AllgatherOptions&) override {
    auto run = [=, this, to = on_host(outputs), from = on_host(inputs)]() mutable {
      for (size_t i = 0; i < to.size(); ++i) gather_into(to[i], from[i]);
    };
    return collective(OpType::COALESCED, "nccl:all_gather_coalesced", inputs, outputs, outputs, run);
  }

  WorkPointer _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto run = [=, this, to = host_alias(output), from = host_alias(input)]() mutable { scatter_sum(to, from, options.reduceOp); };
    return collective(OpType::_REDUCE_SCATTER_BASE, "nccl:reduce_scatter_tensor", {input}, {output}, {output}, run);
  }

  WorkPointer reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    auto run = [=, this, to = on_host(outputs), from = on_host(inputs)]() mutable {
      for (size_t i = 0; i < to.size(); ++i) scatter_sum(to[i], from[i], options.reduceOp);
    };
    return collective(OpType::COALESCED, "nccl:reduce_scatter_coalesced", inputs, outputs, outputs, run);
  }

  WorkPointer reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                             const c10d::ReduceScatterOptions& options) override {
    auto run = [=, this, to = on_host(outputs), from = on_host(inputs.at(0))]() mutable {
      for (int root = 0; root < getSize(); ++root) {
        Tensor sum = from[root].clone();
        reduce_everywhere(sum, options.reduceOp);
        if (root == getRank()) to[0].copy_(sum);
      }
    };
    return collective(OpType::REDUCE_SCATTER, "nccl:reduce_scatter", inputs.at(0), outputs, outputs, run);
  }

  WorkPointer alltoall(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllToAllOptions&) override {
    auto run = [=, this, to = on_host(outputs), from = on_host(inputs)]() mutable { exchange(to, from); };
    return collective(OpType::ALLTOALL, "nccl:all_to_all", inputs, outputs, outputs, run);
  }

  WorkPointer alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions&) override {
    at::AutoDispatchBelowADInplaceOrView below;
    auto run = [this, to = split(host_alias(output), output_sizes), from = split(host_alias(input), input_sizes)]() mutable {
      exchange(to, from);
    };
    return collective(OpType::ALLTOALL_BASE, "nccl:all_to_all_single", {input}, {output}, {output}, run);
  }

  WorkPointer gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::GatherOptions& options) override {
    const auto parts = outputs.empty() ? std::vector<Tensor>{} : outputs[0];
    auto run = [=, this, to = on_host(parts), from = on_host(inputs)]() mutable {
      std::vector<std::vector<Tensor>> lists;
      if (getRank() == options.rootRank) lists.push_back(to);
      gloo_->gather(lists, from, options)->wait();
    };
    return collective(OpType::GATHER, "nccl:gather", inputs, parts, parts, run);
  }

  WorkPointer scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs, const c10d::ScatterOptions& options) override {
    const auto parts = inputs.empty() ? std::vector<Tensor>{} : inputs[0];
    auto run = [=, this, to = on_host(outputs), from = on_host(parts)]() mutable {
      std::vector<std::vector<Tensor>> lists;
      if (getRank() == options.rootRank) lists.push_back(from);
      gloo_->scatter(to, lists, options)->wait();
    };
    return collective(OpType::SCATTER, "nccl:scatter", parts, outputs, outputs, run);
  }

  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    auto run = [=, this] { gloo_->barrier(options)->wait(); };
    WorkPointer work = collective(OpType::BARRIER, "nccl:barrier", {}, {}, {}, run);
    work->wait();
    host_waits(static_cast<SoftWork*>(work.get())->over);
    return work;
  }

  WorkPointer send(std::vector<Tensor>& tensors, int dest, int) override {
    TORCH_CHECK(tensors.size() == 1 && dest != getRank(), "Invalid usage of send");
    check(tensors);
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<Tensor> contents{host_alias(tensors[0]).clone()};
    if (in_batch_) {
      batch_.push_back([=, this]() mutable { return gloo_->send(contents, dest, kTagBatch); });
      batch_reads_.push_back(tensors[0]);
      return c10::make_intrusive<SoftWork>(rank_, OpType::SEND);
    }
    auto run = [=, this]() mutable {
      gloo_->send(contents, dest, kTagMessage)->wait();
      std::vector<Tensor> taken{at::zeros({1})};
      gloo_->recv(taken, dest, kTagTaken)->wait();
    };
    return start(dest, OpType::SEND, "nccl:send", tensors, {}, {}, run);
  }

  WorkPointer recv(std::vector<Tensor>& tensors, int source, int) override {
    TORCH_CHECK(tensors.size() == 1 && source != getRank(), "Invalid usage of recv");
    check(tensors);
    if (in_batch_) {
      batch_.push_back([=, this, host = on_host(tensors)]() mutable { return gloo_->recv(host, source, kTagBatch); });
      batch_writes_.push_back(tensors[0]);
      return c10::make_intrusive<SoftWork>(rank_, OpType::RECV);
    }
    auto run = [=, this, host = on_host(tensors)]() mutable {
      gloo_->recv(host, source, kTagMessage)->wait();
      std::vector<Tensor> taken{at::zeros({1})};
      gloo_->send(taken, source, kTagTaken)->wait();
    };
    return start(source, OpType::RECV, "nccl:recv", {}, tensors, tensors, run);
  }

  void startCoalescing() override { in_batch_ = true; }
  WorkPointer endCoalescing() override {
    in_batch_ = false;
    auto run = [messages = std::exchange(batch_, {})]() mutable {
      std::vector<WorkPointer> works;
      for (auto& message : messages) works.push_back(message());
      for (WorkPointer& work : works) work->wait();
    };
    auto writes = std::exchange(batch_writes_, {});
    return collective(OpType::COALESCED, "nccl:batch", std::exchange(batch_reads_, {}), writes, writes, run);
  }

 private:
  static constexpr int kWholeGroup = -1;

  static std::vector<Tensor> on_host(const std::vector<Tensor>& tensors) {
    std::vector<Tensor> made;
    for (const Tensor& tensor : tensors) made.push_back(host_alias(tensor));
    return made;
  }
  static void check(const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda() && !tensor.is_sparse(), "No backend type associated with device type cpu: Tensors must be CUDA and dense");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    }
  }
  static bool is_mean(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG; }
  static c10d::ReduceOp without_mean(const c10d::ReduceOp& op) { return is_mean(op) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op; }

  void reduce_everywhere(Tensor& tensor, const c10d::ReduceOp& op) {
    std::vector<Tensor> work{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = without_mean(op);
    gloo_->allreduce(work, options)->wait();
    if (is_mean(op)) tensor.div_(getSize());
  }
  void gather_into(Tensor& output, const Tensor& input) {  // `input` may be a part of `output`
    Tensor rows = output.view({getSize(), -1});
    std::vector<std::vector<Tensor>> lists(1);
    for (int rank = 0; rank < getSize(); ++rank) lists[0].push_back(rows[rank]);
    std::vector<Tensor> contents{input.reshape({-1}).clone()};
    gloo_->allgather(lists, contents, {})->wait();
  }
  void scatter_sum(Tensor& output, const Tensor& input, const c10d::ReduceOp& op) {
    Tensor sum = input.reshape({-1}).clone();
    reduce_everywhere(sum, op);
    output.reshape({-1}).copy_(sum.view({getSize(), -1})[getRank()]);
  }
  std::vector<Tensor> split(const Tensor& tensor, const std::vector<int64_t>& sizes) {
    if (!sizes.empty()) return tensor.split_with_sizes(sizes);
    return tensor.numel() ? tensor.chunk(getSize()) : std::vector<Tensor>(getSize(), tensor);
  }
  void exchange(std::vector<Tensor>& to, std::vector<Tensor>& from) {
    std::vector<WorkPointer> works;
    for (int peer = 0; peer < getSize(); ++peer) {
      if (peer == getRank()) {
        to[peer].copy_(from[peer]);
        continue;
      }
      std::vector<Tensor> sent{from[peer]}, received{to[peer]};
      if (from[peer].numel()) works.push_back(gloo_->send(sent, peer, kTagExchange));
      if (to[peer].numel()) works.push_back(gloo_->recv(received, peer, kTagExchange));
    }
    for (WorkPointer& work : works) work->wait();
  }

  WorkPointer collective(OpType type, const char* name, std::vector<Tensor> reads, std::vector<Tensor> writes,
                         std::vector<Tensor> outputs, std::function<void()> run) {
    if (!std::exchange(has_communicator_, true)) {
      run = [this, run = std::move(run)] {
        gloo_->barrier(c10d::BarrierOptions())->wait();
        run();
      };
    }
    return start(kWholeGroup, type, name, std::move(reads), std::move(writes), std::move(outputs), std::move(run));
  }

  // Launch `run`, which reads and writes these tensors, on the stream of the communicator with `peer`.
  WorkPointer start(int peer, OpType type, const char* name, std::vector<Tensor> reads, std::vector<Tensor> writes,
                    std::vector<Tensor> outputs, std::function<void()> run) {
    check(reads);
    check(writes);
    auto [found, is_new] = streams_.try_emplace(peer, 0);
    if (is_new) found->second = number(soft::new_stream(c10::DeviceIndex{-1}));
    const int stream = found->second;
    const c10::Stream callers = current_stream(-1);
    stream_waits(stream, clock_of(number(callers)));
    const uint64_t time = launch(stream);
    for (const Tensor& tensor : reads) note_access(tensor, stream, time, false, name);
    for (const Tensor& tensor : writes) note_access(tensor, stream, time, true, name);

    auto work = c10::make_intrusive<SoftWork>(rank_, type);
    work->over = clock_of(stream);
    work->device = callers.device_index();
    work->is_send = type == OpType::SEND;
    work->outputs = outputs;
    work->kept = std::move(reads);
    work->kept.insert(work->kept.end(), writes.begin(), writes.end());
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    auto promise = std::make_shared<std::promise<void>>();
    work->done = promise->get_future().share();
    {
      std::lock_guard guard(unfinished_lock);
      unfinished.push_back({stream, time, work->done});
    }
    queue().add([run = std::move(run), promise, future = work->future, outputs] {
      try {
        c10::InferenceMode guard(false);
        at::AutoDispatchBelowADInplaceOrView below;
        run();
        promise->set_value();
        future->markCompleted(c10::IValue(outputs));
      } catch (...) {
        promise->set_exception(std::current_exception());
        future->setError(std::current_exception());
      }
    });
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, int> streams_;  // peer -> number
  bool has_communicator_ = false;
  bool in_batch_ = false;
  std::vector<std::function<WorkPointer()>> batch_;
  std::vector<Tensor> batch_reads_, batch_writes_;
};

}  // namespace
}  // namespace soft

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using soft::SoftNccl;
  soft::before_host_waits(&soft::wait_for_operations);
  module.def("default_generator", [](int device) {
    const auto& generator = soft::default_generator(static_cast<c10::DeviceIndex>(device));
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(generator));
  });
  module.def("resize_storage", [](const Tensor& tensor, size_t size) { soft::grow(tensor.storage().unsafeGetStorageImpl(), size); });
  module.def("synchronize", [] { soft::host_waits(soft::clock_of_all_streams()); });
  py::module_::import("torch._C._distributed_c10d");
  py::class_<SoftNccl, c10::intrusive_ptr<SoftNccl>, c10d::Backend>(module, "ProcessGroupNCCL")
      .def(py::init([](py::object store, int rank, int size, py::object options) {
        auto distributed = py::module_::import("torch.distributed");
        auto gloo_store = distributed.attr("PrefixStore")("gloo", store);
        auto gloo = distributed.attr("ProcessGroupGloo")(gloo_store, rank, size, options.attr("_timeout"));
        auto made = c10::make_intrusive<SoftNccl>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), rank, size);
        made->options = options.inc_ref().ptr();
        return made;
      }))
      .def_property_readonly("options", [](const SoftNccl& self) { return py::reinterpret_borrow<py::object>(self.options); })
      .def_property_readonly("uid", [](const SoftNccl&) { return 0; })
      .def("_is_initialized", [](const SoftNccl&) { return true; })
      .def("_group_start", [](const SoftNccl&) {})
      .def("_group_end", [](const SoftNccl&) {})
      .def("comm_split_count", [](const SoftNccl&) { return 0; })
      .def("perform_nocolor_split", [](const SoftNccl&, py::object) {})
      .def("_set_default_timeout", [](const SoftNccl&, py::object) {});
}
