// Results against definitions.
#ifndef M3_BENCH_GPU_COMPARE_CUH
#define M3_BENCH_GPU_COMPARE_CUH

#include "cases.cuh"

struct tally {
  int lists = 0, equal = 0, near_ties = 0, wrong = 0;
};

// Lists differ only where scores are within the slack; never for integers, whose sums are exact.
inline void compare_lists(const paged_case &c, const std::vector<int32_t> &got, int local, tally &t) {
  std::vector<tally> each(c.n() * HEADS);
  parallel(c.n() * HEADS, [&](int64_t i) {
    double slack;
    std::vector<double> scores = c.block_scores((int)(i / HEADS), (int)(i % HEADS), &slack);
    std::vector<int32_t> want = paged_case::choose(scores, local);
    const int32_t *list = &got[i * TOP_K];
    each[i].lists = 1;
    if (std::equal(want.begin(), want.end(), list)) {
      each[i].equal = 1;
      return;
    }
    bool fine = c.kind != INTEGERS && c.kind != ZEROS;
    int last = -1;
    double lowest_want = INFINITY;
    for (int b : want)
      if (b >= 0 && b < (int)scores.size() - local) lowest_want = std::min(lowest_want, scores[b]);
    for (int j = 0; j < TOP_K && fine; j++) {
      int b = list[j];
      fine = b > last && b < (int)scores.size();
      last = b;
      if (fine && std::find(want.begin(), want.end(), b) == want.end()) fine = scores[b] >= lowest_want - 2 * slack;
    }
    for (int b : want)
      if (fine && b >= (int)scores.size() - local) fine = std::find(list, list + TOP_K, b) != list + TOP_K;
    (fine ? each[i].near_ties : each[i].wrong) = 1;
  });
  for (auto &e : each) t.lists += e.lists, t.equal += e.equal, t.near_ties += e.near_ties, t.wrong += e.wrong;
}

// The worst relative error of a head's result among every `step`-th row and the last.
inline double attend_error(const paged_case &c, const std::vector<float> &got, const int32_t *lists, int step = 1) {
  std::vector<double> error(c.n() * N_HEAD), size(c.n() * N_HEAD);
  parallel(c.n() * N_HEAD, [&](int64_t i) {
    int row = (int)(i / N_HEAD), head = (int)(i % N_HEAD);
    if (row % step && row + 1 < c.n()) return;
    auto want = c.attend(row, head, lists ? lists + ((size_t)row * HEADS + head / GROUP) * TOP_K : nullptr);
    for (int d = 0; d < DIM; d++) {
      double e = got[i * DIM + d] - want[d];
      error[i] += std::isnan(e) ? INFINITY : e * e;
      size[i] += want[d] * want[d];
    }
  });
  double worst = 0;
  for (size_t i = 0; i < error.size(); i++) {
    double e = size[i] > 0 || error[i] > 0 ? std::sqrt(error[i] / size[i]) : 0;
    worst = e <= worst ? worst : e;  // NaN stays
  }
  return worst;
}

#endif
