"""The target model: loading, forwards, KV cache, and tree attention.

`target` is what the decode loop calls, and `loading` makes a model from a name. Both stand on
`runtime`, which stands on `attention` and `kv_cache`. Imports nothing of the drafters,
policies or the engine.
"""
