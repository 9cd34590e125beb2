"""The worker's part of the plugin: a draft model that runs when somebody drafts, and only over rows that it lacks.

`lag` knows how much of each context the draft has computed. `rows` lays out forwards. `loop` drafts. `graphs` captures
what the loop runs. `measure` times it. None of them imports vLLM: the adapters worker_v026 and worker_v032 do.
"""
