// SPDX-License-Identifier: Apache-2.0
// simdgroup_matrix: 8x8, two neighbouring elements of one row in each lane, as Apple's GPUs hold them.
#pragma once

namespace metal {

template <class T, int Columns, int Rows> struct simdgroup_matrix {
    static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
    static_assert(is_floating_point_v<T>, "simdgroup_matrix of half, bfloat or float");
    vec<T, 2> e;

    simdgroup_matrix() = default;
    MSL_INLINE explicit simdgroup_matrix(T diagonal) {
        uint r, c;
        place(msl_self()->lane, r, c);
        e = vec<T, 2>(r == c ? diagonal : T(0), r == c + 1 ? diagonal : T(0));
    }
    MSL_INLINE vec<T, 2> &thread_elements() { return e; }
    MSL_INLINE const vec<T, 2> &thread_elements() const { return e; }
    // Row and first column of what `lane` holds.
    static MSL_INLINE void place(uint lane, uint &r, uint &c) {
        uint quad = lane >> 2;
        r = (quad & 4) | ((lane >> 1) & 3);
        c = (quad & 2) * 2 + (lane & 1) * 2;
    }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R = C> MSL_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
    simdgroup_matrix<T, C, R> m;
    m.e = vec<T, 2>(v, v);
    return m;
}

// All lanes meet first: on hardware a load is an operation of the whole simdgroup.
MSL_INLINE void msl_gather(MslSite site) {
    MslOp op;
    op.complete = nullptr, op.site = site;
    msl_simd_op(&op);
}

template <class T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8> &d, const T *source, ulong pitch = 8,
    ulong2 origin = ulong2(0, 0), bool transpose = false, MSL_HERE) {
    msl_gather(site);
    uint r, c;
    d.place(msl_self()->lane, r, c);
    const T *p = source + (transpose ? origin.x * pitch + origin.y : origin.y * pitch + origin.x);
    for (uint k = 0; k < 2; k++) d.e[k] = transpose ? p[(c + k) * pitch + r] : p[r * pitch + c + k];
}
template <class T>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8> &d, T *target, ulong pitch = 8,
    ulong2 origin = ulong2(0, 0), bool transpose = false, MSL_HERE) {
    msl_gather(site);
    uint r, c;
    d.place(msl_self()->lane, r, c);
    T *p = target + (transpose ? origin.x * pitch + origin.y : origin.y * pitch + origin.x);
    for (uint k = 0; k < 2; k++) (transpose ? p[(c + k) * pitch + r] : p[r * pitch + c + k]) = d.e[k];
}

template <class D, class A, class B, class C> struct msl_multiply_op : MslOp {
    vec<A, 2> a;
    vec<B, 2> b;
    vec<C, 2> c;
    vec<D, 2> d;
    MSL_NOSANITIZE static void run(MslOp **lanes, uint32_t mask) {
        alignas(32) float x[8][8] = {}, y[8][8] = {}, z[8][8] = {};
        MSL_EACH_LANE(mask, i) {
            auto &o = *static_cast<msl_multiply_op *>(lanes[i]);
            uint row, column;
            simdgroup_matrix<D, 8, 8>::place(i, row, column);
            for (uint k = 0; k < 2; k++) {
                x[row][column + k] = (float)o.a[k];
                y[row][column + k] = (float)o.b[k];
                z[row][column + k] = (float)o.c[k];
            }
        }
        for (int i = 0; i < 8; i++)
            for (int k = 0; k < 8; k++)
                for (int j = 0; j < 8; j++) z[i][j] += x[i][k] * y[k][j];
        MSL_EACH_LANE(mask, i) {
            uint row, column;
            simdgroup_matrix<D, 8, 8>::place(i, row, column);
            for (uint k = 0; k < 2; k++) static_cast<msl_multiply_op *>(lanes[i])->d[k] = (D)z[row][column + k];
        }
    }
};
template <class D, class A, class B, class C>
MSL_NOINLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> a,
    simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, MSL_HERE) {
    msl_multiply_op<D, A, B, C> op;
    op.complete = op.run, op.site = site;
    op.a = a.e, op.b = b.e, op.c = c.e;
    msl_simd_op(&op);
    d.e = op.d;
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, MSL_HERE) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), site);
}

} // namespace metal
