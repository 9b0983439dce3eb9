// SPDX-License-Identifier: Apache-2.0
// Metal 4: tensors, cooperative tensors and matmul2d.
//
// Which thread holds which element of a cooperative tensor is the implementation's business: in random order it is
// drawn anew for every launch, invalid elements included; else it is what Apple's GPUs were seen to do.
// The operands of matmul2d are what Lily needs: bfloat, half or float times the same, accumulated in float.
// Not handled: convolution, reductions, integer operands, tensors as kernel arguments.
#pragma once

namespace metal {

constexpr size_t dynamic_extent = (size_t)-1;

template <class I, size_t... E> struct extents {
    typedef I index_type;
    static constexpr int dimensions = sizeof...(E);
    static constexpr size_t fixed[dimensions] = {E...};
    I size[dimensions];
    constexpr extents() {
        for (int i = 0; i < dimensions; i++) size[i] = (I)fixed[i];
    }
    template <class... A>
    requires(sizeof...(A) >= 1 && (std::is_convertible_v<A, I> && ...)) constexpr extents(A... a) {
        static_assert(
            sizeof...(A) == dimensions || sizeof...(A) == ((E == dynamic_extent) + ...), "extents: wrong count");
        I v[] = {(I)a...};
        int k = 0;
        for (int i = 0; i < dimensions; i++)
            size[i] = sizeof...(A) == dimensions ? v[i] : fixed[i] == dynamic_extent ? v[k++] : (I)fixed[i];
    }
    static constexpr size_t rank() { return dimensions; }
    constexpr I extent(size_t i) const { return size[i]; }
};
template <class I, class S> struct msl_dextents;
template <class I, size_t... K> struct msl_dextents<I, std::index_sequence<K...>> {
    using type = extents<I, (K * 0 + dynamic_extent)...>;
};
template <class I, size_t R> using dextents = typename msl_dextents<I, std::make_index_sequence<R>>::type;

struct tensor_handle {};
struct tensor_inline {};
struct tensor_offset {};

// Dimension 0 is the innermost.
template <class T, class X, class Descriptor = tensor_handle, class... Tags> struct tensor {
    typedef T element_type;
    typedef remove_cv_t<T> value_type;
    typedef X extents_type;
    static constexpr int dimensions = X::dimensions;
    T *data;
    long size[dimensions], stride[dimensions];

    tensor() = default;
    tensor(T *p, X x) : data(p) {
        long s = 1;
        for (int i = 0; i < dimensions; i++) {
            size[i] = x.extent(i);
            stride[i] = s;
            s *= size[i];
        }
    }
    template <class S> tensor(T *p, X x, const array<S, dimensions> &strides) : data(p) {
        for (int i = 0; i < dimensions; i++) size[i] = x.extent(i), stride[i] = (long)strides[i];
    }
    // The rest of the tensor from an origin on; with sizes, that many elements at most.
    template <size_t... N, class... O>
    requires(sizeof...(O) == dimensions) auto slice(O... origin) const {
        tensor<T, dextents<int, dimensions>, tensor_offset> r;
        const long at[] = {(long)origin...}, wanted[] = {(long)N..., -1};
        r.data = data;
        for (int i = 0; i < dimensions; i++) {
            r.data += at[i] * stride[i];
            r.size[i] = size[i] - at[i];
            r.stride[i] = stride[i];
            if (sizeof...(N) && wanted[i] >= 0 && wanted[i] < r.size[i]) r.size[i] = wanted[i];
        }
        return r;
    }
    template <size_t... N, class... O> auto static_slice(O... origin) const { return slice<N...>(origin...); }
    constexpr long get_extent(int i) const { return size[i]; }
    // In the order of the dimensions, as everywhere: column, then row.
    T *msl_at(long column, long row) const { return data + column * stride[0] + row * stride[1]; }
    bool msl_holds(long column, long row) const { return column >= 0 && column < size[0] && row >= 0 && row < size[1]; }
};
template <class T> struct msl_is_tensor : false_type {};
template <class T, class X, class D, class... G> struct msl_is_tensor<tensor<T, X, D, G...>> : true_type {};

struct execution_thread {
    static constexpr int msl_simdgroups = 0;
};
struct execution_simdgroup {
    static constexpr int msl_simdgroups = 1;
};
template <int N> struct execution_simdgroups { static constexpr int msl_simdgroups = N; };

MSL_INLINE void msl_note(const volatile void *p, uint bytes, bool writes) {
#ifdef MSL_CHECKED
    msl_touch(p, bytes, writes);
#endif
}

// Rows × Columns elements spread over the threads of a scope.
template <class T, int Rows, int Columns, class Scope> struct cooperative_tensor {
    typedef T element_type;
    typedef T value_type;
    static constexpr int threads = Scope::msl_simdgroups ? Scope::msl_simdgroups * 32 : 1;
    static constexpr int room =
        (Rows * Columns + threads - 1) / threads + 1; // one more than needed: never valid, or moved
    static constexpr int rows = Rows, columns = Columns;
    T e[room];
    const uint32_t *place; // row << 16 | column of this thread's elements, ~0 for none

    MSL_NOSANITIZE cooperative_tensor() {
        uint thread = !Scope::msl_simdgroups ? 0 : Scope::msl_simdgroups == 1 ? msl_self()->lane : msl_self()->linear;
        place = msl_layout(Rows, Columns, threads, room) + thread * room;
        __builtin_memset((void *)e, 0xff, sizeof e);
    }
    ushort get_capacity() const { return (ushort)(place[room - 1] == 0xfffffffeu ? room - 1 : room); }
    bool is_valid_element(int i) const { return (place[i] >> 16) < (uint)Rows; }
    array<int, 2> get_multidimensional_index(int i) const { return {(int)(place[i] & 0xffff), (int)(place[i] >> 16)}; }
    T &operator[](int i) { return e[i]; }
    const T &operator[](int i) const { return e[i]; }

    struct iterator {
        cooperative_tensor *t;
        int i;
        T &operator*() const { return t->e[i]; }
        iterator &operator++() {
            i++;
            return *this;
        }
        bool operator!=(const iterator &o) const { return i != o.i; }
        bool operator==(const iterator &o) const { return i == o.i; }
        auto get_multidimensional_index() const { return t->get_multidimensional_index(i); }
    };
    iterator begin() { return {this, 0}; }
    iterator end() { return {this, get_capacity()}; }

    template <class Tensor> void store(const Tensor &to, MSL_HERE) const {
        for (int i = 0; i < get_capacity(); i++) {
            auto at = get_multidimensional_index(i);
            if (is_valid_element(i) && to.msl_holds(at[0], at[1]))
                *to.msl_at(at[0], at[1]) = (typename Tensor::value_type)e[i];
        }
    }
    template <class Tensor> void load(const Tensor &from, MSL_HERE) {
        for (int i = 0; i < get_capacity(); i++) {
            auto at = get_multidimensional_index(i);
            if (is_valid_element(i)) e[i] = from.msl_holds(at[0], at[1]) ? (T)*from.msl_at(at[0], at[1]) : T(0);
        }
    }
};

} // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed_precision;
    mode matmul_mode;
    constexpr matmul2d_descriptor(int rows, int columns, int inner = (int)metal::dynamic_extent, bool left = false,
        bool right = false, bool relaxed = false, mode how = mode::multiply)
        : m(rows), n(columns), k(inner), transpose_left(left), transpose_right(right), relaxed_precision(relaxed),
          matmul_mode(how) {}
};

