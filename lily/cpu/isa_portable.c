// SPDX-License-Identifier: Apache-2.0
#define KERNELS cpu_kernels_portable
#include "kernel_list.h"
