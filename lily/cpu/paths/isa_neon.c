// SPDX-License-Identifier: Apache-2.0
#define KERNELS cpu_kernels_neon
#include "../kernels/kernel_list.h"
