// A forward, a backward and a paged decode on Hopper, without Python, compared with plain loops on the CPU.
//
//   cute-attn export forward-sm90-bf16-d128-causal -o kernels     and with it backward-sm90-bf16-d128-causal and
//                                                                 kvcache-sm90-bf16-d128-causal-seqused_k-paged
//   cmake -S examples/cpp -B build/cpp -DKERNELS=$PWD/kernels && cmake --build build/cpp && build/cpp/example
#include <cuda_runtime.h>
#include <tvm/ffi/tvm_ffi.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "cute_attn_kernels.h"

using namespace tvm::ffi;
using Args = Array<Any>;  // a tuple of arguments

constexpr DLDataType kBf16{kDLBfloat, 16, 1}, kF32{kDLFloat, 32, 1}, kI32{kDLInt, 32, 1};
// Sequences, rows, heads, heads of keys, head dim; rows of a page of the cache, and pages of a sequence.
constexpr int B = 2, S = 200, H = 4, HK = 2, D = 128, PAGE = 64, PAGES = 4;
const double kScale = 1 / std::sqrt(double(D));

struct Gpu {
  void AllocData(DLTensor *x) {
    if (cudaMalloc(&x->data, GetDataSize(*x)) || cudaMemset(x->data, 0, GetDataSize(*x))) std::abort();
  }
  void FreeData(DLTensor *x) { cudaFree(x->data); }
};
float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
Tensor zeros(const Shape &shape, DLDataType type) { return Tensor::FromNDAlloc(Gpu{}, shape, type, {kDLCUDA, 0}); }

Tensor upload(const auto &x, const Shape &shape, DLDataType type) {
  Tensor made = zeros(shape, type);
  cudaMemcpy(made.data_ptr(), x.data(), sizeof(x[0]) * x.size(), cudaMemcpyHostToDevice);
  return made;
}

struct Random {  // normal values that bf16 has, on the CPU and on the GPU
  std::vector<float> x;
  Tensor gpu;
  Random(const Shape &shape, int seed) : gpu(zeros(shape, kBf16)) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> half(gpu.numel());
    for (uint16_t &one : half) x.push_back(from_bf16(one = std::bit_cast<uint32_t>(normal(engine)) >> 16));
    gpu = upload(half, shape, kBf16);
  }
};

bool compare(const char *name, const Tensor &found, const std::vector<float> &expected) {
  std::vector<uint16_t> half(expected.size());
  if (cudaMemcpy(half.data(), found.data_ptr(), 2 * half.size(), cudaMemcpyDeviceToHost)) std::abort();
  double sum = 0, all = 0;
  for (size_t i = 0; i < half.size(); ++i)
    sum += std::pow(from_bf16(half[i]) - expected[i], 2), all += std::pow(expected[i], 2);
  std::printf("%-7s error %.5f of its size\n", name, std::sqrt(sum / all));
  return sum < 1e-4 * all;  // false for NaN
}

// One query of a head: o and, with dO in g, what it adds to the gradients. Key and value j begin at row(j).
void attend(const float *q, const float *k, const float *v, int keys, auto row, float *o, const float *g = nullptr,
            float *dq = nullptr, float *dk = nullptr, float *dv = nullptr) {
  std::vector<double> p(keys);
  double sum = 0, delta = 0;
  auto dot = [](const float *a, const float *b) { return std::inner_product(a, a + D, b, 0.0); };
  for (int j = 0; j < keys; ++j) sum += p[j] = std::exp(kScale * dot(q, k + row(j)));
  for (int j = 0; j < keys * D; ++j) o[j % D] += float(p[j / D] / sum * v[row(j / D) + j % D]);
  if (g) delta = dot(g, o);
  for (int j = 0; g && j < keys * D; ++j) {
    const int at = row(j / D), d = j % D;
    const double prob = p[j / D] / sum, ds = kScale * prob * (dot(g, v + at) - delta);
    dq[d] += float(ds * k[at + d]), dk[at + d] += float(ds * q[d]), dv[at + d] += float(prob * g[d]);
  }
}

