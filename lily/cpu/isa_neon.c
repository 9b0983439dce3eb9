// SPDX-License-Identifier: Apache-2.0
#define KERNELS cpu_kernels_neon
#include "kernel_list.h"
