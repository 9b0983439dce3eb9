// SPDX-License-Identifier: Apache-2.0
#define KERNELS cpu_kernels_amx
#include "kernel_list.h"
