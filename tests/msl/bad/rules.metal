// SPDX-License-Identifier: Apache-2.0
// What the rules of tests/msl_lint.py forbid, beside what they allow.  A line that must be reported says with which words.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint COUNT = 4;
constant int C_BITS [[function_constant(0)]];

// ---- names ----
inline double wide(float x) { return x; } // double does not exist
inline float named(float x) { return exp(x) + metal::cos(x) + precise::exp(x) + INFINITY; }
inline float unnamed(float x) {
    float y = expm1(x);     // expm1 is not in the list
    y += log1p(x);          // log1p is not in the list
    y += metal::erf(x);     // erf is not in the list
    y += fast::sinpi(x);    // sinpi is not in the list
    texture2d<float> image; // texture2d is not in the list
    printf("%f", y);        // printf is not in the list
    return y;
}
inline uint factorial(uint n) { return n < 2 ? 1 : n * factorial(n - 1); } // calls itself
inline uint even(uint n);
inline uint odd(uint n) { return n == 0 ? 0 : even(n - 1); } // calls itself
inline uint even(uint n) { return n == 0 ? 1 : odd(n - 1); } // calls itself
inline float sum_of(float4 v) { return v.x + v.y + v.z + v.w; }
inline float sum_of(float2 v) { return sum_of(float4(v, v)); }

// ---- memory orders ----
inline void orders(device atomic_uint *p) {
    atomic_fetch_add_explicit(p, 1u, memory_order_relaxed);
    atomic_fetch_add_explicit(p, 1u, memory_order_seq_cst); // memory_order_relaxed
    atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
    atomic_thread_fence(mem_flags::mem_device, memory_order_relaxed, thread_scope_device); // needs memory_order_seq_cst
    atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst);                      // names its scope
}

// ---- 16-bit integers ----
inline uint shorts(ushort n, device const ushort *data) { // n is a 16-bit integer
    ushort i = 3;                                         // i is a 16-bit integer
    for (short k = 0; k < 5; k++) i += k;                 // k is a 16-bit integer
    uint16_t m = n;                                       // m is a 16-bit integer
    const uint bits = as_type<ushort>(half(1.0f)) + data[i] + ushort(m);
    return bits;
}
template <typename C> inline float total(thread C &c) {
    float s = 0;
    for (ushort i = 0; i < c.get_capacity(); i++) s += c[i];
    return s;
}

// ---- address spaces ----
inline void pointers(device float *a, float *b) { // names its address space
    device float *c = a;
    float *d = b; // names its address space
    thread float &e = *d;
    const float &f = e; // names its address space
    threadgroup const float *g = nullptr;
    auto h = c;
    float product = *a * e * f;
    if (g && h) *a = product;
}

// ---- arrays in registers ----
inline float by_argument(thread const float (&x)[COUNT], uint i) { return x[i]; }
template <int N> inline float registers(device const float *p, uint lane, uint n) {
    float a[COUNT], b[2][N];
    for (uint i = 0; i < COUNT; i++) a[i] = p[i];
    for (int i = 0; i < N; i++) b[0][i] = b[1][N - 1 - i] = p[i];
    for (uint step = COUNT / 2; step > 0; step /= 2)
        for (uint i = 0; i < step; i++) a[i] += a[i + step];
    for (uint i = 0; i < uint(C_BITS) / 4; i++) a[i] += 1;
    float s = a[0] + a[COUNT - 1] + b[1][N / 2];
    s += a[lane % COUNT];                       // lane is no constant
    for (uint i = 0; i < n; i++) s += a[i];     // i is no constant
    for (uint i = n; i < COUNT; i++) s += a[i]; // i is no constant
    uint k = 0;
    while (k < COUNT) s += a[k++]; // k is no constant
    for (uint i = 0; i < COUNT; i++) s += by_argument(a, i);
    s += by_argument(a, lane); // lane is no constant
    s += p[lane];
    return s;
}

template <uint N> struct Sums {
    float sum[2][N];
    float total(uint lane) {
        float s = 0;
        for (uint i = 0; i < N; i++) s += sum[0][i] + sum[1][i];
        return s + sum[lane & 1][0]; // lane is no constant
    }
};

// ---- cooperative tensors ----
struct Products {
    typedef metal::multiply::cooperative_tensor_destination_t<float, float, float, int> Tensor;
    Tensor field;    // field is a field that is a cooperative tensor
    Tensor parts[2]; // parts is an array of cooperative tensors
    void add(thread Tensor &sum) { Tensor local; }
    void twice() {
        Tensor both[2]; // both is an array of cooperative tensors
        Tensor first, second;
    }
};

// ---- attributes ----
kernel void attributes(device float *a [[buffer(0)]], constant uint &n [[buffer(1)]],
    uint2 group [[threadgroup_position_in_grid]], uint2 size [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    a[lane + group.x * size.x] = n;
}
kernel void twice_at_one(device float *a [[buffer(1)]],
    device float *b [[buffer(1)]]) { // two arguments at buffer(1)
    a[0] = b[0];
}
kernel void unknown_attribute(device float *a [[buffer(0)]],
    uint i [[thread_position_in_universe]], // attribute thread_position_in_universe
    uint j) {                               // needs one attribute
    a[i] = j;
}
kernel void wrong_types(device float *a [[buffer(0)]],
    float lane [[thread_index_in_simdgroup]],     // scalar unsigned integer
    ushort sg [[simdgroup_index_in_threadgroup]], // sg is a 16-bit integer
    int group [[threadgroup_position_in_grid]]) { // is uint, uint2 or uint3
    a[group] = lane + sg;
}
kernel void mixed_dimensions( // differ in dimensions
    device float *a [[buffer(0)]], uint group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]]) {
    a[group] = groups.x;
}
template <typename T> kernel void same_name(device T *a [[buffer(0)]]) { a[0] = 0; }
template [[host_name("one_name")]] kernel void same_name<float>(device float *);
template [[host_name("one_name")]] kernel void same_name<half>(device half *); // one_name is given twice

// ---- the kernel table ----
struct Step {
    int position, rows;
};
struct last_row_params {
    uint hidden;
};
struct copy_params {
    uint bytes;
};
kernel void last_row( // only read (table: r): declare it const
    device const Step *step [[buffer(0)]], device bfloat *x [[buffer(1)]], device bfloat *y [[buffer(2)]],
    constant last_row_params &p [[buffer(3)]]) {
    y[0] = x[p.hidden * (step->rows - 1)];
}
kernel void copy( // the kernel table says src, dst, p
    device uchar *dst [[buffer(0)]], device const uchar *src [[buffer(1)]], constant copy_params &p [[buffer(2)]]) {
    dst[0] = src[p.bytes];
}
