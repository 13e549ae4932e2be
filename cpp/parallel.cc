#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace gleanrl {
namespace {

using std::int64_t;

struct Job {
  const std::function<void(int64_t, int64_t)>& work;
  int64_t n;
  int64_t chunk;
  std::atomic<int64_t> next{0};

  void run() {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= n) return;
      work(begin, std::min(n, begin + chunk));
    }
  }
};

// Invariant: `job` is non-null only while its caller is inside share(), and `inside` is true only while the helper
// may touch that job; share() returns when job is null and inside is false, so a Job can live on the caller's stack.
class Helper {
 public:
  // Runs `job` together with the helper, or returns false when another thread has it.
  bool share(Job& job) {
    const std::unique_lock<std::mutex> mine(callers_, std::try_to_lock);
    if (!mine.owns_lock() || !started()) return false;
    {
      const std::lock_guard<std::mutex> lock(state_);
      job_ = &job;
    }
    wake_.notify_one();
    job.run();
    std::unique_lock<std::mutex> lock(state_);
    job_ = nullptr;
    done_.wait(lock, [&] { return !inside_; });
    return true;
  }

 private:
  bool started() {
    if (running_) return true;
    try {
      std::thread([this] { loop(); }).detach();
      running_ = true;
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

  void loop() {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [&] { return job_ != nullptr; });
      Job* const job = job_;
      job_ = nullptr;
      inside_ = true;
      lock.unlock();
      job->run();
      lock.lock();
      inside_ = false;
      done_.notify_one();
    }
  }

  std::mutex callers_;
  bool running_ = false;  // guarded by callers_
  std::mutex state_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;   // guarded by state_
  bool inside_ = false;  // guarded by state_
};

// Never freed: the detached thread may outlive every destructor of the process. A child of a fork gets a fresh one
// (the old one's locks may be held by threads that don't exist there).
std::atomic<Helper*> helper{nullptr};

bool several_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set) > 1;
#endif
  return std::thread::hardware_concurrency() > 1;
}

std::atomic<bool> allowed{several_processors()};

Helper& the_helper() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { helper.store(nullptr); });
  static_cast<void>(registered);
  Helper* now = helper.load(std::memory_order_acquire);
  if (now == nullptr) {
    auto* fresh = new Helper();
    if (helper.compare_exchange_strong(now, fresh)) return *fresh;
    delete fresh;
  }
  return *now;
}

}  // namespace

void run_parallel(int64_t n, int64_t chunk, int64_t bytes_per_row, const std::function<void(int64_t, int64_t)>& work) {
  const bool long_enough = bytes_per_row > 0 && n > chunk && n >= kParallelBytes / bytes_per_row;
  if (long_enough && allowed.load(std::memory_order_relaxed)) {
    Job job{work, n, chunk};
    if (the_helper().share(job)) return;
  }
  work(0, n);
}

bool set_helper(bool on) { return allowed.exchange(on); }

}  // namespace gleanrl
