"""The hand-off: prefill's first token and draft tokens reach decode together with the KV.

On prefill `sampling.py` says whose first token a step samples and `runner.py` takes it from the model runner,
which `worker.py` tells the engine core before there are drafts (lockstep/node/first_tokens.py).
It travels as `codec.py` writes it, in the payload of the completion notice. On decode `worker_meta.py` brings
it from the worker to the scheduler, where decode_node/scheduler/hand_off.py takes it.
"""