int main() {
  int sms = 0;
  if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0)) return std::puts("error: there is no GPU"), 2;
  // On TVM FFI's current stream, which is the default one.
  const auto launch = [](auto kernel, const auto &...given) { Function::InvokeExternC(nullptr, kernel, given...); };
  const Random q({B, S, H, D}, 1), k({B, S, HK, D}, 2), v({B, S, HK, D}, 3), g({B, S, H, D}, 4);
  const Tensor out = zeros({B, S, H, D}, kBf16), lse = zeros({B, H, S}, kF32);
  const Args lengths{nullptr, nullptr, nullptr, nullptr, S, S, nullptr, nullptr}, scores{1.0, Args{}};
  const Args schedule{zeros({4}, kI32), sms};
  launch(forward_sm90_bf16_d128_causal, q.gpu, k.gpu, v.gpu, out, lse, lengths, kScale, schedule, scores);

  constexpr int M = backward_sm90_bf16_d128_causal_tile_m, N = backward_sm90_bf16_d128_causal_tile_n;
  constexpr int rows = (S + M - 1) / M * M, blocks = (S + N - 1) / N;
  const Tensor lse2 = zeros({B, H, rows}, kF32), delta = zeros({B, H, rows}, kF32), next = zeros({16}, kF32);
  const Tensor sums = zeros({1, B, H, rows * D}, kF32), dq = zeros({B, S, H, D}, kBf16);
  const Tensor dk = zeros({B, S, HK, D}, kBf16), dv = zeros({B, S, HK, D}, kBf16);
  launch(backward_preprocess_sm90_bf16_d128, g.gpu, out, lse, nullptr, lse2, delta, sums, next, nullptr, lengths, 1.0);
  launch(backward_sm90_bf16_d128_causal, q.gpu, k.gpu, v.gpu, g.gpu, lse2, delta, sums, dk, dv, lengths, kScale,
         Args{blocks, 0, next, sms}, scores);
  launch(backward_convert_sm90_bf16_d128, sums, dq, lengths, kScale);

  const std::vector<int> table{3, 1, 4, 0, 7, 2, 6, 5}, used{70, 200};
  const Random one({B, 1, H, D}, 5), kp({B * PAGES, PAGE, HK, D}, 6), vp({B * PAGES, PAGE, HK, D}, 7);
  const Tensor decoded = zeros({B, 1, H, D}, kBf16), decoded_lse = zeros({B, H, 1}, kF32);
  launch(kvcache_sm90_bf16_d128_causal_seqused_k_paged, one.gpu, kp.gpu, vp.gpu, decoded, decoded_lse,
         Args{nullptr, nullptr, nullptr, upload(used, {B}, kI32), 1, PAGE * PAGES, nullptr, 0},
         Args{upload(table, {B, PAGES}, kI32), nullptr}, kScale, schedule, scores, nullptr);

  std::vector<float> o(q.x.size()), gq(q.x.size()), gk(k.x.size()), gv(k.x.size()), step(B * H * D);
  for (int i = 0; i < B * S * H; ++i) {
    const int at = (i / H / S * S * HK + i % H / (H / HK)) * D;
    const auto row = [](int j) { return j * HK * D; };
    attend(&q.x[i * D], &k.x[at], &v.x[at], i / H % S + 1, row, &o[i * D], &g.x[i * D], &gq[i * D], &gk[at], &gv[at]);
  }
  for (int i = 0; i < B * H; ++i) {
    const int head = i % H / (H / HK);
    const auto row = [&](int j) { return ((table[i / H * PAGES + j / PAGE] * PAGE + j % PAGE) * HK + head) * D; };
    attend(&one.x[i * D], kp.x.data(), vp.x.data(), used[i / H], row, &step[i * D]);
  }
  const bool right = compare("out", out, o) & compare("dq", dq, gq) & compare("dk", dk, gk) & compare("dv", dv, gv);
  return compare("decoded", decoded, step) && right ? 0 : 1;
}
