// SPDX-License-Identifier: Apache-2.0
#define KERNELS cpu_kernels_avx512
#include "kernel_list.h"
