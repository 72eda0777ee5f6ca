// The threads of one call, which compute its parts together.
//
// OpenMP starts them once per call, and between its parts they synchronise here, which takes a
// fifth of the time that OpenMP needs to fork and join them. A waiting thread soon yields its core.
// OpenMP's threads keep theirs for milliseconds, at each of the hundreds of parts of a step, and
// even from the thread they wait for, once another program leaves the two of them only one core.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <utility>

#include <omp.h>

namespace {

// A single thread, except inside `meet`.
class Team {
 public:
  int64_t size() const { return size_; }

  // Calls act(thread) in each thread in [0, size). Returns when all are done.
  template <class Act>
  void each(const Act &act) {
    if (size_ == 1) return call<Act>(&act, 0);
    tell(call<Act>, &act);
    call<Act>(&act, 0);
    await_others();
  }

  // Calls act(i) for i in [0, count), each thread a contiguous range. Returns when all are done.
  template <class Act>
  void share(int64_t count, const Act &act) {
    const auto own = [&](int64_t thread) { of_share(count, thread, act); };
    count > 1 ? each(own) : call<decltype(own)>(&own, 0);
  }

  // Calls act(i) for this thread's part of [0, count); thread 0 has the first part.
  template <class Act>
  void of_share(int64_t count, int64_t thread, const Act &act) const {
    const auto from = [&](int64_t t) { return (count * t + size_ - 1) / size_; };
    for (int64_t i = from(thread), end = from(thread + 1); i < end; ++i) act(i);
  }

  // Calls act() in the first OpenMP thread, which the others then follow.
  template <class Act>
  void meet(const Act &act) {
#pragma omp parallel
    if (const int64_t thread = omp_get_thread_num(); thread == 0) {
      size_ = omp_get_num_threads();
      act();
      leave();
    } else {
      follow(thread);
    }
  }

 private:
  typedef void (*Call)(const void *act, int64_t thread);

  // Never inlined or cloned: compilers that know more might sum in another order.
  template <class Act>
  [[gnu::noipa]] static void call(const void *act, int64_t thread) {
    (*static_cast<const Act *>(act))(thread);
  }

  void tell(Call call, const void *act) {
    call_ = call;
    act_ = act;
    done_.store(0, std::memory_order_relaxed);
    told_.fetch_add(1, std::memory_order_release);
  }

  void leave() {
    if (size_ == 1) return;
    tell(nullptr, nullptr);
    await_others();  // OpenMP would wait in its own way
  }

  void await_others() const {
    await([&] { return done_.load(std::memory_order_acquire) == size_ - 1; });
  }

  void follow(int64_t thread) {
    for (int64_t seen = 0;; ++seen) {
      await([&] { return told_.load(std::memory_order_acquire) != seen; });
      const Call call = call_;
      if (call) call(act_, thread);
      done_.fetch_add(1, std::memory_order_release);
      if (!call) return;
    }
  }

  template <class Holds>
  static void await(const Holds &holds) {
    constexpr int kPauses = 100;  // microseconds in total, like most waits
    for (int i = 0; !holds(); ++i)
      if (i < kPauses)
        pause();
      else
        std::this_thread::yield();
  }

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  int64_t size_ = 1;
  Call call_ = nullptr;
  const void *act_ = nullptr;
  alignas(64) std::atomic<int64_t> told_{0};  // calls announced so far
  alignas(64) std::atomic<int64_t> done_{0};  // threads done with the last call
};

// Runs act(team) in one thread of a new team, and returns its result.
template <class Act>
auto together(const Act &act) {
  typedef decltype(act(std::declval<Team &>())) Result;
  Team team;
  if constexpr (std::is_void_v<Result>) {
    team.meet([&] { act(team); });
  } else {
    Result result;
    team.meet([&] { result = act(team); });
    return result;
  }
}

}  // namespace
