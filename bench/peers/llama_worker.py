# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's side of the comparison. usage: llama_worker.py MODEL.gguf THREADS; run it where llama-cpp-python is.

Decode feeds fixed ids and asks for logits of each, without sampling: the least that llama.cpp can do for a token.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp as llama


def main() -> None:
    model_path, threads = sys.argv[1], int(sys.argv[2])
    llama.llama_backend_init()
    model_options = llama.llama_model_default_params()
    model_options.use_mmap = False
    model = llama.llama_model_load_from_file(model_path.encode(), model_options)
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 4096, 512, 512
    options.n_threads = options.n_threads_batch = threads
    context = llama.llama_init_from_model(model, options)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def decode(ids: list[int], position: int) -> None:
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(ids) - 1
        if llama.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        llama.llama_synchronize(context)
        llama.llama_batch_free(batch)

    print(json.dumps({"ready": llama.llama_print_system_info().decode(), "version": llama.__version__}), flush=True)
    for line in sys.stdin:
        prompt, steps = json.loads(line)
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        ids = [i * 2654435761 % 2**32 % vocab for i in range(prompt)]
        begin = time.perf_counter()
        for start in range(0, prompt, 512):
            decode(ids[start : start + 512], start)
        first = time.perf_counter()
        for i in range(steps):
            decode([i * 7919 % vocab], prompt + i)
        end = time.perf_counter()
        print(json.dumps({"prefill": prompt / (first - begin), "decode": steps / (end - first)}), flush=True)


main()