template <class T> using msl_element = metal::remove_cv_t<typename T::value_type>;
template <class T> struct msl_operand_type { typedef T type; };
template <class T>
requires requires { typename T::value_type; }
struct msl_operand_type<T> {
    typedef metal::remove_cv_t<typename T::value_type> type;
};

template <matmul2d_descriptor D, class Scope> struct matmul2d {
    static constexpr matmul2d_descriptor descriptor = D;
    static constexpr bool accumulates = D.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;

    // The operands may be given as tensors or as element types.
    template <class L, class R, class C> auto get_left_input_cooperative_tensor() const {
        static_assert(D.k > 0, "a cooperative left input needs a fixed k");
        constexpr int rows = D.transpose_left ? D.k : D.m, columns = D.transpose_left ? D.m : D.k;
        return metal::cooperative_tensor<typename msl_operand_type<L>::type, rows, columns, Scope>();
    }
    template <class L, class R, class C> auto get_right_input_cooperative_tensor() const {
        static_assert(D.k > 0, "a cooperative right input needs a fixed k");
        constexpr int rows = D.transpose_right ? D.n : D.k, columns = D.transpose_right ? D.k : D.n;
        return metal::cooperative_tensor<typename msl_operand_type<R>::type, rows, columns, Scope>();
    }
    template <class L, class R, class C, class Coordinate = int, class... More>
    using cooperative_tensor_destination_t = metal::cooperative_tensor<C, D.m, D.n, Scope>;
    template <class L, class R, class C> auto get_destination_cooperative_tensor() const {
        return cooperative_tensor_destination_t<L, R, C>();
    }

    template <class A, class B, class C> MSL_NOINLINE void run(const A &a, const B &b, C &c, MSL_HERE) const {
        check_types<A, B, C>();
        Op<A, B, C> op;
        op.site = site, op.a = &a, op.b = &b, op.c = &c;
        if constexpr (Scope::msl_simdgroups == 0) {
            MslOp *alone = &op;
            execute<A, B, C>(&alone, 1);
        } else if constexpr (Scope::msl_simdgroups == 1) {
            op.complete = [](MslOp **lanes, uint32_t mask) {
                if (mask == 0xffffffffu)
                    execute<A, B, C>(lanes, 32);
                else
                    msl_fail(
                        "divergence", "matmul2d needs all lanes of the simdgroup", lanes[__builtin_ctz(mask)]->site);
            };
            msl_simd_op(&op);
        } else {
            op.complete = [](MslOp **lanes, uint32_t count) { execute<A, B, C>(lanes, count); };
            msl_group_op(&op, Scope::msl_simdgroups);
        }
    }

  private:
    template <class A, class B, class C> struct Op : MslOp {
        const A *a;
        const B *b;
        C *c;
    };
    template <class A, class B, class C> static constexpr void check_types() {
        typedef msl_element<A> L;
        typedef msl_element<B> R;
        typedef msl_element<C> O;
        static_assert(
            metal::is_floating_point_v<L> && metal::is_floating_point_v<R>, "operands of bfloat, half or float");
        static_assert(
            metal::is_same_v<O, float> || metal::is_same_v<O, L>, "the destination is float or the operands' type");
        static_assert(D.m % 8 == 0 && D.n % 8 == 0, "m and n are multiples of 8");
    }

    // Elements [rows][columns] of an operand, from memory or from all threads.  Beyond a tensor's end lie zeros; along k
    // (dimension `inner`, -1: none) there is no reading beyond it.
    template <class A, class Get>
    MSL_NOSANITIZE static void gather(float *to, int rows, int columns, int inner, MslOp **lanes, uint count, Get get) {
        if constexpr (metal::msl_is_tensor<A>::value) {
            const A &t = *get(lanes[0]);
            if (inner >= 0 && t.size[inner] < (inner ? rows : columns))
                msl_fail("bounds", "matmul2d reads beyond its operand along k, which is undefined", lanes[0]->site);
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < columns; c++) {
                    if (!t.msl_holds(c, r)) {
                        const bool undefined = inner >= 0 && (inner ? r : c) >= t.size[inner];
                        to[(size_t)r * columns + c] = undefined ? __builtin_nanf("") : 0.0f;
                        continue;
                    }
                    metal::msl_note(t.msl_at(c, r), sizeof(typename A::value_type), false);
                    to[(size_t)r * columns + c] = (float)*t.msl_at(c, r);
                }
        } else {
            static_assert(
                A::threads == (Scope::msl_simdgroups ? Scope::msl_simdgroups * 32 : 1), "operand of another scope");
            for (uint i = 0; i < count; i++) {
                const A &t = *get(lanes[i]);
                for (int k = 0; k < t.get_capacity(); k++) {
                    auto at = t.get_multidimensional_index(k);
                    if (t.is_valid_element(k)) to[(size_t)at[1] * columns + at[0]] = (float)t.e[k];
                }
            }
        }
    }
    template <class C> MSL_NOSANITIZE static void scatter(C &t, const float *from) {
        if constexpr (metal::msl_is_tensor<C>::value) {
            for (int r = 0; r < D.m; r++)
                for (int c = 0; c < D.n; c++)
                    if (t.msl_holds(c, r)) {
                        metal::msl_note(t.msl_at(c, r), sizeof(typename C::value_type), true);
                        *t.msl_at(c, r) = (typename C::value_type)from[(size_t)r * D.n + c];
                    }
        } else {
            for (int k = 0; k < t.get_capacity(); k++) {
                auto at = t.get_multidimensional_index(k);
                if (t.is_valid_element(k)) t.e[k] = (typename C::value_type)from[(size_t)at[1] * D.n + at[0]];
            }
        }
    }
    template <class A, class B, class C> MSL_NOSANITIZE static void execute(MslOp **lanes, uint count) {
        typedef Op<A, B, C> O;
        int inner = D.k;
        if constexpr (metal::msl_is_tensor<A>::value)
            if (D.k < 0) inner = (int)static_cast<O *>(lanes[0])->a->size[D.transpose_left ? 1 : 0];
        float *x = msl_scratch(0, (size_t)D.m * inner), *y = msl_scratch(1, (size_t)D.n * inner);
        float *z = msl_scratch(2, (size_t)D.m * D.n);
        gather<A>(x, D.transpose_left ? inner : D.m, D.transpose_left ? D.m : inner, D.transpose_left, lanes, count,
            [](MslOp *o) { return static_cast<O *>(o)->a; });
        gather<B>(y, D.transpose_right ? D.n : inner, D.transpose_right ? inner : D.n, !D.transpose_right, lanes, count,
            [](MslOp *o) { return static_cast<O *>(o)->b; });
        if (accumulates)
            gather<C>(z, D.m, D.n, -1, lanes, count, [](MslOp *o) -> const C * { return static_cast<O *>(o)->c; });
        msl_matmul(z, x, y, D.m, D.n, inner, D.transpose_left, D.transpose_right, accumulates);
        if constexpr (metal::msl_is_tensor<C>::value)
            scatter(*static_cast<O *>(lanes[0])->c, z);
        else
            for (uint i = 0; i < count; i++) scatter(*static_cast<O *>(lanes[i])->c, z);
    }
};

} // namespace tensor_ops
} // namespace mpp
