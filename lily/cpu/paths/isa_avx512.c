// SPDX-License-Identifier: Apache-2.0
#define KERNELS cpu_kernels_avx512
#include "../kernels/kernel_list.h"
