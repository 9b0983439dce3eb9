// SPDX-License-Identifier: Apache-2.0
#define KERNELS cpu_kernels_avx2
#include "kernel_list.h"
