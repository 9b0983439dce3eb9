# SPDX-License-Identifier: Apache-2.0
"""A model's folder: found, opened, and held as a whole against what its config implies, before any tensor is read.

config.py is the model's shape, tensors.py what tensors follow from it, checkpoint.py the open folder;
safetensors_file.py and generation_config.py read single files, strict_json.py every JSON; library_errors.py tells
a panic of a library from Ctrl-C; resolve.py finds a model on
this disk, hub.py downloads one.
"""
