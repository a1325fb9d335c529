#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace bonsai {
namespace {

bool usable(const float* logits, int64_t vocab) {
    float best = -INFINITY;
    for (int64_t i = 0; i < vocab; ++i) {
        if (std::isnan(logits[i])) return false;
        best = std::max(best, logits[i]);
    }
    return std::isfinite(best);
}

// Ids by (score descending, id ascending): the first `top_k`, or all when it is 0.
std::vector<int64_t> best_first(const std::vector<double>& scores, int64_t top_k) {
    const auto better = [&scores](int64_t a, int64_t b) {
        return scores[size_t(a)] != scores[size_t(b)] ? scores[size_t(a)] > scores[size_t(b)] : a < b;
    };
    std::vector<int64_t> order(scores.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = int64_t(i);
    if (top_k > 0 && top_k < int64_t(order.size())) {
        std::nth_element(order.begin(), order.begin() + top_k - 1, order.end(), better);
        order.resize(size_t(top_k));
    }
    std::sort(order.begin(), order.end(), better);
    return order;
}

}  // namespace

int64_t choose(const float* logits, int64_t vocab, const SamplingRules& rules, const int64_t* seen,
               int64_t seen_count, double uniform) {
    if (vocab < 1 || !usable(logits, vocab)) return -1;
    std::vector<double> scores(logits, logits + vocab);
    if (rules.repetition_penalty != 1.0) {
        for (int64_t i = 0; i < seen_count; ++i) {
            double& score = scores[size_t(seen[i])];
            score = score > 0 ? score / rules.repetition_penalty : score * rules.repetition_penalty;
        }
    }
    if (rules.temperature == 0) {
        return std::max_element(scores.begin(), scores.end()) - scores.begin();
    }
    const std::vector<int64_t> order = best_first(scores, rules.top_k);
    std::vector<double> weights(order.size()), sums(order.size());
    double sum = 0;
    for (size_t i = 0; i < order.size(); ++i) {
        const double below = scores[size_t(order[i])] - scores[size_t(order[0])];
        weights[i] = std::exp(below / rules.temperature);
        sums[i] = sum += weights[i];
    }
    size_t kept = order.size();
    if (rules.top_p < 1) {
        const auto end = std::lower_bound(sums.begin(), sums.end(), rules.top_p * sums.back());
        kept = std::min(size_t(end - sums.begin()) + 1, kept);
    }
    if (rules.min_p > 0) {
        const auto enough = [&rules](double weight) { return weight >= rules.min_p; };
        kept = size_t(std::count_if(weights.begin(), weights.begin() + int64_t(kept), enough));
    }
    const auto last = sums.begin() + int64_t(kept);
    const auto drawn = std::upper_bound(sums.begin(), last, uniform * sums[kept - 1]);
    return order[std::min(size_t(drawn - sums.begin()), kept - 1)];
}

}  // namespace bonsai
