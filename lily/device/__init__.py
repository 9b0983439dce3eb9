# SPDX-License-Identifier: Apache-2.0
"""A device as the host sees it.

device.py is the library behind one C header, pipelines.py has its kernels compiled, shader_library.py hands it shaders,
weights.py fills its buffers in its layout, host_memory.py says what this machine has left.
"""
