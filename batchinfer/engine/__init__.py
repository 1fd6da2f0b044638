"""The engine, which turns token ids into token ids: scheduler, KV cache, model runner and sampler."""
