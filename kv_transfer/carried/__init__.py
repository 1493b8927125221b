"""Carried tokens: a request starts with the output of earlier attempts, kept apart from its prompt.

They come in `kv_transfer_params` (kv_transfer/params.py). `scheduler.py` gives them to the engine core's
request, `runner.py` to the model runner's, `grammar.py` to the grammar.
"""
