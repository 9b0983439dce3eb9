// SPDX-License-Identifier: Apache-2.0
// Calls a kernel for one lane: each parameter's type is the function's own, its value comes from its attribute.
#pragma once

namespace msl {

enum {
    BUFFER = 1,
    THREADGROUP,
    GRID_POSITION,
    GROUP_POSITION,
    GROUP_INDEX,
    LINEAR_INDEX,
    LANE,
    SIMDGROUP,
    SIMDGROUPS,
    GROUP_SIZE,
    GRID_SIZE,
    GROUPS,
    SIMD_WIDTH,
    QUAD_LANE,
    QUADGROUP
};

template <class P> MSL_INLINE P spread(uint x, uint y, uint z) {
    if constexpr (metal::msl_scalar<P>)
        return (P)x;
    else if constexpr (metal::msl_components_v<P> == 2)
        return P(x, y);
    else
        return P(x, y, z);
}
template <class P> MSL_INLINE P spread(const uint32_t (&v)[3]) { return spread<P>(v[0], v[1], v[2]); }

template <class P> MSL_INLINE P pointer(void *p) {
    if constexpr (std::is_reference_v<P>)
        return *(std::remove_reference_t<P> *)p;
    else if constexpr (std::is_pointer_v<P>)
        return (P)p;
    else
        return *(P *)p;
}

template <class P, int Kind, int Index> MSL_INLINE P argument(const MslLaunch *launch, MslLane *lane) {
    MslGroup *g = lane->group;
    if constexpr (Kind == BUFFER)
        return pointer<P>(launch->buffers[Index]);
    else if constexpr (Kind == THREADGROUP)
        return pointer<P>(msl_threadgroup_argument(Index));
    else if constexpr (Kind == GRID_POSITION)
        return spread<P>(g->index[0] * launch->group_size[0] + lane->position[0],
            g->index[1] * launch->group_size[1] + lane->position[1],
            g->index[2] * launch->group_size[2] + lane->position[2]);
    else if constexpr (Kind == GROUP_POSITION)
        return spread<P>(lane->position);
    else if constexpr (Kind == GROUP_INDEX)
        return spread<P>(g->index);
    else if constexpr (Kind == LINEAR_INDEX)
        return (P)lane->linear;
    else if constexpr (Kind == LANE)
        return (P)lane->lane;
    else if constexpr (Kind == SIMDGROUP)
        return (P)lane->simdgroup_index;
    else if constexpr (Kind == SIMDGROUPS)
        return (P)lane->simdgroups;
    else if constexpr (Kind == GROUP_SIZE)
        return spread<P>(g->size);
    else if constexpr (Kind == GRID_SIZE)
        return spread<P>(launch->grid);
    else if constexpr (Kind == GROUPS)
        return spread<P>(launch->groups);
    else if constexpr (Kind == QUAD_LANE)
        return (P)(lane->linear & 3);
    else if constexpr (Kind == QUADGROUP)
        return (P)(lane->linear >> 2);
    else
        return (P)32;
}

template <int... KindIndex> struct binding {};
template <class F> struct signature_of;
template <class... P> struct signature_of<void (*)(P...)> { using type = void(P...); };
template <class F> using signature = typename signature_of<F>::type;

template <class F, class B, class S> struct call;
template <class... P, int... KindIndex, size_t... I>
struct call<void(P...), binding<KindIndex...>, std::index_sequence<I...>> {
    template <void (*function)(P...)> static void run(const MslLaunch *launch, MslLane *lane) {
        constexpr int k[] = {KindIndex..., 0};
        function(argument<P, k[2 * I], k[2 * I + 1]>(launch, lane)...);
    }
};

} // namespace msl
