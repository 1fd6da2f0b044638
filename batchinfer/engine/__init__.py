"""Token ids in, token ids out: scheduler, KV cache, batch, model runner, sampler."""
