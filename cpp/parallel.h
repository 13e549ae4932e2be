// One helper thread for copies that are long enough to share.
//
// Work is [0, n) in chunks; the caller and the helper take the next chunk from one counter until none is left. The
// caller never depends on the helper: while the helper sleeps, is busy for another thread, or shares its processor
// with somebody else, the caller copies on, and at the end waits for at most the chunk that the helper holds.
//
// Threads.  Any thread may call. One call at a time has the helper; the others run alone, without waiting for it.
// Forks.    The helper starts at the first call that is long enough and is never joined. After a fork the child
//   starts its own when it needs one; a fork while another thread has the helper is safe.
// Cost.     Waking the helper costs the caller a few microseconds; it pays from about kParallelBytes on.
// Failure.  `work` must not throw. If no thread can be started, calls run alone.
#pragma once

#include <cstdint>
#include <functional>

namespace gleanrl {

// Below this many bytes a call stays on its own thread.
inline constexpr std::int64_t kParallelBytes = 1 << 20;

// Calls work(begin, end) for disjoint ranges that cover [0, n), each of at most `chunk` rows when the call is shared
// and one range otherwise. bytes_per_row decides whether it is shared.
void run_parallel(std::int64_t n, std::int64_t chunk, std::int64_t bytes_per_row,
                  const std::function<void(std::int64_t, std::int64_t)>& work);

// Whether long copies may use the helper; on when the process may run on two processors or more. Returns the old
// setting. Takes effect with the next call.
bool set_helper(bool on);

}  // namespace gleanrl
