"""Accuracy as a client that is not ours sees it: lm-eval's figures of Lockstep beside plain vLLM's."""
