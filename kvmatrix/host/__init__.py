"""The host device: what lets the real engine, with its KV connector, run on a CPU.

Only the device copy (and the streams and events it needs), Triton's execution and one missing cache-write op are
supplied. The scheduler, the block pools, the metadata and the model runner are vLLM's own.
"""
